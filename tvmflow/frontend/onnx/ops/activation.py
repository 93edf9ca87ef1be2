"""Activations and bounds, written so that NaN comes through, that they fuse, and that layout conversion passes them.

TVM's maximum(a, b) is `a > b ? a : b` on CPUs: it keeps a NaN in its second operand and loses one in its first. So a
constant bound goes first. With two tensors a select is needed. Selects and relax.clip stop layout conversion, and a
select is not computed within the producer's register tile, so arithmetic forms are preferred.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tvmflow.frontend.onnx.ops.node import FLOATS, Converters, Node, dtype_of, scalar


def at_least(op: Any, x: Any, low: float) -> Any:
    return op.maximum(scalar(low, dtype_of(x)), x)


def at_most(op: Any, x: Any, high: float) -> Any:
    return op.minimum(scalar(high, dtype_of(x)), x)


def larger(op: Any, a: Any, b: Any) -> Any:
    """max(a, b) of two tensors, NaN where either is NaN."""
    return op.where(op.isnan(a), a, op.maximum(a, b)) if dtype_of(a) in FLOATS else op.maximum(a, b)


def smaller(op: Any, a: Any, b: Any) -> Any:
    """min(a, b) of two tensors, NaN where either is NaN."""
    return op.where(op.isnan(a), a, op.minimum(a, b)) if dtype_of(a) in FLOATS else op.minimum(a, b)


def full_rank(op: Any, tensor: Any, rank: int) -> Any:
    """A tensor of lower rank with leading axes of size 1, as layout conversion wants second operands."""
    missing = rank - int(tensor.ty.ndim)
    return op.expand_dims(tensor, list(range(missing))) if missing > 0 else tensor


def softplus(op: Any, x: Any) -> Any:
    """log(1 + exp(x)) as max(x, 0) + log(1 + exp(-|x|)), which cannot overflow."""
    tail = op.log(op.add(op.exp(op.negative(op.abs(x))), scalar(1, dtype_of(x))))
    return op.add(at_least(op, x, 0), tail)


def gelu_tanh(op: Any, x: Any) -> Any:
    """x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))."""
    dtype = dtype_of(x)
    cubic = op.multiply(op.multiply(op.multiply(x, x), x), scalar(0.044715, dtype))
    inner = op.multiply(op.add(x, cubic), scalar(math.sqrt(2 / math.pi), dtype))
    return op.multiply(op.multiply(x, scalar(0.5, dtype)), op.add(op.tanh(inner), scalar(1, dtype)))


def hard_sigmoid(op: Any, x: Any, alpha: float, beta: float) -> Any:
    dtype = dtype_of(x)
    line = op.add(op.multiply(x, scalar(alpha, dtype)), scalar(beta, dtype))
    return at_most(op, at_least(op, line, 0), 1)


def exponential_below(op: Any, x: Any, alpha: float, scale: float = 1.0) -> Any:
    """alpha * (exp(x / scale) - 1) for negative x, else 0; exp sees no positive value, so it cannot overflow."""
    dtype = dtype_of(x)
    below = at_most(op, x, 0)
    if scale != 1.0:
        below = op.divide(below, scalar(scale, dtype))
    return op.multiply(op.subtract(op.exp(below), scalar(1, dtype)), scalar(alpha, dtype))


def _two_slopes(op: Any, x: Any, slope: Any) -> Any:
    return op.add(at_least(op, x, 0), op.multiply(at_most(op, x, 0), slope))


def _relu(node: Node) -> Any:
    return at_least(node.op, node.x, 0)


def _leaky_relu(node: Node) -> Any:
    op, x, alpha, dtype = node.op, node.x, node.number("alpha", 0.01), node.dtype()
    if alpha == 0:  # 0 * -inf is NaN
        return op.where(op.equal(x, scalar(-math.inf, dtype)), scalar(math.nan, dtype), at_least(op, x, 0))
    if not math.isfinite(alpha):
        return op.where(op.less(x, scalar(0, dtype)), op.multiply(x, scalar(alpha, dtype)), x)
    return _two_slopes(op, x, scalar(alpha, dtype))


def _prelu(node: Node) -> Any:
    """slope * x below zero; a slope known to be finite allows the form that fuses, for inf * 0 cannot arise."""
    op, x, known = node.op, node.x, node.constant(1)
    if known is not None and known.size == 1:
        slope = scalar(known.item(), node.dtype())
    else:
        slope = full_rank(op, node.tensor(1), node.rank())
    if known is not None and np.isfinite(known.astype("float64")).all():
        return _two_slopes(op, x, slope)
    return op.where(op.less(x, scalar(0, node.dtype())), op.multiply(x, slope), x)


def _clip_by_attributes(node: Node) -> Any:
    x = node.x
    if "min" in node.attributes:
        x = at_least(node.op, x, node.number("min", 0))
    return at_most(node.op, x, node.number("max", 0)) if "max" in node.attributes else x


def _clip(node: Node) -> Any:
    """A NaN bound is no bound, as in ONNX Runtime."""
    op, x, dtype = node.op, node.x, node.dtype()
    for index, function, unbounded in ((1, op.maximum, -math.inf), (2, op.minimum, math.inf)):
        if not node.has(index):
            continue
        known = node.constant(index)
        if known is not None:
            bound = scalar(known.item(), dtype)
        else:
            bound = op.reshape(node.tensor(index), ())
            bound = op.where(op.isnan(bound), scalar(unbounded, dtype), bound) if dtype in FLOATS else bound
        if known is None or known.item() == known.item():
            x = function(bound, x)
    return x


def _elu(node: Node) -> Any:
    op, x = node.op, node.x
    return op.add(at_least(op, x, 0), exponential_below(op, x, node.number("alpha", 1.0)))


def _selu(node: Node) -> Any:
    op, x = node.op, node.x
    alpha, gamma = node.number("alpha", 1.67326319217681884765625), node.number("gamma", 1.05070102214813232421875)
    return op.add(op.multiply(at_least(op, x, 0), scalar(gamma, node.dtype())), exponential_below(op, x, alpha * gamma))


def _celu(node: Node) -> Any:
    op, x, alpha = node.op, node.x, node.number("alpha", 1.0)
    return op.add(at_least(op, x, 0), exponential_below(op, x, alpha, alpha))


def _thresholded_relu(node: Node) -> Any:
    op, x, dtype = node.op, node.x, node.dtype()
    return op.where(op.greater(x, scalar(node.number("alpha", 1.0), dtype)), x, scalar(0, dtype))


def _hard_sigmoid(node: Node) -> Any:
    return hard_sigmoid(node.op, node.x, node.number("alpha", 0.2), node.number("beta", 0.5))


def _hard_swish(node: Node) -> Any:
    return node.op.multiply(node.x, hard_sigmoid(node.op, node.x, 1 / 6, 0.5))


def _softplus(node: Node) -> Any:
    return softplus(node.op, node.x)


def _mish(node: Node) -> Any:
    return node.op.multiply(node.x, node.op.tanh(softplus(node.op, node.x)))


def _swish(node: Node) -> Any:
    op, x, alpha = node.op, node.x, node.number("alpha", 1.0)
    return op.multiply(x, op.sigmoid(x if alpha == 1.0 else op.multiply(x, scalar(alpha, node.dtype()))))


def _gelu(node: Node) -> Any:
    approximate = node.text("approximate", "none")
    if approximate not in ("none", "tanh"):
        raise node.refuse(f"approximate = {approximate!r} is none of the standard's")
    return node.op.nn.gelu(node.x) if approximate == "none" else gelu_tanh(node.op, node.x)


CONVERTERS: Converters = {
    "Relu": {1: _relu},
    "LeakyRelu": {1: _leaky_relu},
    "PRelu": {1: _prelu},
    "Clip": {1: _clip_by_attributes, 11: _clip},
    "Elu": {1: _elu},
    "Selu": {1: _selu},
    "Celu": {12: _celu},
    "ThresholdedRelu": {10: _thresholded_relu},
    "HardSigmoid": {1: _hard_sigmoid},
    "HardSwish": {14: _hard_swish},
    "Softplus": {1: _softplus},
    "Mish": {18: _mish},
    "Swish": {24: _swish},
    "Gelu": {20: _gelu},
}
