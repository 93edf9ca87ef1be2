"""Opens the regular files that a user names, and nothing that could block, never end, or not fit into memory."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from tvmflow.errors import TvmflowError

KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a symbolic link",
}
HINTS: dict[type[Exception], str] = {
    FileNotFoundError: "check the path",
    PermissionError: "give the user who runs this the right to read it: chmod u+r",
}


def open_regular(
    path: str | Path,
    error: type[TvmflowError],
    most_bytes: int | None = None,
    place: str | None = None,
    dir_fd: int | None = None,
) -> BinaryIO:
    """`path` opened for reading; raises `error` at once where it is no regular file, or is larger than `most_bytes`.

    `place` stands in front of the message; unset, it is the path. With `dir_fd`, the path starts at that open folder,
    and a symbolic link in its place is refused.
    """
    where = f"{path}: " if place is None else place
    descriptor = -1
    try:
        status = os.stat(path, dir_fd=dir_fd, follow_symlinks=dir_fd is None)  # opening a device may do something
        fault = _fault(status, most_bytes)
        if not fault:
            # The file may be another one by now. Without O_NONBLOCK, a pipe that nobody writes to would block.
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if dir_fd is not None else 0)
            descriptor = os.open(path, flags, dir_fd=dir_fd)
            fault = _fault(os.fstat(descriptor), most_bytes)
    except (OSError, ValueError) as exc:
        raise error(where + reason(exc), HINTS.get(type(exc), "give a regular file")) from None
    if fault:
        if descriptor >= 0:
            os.close(descriptor)
        raise error(where + fault[0], fault[1])
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, error: type[TvmflowError], most_bytes: int, place: str | None = None) -> bytes:
    """All of a regular file of at most `most_bytes`, also where it grows meanwhile; raises `error`."""
    with open_regular(path, error, most_bytes, place) as stream:
        try:
            data = stream.read(most_bytes + 1)
        except OSError as exc:
            where = f"{path}: " if place is None else place
            raise error(f"{where}cannot be read: {exc.strerror}", "check the file and its disk") from None
    if len(data) > most_bytes:
        raise error(*_too_large(f"{path}: " if place is None else place, len(data), most_bytes))
    return data


def fault_of(path: Path) -> str:
    """Why `path` is no regular file that can be read, in words for a message that names it; "" where it is one."""
    try:
        fault = _fault(path.stat(), None)
    except (OSError, ValueError) as exc:
        return reason(exc)
    return fault[0] if fault else "" if os.access(path, os.R_OK) else reason(PermissionError())


def is_text(path: str) -> bool:
    """Whether a path is valid UTF-8; the system allows any bytes."""
    return not any("\ud800" <= character <= "\udfff" for character in path)


def reason(exc: OSError | ValueError) -> str:
    """Why a path cannot be opened, in words for a message that names it."""
    if isinstance(exc, ValueError):
        return "no path: it holds a null character"
    if isinstance(exc, FileNotFoundError):
        return "no such file"
    if exc.errno == errno.ELOOP:
        return "is a symbolic link that is not followed"
    if exc.errno == errno.ENXIO:
        return "is a socket or a device, not a file"
    if isinstance(exc, PermissionError):
        return "no permission to read it"
    return f"cannot be opened: {exc.strerror}"


def _fault(status: os.stat_result, most_bytes: int | None) -> tuple[str, str] | None:
    if not stat.S_ISREG(status.st_mode):
        kind = KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        hint = "give the file inside it" if stat.S_ISDIR(status.st_mode) else "write its contents into a file first"
        return f"is {kind}, not a file", hint
    if most_bytes is not None and status.st_size > most_bytes:
        return _too_large("", status.st_size, most_bytes)
    return None


def _too_large(where: str, size_bytes: int, most_bytes: int) -> tuple[str, str]:
    return f"{where}{size_bytes:,} bytes are more than the {most_bytes:,} that such a file may have", "check the path"
