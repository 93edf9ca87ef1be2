"""Arrays by name in .npz files: read strictly, written whole or not at all."""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tvmflow.errors import InputError, OutputError


def read(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file by name; raises InputError. Pickled objects are refused."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile, AttributeError) as exc:
        hint = "write it with numpy.savez(path, name=array)"
        raise InputError(f"{path}: not an .npz of arrays: {exc}", hint) from None


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
