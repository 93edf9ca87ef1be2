"""One writer at a time: a lock on the database's folder, which the system lifts when its holder dies."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tvmflow.errors import DatabaseError

LOCK_TIMEOUT_S = 60.0


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a database for one writer. Raises DatabaseError for whatever the system refuses meanwhile."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _wait_for_lock(handle, path)
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)  # a process forked meanwhile has the handle too
            os.close(handle)
    except OSError as exc:
        raise DatabaseError(
            f"{exc.filename or path}: cannot be written: {exc.strerror or exc}",
            "check permissions and space; what was there before is whole",
        ) from None


def _wait_for_lock(handle: int, path: Path) -> None:
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise DatabaseError(
                    f"{path}: another process has been writing to it for {LOCK_TIMEOUT_S:.0f} s",
                    "see which with `fuser`, and end it",
                ) from None
            time.sleep(0.01)
