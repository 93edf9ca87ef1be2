"""Operands whose axes must agree, where that cannot be proven from their symbolic sizes.

A map that was halved and doubled has the size 2 * ((h + 1) // 2), which a model adds to one of size h: right for the
sizes that the model was made for. Such axes are required to be equal when the model runs, and count as equal from there
on. A symbolic axis is never taken for one that broadcasts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm_ffi
from onnx import NodeProto
from tvm import relax

from tvmflow.frontend.sizes import Size, SizeArithmetic, is_size
from tvmflow.graph import run_time_check

BROADCASTS = frozenset(
    {
        "Add",
        "Sub",
        "Mul",
        "Div",
        "Mod",
        "Pow",
        "Max",
        "Min",
        "Sum",
        "Mean",
        "Where",
        "PRelu",
        "And",
        "Or",
        "Xor",
        "Equal",
        "Less",
        "LessOrEqual",
        "Greater",
        "GreaterOrEqual",
        "BitwiseAnd",
        "BitwiseOr",
        "BitwiseXor",
        "BitShift",
    }
)


def agreed(node: NodeProto, inputs: Sequence[Any], builder: relax.BlockBuilder, sizes: SizeArithmetic) -> list[Any]:
    """The operands with the same expression for each axis that must agree, after checks at run time where needed."""
    if node.domain or node.op_type not in (*BROADCASTS, "Concat") or len(inputs) < 2:
        return list(inputs)
    if not all(_has_shape(value) for value in inputs):
        return list(inputs)
    shapes = [[sizes.axis(size) for size in value.ty.shape.values] for value in inputs]
    rank = max(map(len, shapes))
    joined = next((a.i % rank for a in node.attribute if a.name == "axis"), None) if node.op_type == "Concat" else None
    changed = set()
    for axis in range(rank):
        places = [(number, axis - rank + len(shape)) for number, shape in enumerate(shapes)]
        places = [(number, place) for number, place in places if place >= 0 and not is_size(shapes[number][place], 1)]
        target = min((shapes[number][place] for number, place in places), key=_length, default=1)
        for number, place in places:
            size = shapes[number][place]
            fixed = isinstance(size, int) and isinstance(target, int)  # a fault that the converter will name
            if axis != joined and not fixed and not sizes.equal(size, target):
                what = f"{node.op_type}_{node.name}_axis_{axis}_agrees"
                run_time_check.require_equal(builder, size, target, what)
                shapes[number][place] = target
                changed.add(number)
    return [_as(builder, value, shapes[number]) if number in changed else value for number, value in enumerate(inputs)]


def _as(builder: relax.BlockBuilder, value: relax.Expr, shape: list[Size]) -> relax.Expr:
    """`value` with this shape: by a cast, or a reshape where TVM would drop the cast because only names differ."""
    typed = relax.TensorType(shape, value.ty.dtype)
    if tvm_ffi.structural_equal(typed, value.ty, map_free_vars=True):
        return builder.emit(relax.op.reshape(value, typed.shape))
    return builder.match_cast(value, typed)


def _has_shape(value: Any) -> bool:
    return value is not None and isinstance(value.ty, relax.TensorType) and isinstance(value.ty.shape, relax.ShapeExpr)


def _length(size: Size) -> tuple[bool, int]:
    """Integers before expressions, short expressions before long ones."""
    return not isinstance(size, int), len(str(size))
