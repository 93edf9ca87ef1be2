"""Looks inside an ONNX model: all values between its nodes as outputs, and one node as a model of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tvmflow.errors import UnsupportedError

if TYPE_CHECKING:
    from onnx import ModelProto, ValueInfoProto


def expose(path: Path, out: Path) -> tuple[str, ...]:
    """Writes the model with the results of all nodes, as far as they are tensors, for outputs; their names in order."""
    import onnx

    from tvmflow.frontend.onnx.file import read

    model = read(path)
    types = _types(model)
    results = dict.fromkeys(name for node in model.graph.node for name in node.output if name in types)
    del model.graph.output[:]
    model.graph.output.extend(types[name] for name in results)
    onnx.save(model, out)
    return tuple(results)


def isolate(path: Path, result: str, values: Mapping[str, np.ndarray], out: Path) -> tuple[str, tuple[str, ...]]:
    """Writes the node that makes `result` as a model of its own; what it is called, and the names of its inputs.

    `values` holds the graph's inputs and what is between its nodes. Raises UnsupportedError where one is missing.
    """
    import onnx

    from tvmflow.frontend.onnx.file import read
    from tvmflow.frontend.onnx.graph import describe

    model = read(path)
    types = _types(model)
    node = next(node for node in model.graph.node if result in node.output)
    weights = [tensor for tensor in model.graph.initializer if tensor.name in node.input]
    kept = {tensor.name for tensor in weights}
    inputs = tuple(dict.fromkeys(name for name in node.input if name and name not in kept))
    if missing := [name for name in inputs if name not in values]:
        raise UnsupportedError(f"{describe(node)}: no value of {', '.join(missing)} is known", "look at it by hand")
    graph = onnx.helper.make_graph(
        [node],
        "node",
        [_value(name, values[name]) for name in inputs],
        [types[name] for name in node.output if name in types],
        weights,
    )
    alone = onnx.helper.make_model(graph, opset_imports=model.opset_import, functions=model.functions)
    alone.ir_version = max(model.ir_version, 4)
    onnx.save(alone, out)
    return describe(node), inputs


def _types(model: ModelProto) -> dict[str, ValueInfoProto]:
    """By name the tensors whose dtype is known; shapes are left out, they follow from the inputs."""
    import onnx

    graph = onnx.shape_inference.infer_shapes(model).graph
    return {
        value.name: _bare(value) for value in (*graph.value_info, *graph.output) if value.type.tensor_type.elem_type
    }


def _bare(value: ValueInfoProto) -> ValueInfoProto:
    from onnx import ValueInfoProto

    bare = ValueInfoProto(name=value.name)
    bare.type.tensor_type.elem_type = value.type.tensor_type.elem_type
    return bare


def _value(name: str, array: np.ndarray) -> ValueInfoProto:
    import onnx

    dtype = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    return onnx.helper.make_tensor_value_info(name, dtype, array.shape)
