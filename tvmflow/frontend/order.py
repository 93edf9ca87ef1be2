"""Order among numbers: the places of extremes, and keys to sort by. Exact at infinities, NaN and the widest integers.

TVM's argmax starts from the lowest finite number at the place -1, which wins against its like and against -inf; its
sorts compare NaN with `<`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax
from tvm.tirx import IntImm

INTEGERS = {"float32": "int32", "float64": "int64"}  # of the same width
SORTED = ("int32", "int64")  # what TVM's sorts compare


def dtype_of(tensor: Any) -> str:
    return str(tensor.ty.dtype)


def places_of_extremes(op: Any, x: Any, axis: int, largest: bool, last: bool = False) -> Any:
    """Where the largest or smallest of the numbers along `axis` stands, the first or the last: int64, the axis kept.

    `op` is an Emitter. NaN is passed over.
    """
    floats, numbers = "float" in dtype_of(x), x
    if floats:
        nan = op.isnan(x)
        numbers = op.where(nan, relax.const(-np.inf if largest else np.inf, dtype_of(x)), x)
    extreme = (op.max if largest else op.min)(numbers, axis, True)
    found = (op.greater_equal if largest else op.less_equal)(numbers, extreme)
    return _place(op, op.logical_and(found, op.logical_not(nan)) if floats else found, axis, last)


def _place(op: Any, found: Any, axis: int, last: bool) -> Any:
    """The first or last place along `axis` where `found` holds.

    Nowhere does it where there is nothing but the infinity that TVM's reduction does not start from.
    """
    shape = list(found.ty.shape)
    steps = op.reshape(op.arange(0, shape[axis], 1, dtype="int64"), [-1] + [1] * (len(shape) - axis - 1))
    end = (
        op.reshape(op.shape_to_tensor(relax.ShapeExpr([shape[axis]])), ())
        if not isinstance(shape[axis], IntImm)
        else relax.const(int(shape[axis]), "int64")
    )
    zero, one = relax.const(0, "int64"), relax.const(1, "int64")
    if last:
        place = op.max(op.where(found, steps, relax.const(-1, "int64")), axis, True)
        return op.where(op.less(place, zero), op.subtract(end, one), place)
    place = op.min(op.where(found, steps, end), axis, True)
    return op.where(op.equal(place, end), zero, place)


def sort_keys(op: Any, x: Any) -> Any:
    """Integers in the order of `x`: NaN is the largest, and 0 equals -0. uint64 has none."""
    dtype = dtype_of(x)
    if "float" not in dtype:
        return x if dtype in SORTED else op.astype(x, "int64")
    if dtype not in INTEGERS:
        x, dtype = op.astype(x, "float32"), "float32"
    kind, zero = INTEGERS[dtype], relax.const(0, dtype)
    highest = relax.const(np.iinfo(kind).max, kind)
    bits = op.memory.view(op.where(op.equal(x, zero), zero, x), dtype=kind)
    ordered = op.where(op.less(bits, relax.const(0, kind)), op.bitwise_xor(bits, highest), bits)
    return op.where(op.isnan(x), highest, ordered)
