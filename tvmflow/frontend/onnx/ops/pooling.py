"""Pooling. The output's size and the padding that gives it are computed here, by the standard's rules.

TVM's own ceil_mode lets a last window start in the padding, and counts padding that ceil_mode itself added.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax

from tvmflow.frontend.onnx.ops.guard import in_range
from tvmflow.frontend.onnx.ops.node import Converters, Node, dtype_of, in_float32, numpy_dtype, scalar


@dataclass(frozen=True)
class Windows:
    """Where windows lie along each spatial axis: `stated` is the model's padding, `pads` what floor division needs."""

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    stated: list[tuple[int, int]]
    pads: list[tuple[int, int]]
    sizes: list[int]
    counts: list[int]

    @property
    def padding(self) -> list[int]:
        return [p[0] for p in self.pads] + [p[1] for p in self.pads]

    @property
    def ceiled(self) -> bool:
        return self.pads != self.stated


def windows(node: Node) -> Windows:
    rank = node.rank() - 2
    kernel, strides = node.ints("kernel_shape", ()), node.ints("strides", [1] * rank)
    dilations, pads = node.ints("dilations", [1] * rank), node.ints("pads", [0] * (2 * rank))
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    auto, ceil = node.text("auto_pad", "NOTSET"), node.integer("ceil_mode", 0)
    if auto == "NOTSET" and not ceil and not all(isinstance(dim, int) for dim in node.dims()[2:]):
        plain = [(pads[i], pads[i + rank]) for i in range(rank)]
        return Windows(kernel, strides, dilations, plain, plain, [], [])
    sizes = node.shape(0, range(2, rank + 2))
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        stated = same_padding(node, reach, strides, spare=0)
    else:
        stated = [(0, 0) if auto == "VALID" else (pads[i], pads[i + rank]) for i in range(rank)]
    counts = [_count(size, stated[i], reach[i], strides[i], bool(ceil)) for i, size in enumerate(sizes)]
    needed = [max((counts[i] - 1) * strides[i] + reach[i] - sizes[i] - stated[i][0], stated[i][1]) for i in range(rank)]
    return Windows(
        kernel, strides, dilations, stated, [(s[0], n) for s, n in zip(stated, needed, strict=True)], sizes, counts
    )


def same_padding(node: Node, reach: list[int], strides: list[int], spare: int) -> list[tuple[int, int]]:
    """Padding with which ceil(size / stride) windows fit; the odd element goes to the end for SAME_UPPER.

    Where windows reach less far than the strides, up to `spare` elements are left over at the end; with more of them
    the standard's reference and ONNX Runtime put the windows into different places.
    """
    pads = []
    for size, kernel, stride in zip(node.shape(0, range(2, len(reach) + 2)), reach, strides, strict=True):
        total = (-(-size // stride) - 1) * stride + kernel - size
        if total < -spare:
            raise node.refuse(
                "auto_pad = SAME with strides that leave elements out: references disagree on which",
                "state `pads` instead of auto_pad",
            )
        less, more = max(total, 0) // 2, max(total, 0) - max(total, 0) // 2
        pads.append((less, more) if node.text("auto_pad", "") == "SAME_UPPER" else (more, less))
    return pads


def _count(size: int, pads: tuple[int, int], reach: int, stride: int, ceil: bool) -> int:
    room = size + sum(pads) - reach
    count = (-(-room // stride) if ceil else room // stride) + 1
    return count - 1 if ceil and (count - 1) * stride >= size + pads[0] else count


def _relax_pool(node: Node, kind: str, x: Any, w: Windows, count_include_pad: bool = False) -> Any:
    if len(w.kernel) > 3:
        raise node.refuse("more than three spatial axes")
    pool = getattr(node.op.nn, f"{kind}_pool{len(w.kernel)}d")
    return pool(x, w.kernel, w.strides, w.padding, w.dilations, False, count_include_pad)


def _average_pool(node: Node) -> Any:
    op, w, x, include = node.op, windows(node), in_float32(node, node.x), bool(node.integer("count_include_pad", 0))
    plain = not w.ceiled and all(d == 1 for d in w.dilations)
    y = _relax_pool(node, "avg", x, w, include if plain else True)
    if not plain:
        share = _share_counted(w, include)
        y = op.multiply(y, relax.const(share.astype(numpy_dtype(dtype_of(y))), dtype_of(y)))
    return y if dtype_of(y) == node.dtype() else op.astype(y, node.dtype())


def _share_counted(w: Windows, include: bool) -> np.ndarray[Any, Any]:
    """Per window: kernel elements / elements that count, shaped to broadcast over batch and channels."""
    share = np.ones((1, 1))
    for i, kernel in enumerate(w.kernel):
        places = np.arange(w.counts[i])[:, None] * w.strides[i] - w.stated[i][0] + np.arange(kernel) * w.dilations[i]
        low, high = (-w.stated[i][0], w.sizes[i] + w.stated[i][1]) if include else (0, w.sizes[i])
        counted = ((places >= low) & (places < high)).sum(axis=1)
        share = share[..., None] * (kernel / np.maximum(counted, 1))
    return share


def _max_pool(node: Node) -> Any:
    w = windows(node)
    return _max_pool_with_indices(node, w) if node.output_count > 1 else _relax_pool(node, "max", node.x, w)


def _max_pool_with_indices(node: Node, w: Windows) -> Any:
    """Compares the kernel's elements one by one, each a strided slice of the padded input; the first maximum wins.

    A NaN is passed over, except where it is the first of a window's elements, padding not counted: as in ONNX Runtime.
    """
    op, x, dtype = node.op, node.x, node.dtype()
    shape, rank = node.shape(), len(w.kernel)
    low = -math.inf if dtype.startswith(("float", "bfloat")) else float(np.iinfo(dtype).min)
    widths = [0, 0, 0, 0, *itertools.chain.from_iterable(w.pads)]
    padded = op.nn.pad(x, widths, "constant", low) if any(widths) else x
    axes = list(range(2, rank + 2))
    best = place = None
    for offset in itertools.product(*map(range, w.kernel)):
        start = [o * d for o, d in zip(offset, w.dilations, strict=True)]
        stop = [s + (c - 1) * t + 1 for s, c, t in zip(start, w.counts, w.strides, strict=True)]
        value = op.strided_slice(padded, axes, start, stop, w.strides)
        index = relax.const(_flat_indices(w, start, shape, node.integer("storage_order", 0)), "int64")
        if best is None:
            best, place = value, op.broadcast_to(index, list(value.ty.shape))
            continue
        better, first = op.greater(value, best), _is_first_inside(w, offset)
        if first.any():
            better = op.logical_or(better, relax.const(first, "bool"))
        best, place = op.where(better, value, best), op.where(better, index, place)
    return relax.Tuple([best, place])


def _is_first_inside(w: Windows, offset: Sequence[int]) -> np.ndarray[Any, Any]:
    """For each window, whether its element at `offset` is the first that is not padding: [1, 1, windows...]."""
    first = np.ones((1, 1), bool)
    for i, at in enumerate(offset):
        starts = np.arange(w.counts[i]) * w.strides[i] - w.pads[i][0]
        first = first[..., None] & (-(np.minimum(starts, 0) // w.dilations[i]) == at)
    return first


def _flat_indices(w: Windows, start: list[int], shape: list[int], column_major: int) -> np.ndarray[Any, Any]:
    """The place in the whole input tensor of each window's element at `start`."""
    rank, sizes = len(w.kernel), shape[2:]
    order = sizes if not column_major else sizes[::-1]
    weights = [math.prod(order[i + 1 :]) for i in range(rank)]
    weights = weights[::-1] if column_major else weights
    total = np.arange(shape[0] * shape[1]).reshape(shape[0], shape[1]) * math.prod(sizes)
    for i in range(rank):
        place = np.arange(w.counts[i]) * w.strides[i] - w.pads[i][0] + start[i]
        total = total[..., None] + place * weights[i]
    return total


def _lp_pool(node: Node) -> Any:
    op, w, p, x = node.op, windows(node), node.number("p", 2), in_float32(node, node.x)
    mean = _relax_pool(node, "avg", _powered(op, x, p), w, count_include_pad=True)
    y = _root(op, op.multiply(mean, scalar(math.prod(w.kernel), dtype_of(x))), p)
    return y if dtype_of(y) == node.dtype() else op.astype(y, node.dtype())


def _powered(op: Any, x: Any, p: float) -> Any:
    if p == 2:
        return op.multiply(x, x)
    return op.abs(x) if p == 1 else op.power(op.abs(x), scalar(p, dtype_of(x)))


def _root(op: Any, x: Any, p: float) -> Any:
    if p == 2:
        return op.sqrt(x)
    return x if p == 1 else op.power(x, scalar(1 / p, dtype_of(x)))


def _global(kind: str) -> Any:
    def convert(node: Node) -> Any:
        op, x, axes, p = node.op, in_float32(node, node.x), list(range(2, node.rank())), node.number("p", 2)
        if kind == "max":
            y = op.max(x, axes, True)
        elif kind == "mean":
            y = op.mean(x, axes, True)
        else:
            y = _root(op, op.sum(_powered(op, x, p), axes, True), p)
        return y if dtype_of(y) == node.dtype() else op.astype(y, node.dtype())

    return convert


def _max_unpool(node: Node) -> Any:
    """Indices count in the whole output, whose shape is what the windows cover unless `output_shape` is given."""
    op, shape = node.op, node.shape()
    kernel, rank = node.ints("kernel_shape", ()), node.rank() - 2
    strides, pads = node.ints("strides", [1] * rank), node.ints("pads", [0] * (2 * rank))
    smallest = [(shape[i + 2] - 1) * strides[i] + kernel[i] - pads[i] - pads[i + rank] for i in range(rank)]
    given = node.optional(2, "output_shape")
    whole = shape[:2] + smallest if given is None else [int(size) for size in given]
    if len(whole) != rank + 2 or min(whole) < 0:
        raise node.refuse(f"the output's shape {whole} is none for rank {rank + 2}", "correct the model")
    flat = op.broadcast_to(scalar(0, node.dtype()), (math.prod(whole),))
    places = op.reshape(in_range(node, 1, math.prod(whole), from_end=False), (-1,))
    return op.reshape(op.scatter_elements(flat, places, op.reshape(node.x, (-1,)), axis=0), whole)


CONVERTERS: Converters = {
    "AveragePool": {1: _average_pool},
    "MaxPool": {1: _max_pool},
    "LpPool": {1: _lp_pool},
    "GlobalAveragePool": {1: _global("mean")},
    "GlobalMaxPool": {1: _global("max")},
    "GlobalLpPool": {1: _global("lp")},
    "MaxUnpool": {9: _max_unpool},
}
