"""Puts a finished artifact in its place in one step, and clears away what dead writers left.

A writer works in a folder beside the place, on which it holds a lock for as long as it lives; the artifact is made in a
folder inside that one. Publishing exchanges that with what stands in the place, so that at no moment there is none or
half of one. The old version goes as soon as nobody reads it: at once, or by a later writer.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tvmflow.artifact import zipped
from tvmflow.artifact.folder import held, read_manifest_bytes, was_replaced
from tvmflow.artifact.layout import LOG, MANIFEST
from tvmflow.errors import ArtifactError, OutputError
from tvmflow.files import open_regular

INSIDE, OLD = "artifact", "old"  # the folders in a writer's folder
READERS_S = 1.0  # how long a writer waits for readers of the version that it replaced
ATTEMPTS = 100  # to take a place that others take too
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV)


@contextlib.contextmanager
def staging(out: Path, zipped_: bool) -> Iterator[Path]:
    """A folder beside `out` to write an artifact into; it becomes `out` when the block ends well, else it is gone.

    Raises OutputError where `out` cannot be written or holds something that is no artifact.
    """
    try:
        out = out.resolve()
        _check_replaceable(out, zipped_)
        out.parent.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(out)
        workplace, lock = _workplace(out)
    except (OSError, ValueError, RuntimeError) as exc:
        raise OutputError(
            f"{out}: cannot be written: {getattr(exc, 'strerror', None) or exc}", "choose another place with -o"
        ) from None
    try:
        yield workplace / INSIDE
        _publish(workplace, out, zipped_)
    except OSError as exc:
        raise OutputError(
            f"{out}: cannot be written: {exc.strerror or exc}",
            "free space or choose another place with -o; nothing was left behind",
        ) from None
    finally:
        _remove(workplace, READERS_S)
        os.close(lock)


def _workplace(out: Path) -> tuple[Path, int]:
    """A new folder for this writer alone, with the one for the artifact inside it, and the open lock on it."""
    while True:
        workplace = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".tmp", dir=out.parent))
        lock = _try_lock(workplace)  # None: another writer took it for a dead one's, in between
        if lock is not None:
            (workplace / INSIDE).mkdir()
            return workplace, lock


def _clear_leftovers(out: Path) -> None:
    """Removes the folders of writers that died, and old versions that nobody reads any more."""
    prefix = f".{out.name}."
    for name in os.listdir(out.parent):
        workplace = out.parent / name
        if name.startswith(prefix) and name.endswith(".tmp") and not workplace.is_symlink() and workplace.is_dir():
            lock = _try_lock(workplace, surely=True)
            if lock is not None:
                if (workplace / OLD).exists() and not out.exists():
                    os.rename(workplace / OLD, out)  # its writer died between two steps
                _remove(workplace, 0)
                os.close(lock)


def _remove(workplace: Path, patience_s: float) -> None:
    """Removes a writer's folder whose lock the caller holds, unless somebody reads the version in it all the time."""
    if not (workplace / INSIDE).exists():
        return shutil.rmtree(workplace, ignore_errors=True)
    deadline = time.monotonic() + patience_s
    while True:
        lock = _try_lock(workplace / INSIDE)
        if lock is not None:
            shutil.rmtree(workplace, ignore_errors=True)
            return os.close(lock)
        if time.monotonic() >= deadline:
            return None  # the next writer removes it
        time.sleep(0.005)


def _try_lock(folder: Path, surely: bool = False) -> int | None:
    """The open folder, locked for the caller alone; None where another holds it, or it was replaced or removed.

    Where the file system has no locks, it is open without one, or with `surely` None.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        if not surely:
            return descriptor
        os.close(descriptor)
        return None
    if was_replaced(folder, Path(f"/proc/self/fd/{descriptor}")):
        os.close(descriptor)
        return None
    return descriptor


def _check_replaceable(out: Path, zipped_: bool) -> None:
    if not out.exists():
        return
    if out.is_dir() == zipped_:
        kind = "a folder" if zipped_ else "a file"
        raise OutputError(f"{out}: is {kind}", "choose another place with -o, or leave --zip as it was")
    if out.is_dir() and not any(out.iterdir()):
        return
    try:
        with held(out) if out.is_dir() else open_regular(out, ArtifactError) as place:
            replaceable = _is_artifact(place)
    except (ArtifactError, ValueError, KeyError, TypeError, RecursionError):
        replaceable = False
    if not replaceable:
        raise OutputError(f"{out}: exists and is no artifact, so it is not replaced", "choose another place with -o")


def _is_artifact(place: Path | BinaryIO) -> bool:
    """Whether a folder or an open zip file is an artifact, of any version and in any state, and holds nothing else."""
    if not isinstance(place, Path):
        return bool(json.loads(zipped.manifest_bytes(place, Path()))["manifest_sha256"])
    stated = json.loads(read_manifest_bytes(place, place))
    files = {str(path.relative_to(place)) for path in place.rglob("*") if not path.is_dir()}
    known = {MANIFEST, *stated["files"]}
    return bool(stated["manifest_sha256"]) and all(name in known or Path(name).name == LOG for name in files)


def _publish(workplace: Path, out: Path, zipped_: bool) -> None:
    folder = workplace / INSIDE
    if zipped_:
        zipped.pack(folder, workplace / "packed.zip")
        return os.replace(workplace / "packed.zip", out)
    os.chmod(folder, 0o755)
    for _ in range(ATTEMPTS):
        try:
            return os.rename(folder, out)  # also onto an empty folder
        except OSError as exc:
            if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        _check_replaceable(out, zipped_)
        try:
            return _exchange(folder, out)
        except FileNotFoundError:
            continue  # somebody took it away meanwhile
    raise OutputError(f"{out}: others replace it all the time", "let them finish")


def _exchange(folder: Path, out: Path) -> None:
    """Lets two folders change places in one step; raises OSError.

    File systems that cannot do that (some of networks) get two steps, between which nothing stands at `out`.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None:
        if rename(AT_FDCWD, os.fsencode(folder), AT_FDCWD, os.fsencode(out), RENAME_EXCHANGE) == 0:
            return
        number = ctypes.get_errno()
        if number not in _NO_EXCHANGE:
            raise OSError(number, os.strerror(number), str(out))
    old = folder.with_name(OLD)
    os.rename(out, old)
    try:
        os.rename(folder, out)
    except OSError:
        os.rename(old, out)
        raise
    os.rename(old, folder)
