"""Operators that change shapes: through Relax operators where there are any, for passes see through those."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import relax, tirx

from tvmflow.frontend.ops.guard import require
from tvmflow.frontend.ops.node import FLOATS, Converters, Node, numpy_dtype, scalar
from tvmflow.frontend.sizes import SizeArithmetic, is_size

INT_MAX = (2**31 - 1, 2**63 - 1)
PAD_MODES = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}


def run_time_shape(node: Node, tensor: Any, length: int, name: str) -> relax.ShapeExpr:
    """The shape that an int64 tensor of `length` elements holds at run time, as new symbolic axes."""
    axes = [tirx.Var(f"{name}_{i}", "int64") for i in range(length)]
    node.builder.match_cast(node.op.tensor_to_shape(tensor), relax.ShapeType(axes))
    return relax.ShapeExpr(axes)


def _pad_by_attributes(node: Node) -> Any:
    pads = node.ints("pads", node.attributes.get("paddings", ()))
    return padded(node, pads, list(range(node.rank())), node.number("value", 0.0))


def _pad(node: Node) -> Any:
    axes = node.optional(3, "axes")
    picked = list(range(node.rank())) if axes is None else [node.axis(int(axis)) for axis in axes]
    value = node.constant(2) if node.has(2) else np.array(0)
    pads = [int(pad) for pad in node.known(1, "pads")]
    if value is None:
        return _padded_with_tensor(node, pads, picked)
    return padded(node, pads, picked, value.item() if value.size else 0)


def padded(node: Node, pads: list[int], axes: list[int], value: float) -> Any:
    """Negative pads cut off first; then the others are added."""
    op, mode = node.op, node.text("mode", "constant")
    if mode not in PAD_MODES:
        raise node.refuse(f"mode = {mode!r} is none of the standard's", "correct the model")
    x, count = _cut(node, pads, axes), len(axes)
    widths = [0] * (2 * node.rank())
    for i, axis in enumerate(axes):
        widths[2 * axis], widths[2 * axis + 1] = max(pads[i], 0), max(pads[i + count], 0)
        limit = {"reflect": -1, "wrap": 0}.get(mode)
        if limit is not None and max(widths[2 * axis: 2 * axis + 2]) > max(node.shape(0, [axis])[0] + limit, 0):
            raise node.refuse(f"mode = {mode!r} pads axis {axis} by more than it holds")
    if not any(widths):
        return x
    if mode == "constant" and node.dtype() not in FLOATS:
        return _with_borders(op, x, widths, relax.const(np.array(value, numpy_dtype(node.dtype())), node.dtype()))
    return op.nn.pad(x, widths, PAD_MODES[mode], float(value))


def _cut(node: Node, pads: list[int], axes: list[int]) -> Any:
    x, count = node.x, len(axes)
    cut = [(axis, -min(pads[i], 0), min(pads[i + count], 0)) for i, axis in enumerate(axes)]
    cut = [(axis, before, after) for axis, before, after in cut if before or after]
    if cut:
        ends = [end + after for (_, _, after), end in zip(cut, node.shape(0, [c[0] for c in cut]), strict=True)]
        x = node.op.strided_slice(x, [c[0] for c in cut], [c[1] for c in cut], ends)
    return x


def _padded_with_tensor(node: Node, pads: list[int], axes: list[int]) -> Any:
    if node.text("mode", "constant") != "constant":
        return padded(node, pads, axes, 0)
    widths = [0] * (2 * node.rank())
    for i, axis in enumerate(axes):
        widths[2 * axis], widths[2 * axis + 1] = max(pads[i], 0), max(pads[i + len(axes)], 0)
    return _with_borders(node.op, _cut(node, pads, axes), widths, node.op.reshape(node.tensor(2), ()))


def _with_borders(op: Any, x: Any, widths: list[int], value: Any) -> Any:
    """Concatenates borders of a value that nn.pad cannot take: a run-time one, or an integer (it holds doubles)."""
    for axis in range(len(widths) // 2):
        borders = [list(x.ty.shape) for _ in range(2)]
        borders[0][axis], borders[1][axis] = widths[2 * axis], widths[2 * axis + 1]
        before, after = (op.broadcast_to(value, border) if border[axis] else None for border in borders)
        parts = [part for part in (before, x, after) if part is not None]
        x = op.concat(parts, axis=axis) if len(parts) > 1 else x
    return x


def _slice(node: Node) -> Any:
    """Places as Python's slices clamp them, so that TVM gets none beyond the ends and none that run backwards."""
    if node.opset < 10:
        starts, ends = (np.array(node.ints(name, ())) for name in ("starts", "ends"))
        axes: Any = np.array(node.ints("axes", range(len(starts))))
        steps: Any = np.ones(len(starts), "int64")
    else:
        values = [node.constant(i) for i in range(1, 5)]
        if isinstance(node.inputs[0], relax.ShapeExpr) or any(node.has(i + 1) and values[i] is None for i in range(4)):
            return node.upstream()
        starts, ends, axes, steps = values  # type: ignore[assignment] # the first two are no options
    axes = [node.axis(int(axis)) for axis in (range(len(starts)) if axes is None else axes)]
    steps = [1] * len(starts) if steps is None else [int(step) for step in steps]
    dims = node.dims()
    if not all(isinstance(dims[axis], int) for axis in axes):
        return node.op.strided_slice(node.x, axes, [int(s) for s in starts], [int(e) for e in ends], steps)
    begin, end = [], []
    for axis, start, stop, step in zip(axes, starts, ends, steps, strict=True):
        places = _places(dims[axis], int(start), int(stop), step)
        begin.append(places[0] if places else 0)
        after = places[-1] + (1 if step > 0 else -1) if places else 0
        end.append(after if after >= 0 else -dims[axis] - 1)
    return node.op.strided_slice(node.x, axes, begin, end, steps)


def _places(size: int, start: int, stop: int, step: int) -> range:
    """What a slice takes: ends before the front or beyond the end are clamped, as the standard says, to elements.

    The highest integers mean the end in the direction of the step, as ONNX Runtime has it.
    """
    start, stop = (value + size if value < 0 else value for value in (start, stop))
    if step > 0:
        return range(min(max(start, 0), size), min(max(stop, 0), size), step)
    stop = -1 if stop in INT_MAX else min(max(stop, -1), size - 1)
    return range(min(max(start, 0), size - 1), stop, step)


def _expand(node: Node) -> Any:
    """Both shapes broadcast against each other: the result may have more axes than either asks for."""
    op, value = node.op, node.inputs[1]
    dims = node.dims()
    wanted = node.constant(1)
    if wanted is not None or isinstance(value, relax.ShapeExpr):
        target: list[Any] = list(value.values) if wanted is None else wanted.tolist()
        rank = max(len(dims), len(target))
        dims, target = [1] * (rank - len(dims)) + dims, [1] * (rank - len(target)) + target
        shape = [d if is_size(t, 1) or is_size(t, -1) else t for d, t in zip(dims, target, strict=True)]
        for d, s in zip(dims, shape, strict=True):
            if isinstance(d, int) and isinstance(s, int) and d != s and d != 1:
                raise node.refuse(f"shape {node.dims()} does not broadcast to {target}", "correct the model")
        return op.broadcast_to(node.x, relax.ShapeExpr(shape))
    length = node.shape(1)[0]
    rank = max(len(dims), length)
    mine = op.shape_to_tensor(relax.ShapeExpr([1] * (rank - len(dims)) + dims))
    theirs = op.concat([relax.const(np.ones(rank - length, "int64"), "int64"), node.tensor(1)], axis=0)
    one = scalar(1, "int64")
    shape_tensor = op.where(op.equal(theirs, one), mine, theirs)
    require(node, op.logical_or(op.equal(mine, one), op.equal(mine, shape_tensor)), "shapes_broadcast")
    return op.broadcast_to(node.x, run_time_shape(node, shape_tensor, rank, "expanded"))


def _reshape(node: Node) -> Any:
    """A 0 copies the input's axis, a -1 takes what is left."""
    wanted = node.constant(1)
    if wanted is not None and (node.constant(0) is not None or all(isinstance(dim, int) for dim in node.dims())):
        return node.upstream()
    if wanted is not None or isinstance(node.inputs[1], relax.ShapeExpr):
        target = list(node.inputs[1].values) if wanted is None else wanted.tolist()
        return node.op.reshape(node.x, _symbolic_target(node, target))
    op, dims, length, one = node.op, node.dims(), node.shape(1)[0], scalar(1, "int64")
    shape = node.tensor(1)
    if not node.integer("allowzero", 0):
        own = (dims + [1] * length)[:length]
        shape = op.where(op.equal(shape, scalar(0, "int64")), op.shape_to_tensor(relax.ShapeExpr(own)), shape)
    open_axis = op.equal(shape, scalar(-1, "int64"))
    total = op.prod(op.shape_to_tensor(relax.ShapeExpr(dims or [1])), keepdims=True)
    rest = op.maximum(op.prod(op.where(open_axis, one, shape), keepdims=True), one)
    shape = op.where(open_axis, op.floor_divide(total, rest), shape)
    require(node, op.equal(op.prod(shape, keepdims=True), total), "element_counts_agree")
    return op.reshape(node.x, run_time_shape(node, shape, length, "reshaped"))


def _symbolic_target(node: Node, wanted: Sequence[Any]) -> relax.ShapeExpr:
    sizes = SizeArithmetic()
    dims, target = [sizes.axis(dim) for dim in node.dims()], [sizes.simple(size) for size in wanted]
    if not node.integer("allowzero", 0):
        target = [dims[axis] if is_size(size, 0) else size for axis, size in enumerate(target)]
    open_axes = [axis for axis, size in enumerate(target) if is_size(size, -1)]
    if len(open_axes) == 1:
        rest = sizes.rest(dims, [size for size in target if not is_size(size, -1)])
        if rest is None:
            raise node.refuse(f"the -1 in {target} has no size", "correct the model")
        target[open_axes[0]] = rest
    return relax.ShapeExpr(target)


def _tile(node: Node) -> Any:
    """Run-time repeats give each axis a neighbour of that size, over which it is broadcast."""
    op, repeats, dims = node.op, node.constant(1), node.dims()
    if repeats is not None:
        return op.tile(node.x, [int(count) for count in repeats])
    counts = run_time_shape(node, node.tensor(1), len(dims), "repeats").values
    pairs = [size for count, dim in zip(counts, dims, strict=True) for size in (count, dim)]
    spread = op.broadcast_to(op.reshape(node.x, [size for dim in dims for size in (1, dim)]), pairs)
    return op.reshape(spread, [count * dim for count, dim in zip(counts, dims, strict=True)])


def _constant(node: Node) -> Any:
    from onnx.numpy_helper import to_array

    for name, dtype in (("value_int", "int64"), ("value_ints", "int64"), ("value_float", "float32"),
                        ("value_floats", "float32")):
        if name in node.attributes:
            return relax.const(np.array(node.attributes[name], dtype), dtype)
    if "value" not in node.attributes:
        raise node.refuse("only numbers can be constants")
    value = to_array(node.attributes["value"])
    return relax.const(value, str(value.dtype))


def _constant_of_shape(node: Node) -> Any:
    shape = node.constant(0)
    if shape is not None or isinstance(node.inputs[0], relax.ShapeExpr):
        return node.upstream()
    from onnx.numpy_helper import to_array

    value = to_array(node.attributes["value"]) if "value" in node.attributes else np.zeros(1, "float32")
    filled = relax.const(value.reshape(()), str(value.dtype))
    return node.op.broadcast_to(filled, run_time_shape(node, node.tensor(0), node.shape(0)[0], "filled"))


def _eye_like(node: Node) -> Any:
    from onnx.helper import tensor_dtype_to_np_dtype

    dtype = str(tensor_dtype_to_np_dtype(node.attributes["dtype"])) if "dtype" in node.attributes else node.dtype()
    rows, columns = node.shape()
    return relax.const(np.eye(rows, columns, k=node.integer("k", 0)).astype(numpy_dtype(dtype)), dtype)


def _depth_to_space(node: Node) -> Any:
    block, (n, c, h, w) = node.integer("blocksize", 1), node.dims()
    channels, op = c // block**2, node.op
    if node.text("mode", "DCR") == "DCR":
        x = op.permute_dims(op.reshape(node.x, (n, block, block, channels, h, w)), [0, 3, 4, 1, 5, 2])
    else:
        x = op.permute_dims(op.reshape(node.x, (n, channels, block, block, h, w)), [0, 1, 4, 2, 5, 3])
    return op.reshape(x, (n, channels, h * block, w * block))


def _space_to_depth(node: Node) -> Any:
    block, (n, c, h, w), op = node.integer("blocksize", 1), node.dims(), node.op
    order = [0, 3, 5, 1, 2, 4] if node.text("mode", "DCR") == "DCR" else [0, 1, 3, 5, 2, 4]
    x = op.reshape(node.x, (n, c, h // block, block, w // block, block))
    return op.reshape(op.permute_dims(x, order), (n, c * block**2, h // block, w // block))


def _center_crop_pad(node: Node) -> Any:
    axes = [node.axis(axis) for axis in node.ints("axes", range(node.rank()))]
    wanted = [int(size) for size in node.known(1, "shape")]
    pads = [[0] * len(axes), [0] * len(axes)]
    for i, (size, want) in enumerate(zip(node.shape(0, axes), wanted, strict=True)):
        difference = abs(want - size)
        sign = 1 if want >= size else -1
        pads[0][i], pads[1][i] = sign * (difference // 2), sign * (difference - difference // 2)
    return padded(node, pads[0] + pads[1], axes, 0)


def _einsum(node: Node) -> Any:
    """relax.einsum, which later passes can still see; TOPI sums repeated labels and ellipses as ONNX asks."""
    equation = node.text("equation", "").replace(" ", "")
    return node.op.einsum(relax.Tuple([node.tensor(i) for i in range(len(node.inputs))]), equation)


def _bit_cast(node: Node) -> Any:
    from onnx.helper import tensor_dtype_to_np_dtype

    target = numpy_dtype(str(tensor_dtype_to_np_dtype(node.attributes["to"])))
    if target.itemsize != numpy_dtype(node.dtype()).itemsize:
        raise node.refuse("a bit cast between types of different widths")
    known = node.constant(0)
    if known is not None:
        return relax.const(known.view(target), target.name)
    x = node.op.astype(node.x, "uint8") if node.dtype() == "bool" else node.x  # LLVM holds a bool in one bit
    return node.op.memory.view(x, dtype=target.name)


def _size(node: Node) -> Any:
    dims = node.dims()
    if all(isinstance(dim, int) for dim in dims):
        return relax.const(math.prod(dims), "int64")
    return node.op.prod(node.op.shape_to_tensor(relax.ShapeExpr(dims)))


CONVERTERS: Converters = {
    "Pad": {1: _pad_by_attributes, 11: _pad},
    "Slice": {1: _slice},
    "Expand": {8: _expand},
    "Reshape": {5: _reshape},
    "Tile": {6: _tile},
    "Constant": {1: _constant},
    "ConstantOfShape": {9: _constant_of_shape},
    "EyeLike": {9: _eye_like},
    "DepthToSpace": {1: _depth_to_space},
    "SpaceToDepth": {1: _space_to_depth},
    "CenterCropPad": {18: _center_crop_pad},
    "Einsum": {12: _einsum},
    "BitCast": {26: _bit_cast},
    "Size": {1: _size},
}
