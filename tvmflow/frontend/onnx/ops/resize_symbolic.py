"""Resize along an axis of symbolic size: places and weights are computed when the model runs, in float32.

The formulas are those of resize.py, in Relax operators.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax

from tvmflow.frontend.onnx.ops.node import Node, dtype_of, scalar
from tvmflow.frontend.sizes import Size, SizeArithmetic

F = np.float32


@dataclass(frozen=True)
class Plan:
    """What is resized: `axes`, the sizes before and after, the scales, and the region (start, end) per axis.

    A scale of NaN is the quotient of two sizes of which one is symbolic.
    """

    axes: list[int]
    before: list[Size]
    after: list[Size]
    scales: list[float]
    region: list[tuple[float, float]]
    coordinates: str
    mode: str
    nearest: str

    def is_symbolic(self, i: int) -> bool:
        return not (isinstance(self.before[i], int) and isinstance(self.after[i], int))

    def is_unchanged(self, i: int) -> bool:
        same = SizeArithmetic().equal(self.before[i], self.after[i])
        return same and self._scale_is(i, 1) and self.region[i] == (0.0, 1.0)

    def _scale_is(self, i: int, value: int) -> bool:
        return self.scales[i] == value or math.isnan(self.scales[i])

    def factor(self, i: int) -> int | None:
        """How many times longer axis i becomes, where that is a whole number."""
        if not self.is_symbolic(i):
            whole = self.after[i] % self.before[i] == 0 and self.after[i] == self.before[i] * self.scales[i]
            return int(self.after[i] // self.before[i]) if whole else None
        times = self.scales[i]
        if math.isnan(times):
            quotient = SizeArithmetic().quotient(self.after[i], self.before[i])
            times = quotient if isinstance(quotient, int) else 0.5
        fits = times == int(times) and SizeArithmetic().equal(self.after[i], self.before[i] * int(times))
        return int(times) if fits else None


def size_after(node: Node, size: Size, scale: float) -> Size:
    """What floor(float32(scale) * float32(size)) is for all sizes below 2^24, where that can be said exactly."""
    numerator, denominator = float(F(scale)).as_integer_ratio()
    if numerator >= 1 << 8 or denominator >= 1 << 8:
        raise node.refuse(
            f"a scale of {scale} along an axis of symbolic size gives sizes that depend on rounding",
            "fix the axis with [shapes.dims] in the config, or give `sizes` instead of `scales`",
        )
    return SizeArithmetic().quotient(SizeArithmetic().axis(size) * numerator, denominator)


def along(node: Node, plan: Plan, i: int, x: Any) -> Any:
    """`x`, resized along axis number i of the plan."""
    if plan.coordinates == "tf_crop_and_resize" or node.integer("antialias", 0) or node.integer("exclude_outside", 0):
        raise node.refuse(
            "the axis is symbolic, and this form of Resize needs sizes that are known",
            "fix it with [shapes.dims] in the config",
        )
    op, axis, places = node.op, plan.axes[i], _coordinates(node.op, plan, i)
    last = op.subtract(_tensor(op, plan.before[i], "int64"), scalar(1, "int64"))
    if plan.mode == "nearest":
        return op.take(x, _inside(op, _nearest(op, plan, i, places), last), axis)
    base, total = op.floor(places), None
    for offset in (0, 1) if plan.mode == "linear" else (-1, 0, 1, 2):
        tap = op.add(base, scalar(offset, "float32"))
        weight = _weight(op, op.abs(op.subtract(tap, places)), node.number("cubic_coeff_a", -0.75), plan.mode)
        weight = op.reshape(op.astype(weight, dtype_of(x)), [-1] + [1] * (node.rank() - axis - 1))
        term = op.multiply(op.take(x, _inside(op, tap, last), axis), weight)
        total = term if total is None else op.add(total, term)
    return total


def _coordinates(op: Any, plan: Plan, i: int) -> Any:
    """Where each output element lies among the input's elements."""

    def number(value: float) -> Any:
        return scalar(value, "float32")

    out = op.astype(op.arange(0, plan.after[i], 1, dtype="int64"), "float32")
    scale = _scale(op, plan, i)
    half_pixel = op.subtract(op.divide(op.add(out, number(0.5)), scale), number(0.5))
    size, length = (_tensor(op, value, "float32") for value in (plan.before[i], plan.after[i]))
    match plan.coordinates:
        case "half_pixel":
            return half_pixel
        case "pytorch_half_pixel":
            return op.where(op.greater(length, number(1)), half_pixel, number(0))
        case "asymmetric":
            return op.divide(out, scale)
        case "align_corners":
            spaces = op.maximum(op.subtract(length, number(1)), number(1))
            return op.divide(op.multiply(out, op.subtract(size, number(1))), spaces)
        case _:  # half_pixel_symmetric
            missing = op.subtract(number(1), op.divide(length, op.multiply(scale, size)))
            return op.add(op.multiply(op.divide(size, number(2)), missing), half_pixel)


def _scale(op: Any, plan: Plan, i: int) -> Any:
    if not math.isnan(plan.scales[i]):
        return scalar(plan.scales[i], "float32")
    return op.divide(_tensor(op, plan.after[i], "float32"), _tensor(op, plan.before[i], "float32"))


def _tensor(op: Any, size: Size, dtype: str) -> Any:
    if isinstance(size, int):
        return scalar(size, dtype)
    tensor = op.reshape(op.shape_to_tensor(relax.ShapeExpr([size])), ())
    return tensor if dtype == "int64" else op.astype(tensor, dtype)


def _inside(op: Any, places: Any, last: Any) -> Any:
    return op.minimum(op.maximum(op.astype(places, "int64"), scalar(0, "int64")), last)


def _nearest(op: Any, plan: Plan, i: int, places: Any) -> Any:
    half = scalar(0.5, "float32")
    match plan.nearest:
        case "floor":
            return op.floor(places)
        case "ceil":
            return op.ceil(places)
        case "round_prefer_ceil":
            return op.floor(op.add(places, half))
        case "simple":
            shrinks = op.less(_scale(op, plan, i), scalar(1, "float32"))
            return op.where(shrinks, op.ceil(places), op.trunc(places))
        case _:
            lower = op.floor(places)
            return op.where(op.equal(places, op.add(lower, half)), lower, op.floor(op.add(places, half)))


def _weight(op: Any, distance: Any, a: float, mode: str) -> Any:
    """The weight of a tap at this distance: a triangle, or Keys' cubic."""

    def number(value: float) -> Any:
        return scalar(value, "float32")

    if mode == "linear":
        return op.maximum(op.subtract(number(1), distance), number(0))
    square = op.multiply(distance, distance)
    near = op.add(op.multiply(op.subtract(op.multiply(number(a + 2), distance), number(a + 3)), square), number(1))
    inner = op.add(op.multiply(op.subtract(op.multiply(number(a), distance), number(5 * a)), distance), number(8 * a))
    far = op.subtract(op.multiply(inner, distance), number(4 * a))
    return op.where(op.less_equal(distance, number(1)), near, op.where(op.less(distance, number(2)), far, number(0)))
