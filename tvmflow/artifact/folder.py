"""One version of an artifact folder, held open: what replaces it meanwhile changes nothing for whoever reads it.

A reader opens the folder once, reads everything relative to it, and holds a shared lock on it, which keeps the writer
that replaced it from removing its files. Where the file system has no such locks, a reader whose files are gone starts
again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tvmflow.artifact.layout import AGAIN, LOG, MANIFEST, MOST_MANIFEST_BYTES
from tvmflow.errors import ArtifactError
from tvmflow.files import open_regular, read_regular, reason
from tvmflow.manifest import FileEntry

PATIENCE_S = 1.0  # how long to wait for a folder that is being replaced again and again
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)


@contextlib.contextmanager
def held(path: Path) -> Iterator[Path]:
    """A path of the folder that stands at `path` now: it leads to this one, also from processes started meanwhile.

    Raises ArtifactError where none is there.
    """
    descriptor = _open(path)
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)


def was_replaced(path: Path, folder: Path) -> bool:
    """Whether another folder stands at `path` than the one held open."""
    try:
        return not os.path.samestat(os.stat(path), os.stat(folder))
    except OSError:
        return True


def read_manifest_bytes(folder: Path, shown: Path) -> bytes:
    """The bytes of manifest.json; messages show the folder as `shown`."""
    if not os.path.lexists(folder / MANIFEST):
        raise ArtifactError(f"{shown}: no artifact is there: it has no {MANIFEST}", "`tvmflow compile` makes one")
    return _read(folder, MANIFEST, shown)


def read_log_bytes(folder: Path, shown: Path) -> bytes | None:
    """The bytes of the build log, if there is one."""
    return _read(folder, LOG, shown) if os.path.lexists(folder / LOG) else None


def check_files(folder: Path, files: Mapping[str, FileEntry], shown: Path) -> None:
    """Raises ArtifactError where a file is missing, is none, or has another size, or where the folder holds others.

    Files whose names start with a dot are not counted: systems leave such behind.
    """
    known = {MANIFEST, *files}
    for name in known:
        _check(folder, name, shown)
        if name in files and os.stat(folder / name).st_size != files[name].size_bytes:
            raise ArtifactError(f"{shown / name}: changed or damaged since it was built", AGAIN)
    inside = {"", *(os.path.dirname(name) for name in known if not name.startswith("../"))}
    for place in sorted(inside):
        expected = {LOG, *inside, *(name for name in known)}
        for entry in sorted(os.listdir(folder / place)):
            name = f"{place}/{entry}" if place else entry
            if name not in expected and entry != LOG and not entry.startswith("."):
                raise ArtifactError(
                    f"{shown / name}: is not part of the artifact, which its manifest would list", "move it away"
                )


def _open(path: Path) -> int:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (OSError, ValueError) as exc:
            raise ArtifactError(f"{path}: no artifact: {reason(exc)}", "`tvmflow compile` makes one") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if not was_replaced(path, Path(f"/proc/self/fd/{descriptor}")):
                return descriptor
        except OSError as exc:
            if exc.errno in _NO_LOCKS or time.monotonic() > deadline:
                return descriptor  # without a lock
        os.close(descriptor)
        if time.monotonic() > deadline:
            raise ArtifactError(f"{path}: is replaced faster than it can be read", "let its writers finish")
        time.sleep(0.001)


def _read(folder: Path, name: str, shown: Path) -> bytes:
    _check(folder, name, shown)
    return read_regular(folder / name, ArtifactError, MOST_MANIFEST_BYTES, f"{shown / name}: ")


def _check(folder: Path, name: str, shown: Path) -> None:
    """Raises ArtifactError where a file is not there, or where a link or anything but a folder leads to it."""
    place = folder
    for part in Path(name).parts[:-1]:
        place /= part
        if part != ".." and not stat.S_ISDIR(_mode(place, shown / name)):
            raise ArtifactError(f"{shown / name}: is not inside a folder of the artifact", AGAIN)
    mode = _mode(folder / name, shown / name)
    if stat.S_ISLNK(mode):
        raise ArtifactError(f"{shown / name}: is a symbolic link, which an artifact does not hold", AGAIN)
    if not stat.S_ISREG(mode):
        open_regular(folder / name, ArtifactError, place=f"{shown / name}: ").close()  # says what it is


def _mode(place: Path, shown: Path) -> int:
    try:
        return os.lstat(place).st_mode
    except (OSError, ValueError):
        raise ArtifactError(f"{shown}: missing from the artifact", AGAIN) from None
