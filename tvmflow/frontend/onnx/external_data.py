"""Weights of an ONNX model in files beside it: which files that may be, and how they are read."""

from __future__ import annotations

import math
import os
from pathlib import Path, PurePosixPath

from onnx import TensorProto

from tvmflow.errors import ModelError
from tvmflow.files import open_regular
from tvmflow.frontend.onnx import memory

EXPORT_AGAIN = "export the model again, or fetch the whole file"
OUTSIDE = "external data must lie beside the model; save the model again with relative locations"


def location(tensor: TensorProto) -> str:
    """Where a tensor says that its data is, from the model's folder; "" where it says nothing."""
    return _entries(tensor).get("location", "")


def expected_bytes(tensor: TensorProto) -> int:
    elements: int = math.prod(tensor.dims)
    return -(-elements * memory.bits_of(tensor.data_type) // 8)


def load(model: Path, tensor: TensorProto) -> None:
    """Reads a tensor's data into it, once its file is known to belong to the model and to be long enough.

    Raises ModelError, naming the tensor and the file.
    """
    where = f"tensor '{tensor.name}'"
    file = _file_of(model, location(tensor), where)
    start, length = _extent(tensor, where)
    with open_regular(file, ModelError, place=f"{where}: its external data file {file}: ") as stream:
        size_bytes = os.fstat(stream.fileno()).st_size
        if start + length > size_bytes:
            raise ModelError(
                f"{where}: its external data file {file} is too short: {start + length:,} bytes are "
                f"needed, it has {size_bytes:,}",
                EXPORT_AGAIN,
            )
        try:
            stream.seek(start)
            data = stream.read(length)
        except OSError as exc:
            raise ModelError(
                f"{where}: its external data file {file} cannot be read: {exc.strerror}", "check the file and its disk"
            ) from None
    if len(data) != length:
        raise ModelError(f"{where}: its external data file {file} became shorter while it was read", EXPORT_AGAIN)
    tensor.raw_data = data
    tensor.data_location = TensorProto.DEFAULT
    del tensor.external_data[:]


def _file_of(model: Path, location: str, where: str) -> Path:
    """The file at `location`, which neither its words nor symbolic links may lead away from the model.

    Links may lead to places in the model's folder. Where the model itself is a link, they may also lead to files that
    lie side by side with the file that it points at: so caches keep downloads (Hugging Face's: links in `snapshots`
    to files in one folder `blobs`).
    """
    words = PurePosixPath(location)
    if not location or "\0" in location or words.is_absolute() or ".." in words.parts:
        raise ModelError(f"{where}: its external data '{location}' lies outside the model's folder", OUTSIDE)
    file = model.parent / location
    try:
        real, folder = file.resolve(), model.parent.resolve()
        is_beside = model.is_symlink() and real.parent == model.resolve().parent
    except (OSError, RuntimeError):  # RuntimeError: links in a circle
        raise ModelError(f"{where}: its external data '{location}' is no usable path", OUTSIDE) from None
    if not real.is_relative_to(folder) and not is_beside:
        raise ModelError(f"{where}: its external data '{location}' lies outside the model's folder", OUTSIDE)
    if not os.path.lexists(real):
        raise ModelError(
            f"{where}: its external data file {file} does not exist",
            f"put {location} beside the model, where the export wrote it",
        )
    return file


def _extent(tensor: TensorProto, where: str) -> tuple[int, int]:
    """Where a tensor's data starts in its file, and how long it is: as long as its shape says."""
    entries, needed = _entries(tensor), expected_bytes(tensor)
    try:
        start, length = int(entries.get("offset", 0)), int(entries.get("length", needed))
    except ValueError:
        raise ModelError(f"{where}: its external data has no valid offset and length", EXPORT_AGAIN) from None
    if start < 0 or length != needed:
        raise ModelError(
            f"{where} of shape {list(tensor.dims)} needs {needed:,} bytes of external data, and the model "
            f"gives it {length:,} at offset {start:,}",
            EXPORT_AGAIN,
        )
    return start, length


def _entries(tensor: TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}
