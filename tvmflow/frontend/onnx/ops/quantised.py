"""Quantised operators, as the integer arithmetic that the standard defines them by: products are summed in int32."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax

from tvmflow.frontend.onnx.ops.activation import at_least, at_most
from tvmflow.frontend.onnx.ops.linear import convolve
from tvmflow.frontend.onnx.ops.node import Converters, Node, dtype_of, in_float32, scalar

INTEGERS = frozenset({"int8", "uint8", "int16", "uint16", "int32"})


def quantise(op: Any, x: Any, scale: Any, zero: Any | None, dtype: str) -> Any:
    """saturate(round(x / scale) + zero), halves to even; operands broadcast, x and scale are floats."""
    y = op.round(op.divide(x, scale))
    if zero is not None:
        y = op.add(y, op.astype(zero, dtype_of(y)))
    limits = np.iinfo(dtype)
    return op.astype(at_most(op, at_least(op, y, int(limits.min)), int(limits.max)), dtype)


def centred(op: Any, x: Any, zero: Any | None) -> Any:
    """x - zero in int32; operands broadcast."""
    x = op.astype(x, "int32")
    return x if zero is None else op.subtract(x, op.astype(zero, "int32"))


def dequantise(op: Any, x: Any, scale: Any, zero: Any | None) -> Any:
    """(x - zero) * scale; operands broadcast."""
    return op.multiply(op.astype(centred(op, x, zero), dtype_of(scale)), scale)


def _per_axis(node: Node, index: int) -> Any:
    """A scale or zero point, shaped to broadcast: a scalar, a vector along `axis`, or one value per block."""
    if not node.has(index):
        return None
    op, value, block = node.op, node.tensor(index), node.integer("block_size", 0)
    if value.ty.ndim == 0 or (value.ty.ndim == 1 and node.shape(index) == [1]):
        return op.reshape(value, ())
    axis = node.axis(node.integer("axis", 1))
    if block:
        length = node.shape(0, [axis])[0]
        return op.strided_slice(op.repeat(value, block, axis), [axis], [0], [length])
    return op.reshape(value, [1] * axis + [-1] + [1] * (node.rank() - axis - 1))


def _element_type(node: Node, name: str, otherwise: str) -> str:
    from onnx.helper import tensor_dtype_to_np_dtype

    code = node.integer(name, 0)
    return str(tensor_dtype_to_np_dtype(code)) if code else otherwise


def _quantize_linear(node: Node) -> Any:
    zero = _per_axis(node, 2)
    dtype = _element_type(node, "output_dtype", "uint8" if zero is None else dtype_of(zero))
    if dtype not in INTEGERS:
        raise node.refuse(f"quantising to {dtype} is not supported")
    x, scale = in_float32(node, node.x), in_float32(node, _per_axis(node, 1))
    x = x if dtype_of(x) == dtype_of(scale) else node.op.astype(x, dtype_of(scale))
    return quantise(node.op, x, scale, zero, dtype)


def _dequantize_linear(node: Node) -> Any:
    if node.dtype() not in INTEGERS:
        raise node.refuse(f"dequantising {node.dtype()} is not supported")
    scale = _per_axis(node, 1)
    y = dequantise(node.op, node.x, in_float32(node, scale), _per_axis(node, 2))
    dtype = _element_type(node, "output_dtype", dtype_of(scale))
    return y if dtype_of(y) == dtype else node.op.astype(y, dtype)


def _dynamic_quantize_linear(node: Node) -> Any:
    return relax.Tuple(dynamic(node.op, node.x))


def dynamic(op: Any, x: Any) -> list[Any]:
    """The uint8 tensor, its scale and its zero point; a tensor of zeros has the scale 1."""
    dtype, row = dtype_of(x), op.reshape(x, (1, -1))  # a row has a schedule
    high, low = (op.reshape(extreme(row, [1]), ()) for extreme in (op.max, op.min))
    high, low = at_least(op, high, 0), at_most(op, low, 0)
    scale = op.divide(op.subtract(high, low), scalar(255, dtype))
    scale = op.where(op.equal(scale, scalar(0, dtype)), scalar(1, dtype), scale)
    zero = op.round(op.divide(op.negative(low), scale))
    zero = op.astype(at_most(op, at_least(op, zero, 0), 255), "uint8")
    return [quantise(op, x, scale, zero, "uint8"), scale, zero]


def _centred(node: Node, index: int, zero_index: int, vector_axis: int) -> Any:
    """An operand in int32 with its zero point taken off; a zero point's vector lies along `vector_axis` from behind."""
    zero = _vector(node, zero_index, vector_axis) if node.has(zero_index) else None
    return centred(node.op, node.tensor(index), zero)


def _vector(node: Node, index: int, vector_axis: int) -> Any:
    """A scalar, or a vector along an axis counted from behind (-2: rows, -1: columns), or a tensor that broadcasts."""
    op, value = node.op, node.tensor(index)
    if value.ty.ndim == 1:
        single = node.shape(index) == [1]
        return op.reshape(value, () if single else [-1] + [1] * (-1 - vector_axis))
    return value


def _matmul_integer(node: Node) -> Any:
    return node.op.matmul(_centred(node, 0, 2, -2), _centred(node, 1, 3, -1), out_dtype="int32")


def _qlinear_matmul(node: Node) -> Any:
    op = node.op
    total = op.matmul(_centred(node, 0, 2, -2), _centred(node, 3, 5, -1), out_dtype="int32")
    scale = op.multiply(_float_vector(node, 1, -2), _float_vector(node, 4, -1))
    y = op.multiply(op.astype(total, "float32"), scale)
    return quantise(op, y, _float_vector(node, 6, -2), _vector(node, 7, -2), node.dtype(7))


def _float_vector(node: Node, index: int, vector_axis: int) -> Any:
    return in_float32(node, _vector(node, index, vector_axis))


def _conv_integer(node: Node) -> Any:
    return convolve(node, _centred(node, 0, 2, -1), _channels(node, 1, 3, node.rank()), "int32")


def _channels(node: Node, index: int, zero_index: int, rank: int) -> Any:
    """Weights in int32 without their zero point, which may be one per output channel."""
    op = node.op
    zero = op.reshape(node.tensor(zero_index), [-1] + [1] * (rank - 1)) if node.has(zero_index) else None
    return centred(op, node.tensor(index), zero)


def _qlinear_conv(node: Node) -> Any:
    op, rank = node.op, node.rank()
    total = convolve(node, _centred(node, 0, 2, -1), _channels(node, 3, 5, rank), "int32")
    if node.has(8):
        total = op.add(total, op.reshape(node.tensor(8), [1, -1] + [1] * (rank - 2)))
    scale = op.multiply(op.reshape(node.tensor(1), ()), node.tensor(4))
    scale = op.reshape(scale, [1, -1] + [1] * (rank - 2))
    y = op.multiply(op.astype(total, "float32"), scale)
    return quantise(op, y, op.reshape(node.tensor(6), ()), op.reshape(node.tensor(7), ()), node.dtype(7))


def _scalar_pair(node: Node, index: int) -> tuple[Any, Any]:
    """A scale and, where given, the zero point that follows it, both as scalars."""
    zero = node.op.reshape(node.tensor(index + 1), ()) if node.has(index + 1) else None
    return node.op.reshape(node.tensor(index), ()), zero


def _qlinear_binary(name: str) -> Any:
    """com.microsoft's QLinearAdd and QLinearMul: A, its scale and zero point, B likewise, those of the result."""

    def convert(node: Node) -> Any:
        op = node.op
        a = dequantise(op, node.x, *_scalar_pair(node, 1))
        b = dequantise(op, node.tensor(3), *_scalar_pair(node, 4))
        return quantise(op, getattr(op, name)(a, b), *_scalar_pair(node, 6), node.dtype())

    return convert


def _qlinear_unary(function: Any) -> Any:
    """com.microsoft's QLinear functions of one tensor: X, its scale and zero point, those of the result."""

    def convert(node: Node) -> Any:
        x = dequantise(node.op, node.x, *_scalar_pair(node, 1))
        return quantise(node.op, function(node, x), *_scalar_pair(node, 3), node.dtype())

    return convert


def _leaky(node: Node, x: Any) -> Any:
    slope = scalar(node.number("alpha", 0.01), dtype_of(x))
    return node.op.add(at_least(node.op, x, 0), node.op.multiply(at_most(node.op, x, 0), slope))


def _global_mean(node: Node, x: Any) -> Any:
    if node.integer("channels_last", 0):
        raise node.refuse("channels_last is not supported")
    return node.op.mean(x, list(range(2, node.rank())), True)


def _qlinear_concat(node: Node) -> Any:
    """The result's scale and zero point, then a tensor, its scale and its zero point for each part."""
    op, parts = node.op, []
    for index in range(2, len(node.inputs), 3):
        part = dequantise(op, node.tensor(index), *_scalar_pair(node, index + 1))
        parts.append(quantise(op, part, *_scalar_pair(node, 0), node.dtype(index)))
    return op.concat(parts, axis=node.integer("axis", 0))


def _dynamic_quantize_matmul(node: Node) -> Any:
    """com.microsoft: A is quantised on the way; B, its scale and zero point per tensor or column, a bias."""
    op = node.op
    a, a_scale, a_zero = dynamic(op, node.x)
    total = op.matmul(centred(op, a, a_zero), _centred(node, 1, 3, -1), out_dtype="int32")
    y = op.multiply(op.astype(total, "float32"), op.multiply(a_scale, _vector(node, 2, -1)))
    return op.add(y, node.tensor(4)) if node.has(4) else y


def _matmul_integer_to_float(node: Node) -> Any:
    op = node.op
    total = op.matmul(_centred(node, 0, 4, -2), _centred(node, 1, 5, -1), out_dtype="int32")
    scale = op.multiply(_vector(node, 2, -2), _vector(node, 3, -1))
    y = op.multiply(op.astype(total, dtype_of(scale)), scale)
    return op.add(y, node.tensor(6)) if node.has(6) else y


CONVERTERS: Converters = {
    "QuantizeLinear": {10: _quantize_linear},
    "DequantizeLinear": {10: _dequantize_linear},
    "DynamicQuantizeLinear": {11: _dynamic_quantize_linear},
    "MatMulInteger": {10: _matmul_integer},
    "ConvInteger": {10: _conv_integer},
    "QLinearMatMul": {10: _qlinear_matmul},
    "QLinearConv": {10: _qlinear_conv},
    "com.microsoft::QuantizeLinear": {1: _quantize_linear},
    "com.microsoft::DequantizeLinear": {1: _dequantize_linear},
    "com.microsoft::QLinearAdd": {1: _qlinear_binary("add")},
    "com.microsoft::QLinearMul": {1: _qlinear_binary("multiply")},
    "com.microsoft::QLinearSigmoid": {1: _qlinear_unary(lambda node, x: node.op.sigmoid(x))},
    "com.microsoft::QLinearLeakyRelu": {1: _qlinear_unary(_leaky)},
    "com.microsoft::QLinearGlobalAveragePool": {1: _qlinear_unary(_global_mean)},
    "com.microsoft::QLinearConcat": {1: _qlinear_concat},
    "com.microsoft::DynamicQuantizeMatMul": {1: _dynamic_quantize_matmul},
    "com.microsoft::MatMulIntegerToFloat": {1: _matmul_integer_to_float},
}
