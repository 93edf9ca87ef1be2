"""Reductions and scans: empty axes, empty sets, NaN, and half precision summed in float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax

from tvmflow.frontend.onnx.ops.node import FLOATS, Converters, Node, dtype_of, in_float32, numpy_dtype, scalar
from tvmflow.frontend.order import places_of_extremes, sort_keys


@dataclass(frozen=True)
class Reducer:
    """Reductions over fixed axes. No axes means no reduction: what is elementwise in the operator still happens."""

    op: Any
    axes: list[int]
    keepdims: bool
    count: int | None

    def sum(self, x: Any) -> Any:
        return self.op.sum(x, self.axes, self.keepdims) if self.axes else x

    def prod(self, x: Any) -> Any:
        return self.op.prod(x, self.axes, self.keepdims) if self.axes else x

    def max(self, x: Any) -> Any:
        return self._extreme(x, self.op.max, -math.inf)

    def min(self, x: Any) -> Any:
        return self._extreme(x, self.op.min, math.inf)

    def mean(self, x: Any) -> Any:
        if not self.axes:
            return x
        if dtype_of(x) in FLOATS:
            return self.op.mean(x, self.axes, self.keepdims)
        if self.count is None:
            return self.op.astype(self.op.mean(self.op.astype(x, "float64"), self.axes, self.keepdims), dtype_of(x))
        return self.op.divide(self.sum(x), scalar(self.count, dtype_of(x)))

    def log_sum_exp(self, x: Any) -> Any:
        """With the maximum taken out, unless it is infinite, lest inf - inf make a NaN."""
        op = self.op
        if not self.axes:
            return x
        top = op.max(x, self.axes, True)
        top = op.where(op.isfinite(top), top, scalar(0, dtype_of(x)))
        total = op.add(op.log(op.sum(op.exp(op.subtract(x, top)), self.axes, True)), top)
        return total if self.keepdims else op.squeeze(total, self.axes)

    def _extreme(self, x: Any, function: Any, start: float) -> Any:
        """Of floats NaN where any is NaN, as in numpy. A bool's extreme is taken of integers.

        TVM starts from the lowest finite number instead of -inf, so that the extreme of nothing but -inf is that
        number; a second reduction tells what there is besides: 0 nothing but `start`, 1 other numbers, 2 a NaN.
        """
        op, dtype = self.op, dtype_of(x)
        if not self.axes:
            return x
        if dtype == "bool":
            return op.astype(function(op.astype(x, "int8"), self.axes, self.keepdims), "bool")
        extreme = function(x, self.axes, self.keepdims)
        if dtype not in FLOATS:
            return extreme
        # Not by not_equal, which TVM compiles to a comparison that is false for NaN.
        other = op.logical_not(op.equal(x, scalar(start, dtype)))
        kind = op.max(op.add(op.astype(other, "int8"), op.astype(op.isnan(x), "int8")), self.axes, self.keepdims)
        extreme = op.where(op.equal(kind, scalar(0, "int8")), scalar(start, dtype), extreme)
        return op.where(op.equal(kind, scalar(2, "int8")), scalar(math.nan, dtype), extreme)


Reduction = Callable[[Reducer, Any], Any]


def _axes(node: Node) -> list[int]:
    given: Any = node.attributes["axes"] if "axes" in node.attributes else node.optional(1, "axes")
    if given is not None and len(given):
        return sorted({node.axis(int(axis)) for axis in given})
    return [] if node.integer("noop_with_empty_axes", 0) else list(range(node.rank()))


def _reduce(reduction: Reduction, empty: float) -> Callable[[Node], Any]:
    """A converter; `empty` is the operator's value for an empty set."""

    def convert(node: Node) -> Any:
        axes, keepdims, dims, dtype = _axes(node), bool(node.integer("keepdims", 1)), node.dims(), node.dtype()
        sizes = [dims[axis] for axis in axes]
        if any(size == 0 for size in sizes if isinstance(size, int)):
            shape = [1 if a in axes else d for a, d in enumerate(dims) if keepdims or a not in axes]
            return node.op.broadcast_to(relax.const(_empty_value(empty, dtype), dtype), shape)
        count = math.prod(sizes) if all(isinstance(size, int) for size in sizes) else None
        x = in_float32(node, node.x)
        result = reduction(Reducer(node.op, axes, keepdims, count), x)
        return result if dtype_of(result) == dtype else node.op.astype(result, dtype)

    return convert


def _empty_value(value: float, dtype: str) -> np.ndarray[Any, Any]:
    kind = numpy_dtype(dtype)
    if math.isinf(value) and dtype not in FLOATS and dtype != "bool":
        return np.array(np.iinfo(kind).max if value > 0 else np.iinfo(kind).min, kind)
    return np.array(value > 0 if dtype == "bool" else value, kind)


def _l2(reducer: Reducer, x: Any) -> Any:
    op = reducer.op
    x = x if dtype_of(x) in FLOATS else op.astype(x, "float64")
    return op.sqrt(reducer.sum(op.multiply(x, x)))


def _log_sum(reducer: Reducer, x: Any) -> Any:
    return reducer.op.log(reducer.sum(x if dtype_of(x) in FLOATS else reducer.op.astype(x, "float64")))


def _log_sum_exp(reducer: Reducer, x: Any) -> Any:
    return reducer.log_sum_exp(x if dtype_of(x) in FLOATS else reducer.op.astype(x, "float64"))


def _scan(product: bool) -> Callable[[Node], Any]:
    def convert(node: Node) -> Any:
        op, axis = node.op, node.axis(int(node.known(1, "axis").item()))
        reverse, exclusive = node.integer("reverse", 0), bool(node.integer("exclusive", 0))
        x = in_float32(node, node.x)
        x = op.flip(x, axis) if reverse else x
        x = (op.cumprod if product else op.cumsum)(x, axis, exclusive=exclusive)
        x = op.flip(x, axis) if reverse else x
        return x if dtype_of(x) == node.dtype() else op.astype(x, node.dtype())

    return convert


def _top_k(node: Node) -> Any:
    """NaN counts as the largest value. The order is found among integers, which the sort can compare."""
    op, x, dtype = node.op, node.x, node.dtype()
    k = int(node.known(1, "K").item()) if node.opset >= 10 else node.integer("k", 1)
    axis, largest = node.axis(node.integer("axis", -1)), bool(node.integer("largest", 1))
    if isinstance(node.dims()[axis], int) and not 0 <= k <= node.dims()[axis]:
        raise node.refuse(f"k = {k} is more than axis {axis} holds", "correct the model")
    if dtype == "uint64":
        raise node.refuse("the sort cannot compare uint64", "cast to int64 before it")
    if k == 0:
        empty = op.strided_slice(x, [axis], [0], [0])
        return relax.Tuple([empty, op.astype(empty, "int64")])
    places = op.topk(sort_keys(op, x), k, axis, ret_type="indices", largest=largest, dtype="int64")
    return relax.Tuple([op.gather_elements(x, places, axis), places])


def _softmax(kind: str) -> Callable[[Node], Any]:
    """Before opset 13 all axes from `axis` on are normalised together. Half precision is summed in float32."""

    def convert(node: Node) -> Any:
        op, dtype, dims = node.op, node.dtype(), node.dims()
        x, legacy = in_float32(node, node.x), node.opset < 13
        axis = node.integer("axis", 1 if legacy else -1)
        axis = axis % node.rank() if -node.rank() <= axis < node.rank() else axis
        if legacy and axis != node.rank() - 1:
            x = op.reshape(x, (math.prod(dims[:axis]), math.prod(dims[axis:])))
            axis = 1
        if kind == "hardmax":
            x = op.astype(_is_first_maximum(node, x, axis), dtype)
        else:
            x = (op.nn.softmax if kind == "softmax" else op.nn.log_softmax)(x, axis=axis)
        x = x if len(x.ty.shape) == len(dims) and not legacy else op.reshape(x, dims)
        return x if dtype_of(x) == dtype else op.astype(x, dtype)

    return convert


def _is_first_maximum(node: Node, x: Any, axis: int) -> Any:
    """Whether an element is the first of the largest along an axis; none is where a NaN stands in front, as in ONNX
    Runtime."""
    op, columns = node.op, np.arange(_extent(node, x, axis)).reshape((-1,) + (1,) * (x.ty.ndim - axis - 1))
    place = places_of_extremes(op, x, axis, largest=True)
    if dtype_of(x) in FLOATS:
        place = op.where(op.isnan(op.strided_slice(x, [axis], [0], [1])), scalar(-1, "int64"), place)
    return op.equal(place, relax.const(columns, "int64"))


def _extent(node: Node, x: Any, axis: int) -> int:
    size = x.ty.shape[axis]
    if not hasattr(size, "value"):
        raise node.refuse("the axis is symbolic", "fix it with [shapes.dims] in the config")
    return int(size)


_NONE = -math.inf
CONVERTERS: Converters = {
    "ReduceSum": {1: _reduce(Reducer.sum, 0)},
    "ReduceMean": {1: _reduce(Reducer.mean, math.nan)},
    "ReduceMax": {1: _reduce(Reducer.max, _NONE)},
    "ReduceMin": {1: _reduce(Reducer.min, math.inf)},
    "ReduceProd": {1: _reduce(Reducer.prod, 1)},
    "ReduceL1": {1: _reduce(lambda r, x: r.sum(r.op.abs(x)), 0)},
    "ReduceL2": {1: _reduce(_l2, 0)},
    "ReduceSumSquare": {1: _reduce(lambda r, x: r.sum(r.op.multiply(x, x)), 0)},
    "ReduceLogSum": {1: _reduce(_log_sum, _NONE)},
    "ReduceLogSumExp": {1: _reduce(_log_sum_exp, _NONE)},
    "CumSum": {11: _scan(product=False)},
    "CumProd": {26: _scan(product=True)},
    "TopK": {1: _top_k},
    "Softmax": {1: _softmax("softmax")},
    "LogSoftmax": {1: _softmax("log_softmax")},
    "Hardmax": {1: _softmax("hardmax")},
}
