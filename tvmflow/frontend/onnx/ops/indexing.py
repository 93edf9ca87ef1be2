"""Operators that read or write at computed places: negative indices, indices out of range, batch dimensions."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax, tirx

from tvmflow.frontend.onnx.ops.guard import in_range, lengths_within, require
from tvmflow.frontend.onnx.ops.node import FLOATS, Converters, Node, dtype_of, in_float32, scalar
from tvmflow.frontend.order import places_of_extremes

REDUCTIONS = {"none": "update", "add": "add", "mul": "mul", "min": "min", "max": "max"}


def _gather(node: Node) -> Any:
    axis, values, indices = node.axis(node.integer("axis", 0)), node.constant(0), node.constant(1)
    picked = in_range(node, 1, node.dims()[axis])
    if values is not None and indices is not None and values.size <= 1 << 20:
        return relax.const(np.take(values, indices, axis=axis), node.dtype())
    return node.op.take(node.x, picked, axis)


def _gather_elements(node: Node) -> Any:
    axis = node.axis(node.integer("axis", 0))
    return node.op.gather_elements(node.x, in_range(node, 1, node.dims()[axis]), axis)


def _gather_nd(node: Node) -> Any:
    batch = node.integer("batch_dims", 0)
    length = node.shape(1, [-1])[0]
    return node.op.gather_nd(node.x, in_range(node, 1, node.dims()[batch : batch + length]), batch)


def _reduction(node: Node) -> str:
    name = node.text("reduction", "none")
    if name not in REDUCTIONS:
        raise node.refuse(f"reduction = {name!r} is none of the standard's", "correct the model")
    return REDUCTIONS[name]


def _scatter_nd(node: Node) -> Any:
    length = node.shape(1, [-1])[0]
    indices = in_range(node, 1, node.dims()[:length])
    return node.op.scatter_nd(node.x, indices, node.tensor(2), _reduction(node))


def _scatter_elements(node: Node) -> Any:
    """TVM's kernel walks data and indices in step, so it is right only where all axes but one agree."""
    axis, op = node.axis(node.integer("axis", 0)), node.op
    indices, data_dims, index_dims = in_range(node, 1, node.dims()[axis]), node.dims(), node.dims(1)
    if all(a == axis or _same(d, i) for a, (d, i) in enumerate(zip(data_dims, index_dims, strict=True))):
        return op.scatter_elements(node.x, indices, node.tensor(2), axis=axis, reduction=_reduction(node))
    shape, rank, dtype = node.shape(1), node.rank(), dtype_of(indices)
    places = np.moveaxis(np.indices(shape), 0, -1).reshape(-1, rank)
    columns = [relax.const(places[:, a : a + 1].astype(dtype), dtype) for a in range(rank)]
    columns[axis] = op.reshape(indices, (-1, 1))
    return op.scatter_nd(node.x, op.concat(columns, axis=1), op.reshape(node.tensor(2), (-1,)), _reduction(node))


def _same(a: Any, b: Any) -> bool:
    return a == b if isinstance(a, int) and isinstance(b, int) else a is b


def _one_hot(node: Node) -> Any:
    """`depth` columns; an index outside [-depth, depth) gives a row of off-values."""
    op, depth = node.op, int(node.known(1, "depth").item())
    if depth <= 0:
        raise node.refuse(f"depth = {depth} leaves no column", "correct the model")
    rank = node.rank()
    axis = node.axis(node.integer("axis", -1), rank + 1)
    indices = op.astype(node.x, "int64")
    indices = op.where(op.less(indices, scalar(0, "int64")), op.add(indices, scalar(depth, "int64")), indices)
    columns = np.arange(depth).reshape((-1,) + (1,) * (rank - axis))
    hot = op.equal(op.expand_dims(indices, axis), relax.const(columns, "int64"))
    off, on = (op.take(node.tensor(2), relax.const(i, "int64"), 0) for i in (0, 1))
    return op.where(hot, on, off)


def _reverse_sequence(node: Node) -> Any:
    batch, time = node.integer("batch_axis", 1), node.integer("time_axis", 0)
    lengths = node.op.astype(lengths_within(node, 1, node.dims()[time]), "int32")
    return node.op.reverse_sequence(node.x, lengths, seq_axis=time, batch_axis=batch)


def _tensor_scatter(node: Node) -> Any:
    """Writes `update` into a cache from each batch's place on: positions past the end wrap around if circular."""
    op, axis = node.op, node.axis(node.integer("axis", -2))
    shape, size = node.shape(1), node.shape(0, [axis])[0]
    steps = np.arange(shape[axis]).reshape((1,) * axis + (-1,) + (1,) * (len(shape) - axis - 1))
    start: Any = scalar(0, "int64")
    if node.has(2):
        start = op.reshape(op.astype(node.tensor(2), "int64"), (-1,) + (1,) * (len(shape) - 1))
    places = op.broadcast_to(op.add(relax.const(steps, "int64"), start), shape)
    if node.text("mode", "linear") == "circular":
        places = op.floor_mod(places, scalar(size, "int64"))
    else:
        inside = op.logical_and(op.less(places, scalar(size, "int64")), op.greater_equal(places, scalar(0, "int64")))
        require(node, inside, "place_in_range")
        places = op.where(inside, places, scalar(0, "int64"))
    return op.scatter_elements(node.x, places, node.tensor(1), axis=axis)


def _split(node: Node) -> Any:
    """Sizes from the input or the attribute; else even parts, of which the last may be smaller."""
    op, axis, count = node.op, node.axis(node.integer("axis", 0)), node.output_count
    sizes = node.constant(1)
    if node.has(1) and sizes is None:
        return _split_at_run_time(node, axis)
    if sizes is None and "split" in node.attributes:
        sizes = np.array(node.ints("split", ()))
    if sizes is None:
        length = node.shape(0, [axis])[0]
        part = -(-length // count)
        sizes = np.clip(length - part * np.arange(count), 0, part)
    if len(sizes) != count:
        raise node.refuse(f"{len(sizes)} sizes are given for {count} outputs", "correct the model")
    ends = np.cumsum(sizes).tolist()
    if isinstance(node.dims()[axis], int) and ends[-1] != node.dims()[axis]:
        raise node.refuse(f"the sizes add up to {ends[-1]}, the axis has {node.dims()[axis]}", "correct the model")
    if count > 1 and all(size > 0 for size in sizes):
        return op.split(node.x, ends[:-1], axis)
    parts = [op.strided_slice(node.x, [axis], [end - int(size)], [end]) for size, end in zip(sizes, ends, strict=True)]
    return relax.Tuple(parts) if count > 1 else parts[0]


def _split_at_run_time(node: Node, axis: int) -> Any:
    op, count, dims = node.op, node.output_count, node.dims()
    sizes = op.astype(node.tensor(1), "int64")
    shape = op.shape_to_tensor(relax.ShapeExpr([dims[axis]]))
    require(node, op.greater_equal(sizes, scalar(0, "int64")), "size_not_negative")
    require(node, op.equal(op.sum(sizes, keepdims=True), shape), "sizes_fill_the_axis")
    lengths = [tirx.Var(f"split_size_{i}", "int64") for i in range(count)]
    node.builder.match_cast(op.tensor_to_shape(sizes), relax.ShapeType(lengths))
    start, parts = 0, []
    for length in lengths:
        part = op.strided_slice(node.x, [axis], [start], [start + length], assume_inbound=True)
        parts.append(part)
        start = start + length
    return relax.Tuple(parts) if count > 1 else parts[0]


def _arg_extreme(largest: bool) -> Any:
    def convert(node: Node) -> Any:
        return _arg_of(node, largest)

    return convert


def _arg_of(node: Node, largest: bool) -> Any:
    """NaN is passed over, except one in front, which wins: what ONNX Runtime does."""
    op, x = node.op, in_float32(node, node.x)
    axis, keepdims = node.axis(node.integer("axis", 0)), bool(node.integer("keepdims", 1))
    if node.dims()[axis] == 0:
        raise node.refuse("the reduced axis is empty", "correct the model")
    place = places_of_extremes(op, x, axis, largest, bool(node.integer("select_last_index", 0)))
    if node.dtype() in FLOATS:
        place = op.where(op.isnan(op.strided_slice(x, [axis], [0], [1])), scalar(0, "int64"), place)
    return place if keepdims else op.squeeze(place, [axis])


def _compress(node: Node) -> Any:
    picked = np.flatnonzero(node.known(1, "condition"))
    x, axis = node.x, node.attributes.get("axis")
    x = node.op.reshape(x, (-1,)) if axis is None else x
    return node.op.take(x, relax.const(picked, "int64"), 0 if axis is None else node.axis(int(axis)))


CONVERTERS: Converters = {
    "Compress": {9: _compress},
    "Gather": {1: _gather},
    "GatherElements": {11: _gather_elements},
    "GatherND": {11: _gather_nd},
    "Scatter": {9: _scatter_elements},
    "ScatterElements": {11: _scatter_elements},
    "ScatterND": {11: _scatter_nd},
    "OneHot": {9: _one_hot},
    "ReverseSequence": {10: _reverse_sequence},
    "TensorScatter": {24: _tensor_scatter},
    "Split": {1: _split},
    "ArgMax": {1: _arg_extreme(largest=True)},
    "ArgMin": {1: _arg_extreme(largest=False)},
}
