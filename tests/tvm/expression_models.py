"""Expressions as ONNX models with inputs, and a line for each whose values are not allowed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from expressions import COMPARE, EDGES, SIZE, Expression, Node, agree, allowed, draw, numbers, numpy_dtype
from onnx import TensorProto, helper

TYPES = {
    "float32": TensorProto.FLOAT,
    "float64": TensorProto.DOUBLE,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
    "uint8": TensorProto.UINT8,
    "int8": TensorProto.INT8,
}


def model_of(expressions: Sequence[Expression]) -> onnx.ModelProto:
    """One output per expression, o0, o1, ..., with inputs x0_0, x0_1, x1_0, ... of its own."""
    nodes: list[onnx.NodeProto] = []
    inputs, outputs, weights = [], [], []
    for number, expression in enumerate(expressions):
        home = EDGES[expression[-1].dtype]
        made = _Made(f"e{number}", nodes, weights)
        for node in expression:
            made.add(node, f"x{number}_{made.inputs}")
        nodes.append(helper.make_node("Cast", [made.names[-1]], [f"o{number}"], to=TYPES[home]))
        inputs += [helper.make_tensor_value_info(f"x{number}_{i}", TYPES[home], [SIZE]) for i in range(2)]
        outputs.append(helper.make_tensor_value_info(f"o{number}", TYPES[home], [SIZE]))
    graph = helper.make_graph(nodes, "expressions", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


class _Made:
    """The nodes of one expression under construction; `names` are those of its values."""

    def __init__(self, prefix: str, nodes: list[onnx.NodeProto], weights: list[onnx.TensorProto]) -> None:
        self.names: list[str] = []
        self.inputs = 0
        self._prefix, self._nodes, self._weights = prefix, nodes, weights

    def add(self, node: Node, name: str) -> None:
        args = [self.names[arg] for arg in node.args]
        if node.op == "Input":
            self.inputs += 1
            self.names.append(self._node("Cast", [name], to=TYPES[node.dtype]))
        elif node.op == "Constant":
            self.names.append(self._weight(node.value, node.dtype))
        elif node.op == "Cast":
            self.names.append(self._node("Cast", args, to=TYPES[node.dtype]))
        elif node.op in COMPARE:
            self.names.append(self._node("Where", [self._node(node.op, args[:2]), *args[2:]]))
        else:
            result = self._node(node.op, args)
            zero = node.op in ("Min", "Max")
            self.names.append(self._node("Add", [result, self._weight(0, node.dtype)]) if zero else result)

    def _node(self, op: str, args: Sequence[str], **attributes: int) -> str:
        name = f"{self._prefix}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(op, args, [name], **attributes))
        return name

    def _weight(self, value: float, dtype: str) -> str:
        name = f"{self._prefix}_w{len(self._weights)}"
        with np.errstate(all="ignore"):
            data = np.array(value).astype(numpy_dtype(dtype))
        self._weights.append(helper.make_tensor(name, TYPES[dtype], [], data.tobytes(), raw=True))
        return name


@dataclass(frozen=True)
class Batch:
    """Expressions with their model and inputs."""

    expressions: tuple[Expression, ...]
    feeds: dict[str, np.ndarray]

    def model(self) -> onnx.ModelProto:
        return model_of(self.expressions)

    def wrong(self, got: Mapping[str, np.ndarray], widen_half: bool = True) -> Iterator[str]:
        """A line per expression that has a value which is not allowed."""
        for number, nodes in enumerate(self.expressions):
            inputs = [self.feeds[f"x{number}_{place}"] for place in range(2)]
            wanted = allowed(nodes, inputs, widen_half)
            same = agree(np.asarray(got[f"o{number}"]), wanted)
            if not same.all():
                at = int(np.flatnonzero(~same)[0])
                yield (
                    f"{text(nodes)} for {[value[at] for value in inputs]}: {got[f'o{number}'][at]!r}, wanted "
                    f"{sorted({str(want[at]) for want in wanted})}"
                )


def batch(seed: int, homes: Sequence[str], count: int, named: Sequence[Expression] = (), without: str = "-") -> Batch:
    """Drawn expressions behind the named ones; the dtype `without` is in none of them."""
    rng = random.Random(seed)
    drawn = (draw(rng, rng.choice(homes)) for _ in itertools.count())
    kept = (nodes for nodes in drawn if all(node.dtype != without for node in nodes))
    expressions = (*named, *itertools.islice(kept, count))
    feeds = {
        f"x{number}_{place}": numbers(rng, nodes[-1].dtype)
        for number, nodes in enumerate(expressions)
        for place in range(2)
    }
    return Batch(expressions, feeds)


def text(nodes: Expression) -> str:
    """An expression as one line, shared parts written out."""

    def of(number: int) -> str:
        node = nodes[number]
        if node.op in ("Input", "Constant"):
            return f"x{number}" if node.op == "Input" else f"{node.dtype}({node.value!r})"
        name = node.dtype if node.op == "Cast" else node.op
        return f"{name}({', '.join(map(of, node.args))})"

    return f"{nodes[-1].dtype}: {of(len(nodes) - 1)}"
