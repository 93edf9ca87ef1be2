"""The artifact as one zip file. Members are not compressed: what comes out of it is no larger than the file itself."""

from __future__ import annotations

import os
import shutil
import stat
import zipfile
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from tvmflow.artifact.layout import AGAIN, LOG, MANIFEST, MOST_MANIFEST_BYTES
from tvmflow.errors import ArtifactError
from tvmflow.manifest import Described

ENCRYPTED = 1  # bit of a member's flags
BROKEN = (OSError, zipfile.BadZipFile, zlib.error, ValueError, NotImplementedError, RuntimeError, EOFError, KeyError)


def manifest_bytes(stream: BinaryIO, shown: Path) -> bytes:
    """The bytes of manifest.json in an open zip file; raises ArtifactError, also for members that none would have."""
    try:
        with zipfile.ZipFile(stream) as archive:
            members = archive.infolist()
            _check_members(members, os.fstat(stream.fileno()).st_size, shown)
            if archive.getinfo(MANIFEST).file_size > MOST_MANIFEST_BYTES:
                raise ArtifactError(f"{shown}: {MANIFEST} in it is too large", AGAIN)
            return archive.read(MANIFEST)
    except BROKEN as exc:
        what = f"it has no {MANIFEST}" if isinstance(exc, KeyError) else str(exc)[:200]
        raise ArtifactError(f"{shown}: not an artifact: {what}", "give what `tvmflow compile` wrote") from None


def unpack(stream: BinaryIO, manifest: Described, folder: Path, shown: Path) -> None:
    """Writes the artifact's files into a folder; raises ArtifactError where the manifest does not describe them."""
    try:
        with zipfile.ZipFile(stream) as archive:
            sizes = {member.filename: member.file_size for member in archive.infolist()}
            for name, entry in manifest.files.items():
                if sizes.get(name) != entry.size_bytes:
                    raise ArtifactError(f"{shown}: damaged: {name} does not have {entry.size_bytes} bytes", AGAIN)
            if unknown := sizes.keys() - manifest.files.keys() - {MANIFEST}:
                raise ArtifactError(f"{shown}: holds {min(unknown)!r}, which its manifest does not list", AGAIN)
            for name in (MANIFEST, *manifest.files):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                with archive.open(name) as source, (folder / name).open("xb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
    except BROKEN as exc:
        raise ArtifactError(f"{shown}: damaged: {str(exc)[:200]}", AGAIN) from None


def pack(folder: Path, file: Path) -> None:
    """Writes what is in a folder, but for build logs, into a zip file; equal contents give equal bytes."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != LOG)
    with zipfile.ZipFile(file, "x") as archive:
        for name in names:
            member = zipfile.ZipInfo(name)  # of 1980
            member.external_attr = (stat.S_IFREG | 0o644) << 16
            member.file_size = (folder / name).stat().st_size
            with (folder / name).open("rb") as source, archive.open(member, "w") as target:
                shutil.copyfileobj(source, target, 1 << 20)


def _check_members(members: Sequence[zipfile.ZipInfo], size_bytes: int, shown: Path) -> None:
    for name, count in Counter(member.filename for member in members).items():
        if count > 1:
            raise ArtifactError(f"{shown}: holds {name!r} twice", AGAIN)
    for member in members:
        if fault := _fault(member):
            raise ArtifactError(
                f"{shown}: {member.filename!r} in it {fault}", "give what `tvmflow compile --zip` wrote"
            )
    if sum(member.file_size for member in members) > size_bytes:
        raise ArtifactError(f"{shown}: says of its files that they are larger than all of it", AGAIN)


def _fault(member: zipfile.ZipInfo) -> str:
    """What no member of an artifact is; empty where nothing is wrong."""
    name, mode = member.filename, member.external_attr >> 16
    if name.startswith("/") or not set(name.split("/")).isdisjoint({"", ".", ".."}) or "\\" in name or "\0" in name:
        return "does not lie inside it"
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
        return "is a link or something else that is no file"
    if member.flag_bits & ENCRYPTED:
        return "is encrypted"
    if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
        return "is compressed, so another program packed it"
    return ""
