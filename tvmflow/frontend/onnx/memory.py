"""How many bytes a declared tensor takes, and whether this machine has them."""

from __future__ import annotations

import math
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import onnx
import psutil
from onnx import ModelProto, TensorProto

from tvmflow import process
from tvmflow.errors import ModelError

# What an import may allocate beyond what the file holds, and how often it may copy the weights.
MOST_BYTES = 2 << 30
BYTES_PER_NODE = 64 << 10
COPIES = 8
NEGLIGIBLE = 1 << 20  # bytes; asking the system what is free takes longer than having them
_SUB_BYTE_BITS = {
    TensorProto.INT4: 4,
    TensorProto.UINT4: 4,
    TensorProto.FLOAT4E2M1: 4,
    TensorProto.INT2: 2,
    TensorProto.UINT2: 2,
}


def bits_of(elem_type: int) -> int:
    """Bits per element of an ONNX element type; strings and unknown types count as one byte."""
    if elem_type in _SUB_BYTE_BITS:
        return _SUB_BYTE_BITS[elem_type]
    if elem_type == TensorProto.STRING or elem_type not in TensorProto.DataType.values() or not elem_type:
        return 8
    bits: int = onnx.helper.tensor_dtype_to_np_dtype(elem_type).itemsize * 8
    return bits


def check_fits(what: str, shape: Sequence[int], elem_type: int) -> None:
    """Raises ModelError when a tensor of `shape` alone takes more than this machine's free memory."""
    if any(size < 0 for size in shape):
        raise ModelError(f"{what} has a negative size in its shape {list(shape)}", "export the model again")
    check_total(f"{what} of shape {list(shape)}", math.prod(shape) * bits_of(elem_type) // 8)


def check_total(what: str, needed_bytes: int) -> None:
    """Raises ModelError where something takes more than this machine's free memory, or than the limit of it."""
    if needed_bytes < NEGLIGIBLE:
        return
    free = psutil.virtual_memory().available
    if needed_bytes > free:
        raise ModelError(
            f"{what} takes {needed_bytes:,} bytes, and {free:,} bytes of memory are free",
            "make the shapes smaller, or use a machine with more memory",
        )
    if needed_bytes > (limit := process.memory_limit_bytes()):
        raise ModelError(
            f"{what} takes {needed_bytes:,} bytes, and limits.memory_gib allows {limit:,}",
            "make the shapes smaller, or allow more: --set limits.memory_gib=...",
        )


@contextmanager
def bounded(model: ModelProto) -> Iterator[None]:
    """Inside, at most what importing `model` may take is allocated; a request for more is a MemoryError at once.

    Sizes that stand in a model's attributes and constants become arrays in many places: in onnxscript, in TVM, in our
    converters. The system refuses what is too large, before any of it is used.
    """
    nodes = len(model.graph.node)
    allowed = MOST_BYTES + BYTES_PER_NODE * nodes + COPIES * sum(len(t.raw_data) for t in model.graph.initializer)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    most = _data_bytes() + allowed
    if before[0] == resource.RLIM_INFINITY or most < before[0]:
        resource.setrlimit(resource.RLIMIT_DATA, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _data_bytes() -> int:
    """What counts against RLIMIT_DATA by now."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


def values_of(tensor: TensorProto) -> tuple[str, int] | None:
    """The field that holds a tensor's values where they are not raw, and how many it must hold.

    None for types that onnx does not know.
    """
    known = [number for number in TensorProto.DataType.values() if number != TensorProto.UNDEFINED]
    if tensor.data_type not in known:
        return None
    count = math.prod(tensor.dims)
    packed = 8 // _SUB_BYTE_BITS.get(tensor.data_type, 8)
    parts = 2 if tensor.data_type in (TensorProto.COMPLEX64, TensorProto.COMPLEX128) else 1
    return onnx.helper.tensor_dtype_to_field(tensor.data_type), -(-count * parts // packed)
