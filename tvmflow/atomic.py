"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path, prefix: str = ".tvmflow.") -> Iterator[BinaryIO]:
    """A stream for a file's new content, which takes its place when the block ends well, and is gone otherwise.

    Whoever reads at any moment, or after a crash, finds the old file or the new one. Until then it stands beside it,
    under a name that begins with `prefix`. Raises OSError.
    """
    temporary = path.parent / f"{prefix}{secrets.token_hex(8)}"
    try:
        with temporary.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Makes the disk remember which files a folder holds."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
