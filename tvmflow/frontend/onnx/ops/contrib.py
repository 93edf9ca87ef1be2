"""Operators of the domain com.microsoft that ONNX Runtime's graph fusions write into models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tvm import relax

from tvmflow.frontend.onnx.ops.activation import at_least, at_most, gelu_tanh, hard_sigmoid
from tvmflow.frontend.onnx.ops.guard import in_range
from tvmflow.frontend.onnx.ops.linear import convolve, matmul
from tvmflow.frontend.onnx.ops.node import Converters, Node, Refusal, dtype_of, in_float32, scalar


def _gelu(node: Node) -> Any:
    return node.op.nn.gelu(node.x)


def _bias_gelu(node: Node) -> Any:
    return node.op.nn.gelu(node.op.add(node.x, node.tensor(1)))


def _fast_gelu(node: Node) -> Any:
    return gelu_tanh(node.op, node.op.add(node.x, node.tensor(1)) if node.has(1) else node.x)


def _quick_gelu(node: Node) -> Any:
    alpha = scalar(node.number("alpha", 1.702), node.dtype())
    return node.op.multiply(node.x, node.op.sigmoid(node.op.multiply(node.x, alpha)))


def _normalised(node: Node, x: Any, gamma: Any, beta: Any | None, simplified: bool) -> Any:
    """Over the last axis, in float32: (x - mean) / deviation * gamma + beta; `simplified` leaves the mean in."""
    op, dtype, inner = node.op, dtype_of(x), in_float32(node, x)
    centred = inner if simplified else op.subtract(inner, op.mean(inner, [-1], True))
    spread = op.mean(op.multiply(centred, centred), [-1], True)
    epsilon = scalar(node.number("epsilon", 1e-12), dtype_of(inner))
    y = op.multiply(op.divide(centred, op.sqrt(op.add(spread, epsilon))), in_float32(node, gamma))
    y = y if beta is None else op.add(y, in_float32(node, beta))
    return y if dtype_of(y) == dtype else op.astype(y, dtype)


def _skip_normalization(simplified: bool) -> Any:
    def convert(node: Node) -> Any:
        """Outputs: the normalised sum; mean and deviation, of training only; the sum itself."""
        op, bias = node.op, 3 if simplified else 4
        total = op.add(node.x, node.tensor(1))
        total = op.add(total, node.tensor(bias)) if node.has(bias) else total
        beta = node.tensor(3) if not simplified and node.has(3) else None
        y = _normalised(node, total, node.tensor(2), beta, simplified)
        unused = scalar(0, "float32")
        return y if node.output_count == 1 else relax.Tuple([y, unused, unused, total])

    return convert


def _embed_layer_normalization(node: Node) -> Any:
    op = node.op
    total = op.take(node.tensor(2), in_range(node, 0, node.dims(2)[0]), 0)
    if node.has(8):
        positions = op.take(node.tensor(3), in_range(node, 8, node.dims(3)[0]), 0)
    else:
        positions = op.strided_slice(node.tensor(3), [0], [0], [node.shape(0, [1])[0]])
    total = op.add(total, positions)
    if node.has(1) and node.has(4):
        total = op.add(total, op.take(node.tensor(4), in_range(node, 1, node.dims(4)[0]), 0))
    y = _normalised(node, total, node.tensor(5), node.tensor(6), simplified=False)
    if node.has(7):
        lengths = op.sum(op.astype(node.tensor(7), "int32"), [1])
    else:
        lengths = op.broadcast_to(scalar(0, "int32"), (node.dims()[0],))
    return relax.Tuple([y, lengths, total][: node.output_count]) if node.output_count > 1 else y


def _fused_matmul(node: Node) -> Any:
    op = node.op
    operands = []
    for index, name in enumerate(("transA", "transB")):
        tensor, rank = node.tensor(index), node.rank(index)
        if node.integer(name, 0) and rank > 1:
            tensor = op.permute_dims(tensor, [*range(rank - 2), rank - 1, rank - 2])
        operands.append(tensor)
    y, alpha = matmul(op, *operands), node.number("alpha", 1.0)
    return y if alpha == 1.0 else op.multiply(y, scalar(alpha, dtype_of(y)))


def _fused_conv(node: Node) -> Any:
    """A convolution, its bias, a tensor to add, and an activation."""
    op = node.op
    y = convolve(node, node.x, node.tensor(1), None, bias=2)
    y = op.add(y, node.tensor(3)) if node.has(3) else y
    parameters = [float(value) for value in node.attributes.get("activation_params", ())]
    match node.text("activation", ""):
        case "":
            return y
        case "Relu":
            return at_least(op, y, 0)
        case "Sigmoid":
            return op.sigmoid(y)
        case "Tanh":
            return op.tanh(y)
        case "LeakyRelu":
            return op.add(at_least(op, y, 0), op.multiply(at_most(op, y, 0), scalar(parameters[0], dtype_of(y))))
        case "Clip":
            return at_most(op, at_least(op, y, parameters[0]), parameters[1])
        case "HardSigmoid":
            return hard_sigmoid(op, y, parameters[0], parameters[1])
        case other:
            raise node.refuse(f"activation {other} is not supported")


def _multi_head_attention(node: Node) -> Any:
    """softmax(scale * Q K^T + bias) V of Q, K, V [batch, length, heads * size]; no packed operands, masks or caches."""
    op, heads = node.op, node.integer("num_heads", 1)
    if not (node.has(1) and node.has(2)) or any(node.has(i) for i in (4, *range(6, len(node.inputs)))):
        raise node.refuse("packed operands, key padding masks and caches are not supported")
    if node.output_count > 1 or node.rank(1) != 3 or node.rank(2) != 3:
        raise node.refuse("caches and operands of other ranks than three are not supported")
    start, split = 0, []
    for index in range(3):
        tensor, (batch, length, width) = node.tensor(index), node.dims(index)
        if node.has(3):
            tensor = op.add(tensor, op.strided_slice(node.tensor(3), [0], [start], [start + width]))
            start += width
        shaped = op.reshape(tensor, (batch, length, heads, width // heads))
        split.append(op.permute_dims(shaped, [0, 2, 1, 3]))
    query, key, value = split
    scale = node.number("scale", 0.0) or 1 / math.sqrt(node.shape(0, [2])[0] // heads)
    scores = matmul(op, op.multiply(query, scalar(scale, node.dtype())), op.permute_dims(key, [0, 1, 3, 2]))
    scores = op.add(scores, node.tensor(5)) if node.has(5) else scores
    result = matmul(op, op.astype(op.nn.softmax(in_float32(node, scores), -1), node.dtype()), value)
    batch, length, _ = node.dims()
    return op.reshape(op.permute_dims(result, [0, 2, 1, 3]), (batch, length, node.shape(2, [2])[0]))


def _fused_matmul_refusal(attributes: Mapping[str, Any]) -> str | None:
    names = [name for name in ("transBatchA", "transBatchB") if attributes.get(name, 0)]
    return f"{names[0]} is not supported" if names else None


def _attention_refusal(attributes: Mapping[str, Any]) -> str | None:
    return "causal masks (unidirectional) are not supported" if attributes.get("unidirectional", 0) else None


REFUSALS: dict[str, Refusal] = {
    "com.microsoft::FusedMatMul": _fused_matmul_refusal,
    "com.microsoft::MultiHeadAttention": _attention_refusal,
}
CONVERTERS: Converters = {
    "com.microsoft::Gelu": {1: _gelu},
    "com.microsoft::BiasGelu": {1: _bias_gelu},
    "com.microsoft::FastGelu": {1: _fast_gelu},
    "com.microsoft::QuickGelu": {1: _quick_gelu},
    "com.microsoft::SkipLayerNormalization": {1: _skip_normalization(simplified=False)},
    "com.microsoft::SkipSimplifiedLayerNormalization": {1: _skip_normalization(simplified=True)},
    "com.microsoft::EmbedLayerNormalization": {1: _embed_layer_normalization},
    "com.microsoft::FusedMatMul": {1: _fused_matmul},
    "com.microsoft::FusedConv": {1: _fused_conv},
    "com.microsoft::MultiHeadAttention": {1: _multi_head_attention},
}
