"""Operators that change shapes: through Relax operators where there are any, for passes see through those."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import relax, tirx

from tvmflow.frontend.onnx.ops.guard import require, require_equal
from tvmflow.frontend.onnx.ops.node import Converters, Node, numpy_dtype, scalar
from tvmflow.frontend.sizes import SizeArithmetic, is_size

MOST_ELEMENTS = 2.0**40  # of a tensor whose size is computed at run time


def run_time_shape(node: Node, tensor: Any, length: int, name: str) -> relax.ShapeExpr:
    """The shape that an int64 tensor of `length` elements holds at run time, as new symbolic axes."""
    _check_shape(node, tensor)
    axes = [tirx.Var(f"{name}_{i}", "int64") for i in range(length)]
    node.builder.match_cast(node.op.tensor_to_shape(tensor), relax.ShapeType(axes))
    return relax.ShapeExpr(axes)


def _check_shape(node: Node, sizes: Any) -> None:
    """Stops the run where no tensor can have these sizes, before memory for it is asked for."""
    op = node.op
    require(node, op.greater_equal(sizes, scalar(0, "int64")), "size_not_negative")
    elements = op.prod(op.astype(sizes, "float64"), keepdims=True)  # integers would wrap
    require(node, op.less_equal(elements, scalar(MOST_ELEMENTS, "float64")), "size_fits_into_memory")


def _known_shape(node: Node, sizes: Sequence[Any]) -> None:
    """Likewise for expressions of sizes, of which one may become negative."""
    arithmetic = SizeArithmetic()
    doubtful = [size for size in sizes if not isinstance(size, int | tirx.IntImm) and not arithmetic.not_negative(size)]
    if doubtful:
        tensor = node.op.shape_to_tensor(relax.ShapeExpr(doubtful))
        require(node, node.op.greater_equal(tensor, scalar(0, "int64")), "size_not_negative")


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


def _reshape_by_attribute(node: Node) -> Any:
    return node.op.reshape(node.x, _symbolic_target(node, node.ints("shape", ())))


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
    """Symbolic repeats give each axis a neighbour of that size, over which it is broadcast."""
    op, repeats, dims = node.op, node.constant(1), node.dims()
    if repeats is not None:
        return op.tile(node.x, [int(count) for count in repeats])
    if isinstance(node.inputs[1], relax.ShapeExpr):
        counts = node.inputs[1].values
        _known_shape(node, counts)
    else:
        counts = run_time_shape(node, node.tensor(1), len(dims), "repeats").values
        _check_shape(node, op.multiply(node.tensor(1), op.shape_to_tensor(relax.ShapeExpr(dims))))
    pairs = [size for count, dim in zip(counts, dims, strict=True) for size in (count, dim)]
    spread = op.broadcast_to(op.reshape(node.x, [size for dim in dims for size in (1, dim)]), pairs)
    return op.reshape(spread, [count * dim for count, dim in zip(counts, dims, strict=True)])


def _constant(node: Node) -> Any:
    from onnx.numpy_helper import to_array

    for name, dtype in (
        ("value_int", "int64"),
        ("value_ints", "int64"),
        ("value_float", "float32"),
        ("value_floats", "float32"),
    ):
        if name in node.attributes:
            return relax.const(np.array(node.attributes[name], dtype), dtype)
    if "value" not in node.attributes:
        raise node.refuse("only numbers can be constants")
    value = to_array(node.attributes["value"])
    return relax.const(value, str(value.dtype))


def _constant_of_shape(node: Node) -> Any:
    shape = node.constant(0)
    if shape is not None and (shape < 0).any():
        raise node.refuse(f"the shape {shape.tolist()} has a negative size", "correct the model")
    if isinstance(node.inputs[0], relax.ShapeExpr):
        _known_shape(node, node.inputs[0].values)
    if shape is not None or isinstance(node.inputs[0], relax.ShapeExpr):
        return node.upstream()
    from onnx.numpy_helper import to_array

    value = to_array(node.attributes["value"]) if "value" in node.attributes else np.zeros(1, "float32")
    filled = relax.const(value.reshape(()), str(value.dtype))
    return node.op.broadcast_to(filled, run_time_shape(node, node.tensor(0), node.shape(0)[0], "filled"))


def _range(node: Node) -> Any:
    """Limits that are only known at run time, after a check that the step is not 0 and the length fits into memory."""
    if all(node.constant(i) is not None for i in range(3)):
        return node.upstream()
    op = node.op
    start, limit, step = (op.reshape(node.tensor(i), ()) for i in range(3))
    first, last, stride = (op.astype(value, "float64") for value in (start, limit, step))
    zero = scalar(0, "float64")
    moves = op.logical_and(op.not_equal(stride, zero), op.equal(stride, stride))
    length = op.divide(op.subtract(last, first), op.where(moves, stride, scalar(1, "float64")))
    good = op.logical_and(moves, op.less_equal(length, scalar(MOST_ELEMENTS, "float64")))
    require(node, good, "step_is_not_0_and_length_fits_into_memory")
    return node.upstream([start, limit, op.where(good, step, scalar(1, node.dtype(2)))])


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


def _squeeze(node: Node) -> Any:
    """An axis of symbolic size must have the size 1 when the model runs."""
    axes: Any = node.attributes["axes"] if "axes" in node.attributes else node.optional(1, "axes")
    if node.constant(0) is not None:
        return node.upstream()
    if axes is None:
        if not all(isinstance(dim, int) for dim in node.dims()):
            raise node.refuse(
                "without `axes`, which axes stay depends on sizes that are not known",
                "fix them with [shapes.dims] in the config, or state `axes` in the model",
            )
        return node.upstream()
    dims, gone = node.dims(), {node.axis(int(axis)) for axis in axes}
    symbolic = [axis for axis in sorted(gone) if not isinstance(dims[axis], int)]
    if not symbolic:
        return node.upstream()
    for axis in symbolic:
        require_equal(node, dims[axis], 1, f"axis_{axis}_has_size_1")
    return node.op.reshape(node.x, relax.ShapeExpr([dim for axis, dim in enumerate(dims) if axis not in gone]))


CONVERTERS: Converters = {
    "Squeeze": {1: _squeeze},
    "Expand": {8: _expand},
    "Reshape": {1: _reshape_by_attribute, 5: _reshape},
    "Tile": {6: _tile},
    "Constant": {1: _constant},
    "ConstantOfShape": {9: _constant_of_shape},
    "Range": {11: _range},
    "EyeLike": {9: _eye_like},
    "DepthToSpace": {1: _depth_to_space},
    "SpaceToDepth": {1: _space_to_depth},
    "Einsum": {12: _einsum},
    "BitCast": {26: _bit_cast},
    "Size": {1: _size},
}
