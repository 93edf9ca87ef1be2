"""Which values make sense for an integer input: an index has as many as the table it looks up.

Random inputs for verifying must stay inside, or the reference fails and the comparison says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto

from tvmflow.frontend.onnx.shapes import Shape, value_types

Range = tuple[float, float]
INTEGERS = frozenset(
    {
        TensorProto.INT8,
        TensorProto.INT16,
        TensorProto.INT32,
        TensorProto.INT64,
        TensorProto.UINT8,
        TensorProto.UINT16,
        TensorProto.UINT32,
        TensorProto.UINT64,
    }
)
# Operators whose result holds the same values as their first input.
CARRIERS = frozenset(
    {
        "Cast",
        "CastLike",
        "Reshape",
        "Unsqueeze",
        "Squeeze",
        "Identity",
        "Slice",
        "Flatten",
        "Transpose",
        "Expand",
        "Gather",
        "Tile",
        "Split",
        "Concat",
    }
)
LOOKUPS = frozenset({"Gather", "GatherElements"})


def input_ranges(model: ModelProto) -> list[Range | None]:
    """For each input of the graph the lowest and highest value that makes sense, or None where all do."""
    graph = model.graph
    types = value_types(model)
    weights = {tensor.name: tensor for tensor in graph.initializer}
    readers: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        for name in dict.fromkeys(node.input):
            readers.setdefault(name, []).append(node)
    found: list[Range | None] = []
    for value in graph.input:
        limits: list[Range] = []
        if value.type.tensor_type.elem_type in INTEGERS:
            limits = [
                limit
                for name, node in _reached(value.name, readers)
                if (limit := _limit(name, node, types, weights)) is not None
            ]
        found.append((max(low for low, _ in limits), min(high for _, high in limits)) if limits else None)
    return found


def _reached(name: str, readers: Mapping[str, list[NodeProto]]) -> Iterator[tuple[str, NodeProto]]:
    """Each node that reads the values of `name`, also behind nodes that only carry them on, with the name it reads."""
    stack, seen = [name], {name}
    while stack:
        current = stack.pop()
        for node in readers.get(current, ()):
            yield current, node
            carried = node.op_type in CARRIERS and (node.input[0] == current or node.op_type == "Concat")
            for output in node.output if carried else ():
                if output not in seen:
                    seen.add(output)
                    stack.append(output)


def _limit(
    name: str, node: NodeProto, types: Mapping[str, tuple[int, Shape | None]], weights: Mapping[str, TensorProto]
) -> Range | None:
    """What one reader asks of its input `name`."""
    if node.op_type in LOOKUPS and node.input[1] == name:
        shape = types.get(node.input[0], (0, None))[1]
        size = shape[_attribute(node, "axis", 0)] if shape else None
        return (0, size - 1) if isinstance(size, int) and size > 0 else None
    if node.op_type == "OneHot" and node.input[0] == name and node.input[1] in weights:
        depth = int(onnx.numpy_helper.to_array(weights[node.input[1]]).reshape(-1)[0])
        return 0, depth - 1
    if node.op_type == "Equal":
        other = node.input[1] if node.input[0] == name else node.input[0]
        table = onnx.numpy_helper.to_array(weights[other]) if other in weights else None
        # Compared with a table of classes: a one-hot encoding written out.
        return (float(table.min()), float(table.max())) if table is not None and table.size > 1 else None
    return (0, 1) if _reads_as_mask(name, node, types, weights) else None


def _reads_as_mask(
    name: str, node: NodeProto, types: Mapping[str, tuple[int, Shape | None]], weights: Mapping[str, TensorProto]
) -> bool:
    """A mask is cast to bool, or taken from one as in `(1 - mask) * -10000`."""
    if node.op_type == "Cast":
        return _attribute(node, "to", 0) == int(TensorProto.BOOL)
    if node.op_type == "Sub" and node.input[1] == name and node.input[0] in weights:
        one = onnx.numpy_helper.to_array(weights[node.input[0]])
        is_one: bool = one.size == 1 and one.item() == 1
        return is_one
    return False


def _attribute(node: NodeProto, name: str, default: int) -> int:
    return next((int(a.i) for a in node.attribute if a.name == name and a.type == AttributeProto.INT), default)
