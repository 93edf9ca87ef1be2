"""Arrays by name in .npz files: read strictly, written whole or not at all."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import psutil

from tvmflow import atomic
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

ENDING = ".npy"
MAX_NAME_BYTES = 0xFFFF
"""Of a member of a zip file, its ending included."""


def read(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file by name; raises InputError. Pickled objects are refused, and more than fits.

    Not numpy's own reader: for a file with `x` and `x.npy` it gives the array of `x` for both.
    """
    hint = "write it with numpy.savez(path, name=array)"
    arrays: dict[str, np.ndarray] = {}
    with open_regular(path, InputError) as stream:
        try:
            with zipfile.ZipFile(stream) as archive:
                _check_size(path, sum(member.file_size for member in archive.infolist()))
                for entry in archive.infolist():
                    name = entry.filename.removesuffix(ENDING)
                    if name in arrays:
                        raise InputError(f"{path}: holds two arrays called `{name}`", hint)
                    with archive.open(entry) as member:
                        arrays[name] = np.lib.format.read_array(member, allow_pickle=False)
        except MALFORMED as exc:
            raise InputError(f"{path}: not an .npz of arrays: {first_line(exc)}", hint) from None
    return arrays


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
    _check_names(path, arrays)
    try:
        with atomic.replacing(path.resolve()) as stream, zipfile.ZipFile(stream, "w") as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}{ENDING}", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
    except OSError as exc:
        raise OutputError(f"{path}: cannot be written: {exc.strerror}", "choose another place") from None


def _check_names(path: Path, names: Iterable[str]) -> None:
    """Raises OutputError where the names would not be read back: a zip file cuts them at a NUL, for instance."""
    known = set(names)
    for name in known:
        size = len(name.encode(errors="surrogatepass")) + len(ENDING)
        if "\0" in name or size > MAX_NAME_BYTES or f"{name}{ENDING}" in known or not _is_unicode(name):
            raise OutputError(
                f"{path}: an .npz file cannot hold an array called `{name}` and give it back",
                "take the arrays in Python: tvmflow.load(ARTIFACT).run(inputs)",
            )


def _is_unicode(name: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in name)
