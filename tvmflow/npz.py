"""Arrays by name in .npz files: read strictly, written whole or not at all."""

from __future__ import annotations

import os
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import psutil

from tvmflow.errors import InputError, OutputError, first_line
from tvmflow.files import open_regular

# What zipfile, zlib and numpy raise for archives that are none, broken, encrypted, or hold other things than arrays.
MALFORMED = (
    OSError,
    ValueError,
    EOFError,
    TypeError,
    KeyError,
    AttributeError,
    MemoryError,
    OverflowError,
    RuntimeError,
    NotImplementedError,
    SyntaxError,
    zipfile.BadZipFile,
    zlib.error,
)


def read(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file by name; raises InputError. Pickled objects are refused, and more than fits."""
    with open_regular(path, InputError) as stream:
        try:
            with zipfile.ZipFile(stream) as archive:
                _check_size(path, sum(member.file_size for member in archive.infolist()))
            stream.seek(0)
            with np.load(stream, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in arrays.files}
        except MALFORMED as exc:
            raise InputError(
                f"{path}: not an .npz of arrays: {first_line(exc)}", "write it with numpy.savez(path, name=array)"
            ) from None


def _check_size(path: Path, size_bytes: int) -> None:
    free = psutil.virtual_memory().available
    if size_bytes > free:
        raise InputError(
            f"{path}: its arrays take {size_bytes:,} bytes, and {free:,} bytes of memory are free",
            "give smaller inputs, or use a machine with more memory",
        )


def write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays by name, whole or not at all; raises OutputError. Only a regular file is ever replaced."""
    if path.exists() and not path.is_file():
        raise OutputError(f"{path}: exists and is no file, so it is not replaced", "choose another place")
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".npz", delete=False) as stream:
            temporary = Path(stream.name)
            try:
                with zipfile.ZipFile(stream, "w") as archive:
                    for name, array in arrays.items():
                        with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                            np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
                stream.flush()
                temporary.chmod(0o666 & ~_umask())
                temporary.replace(path.resolve())
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
    except OSError as exc:
        raise OutputError(f"{path}: cannot be written: {exc.strerror}", "choose another place") from None


def _umask() -> int:
    """The mode bits that new files are not given; the system only tells by setting them."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
