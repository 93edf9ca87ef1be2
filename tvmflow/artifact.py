"""The artifact: a folder (or one zip file) with a library, its constants and a manifest. No TVM in here.

    library.so       the compiled kernels and the calls between them
    constants.bin    the weights, each at a 64-byte boundary, as the manifest lists them
    manifest.json    what is inside, how it was made, what was verified

With buckets, constants.bin holds the weights of all of them, each once, and a folder per bucket, named after its sizes,
is an artifact whose constants.bin is the one above it.

A folder appears whole or not at all: it is written beside its place and then renamed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tvmflow import host
from tvmflow.errors import ArtifactError, OutputError, UsageError
from tvmflow.manifest import Bundle, Described, FileEntry, Manifest

FORMAT_VERSION = 1
LIBRARY, CONSTANTS, MANIFEST = "library.so", "constants.bin", "manifest.json"
ALIGNMENT = 64  # bytes; what TVM's kernels may assume of a buffer's address


@contextmanager
def staging(out: Path, zipped: bool) -> Iterator[Path]:
    """A folder beside `out` to write an artifact into; it becomes `out` when the block ends well, else it is gone.

    Raises OutputError where `out` cannot be written or holds something that is no artifact.
    """
    out = out.resolve()
    _check_replaceable(out, zipped)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".tmp", dir=out.parent))
    except OSError as exc:
        raise OutputError(f"{out}: cannot be written: {exc.strerror}", "choose another place with -o") from None
    try:
        yield folder
        _publish(folder, out, zipped)
    except OSError as exc:
        raise OutputError(
            f"{out}: cannot be written: {exc.strerror or exc}",
            "free space or choose another place with -o; nothing was left behind",
        ) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_manifest(folder: Path, manifest: Described) -> None:
    """Writes manifest.json, with a digest of itself so that a damaged one is seen."""
    body = manifest.model_dump(mode="json")
    text = json.dumps({**body, "manifest_sha256": _digest(body)}, indent=1, sort_keys=True)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read(path: Path) -> Manifest | Bundle:
    """The manifest of an artifact folder or zip, checked for damage; raises ArtifactError."""
    try:
        body = json.loads(_manifest_text(path))
        stated = body.pop("manifest_sha256", None)
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no artifact is there", "`tvmflow compile` makes one") from None
    except (OSError, KeyError, ValueError, AttributeError, TypeError, zipfile.BadZipFile) as exc:
        raise ArtifactError(f"{path}: not an artifact: {exc}", "give what `tvmflow compile` wrote") from None
    version = body.get("format_version")
    if version != FORMAT_VERSION:
        raise ArtifactError(
            f"{path}: format version {version}, this tvmflow reads {FORMAT_VERSION}",
            "compile the model again, or install the tvmflow that made it",
        )
    if stated != _digest(body):
        raise ArtifactError(f"{path}: manifest.json was changed or damaged", "compile the model again")
    try:
        return Bundle.model_validate(body) if "buckets" in body else Manifest.model_validate(body)
    except ValidationError as exc:
        raise ArtifactError(f"{path}: manifest.json: {exc.errors()[0]['msg']}", "compile the model again") from None


def read_manifest(path: Path) -> Manifest:
    """The manifest of an artifact with one library; raises ArtifactError, UsageError where it has buckets."""
    return _of_one_library(path, read(path))


@contextmanager
def opened(path: Path) -> Iterator[tuple[Path, Manifest]]:
    """Like `opened_any`, for an artifact with one library; raises UsageError where it has buckets."""
    with opened_any(path) as (folder, manifest):
        yield folder, _of_one_library(path, manifest)


@contextmanager
def opened_any(path: Path) -> Iterator[tuple[Path, Manifest | Bundle]]:
    """A folder with the artifact's files and its manifest, integrity checked; a zip is unpacked while it is open."""
    manifest = read(path)
    if path.is_dir():
        check_files(path, manifest)
        yield path, manifest
        return
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
        try:
            with zipfile.ZipFile(path) as archive:
                for name in (MANIFEST, *manifest.files):
                    archive.extract(name, folder)
        except (OSError, KeyError, zipfile.BadZipFile) as exc:
            raise ArtifactError(f"{path}: damaged: {exc}", "compile the model again") from None
        check_files(Path(folder), manifest)
        yield Path(folder), manifest


def libraries(folder: Path, manifest: Manifest | Bundle) -> list[tuple[Path, Manifest]]:
    """The folder and manifest of every library of an artifact, in the order of its buckets."""
    if isinstance(manifest, Manifest):
        return [(folder, manifest)]
    return [(folder / bucket.folder, read_manifest(folder / bucket.folder)) for bucket in manifest.buckets]


def check_files(folder: Path, manifest: Described) -> None:
    """Raises ArtifactError where a file is missing or not what the manifest says it is."""
    for name, entry in manifest.files.items():
        file = folder / name
        if not file.is_file():
            raise ArtifactError(f"{file}: missing from the artifact", "compile the model again")
        if file_entry(file) != entry:
            raise ArtifactError(f"{file}: changed or damaged since it was built", "compile the model again")


def check_source(model: Path, manifest: Described) -> None:
    """Raises ArtifactError where `model`, or a file beside it that holds weights, is not what was compiled."""
    beside = {model.parent / name: entry for name, entry in manifest.source_data.items()}
    for file, entry in ({model: manifest.source} | beside).items():
        if entry and (not file.is_file() or file_entry(file) != entry):
            raise ArtifactError(
                f"{file}: not the file that {manifest.name} was compiled from",
                "name the right one with --model, or compile again",
            )


def check_machine(manifest: Described, features: frozenset[str], versions: dict[str, str]) -> None:
    """Raises ArtifactError where the library cannot run here: architecture, CPU extensions, run-time version."""
    target = manifest.target
    if obstacle := host.find_obstacle(target.machine, target.features, features):
        hint = "compile it for this machine, perhaps with a lower target.mcpu, e.g. x86-64-v3"
        raise ArtifactError(f"{manifest.name}: {obstacle}", hint)
    for package, version in versions.items():
        built = manifest.versions.get(package)
        if built != version:
            raise ArtifactError(
                f"{manifest.name}: built with {package} {built}, here is {version}",
                f"install {package}=={built}, or compile it again",
            )


def file_entry(path: Path) -> FileEntry:
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return FileEntry(sha256=digest, size_bytes=path.stat().st_size)


def _of_one_library(path: Path, manifest: Manifest | Bundle) -> Manifest:
    if isinstance(manifest, Manifest):
        return manifest
    folders = ", ".join(str(path / bucket.folder) for bucket in manifest.buckets[:3])
    raise UsageError(
        f"{path}: has {len(manifest.buckets)} buckets, and this is done for one library",
        f"name a bucket's folder: {folders}, ...",
    )


def _manifest_text(path: Path) -> str:
    if path.is_dir():
        return (path / MANIFEST).read_text(encoding="utf-8")
    with zipfile.ZipFile(path) as archive:
        return archive.read(MANIFEST).decode()


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _check_replaceable(out: Path, zipped: bool) -> None:
    if not out.exists():
        return
    if out.is_dir() == zipped:
        kind = "a folder" if zipped else "a file"
        raise OutputError(f"{out}: is {kind}", "choose another place with -o, or leave --zip as it was")
    if out.is_dir() and not any(out.iterdir()):
        return
    try:
        stated = json.loads(_manifest_text(out))
        known = {MANIFEST, *stated["files"]} if stated["manifest_sha256"] else set()
    except (OSError, KeyError, TypeError, ValueError, zipfile.BadZipFile):
        known = set()
    if not known or (out.is_dir() and _files(out) - known):
        raise OutputError(f"{out}: exists and is no artifact, so it is not replaced", "choose another place with -o")


def _files(folder: Path) -> set[str]:
    """The files in a folder, by path from it."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def _publish(folder: Path, out: Path, zipped: bool) -> None:
    if zipped:
        packed, names = folder / "packed.zip", sorted(_files(folder))
        with zipfile.ZipFile(packed, "w") as archive:
            for name in names:
                archive.writestr(zipfile.ZipInfo(name), (folder / name).read_bytes())
        packed.replace(out)
        return
    folder.chmod(0o755)  # as any folder that a user makes; mkdtemp made it private
    if out.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".old", dir=out.parent))
        out.replace(old / out.name)
        folder.replace(out)
        shutil.rmtree(old)
    else:
        folder.replace(out)
