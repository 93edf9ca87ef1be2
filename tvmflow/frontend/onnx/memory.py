"""How many bytes a declared tensor takes, and whether this machine has them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx
import psutil
from onnx import TensorProto

from tvmflow.errors import ModelError

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
    needed = math.prod(shape) * bits_of(elem_type) // 8
    free = psutil.virtual_memory().available
    if needed > free:
        raise ModelError(
            f"{what} of shape {list(shape)} takes {needed:,} bytes, and {free:,} bytes of memory are free",
            "make the shapes smaller, or use a machine with more memory",
        )
