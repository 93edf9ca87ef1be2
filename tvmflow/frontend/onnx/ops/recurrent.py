"""RNN, GRU and LSTM, unrolled over time: all steps call the same kernels, for they differ in their operands only.

The products with the input are one matrix product for all steps; what remains per step is a product with the state.
com.microsoft's DynamicQuantizeLSTM takes both of 8-bit integers: the input of all steps is quantised with one scale,
the state of all rows with one scale per step. ONNX Runtime does the same, but quantises groups of rows apart where it
spreads a batch over threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax

from tvmflow.frontend.onnx.ops.activation import at_least, at_most, hard_sigmoid, softplus
from tvmflow.frontend.onnx.ops.guard import lengths_within
from tvmflow.frontend.onnx.ops.linear import matmul
from tvmflow.frontend.onnx.ops.node import Converters, Node, Refusal, dtype_of, scalar, text_of
from tvmflow.frontend.onnx.ops.quantised import centred, dynamic

MAX_STEPS = 1024
Function = Callable[[Any, Any], Any]
Step = Callable[["Direction", Any, list[Any]], list[Any]]
FUNCTIONS: dict[str, Callable[[float | None, float | None], Function]] = {
    "relu": lambda a, b: lambda op, x: at_least(op, x, 0),
    "tanh": lambda a, b: lambda op, x: op.tanh(x),
    "sigmoid": lambda a, b: lambda op, x: op.sigmoid(x),
    "softplus": lambda a, b: softplus,
    "softsign": lambda a, b: lambda op, x: op.divide(x, op.add(op.abs(x), scalar(1, dtype_of(x)))),
    "hardsigmoid": lambda a, b: lambda op, x: hard_sigmoid(op, x, 0.2 if a is None else a, 0.5 if b is None else b),
    "leakyrelu": lambda a, b: (
        lambda op, x: op.add(
            at_least(op, x, 0), op.multiply(at_most(op, x, 0), scalar(0.01 if a is None else a, dtype_of(x)))
        )
    ),
    "affine": lambda a, b: (
        lambda op, x: op.add(op.multiply(x, scalar(1 if a is None else a, dtype_of(x))), scalar(b or 0, dtype_of(x)))
    ),
}
ONE_PARAMETER, TWO_PARAMETERS = frozenset({"leakyrelu"}), frozenset({"hardsigmoid", "affine"})


@dataclass(frozen=True)
class Weights:
    """A matrix [I, gates*H]; a quantised one is of int32 without its zero point, and has a scale, or one per column."""

    matrix: Any
    scale: Any | None = None

    def product(self, op: Any, x: Any) -> Any:
        """x [B, I] times the matrix: [B, gates*H]."""
        if self.scale is None:
            return matmul(op, x, self.matrix)
        quantised, scale, zero = dynamic(op, x)
        total = op.matmul(centred(op, quantised, zero), self.matrix, out_dtype="int32")
        return op.multiply(op.astype(total, dtype_of(x)), op.multiply(scale, self.scale))


@dataclass(frozen=True)
class Direction:
    """One direction's weights, and what the gates need besides."""

    node: Node
    hidden: int
    weight: Weights
    recurrent: Weights
    input_bias: Any
    recurrent_bias: Any
    peepholes: list[Any]
    functions: list[Function]

    def gate(self, x: Any, index: int) -> Any:
        return self.node.op.strided_slice(x, [1], [index * self.hidden], [(index + 1) * self.hidden])

    def apply(self, index: int, x: Any) -> Any:
        limit, op = self.node.number("clip", 0.0), self.node.op
        x = at_most(op, at_least(op, x, -limit), limit) if limit > 0 else x
        return self.functions[index](op, x)

    def from_state(self, h: Any) -> Any:
        return self.node.op.add(self.recurrent.product(self.node.op, h), self.recurrent_bias)


def _rnn_step(d: Direction, x: Any, states: list[Any]) -> list[Any]:
    return [d.apply(0, d.node.op.add(x, d.from_state(states[0])))]


def _gru_step(d: Direction, x: Any, states: list[Any]) -> list[Any]:
    """z, r, then the candidate; linear_before_reset says whether r gates the state or its product."""
    op, h = d.node.op, states[0]
    product = d.from_state(h)
    z = d.apply(0, op.add(d.gate(x, 0), d.gate(product, 0)))
    r = d.apply(0, op.add(d.gate(x, 1), d.gate(product, 1)))
    if d.node.integer("linear_before_reset", 0):
        inner = op.multiply(r, d.gate(product, 2))
    else:
        inner = op.add(matmul(op, op.multiply(r, h), d.gate(d.recurrent.matrix, 2)), d.gate(d.recurrent_bias, 2))
    candidate = d.apply(1, op.add(d.gate(x, 2), inner))
    return [op.add(candidate, op.multiply(z, op.subtract(h, candidate)))]


def _lstm_step(d: Direction, x: Any, states: list[Any]) -> list[Any]:
    """Gates in the order input, output, forget, cell; a peephole adds the cell's state to its gate."""
    op, c = d.node.op, states[1]
    gates = op.add(x, d.from_state(states[0]))
    raw = [d.gate(gates, index) for index in range(4)]
    if d.peepholes:
        raw[0] = op.add(raw[0], op.multiply(d.peepholes[0], c))
        raw[2] = op.add(raw[2], op.multiply(d.peepholes[2], c))
    i = d.apply(0, raw[0])
    f = op.subtract(scalar(1, dtype_of(i)), i) if d.node.integer("input_forget", 0) else d.apply(0, raw[2])
    c = op.add(op.multiply(f, c), op.multiply(i, d.apply(1, raw[3])))
    o = d.apply(0, op.add(raw[1], op.multiply(d.peepholes[1], c)) if d.peepholes else raw[1])
    return [op.multiply(o, d.functions[2](op, c)), c]


def _part(node: Node, index: int, direction: int) -> Any:
    op, value = node.op, node.tensor(index)
    return op.squeeze(op.strided_slice(value, [0], [direction], [direction + 1]), [0])


def _float_weights(node: Node, index: int, direction: int) -> Weights:
    """W or R [D, gates*H, I]."""
    return Weights(node.op.permute_dims(_part(node, index, direction), [1, 0]))


def _quantised_weights(node: Node, index: int, direction: int) -> Weights:
    """W or R [D, I, gates*H] of 8 bits; scale and zero point [D] or [D, gates*H] are inputs 8 and 9 of W, 10 and 11 of
    R."""
    scale = 6 + 2 * index
    zero = _part(node, scale + 1, direction) if node.has(scale + 1) else None
    return Weights(centred(node.op, _part(node, index, direction), zero), _part(node, scale, direction))


def _recurrent(
    step: Step, gates: int, defaults: list[str], weights: Callable[[Node, int, int], Weights] = _float_weights
) -> Callable[[Node], Any]:
    states = 2 if gates == 4 else 1

    def convert(node: Node) -> Any:
        op, batch_first = node.op, bool(node.integer("layout", 0))
        x = op.permute_dims(node.x, [1, 0, 2]) if batch_first else node.x
        steps = x.ty.shape[0]
        if not hasattr(steps, "value") or not 0 < int(steps) <= MAX_STEPS:
            raise node.refuse(f"it takes a fixed number of steps, at most {MAX_STEPS}", "fix the sequence length")
        kind = node.text("direction", "forward")
        count = 2 if kind == "bidirectional" else 1
        lengths = op.astype(lengths_within(node, 4, int(steps)), "int32") if node.has(4) else None
        found = []
        for index in range(count):
            direction = _direction(node, index, gates, _functions(node, index, defaults), weights)
            start = [_initial(node, 5 + s, direction, index, x, batch_first) for s in range(states)]
            found.append(_run(step, direction, x, start, lengths, kind == "reverse" or index == 1))
        return _results(node, found, batch_first)

    return convert


def _functions(node: Node, direction: int, defaults: list[str]) -> list[Function]:
    names = [text_of(name).lower() for name in node.attributes.get("activations", ())] or defaults * 2
    width = len(defaults)
    alphas, betas = list(node.attributes.get("activation_alpha", ())), list(node.attributes.get("activation_beta", ()))
    made = []
    for name in names:
        alpha = alphas.pop(0) if name in ONE_PARAMETER | TWO_PARAMETERS and alphas else None
        beta = betas.pop(0) if name in TWO_PARAMETERS and betas else None
        made.append(FUNCTIONS[name](alpha, beta))
    return made[direction * width : (direction + 1) * width]


def _direction(
    node: Node, index: int, gates: int, functions: list[Function], weights: Callable[[Node, int, int], Weights]
) -> Direction:
    op, weight, recurrent = node.op, weights(node, 1, index), weights(node, 2, index)
    hidden = int(recurrent.matrix.ty.shape[0])
    both = _part(node, 3, index) if node.has(3) else op.broadcast_to(scalar(0, node.dtype()), (2 * gates * hidden,))
    width = gates * hidden
    input_bias, recurrent_bias = (
        op.expand_dims(op.strided_slice(both, [0], [i * width], [(i + 1) * width]), 0) for i in (0, 1)
    )
    peepholes = []
    if node.has(7):
        peepholes = [
            op.expand_dims(op.strided_slice(_part(node, 7, index), [0], [i * hidden], [(i + 1) * hidden]), 0)
            for i in range(3)
        ]
    return Direction(node, hidden, weight, recurrent, input_bias, recurrent_bias, peepholes, functions)


def _initial(node: Node, index: int, d: Direction, direction: int, x: Any, batch_first: bool) -> Any:
    op = node.op
    if not node.has(index):
        return op.broadcast_to(scalar(0, node.dtype()), (x.ty.shape[1], d.hidden))
    if batch_first:
        return op.squeeze(op.strided_slice(node.tensor(index), [1], [direction], [direction + 1]), [1])
    return _part(node, index, direction)


def _run(step: Step, d: Direction, x: Any, states: list[Any], lengths: Any | None, backwards: bool) -> list[Any]:
    """All outputs [T, B, H], then the last states; beyond a sequence's length outputs are 0 and states stay."""
    op, (steps, batch, width) = d.node.op, x.ty.shape
    if backwards:
        x = op.flip(x, 0) if lengths is None else op.reverse_sequence(x, lengths, seq_axis=0, batch_axis=1)
    if d.weight.scale is not None and lengths is not None:
        x = _within(op, x, op.max(lengths))  # steps beyond all sequences have no part in the scale
    flat = op.add(d.weight.product(op, op.reshape(x, (steps * batch, width))), d.input_bias)
    projected = op.reshape(flat, (steps, batch, d.recurrent.matrix.ty.shape[1]))
    outputs: list[Any] = []
    for time in range(int(steps)):
        now = op.squeeze(op.take(projected, relax.const([time], "int64"), 0), [0])
        new = step(d, now, [outputs[-1] if outputs else states[0], *states[1:]])
        output = new[0]
        if lengths is not None:
            alive = op.expand_dims(op.less(relax.const([time], "int32"), lengths), 1)
            output = op.where(alive, output, scalar(0, dtype_of(output)))
            new = [op.where(alive, fresh, old) for fresh, old in zip(new, states, strict=True)]
        outputs.append(output)
        states = new
    every = op.stack(outputs, axis=0)
    if backwards:
        every = op.flip(every, 0) if lengths is None else op.reverse_sequence(every, lengths, seq_axis=0, batch_axis=1)
    return [every, *states]


def _within(op: Any, x: Any, length: Any) -> Any:
    """x [T, B, I] with zeros from the step `length` on."""
    steps = relax.const(np.arange(int(x.ty.shape[0]), dtype="int32").reshape(-1, 1, 1), "int32")
    return op.where(op.less(steps, length), x, scalar(0, dtype_of(x)))


def _results(node: Node, found: list[list[Any]], batch_first: bool) -> relax.Tuple:
    """Y [T, D, B, H], then the last states [D, B, H]; batches come first in layout 1."""
    op = node.op
    y = op.stack([direction[0] for direction in found], axis=1)
    last = [op.stack([direction[i] for direction in found], axis=0) for i in range(1, len(found[0]))]
    if batch_first:
        y, last = op.permute_dims(y, [2, 0, 1, 3]), [op.permute_dims(state, [1, 0, 2]) for state in last]
    return relax.Tuple([y, *last])


def _refusal(attributes: Mapping[str, Any]) -> str | None:
    names = [text_of(name) for name in attributes.get("activations", ())]
    unknown = [name for name in names if name.lower() not in FUNCTIONS]
    return f"activation {unknown[0]} is not supported" if unknown else None


DYNAMIC_LSTM = "com.microsoft::DynamicQuantizeLSTM"
REFUSALS: dict[str, Refusal] = dict.fromkeys(("RNN", "GRU", "LSTM", DYNAMIC_LSTM), _refusal)
CONVERTERS: Converters = {
    "RNN": {1: _recurrent(_rnn_step, 1, ["tanh"])},
    "GRU": {1: _recurrent(_gru_step, 3, ["sigmoid", "tanh"])},
    "LSTM": {1: _recurrent(_lstm_step, 4, ["sigmoid", "tanh", "tanh"])},
    DYNAMIC_LSTM: {1: _recurrent(_lstm_step, 4, ["sigmoid", "tanh", "tanh"], _quantised_weights)},
}
