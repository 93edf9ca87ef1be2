"""Refuses, all at once, what an ONNX model holds and TVM cannot compile or would silently compile to wrong values."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from tvmflow.errors import UnsupportedError
from tvmflow.frontend.onnx.file import graphs
from tvmflow.frontend.onnx.functions import opset_of
from tvmflow.frontend.onnx.graph import RANDOM, describe, operator_key
from tvmflow.frontend.onnx.shapes import dtype_name, kind_of

LOOPS = frozenset({"Loop", "Scan"})
# What the importer does itself, without a converter.
BUILT_IN = frozenset({"If", "Constant"})
STANDARD = ("", "ai.onnx")
# Attributes that may hold numbers beyond 32 bits; others are axes, sizes and modes, which TVM would cut off.
WIDE = frozenset({"starts", "ends", "value", "value_int", "value_ints", "keys_int64s", "values_int64s"})
# Operators whose output's size depends on the values of an input, unless that is a constant -> which input.
SIZED_BY_VALUES = {"NonZero": 0, "Unique": 0, "Compress": 1}
# Element types that both ONNX and TVM compute with.
SUPPORTED_TYPES = frozenset(
    {
        TensorProto.BOOL,
        TensorProto.INT8,
        TensorProto.INT16,
        TensorProto.INT32,
        TensorProto.INT64,
        TensorProto.UINT8,
        TensorProto.UINT16,
        TensorProto.UINT32,
        TensorProto.UINT64,
        TensorProto.FLOAT16,
        TensorProto.BFLOAT16,
        TensorProto.FLOAT,
        TensorProto.DOUBLE,
    }
)


@dataclass(frozen=True)
class Fault:
    """Something that cannot be compiled: where, why, and what to do about it."""

    where: str
    why: str
    advice: str


Refusal = Callable[[NodeProto, int], str | None]


def nothing_refused(_node: NodeProto, _version: int) -> str | None:
    """No converter refuses anything."""
    return None


def check(model: ModelProto, converters: Container[str], refusal: Refusal = nothing_refused) -> None:
    """Raises one UnsupportedError that lists everything in `model` that cannot be compiled.

    `converters` holds the operators that can be, those of other domains than ai.onnx as "domain::name"; `refusal` says
    why one of them cannot convert a node in an opset, or None. Nodes are looked at in the main graph, in branches, loop
    bodies and the model's functions.
    """
    _refuse(list(faults(model, converters, refusal)))


def check_dense(model: ModelProto) -> None:
    """Raises one UnsupportedError that lists the sparse tensors of `model`, which no later step knows."""
    _refuse(list(_sparse_faults(model)))


def _refuse(found: Sequence[Fault]) -> None:
    if not found:
        return
    lines = [f"{fault.where}: {fault.why}" for fault in found]
    advice = "; ".join(dict.fromkeys(fault.advice for fault in found))
    if len(lines) == 1:
        raise UnsupportedError(lines[0], advice)
    raise UnsupportedError(f"{len(lines)} things cannot be compiled", advice, items=lines)


def faults(model: ModelProto, converters: Container[str], refusal: Refusal = nothing_refused) -> Iterator[Fault]:
    """Everything that `check` would refuse, in the order of the file."""
    yield from _value_faults(model.graph)
    constants = {tensor.name: tensor for graph in graphs(model) for tensor in graph.initializer}
    local = {(function.domain, function.name) for function in model.functions}
    version = opset_of(model)
    for nodes in (*(graph.node for graph in graphs(model)), *(function.node for function in model.functions)):
        for node in nodes:
            if (node.domain, node.op_type) not in local:
                yield from _node_faults(node, version, converters)
                yield from _meaning_faults(node, constants)
                if reason := refusal(node, version):
                    yield Fault(describe(node), reason, "replace the operator by one that can be converted")


def _value_faults(graph: GraphProto) -> Iterator[Fault]:
    """Inputs, outputs and weights of kinds that a library cannot take."""
    advice = "export the model with plain tensors as inputs, outputs and weights"
    for kind, values in (("input", graph.input), ("output", graph.output)):
        for value in values:
            if other := kind_of(value):
                yield Fault(f"{kind} '{value.name}'", f"is {other}, not a tensor", advice)
            elif value.type.tensor_type.elem_type not in (*SUPPORTED_TYPES, TensorProto.UNDEFINED):
                yield Fault(f"{kind} '{value.name}'", _unsupported(value.type.tensor_type.elem_type), advice)
    for tensor in graph.initializer:
        if tensor.data_type not in SUPPORTED_TYPES:
            yield Fault(f"initialiser '{tensor.name}'", _unsupported(tensor.data_type), advice)
    for sparse in graph.sparse_initializer:
        yield Fault(f"initialiser '{sparse.values.name}'", "is a sparse tensor", advice)


def _sparse_faults(model: ModelProto) -> Iterator[Fault]:
    advice = "export the model with dense tensors as weights"
    for graph in graphs(model):
        for sparse in graph.sparse_initializer:
            yield Fault(f"initialiser '{sparse.values.name}'", "is a sparse tensor", advice)
    for nodes in (*(graph.node for graph in graphs(model)), *(function.node for function in model.functions)):
        for node in nodes:
            if any(a.HasField("sparse_tensor") or a.sparse_tensors for a in node.attribute):
                yield Fault(describe(node), "holds a sparse tensor", advice)


def _unsupported(elem_type: int) -> str:
    return f"has the element type {dtype_name(elem_type)}, which is not supported"


def _node_faults(node: NodeProto, version: int, converters: Container[str]) -> Iterator[Fault]:
    """An operator that has no converter."""
    where, key = describe(node), operator_key(node)
    if node.domain not in STANDARD:
        if key not in converters:
            yield Fault(
                where,
                f"operators of the domain '{node.domain}' have no converter",
                "export the model with operators of ai.onnx only",
            )
    elif not onnx.defs.has(node.op_type, version, ""):
        yield Fault(where, f"ai.onnx has no such operator in opset {version}", "export the model again")
    elif node.op_type in RANDOM:
        yield Fault(
            where, "its result is random, so that no run can be verified", "make random values an input of the model"
        )
    elif node.op_type in LOOPS and key not in converters:
        yield Fault(where, "loops are not compiled", "export the model with its loops unrolled")
    elif key not in converters and node.op_type not in BUILT_IN:
        yield Fault(where, "there is no converter for it", "replace the operator, or add a converter to frontend/ops")


def _meaning_faults(node: NodeProto, constants: Mapping[str, TensorProto]) -> Iterator[Fault]:
    """An operator that is known, in a form that would be compiled to something else."""
    where = describe(node)
    if _is_training(node, constants):
        yield Fault(where, "it is in training mode", "export the model in inference mode: model.eval()")
    elif _mode_of(node) and _mode_of(node) not in constants:
        yield Fault(where, "its training mode is only known at run time", "export the model in inference mode")
    picking = SIZED_BY_VALUES.get(node.op_type) if node.domain in STANDARD else None
    if picking is not None and node.input[picking] not in constants:
        yield Fault(where, "how much it gives depends on values", "use a mask and Where, or make its result an input")
    for attribute in node.attribute:
        if attribute.name not in WIDE and any(abs(i) >= 1 << 31 for i in (attribute.i, *attribute.ints)):
            yield Fault(
                where,
                f"its attribute '{attribute.name}' holds a number that needs more than 32 bits",
                "correct the attribute",
            )
        if node.op_type == "Cast" and attribute.name == "to" and attribute.i not in SUPPORTED_TYPES:
            yield Fault(where, f"its result {_unsupported(attribute.i)}", "export the model without this type")
        if node.op_type == "Constant" and attribute.name in ("sparse_value", "value_string", "value_strings"):
            yield Fault(where, "its value is no plain tensor", "export the model without strings and sparse tensors")


def _is_training(node: NodeProto, constants: Mapping[str, TensorProto]) -> bool:
    if node.op_type == "BatchNormalization":
        return any(a.name == "training_mode" and a.i for a in node.attribute) or len(node.output) > 1
    mode = _mode_of(node)
    return mode in constants and bool(onnx.numpy_helper.to_array(constants[mode]).any())


def _mode_of(node: NodeProto) -> str:
    """The name of Dropout's input that switches training on, "" where there is none."""
    return node.input[2] if node.op_type == "Dropout" and len(node.input) > 2 else ""
