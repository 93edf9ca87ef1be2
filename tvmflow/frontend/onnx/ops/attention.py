"""ai.onnx's Attention (opset 23 and later): softmax(scale * Q K^T, capped, masked) V, with grouped heads and caches."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import relax

from tvmflow.frontend.onnx.ops.activation import full_rank
from tvmflow.frontend.onnx.ops.linear import matmul
from tvmflow.frontend.onnx.ops.node import Converters, Node, dtype_of, in_float32, scalar


def _attention(node: Node) -> Any:
    """Outputs: Y; the keys and values with the cache; the product at the stage that qk_matmul_output_mode names."""
    op, dtype, stages = node.op, node.dtype(), {}
    query, key, value = (_heads(node, i, "q_num_heads" if i == 0 else "kv_num_heads") for i in range(3))
    past = 0
    if node.has(4):
        past = int(node.shape(4, [2])[0])
        key, value = (op.concat([node.tensor(i + 3), t], axis=2) for i, t in ((1, key), (2, value)))
    present, groups = [key, value], int(query.ty.shape[1]) // int(key.ty.shape[1])
    if groups > 1:
        key, value = op.repeat(key, groups, 1), op.repeat(value, groups, 1)
    scale = node.number("scale", 0.0) or 1 / math.sqrt(int(query.ty.shape[3]))
    query, turned = in_float32(node, query), op.permute_dims(in_float32(node, key), [0, 1, 3, 2])
    scores = op.matmul(op.multiply(query, scalar(scale, dtype_of(query))), turned)
    stages[0] = scores
    softcap = node.number("softcap", 0.0)
    if softcap:
        cap = scalar(softcap, dtype_of(scores))
        scores = op.multiply(op.tanh(op.divide(scores, cap)), cap)
    stages[1] = scores
    scores, masked = _masked(node, scores, past)
    stages[2] = scores
    weights = op.nn.softmax(scores, -1)
    if masked:
        attends = op.max(op.astype(op.greater(scores, scalar(-math.inf, dtype_of(scores))), "int8"), [-1], True)
        weights = op.where(op.astype(attends, "bool"), weights, scalar(0, dtype_of(weights)))
    stages[3] = weights
    y = matmul(op, weights if dtype_of(weights) == dtype else op.astype(weights, dtype), value)
    outputs = [_as_input(node, y), *present]
    if node.output_count > 3:
        stage = stages[node.integer("qk_matmul_output_mode", 0)]
        outputs.append(stage if dtype_of(stage) == dtype else op.astype(stage, dtype))
    return relax.Tuple(outputs[: node.output_count]) if node.output_count > 1 else outputs[0]


def _heads(node: Node, index: int, heads: str) -> Any:
    """[batch, heads, length, size], also where the heads lie side by side in the last of three axes."""
    op, dims = node.op, node.dims(index)
    if len(dims) == 4:
        return node.tensor(index)
    count = node.integer(heads, 0)
    if not count:
        raise node.refuse(f"{heads} is missing", "correct the model")
    shaped = op.reshape(node.tensor(index), (dims[0], dims[1], count, dims[2] // count))
    return op.permute_dims(shaped, [0, 2, 1, 3])


def _as_input(node: Node, y: Any) -> Any:
    if node.rank() == 4:
        return y
    batch, heads, length, size = y.ty.shape
    return node.op.reshape(node.op.permute_dims(y, [0, 2, 1, 3]), (batch, length, heads * size))


def _masked(node: Node, scores: Any, past: int) -> tuple[Any, bool]:
    """The scores, -inf where a key is not attended, and whether a query may be left without any key."""
    op, dtype = node.op, dtype_of(scores)
    lengths = [scores.ty.shape[2], scores.ty.shape[3]]
    allowed = _allowed(node, lengths, past)
    if node.has(3):
        mask = full_rank(op, node.tensor(3), 4)
        missing = int(lengths[1]) - int(mask.ty.shape[3]) if int(mask.ty.shape[3]) > 1 else 0
        boolean = dtype_of(mask) == "bool"
        mask = op.astype(mask, dtype) if not boolean else op.where(mask, scalar(0, dtype), scalar(-math.inf, dtype))
        if missing > 0:
            mask = op.nn.pad(mask, [0, 0, 0, 0, 0, 0, 0, missing], "constant", -math.inf)
        scores = op.add(scores, mask)
    if allowed is not None:
        scores = op.where(allowed, scores, scalar(-math.inf, dtype))
    return scores, node.has(3) or allowed is not None


def _allowed(node: Node, lengths: list[Any], past: int) -> Any | None:
    """Which keys each query may attend by causality, window and the number of keys that are no padding."""
    op = node.op
    causal = bool(node.integer("is_causal", 0))
    left, right = node.integer("left_window_size", -1), node.integer("right_window_size", -1)
    if not (causal or left >= 0 or right >= 0 or node.has(6)):
        return None
    if not all(hasattr(length, "value") for length in lengths):
        raise node.refuse("its mask needs fixed lengths", "fix them with [shapes.dims] in the config")
    queries = relax.const(np.arange(int(lengths[0]))[:, None], "int64")
    keys = relax.const(np.arange(int(lengths[1]))[None], "int64")
    offset: Any = scalar(past, "int64")
    conditions = []
    if node.has(6):
        count = op.reshape(op.astype(node.tensor(6), "int64"), (-1, 1, 1, 1))
        conditions.append(op.less(keys, count))
        offset = offset if node.has(4) else op.subtract(count, scalar(int(lengths[0]), "int64"))
    place = op.add(queries, offset)
    right = min(right, 0) if causal and right >= 0 else 0 if causal else right
    if right >= 0:
        conditions.append(op.less_equal(keys, op.add(place, scalar(right, "int64"))))
    if left >= 0:
        conditions.append(op.greater_equal(keys, op.subtract(place, scalar(left, "int64"))))
    allowed = conditions[0]
    for condition in conditions[1:]:
        allowed = op.logical_and(allowed, condition)
    return allowed


CONVERTERS: Converters = {"Attention": {23: _attention}}
