"""Normalisations: every output, several axes, training mode, statistics of half precision in float32."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tvm import relax

from tvmflow.frontend.onnx.ops.activation import full_rank
from tvmflow.frontend.onnx.ops.node import Converters, Node, Refusal, dtype_of, in_float32, scalar


def _as(op: Any, x: Any, dtype: str) -> Any:
    return x if dtype_of(x) == dtype else op.astype(x, dtype)


def _batch_normalization(node: Node) -> Any:
    op, dtype, x = node.op, node.dtype(), in_float32(node, node.x)
    scale, bias, mean, var = (_as(op, node.tensor(i), dtype_of(x)) for i in range(1, 5))
    epsilon = node.number("epsilon", 1e-5)
    if not (node.integer("training_mode", 0) or (node.opset < 14 and node.output_count > 1)):
        result = op.nn.batch_norm(x, scale, bias, mean, var, axis=1, epsilon=epsilon, training=False)
        return _as(op, op_item(node, result, 0), dtype)
    if node.opset < 14:
        raise node.refuse("training outputs before opset 14 are not supported", "export the model in evaluation mode")
    axes = [axis for axis in range(node.rank()) if axis != 1]
    batch_mean, batch_var = op.mean(x, axes), op.variance(x, axes)
    result = op.nn.batch_norm(x, scale, bias, batch_mean, batch_var, axis=1, epsilon=epsilon, training=False)
    outputs = [_as(op, op_item(node, result, 0), dtype)]
    kept, new = scalar(node.number("momentum", 0.9), dtype_of(x)), scalar(1 - node.number("momentum", 0.9), dtype_of(x))
    for index, old, batch in ((3, mean, batch_mean), (4, var, batch_var)):
        running = op.add(op.multiply(old, kept), op.multiply(batch, new))
        outputs.append(_as(op, running, node.dtype(index)))
    return relax.Tuple(outputs)


def op_item(node: Node, value: Any, index: int) -> Any:
    return node.emit(relax.TupleGetItem(value, index))


def _layer_normalization(node: Node) -> Any:
    """Over all axes from `axis` on; scale and bias broadcast, so that they may hold fewer axes than are normalised."""
    op, dtype, x = node.op, node.dtype(), _stashed(node)
    axes = list(range(node.axis(node.integer("axis", -1)), node.rank()))
    epsilon = node.number("epsilon", 1e-5)
    if node.output_count == 1 and len(node.dims(1)) == len(axes) and node.dims(1) == node.dims()[axes[0] :]:
        scale = _as(op, node.tensor(1), dtype_of(x))
        bias = _as(op, node.tensor(2), dtype_of(x)) if node.has(2) else op.zeros_like(scale)
        return _as(op, op.nn.layer_norm(x, scale, bias, axes, epsilon), dtype)
    mean = op.mean(x, axes, True)
    centred = op.subtract(x, mean)
    var = op.mean(op.multiply(centred, centred), axes, True)
    inverse = op.divide(scalar(1, dtype_of(x)), op.sqrt(op.add(var, scalar(epsilon, dtype_of(x)))))
    y = op.multiply(_as(op, op.multiply(centred, inverse), dtype), full_rank(op, node.tensor(1), node.rank()))
    if node.has(2):
        y = op.add(y, full_rank(op, node.tensor(2), node.rank()))
    return relax.Tuple([y, mean, inverse]) if node.output_count > 1 else y


def _stashed(node: Node) -> Any:
    """The input in the type that statistics are computed in: float32 (stash_type 1), or the input's own."""
    if node.integer("stash_type", 1) == 1:
        return in_float32(node, node.x)
    if node.dtype() in ("float16", "bfloat16"):
        raise node.refuse("stash_type other than 1 (float32) for half precision")
    return node.x


def _rms_normalization(node: Node) -> Any:
    op, dtype, x = node.op, node.dtype(), _stashed(node)
    axes = list(range(node.axis(node.integer("axis", -1)), node.rank()))
    square = op.mean(op.multiply(x, x), axes, True)
    root = op.sqrt(op.add(square, scalar(node.number("epsilon", 1e-5), dtype_of(x))))
    return op.multiply(_as(op, op.divide(x, root), dtype), full_rank(op, node.tensor(1), node.rank()))


def _per_channel(node: Node, index: int, rank: int, dtype: str) -> Any:
    """A vector over axis 1, as a tensor that broadcasts against [N, C, ...]."""
    return node.op.reshape(_as(node.op, node.tensor(index), dtype), [1, -1] + [1] * (rank - 2))


def _instance_normalization(node: Node) -> Any:
    op, dtype, rank, x = node.op, node.dtype(), node.rank(), in_float32(node, node.x)
    axes, inner = list(range(2, rank)), dtype_of(x)
    centred = op.subtract(x, op.mean(x, axes, True))
    var = op.mean(op.multiply(centred, centred), axes, True)
    y = op.divide(centred, op.sqrt(op.add(var, scalar(node.number("epsilon", 1e-5), inner))))
    y = op.add(op.multiply(y, _per_channel(node, 1, rank, inner)), _per_channel(node, 2, rank, inner))
    return _as(op, y, dtype)


def _group_normalization(node: Node) -> Any:
    """Scale and bias hold one value per group in opset 18, one per channel from opset 21 on."""
    op, dtype, rank, x, groups = node.op, node.dtype(), node.rank(), _stashed(node), node.integer("num_groups", 1)
    inner, dims, channels = dtype_of(x), node.dims(), node.shape(0, [1])[0]
    if channels % groups:
        raise node.refuse(f"{channels} channels do not divide into {groups} groups", "correct the model")
    grouped = op.reshape(x, (dims[0], groups, math.prod([channels // groups, *dims[2:]])))
    centred = op.subtract(grouped, op.mean(grouped, [2], True))
    var = op.mean(op.multiply(centred, centred), [2], True)
    y = op.divide(centred, op.sqrt(op.add(var, scalar(node.number("epsilon", 1e-5), inner))))
    if node.opset < 21 and groups != channels:
        y = op.multiply(y, op.reshape(_as(op, node.tensor(1), inner), (1, groups, 1)))
        y = op.add(y, op.reshape(_as(op, node.tensor(2), inner), (1, groups, 1)))
        return _as(op, op.reshape(y, dims), dtype)
    y = _as(op, op.reshape(y, dims), dtype)
    y = op.multiply(y, _per_channel(node, 1, rank, dtype))
    return op.add(y, _per_channel(node, 2, rank, dtype))


def _mean_variance_normalization(node: Node) -> Any:
    op, dtype, x = node.op, node.dtype(), in_float32(node, node.x)
    axes = node.ints("axes", (0, 2, 3))
    centred = op.subtract(x, op.mean(x, axes, True))
    deviation = op.sqrt(op.mean(op.multiply(centred, centred), axes, True))
    return _as(op, op.divide(centred, op.add(deviation, scalar(1e-9, dtype_of(x)))), dtype)


def _lp_normalization(node: Node) -> Any:
    """x / ||x||, and 0 where the norm is 0, as ONNX Runtime has it."""
    op, dtype, x, axis = node.op, node.dtype(), in_float32(node, node.x), node.axis(node.integer("axis", -1))
    if node.integer("p", 2) == 1:
        norm = op.sum(op.abs(x), [axis], True)
    else:
        norm = op.sqrt(op.sum(op.multiply(x, x), [axis], True))
    zero = scalar(0, dtype_of(x))
    return _as(op, op.where(op.equal(norm, zero), zero, op.divide(x, norm)), dtype)


def _lrn(node: Node) -> Any:
    """x / (bias + alpha/size * sum of squares over `size` neighbouring channels) ^ beta, at any rank."""
    op, dtype, x, size = node.op, node.dtype(), in_float32(node, node.x), node.integer("size", 1)
    inner, channels, before = dtype_of(x), node.shape(0, [1])[0], (size - 1) // 2
    widths = [0, 0, before, size - 1 - before] + [0] * (2 * (node.rank() - 2))
    squares = op.nn.pad(op.multiply(x, x), widths)
    total = None
    for shift in range(size):
        part = op.strided_slice(squares, [1], [shift], [shift + channels])
        total = part if total is None else op.add(total, part)
    scale = op.multiply(total, scalar(node.number("alpha", 1e-4) / size, inner))
    scale = op.add(scale, scalar(node.number("bias", 1.0), inner))
    return _as(op, op.divide(x, op.power(scale, scalar(node.number("beta", 0.75), inner))), dtype)


def _dropout(node: Node) -> Any:
    """The identity, and a mask that keeps all. Dropping at random has no answer to verify, so training is refused."""
    training = node.optional(2, "training_mode")
    ratio = node.constant(1)
    if training is not None and bool(training) and not (ratio is not None and float(ratio) == 0.0):
        raise node.refuse("training mode drops elements at random", "export the model in evaluation mode")
    if node.output_count == 1:
        return node.x
    mask = node.op.broadcast_to(relax.const(True, "bool"), node.dims())
    return relax.Tuple([node.x, mask if node.opset >= 10 else node.op.astype(mask, node.dtype())])


def _batch_normalization_refusal(attributes: Mapping[str, Any]) -> str | None:
    return None if attributes.get("spatial", 1) else "spatial = 0 is not supported"


REFUSALS: dict[str, Refusal] = {"BatchNormalization": _batch_normalization_refusal}
CONVERTERS: Converters = {
    "BatchNormalization": {1: _batch_normalization},
    "LayerNormalization": {17: _layer_normalization},
    "RMSNormalization": {23: _rms_normalization},
    "InstanceNormalization": {1: _instance_normalization},
    "GroupNormalization": {18: _group_normalization},
    "MeanVarianceNormalization": {9: _mean_variance_normalization},
    "LpNormalization": {1: _lp_normalization},
    "LRN": {1: _lrn},
    "Dropout": {1: _dropout},
}
