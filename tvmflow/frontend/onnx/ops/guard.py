"""Checks at run time of values that would make the library read or write where it must not, or divide by zero.

The error says which node's which operand is at fault.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax

from tvmflow.frontend.onnx.ops.node import Node, dtype_of, scalar
from tvmflow.frontend.sizes import Size
from tvmflow.graph import run_time_check


def in_range(node: Node, index: int, extents: Any, from_end: bool = True) -> Any:
    """An operand's indices counted from the front, after a check that all are in [-extent, extent).

    `extents` is the size of the indexed axis, or the list of sizes that the indices' last axis runs over; sizes may
    be symbolic. Without `from_end` indices are in [0, extent), and bad ones are replaced, for those are written to.
    Constant indices are checked now where the sizes are known, else at run time.
    """
    op, indices, known = node.op, node.tensor(index), node.constant(index)
    dtype, sizes = dtype_of(indices), extents if isinstance(extents, list) else [extents]
    if all(isinstance(size, int) for size in sizes):
        fixed = np.array(extents)
        if known is not None:
            return _known_in_range(node, known, fixed, from_end)
        bound = relax.const(fixed.astype(dtype), dtype)
    else:
        bound = op.astype(op.shape_to_tensor(relax.ShapeExpr(sizes)), dtype)
        bound = bound if isinstance(extents, list) else op.reshape(bound, ())
    good, zero = op.less(indices, bound), scalar(0, dtype)
    if not dtype.startswith("u"):
        good = op.logical_and(good, op.greater_equal(indices, op.negative(bound) if from_end else zero))
    require(node, good, "index_in_range")
    if not from_end:
        return op.where(good, indices, zero)
    return indices if dtype.startswith("u") else op.where(op.less(indices, zero), op.add(indices, bound), indices)


def _known_in_range(node: Node, indices: np.ndarray[Any, Any], sizes: np.ndarray[Any, Any], from_end: bool) -> Any:
    wrong = indices[(indices < (-sizes if from_end else 0)) | (indices >= sizes)]
    if wrong.size:
        raise node.refuse(f"index {wrong.flat[0]} is out of range for size {sizes.tolist()}", "correct the model")
    return relax.const(np.where(indices < 0, indices + sizes, indices).astype(indices.dtype), str(indices.dtype))


def lengths_within(node: Node, index: int, most: Size) -> Any:
    """An operand that says how much of an axis of size `most` is meant, after a check that it is in [0, most]."""
    op, lengths = node.op, node.tensor(index)
    dtype, zero = dtype_of(lengths), scalar(0, dtype_of(lengths))
    if isinstance(most, int):
        bound = scalar(most, dtype)
    else:
        bound = op.astype(op.reshape(op.shape_to_tensor(relax.ShapeExpr([most])), ()), dtype)
    good = op.logical_and(op.greater_equal(lengths, zero), op.less_equal(lengths, bound))
    require(node, good, "length_in_range")
    return op.where(good, lengths, zero)


def no_zero(node: Node, divisor: Any) -> Any:
    """A run-time integer divisor, after a check that it holds no zero; zeros are replaced lest the check come late."""
    op, dtype = node.op, dtype_of(divisor)
    zero = op.equal(divisor, scalar(0, dtype))
    require(node, op.logical_not(zero), "divisor_not_zero")
    return op.where(zero, scalar(1, dtype), divisor)


def require(node: Node, good: Any, what: str) -> None:
    """Stops the run where a boolean tensor does not hold throughout; the error names the node and `what`."""
    run_time_check.require(node.builder, good, f"{node.op_type}_{node.name}_{what}")


def require_equal(node: Node, a: Size, b: Size, what: str) -> None:
    """Stops the run where two sizes differ."""
    run_time_check.require_equal(node.builder, a, b, f"{node.op_type}_{node.name}_{what}")
