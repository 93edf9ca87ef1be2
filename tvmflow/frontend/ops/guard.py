"""Checks at run time of values that would make the library read or write where it must not, or divide by zero.

A guard counts the good values and casts the pair (all, good) to the shape (n, n): where the two differ, the virtual
machine stops with an error that shows n's name, and the name says which node's which operand is at fault. This uses
nothing but the virtual machine's own built-ins, so it works on every target and in every runtime.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from tvm import relax, tirx

from tvmflow.frontend.ops.node import Node, dtype_of, scalar


def in_range(node: Node, index: int, extents: int | list[int]) -> Any:
    """An operand's indices counted from the front, after a check that all are in [-extent, extent).

    `extents` is the size of the indexed axis, or the list of sizes that the indices' last axis runs over.
    Constant indices are checked now, run-time indices at run time.
    """
    op, indices, known, sizes = node.op, node.tensor(index), node.constant(index), np.asarray(extents)
    dtype = dtype_of(indices)
    if known is not None:
        wrong = known[(known < -sizes) | (known >= sizes)]
        if wrong.size:
            raise node.refuse(f"index {wrong.flat[0]} is out of range for size {extents}", "correct the model")
        return relax.const(np.where(known < 0, known + sizes, known).astype(dtype), dtype)
    bound = relax.const(sizes.astype(dtype), dtype)
    good = op.less(indices, bound)
    if not dtype.startswith("u"):
        good = op.logical_and(good, op.greater_equal(indices, relax.const(-sizes.astype(dtype), dtype)))
    require(node, good, "index_in_range")
    if dtype.startswith("u"):
        return indices
    return op.where(op.less(indices, scalar(0, dtype)), op.add(indices, bound), indices)


def no_zero(node: Node, divisor: Any) -> Any:
    """A run-time integer divisor, after a check that it holds no zero; zeros are replaced lest the check come late."""
    op, dtype = node.op, dtype_of(divisor)
    zero = op.equal(divisor, scalar(0, dtype))
    require(node, op.logical_not(zero), "divisor_not_zero")
    return op.where(zero, scalar(1, dtype), divisor)


def require(node: Node, good: Any, what: str) -> None:
    """Stops the run where a boolean tensor does not hold throughout."""
    op = node.op
    good = op.reshape(op.astype(good, "int64"), (-1,))
    counts = op.concat([op.sum(op.ones_like(good), keepdims=True), op.sum(good, keepdims=True)], axis=0)
    n = tirx.Var(re.sub(r"\W+", "_", f"{node.op_type}_{node.name}_{what}"), "int64")
    node.builder.match_cast(op.tensor_to_shape(counts), relax.ShapeType([n, n]))
