"""Inlines ONNX functions: those the model brings along, and operators that ONNX itself defines by others.

Inlining is onnx_ir's: unlike onnx.inliner it fills in attribute defaults and takes omitted optional inputs.
An operator of ONNX becomes a function of the model first, one per node where its body depends on the node's inputs.
The models given to these functions are given up by their callers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import onnx
import onnx_ir
from onnx import FunctionProto, ModelProto, NodeProto, TypeProto
from onnx_ir.passes.common import InlinePass, inliner

from tvmflow.errors import UnsupportedError, innermost, last_line
from tvmflow.frontend.onnx.file import graphs
from tvmflow.frontend.onnx.function_bounds import check_functions
from tvmflow.frontend.onnx.shapes import value_types

DOMAIN = "tvmflow.inlined"
MAX_DEPTH = 8


def inline_local_functions(model: ModelProto) -> ModelProto:
    """Replaces every call of a function that the model itself defines by the function's body."""
    if not model.functions:
        return model
    check_functions(model)
    ir = onnx_ir.serde.deserialize_model(model)
    try:
        with _names_in_linear_time():
            InlinePass()(ir)
    except (ValueError, RuntimeError, onnx_ir.passes.PassError, onnx_ir.passes.PreconditionError) as exc:
        raise UnsupportedError(
            f"the model's own functions cannot be inlined: {last_line(innermost(exc))[:300]}",
            "export the model without functions, or with one opset version throughout",
        ) from None
    return onnx_ir.serde.serialize_model(ir)


def inline_operators(model: ModelProto, wanted: Callable[[NodeProto], bool]) -> ModelProto:
    """Replaces each `wanted` node by the body that ONNX gives its operator, also where bodies use such operators."""
    for _ in range(MAX_DEPTH):
        inlined = _inline_once(model, wanted)
        if inlined is None:
            return model
        model = inlined
    return model


def has_body(node: NodeProto, version: int) -> bool:
    """Whether ONNX defines the operator of `node` by other operators."""
    if node.domain not in ("", "ai.onnx") or not onnx.defs.has(node.op_type, version, ""):
        return False
    schema = onnx.defs.get_schema(node.op_type, version, "")
    return bool(schema.has_function or schema.has_context_dependent_function)


def opset_of(model: ModelProto) -> int:
    """The version of the ai.onnx operators; 1 for files from before there were versions."""
    return next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)


@contextmanager
def _names_in_linear_time() -> Iterator[None]:
    """Gives names of inlined values the numbers that onnx_ir would, without a search from 2 on for each of them."""
    last: dict[str, int] = {}

    def make_unique_name(name: str, _callstack: object, used: set[str]) -> str:
        candidate, number = name, last.get(name, 1)
        while candidate in used:
            number += 1
            candidate = f"{name}_{number}"
        last[name] = number
        used.add(candidate)
        return candidate

    original = inliner._make_unique_name
    inliner._make_unique_name = make_unique_name
    try:
        yield
    finally:
        inliner._make_unique_name = original


def _inline_once(model: ModelProto, wanted: Callable[[NodeProto], bool]) -> ModelProto | None:
    version = opset_of(model)
    if not any(wanted(node) and has_body(node, version) for graph in graphs(model) for node in graph.node):
        return None
    types = value_types(model)
    for number, node in enumerate(_chosen(model, wanted, version)):
        model.functions.append(_function_of(node, version, types, f"{node.op_type}_{number}"))
        _complete_attributes(node, version)
        node.op_type, node.domain = f"{node.op_type}_{number}", DOMAIN
    model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))
    inlined = inline_local_functions(model)
    kept = [entry for entry in inlined.opset_import if entry.domain != DOMAIN]
    del inlined.opset_import[:]
    inlined.opset_import.extend(kept)
    return inlined


def _chosen(model: ModelProto, wanted: Callable[[NodeProto], bool], version: int) -> Iterator[NodeProto]:
    for graph in graphs(model):
        for node in graph.node:
            if wanted(node) and has_body(node, version):
                yield node


def _function_of(node: NodeProto, version: int, types: Mapping[str, tuple[int, object]], name: str) -> FunctionProto:
    """The body of `node`'s operator as a function of the model called `name`."""
    schema = onnx.defs.get_schema(node.op_type, version, "")
    if schema.has_context_dependent_function:
        inputs = [_type_of(types.get(value)).SerializeToString() for value in node.input]
        versions = [v for v in schema.context_dependent_function_opset_versions if v <= version]
        body = schema.get_context_dependent_function_with_opset_version(max(versions), node.SerializeToString(), inputs)
    else:
        body = schema.get_function_with_opset_version(max(v for v in schema.function_opset_versions if v <= version))
    function = FunctionProto.FromString(body)
    function.name, function.domain = name, DOMAIN
    del function.output[len(node.output) :]  # a body may leave out what computes outputs that the node does not have
    del function.opset_import[:]
    function.opset_import.append(onnx.helper.make_opsetid("", version))
    return function


def _type_of(found: tuple[int, object] | None) -> TypeProto:
    if found is None:
        return TypeProto()
    elem_type, shape = found
    return onnx.helper.make_tensor_type_proto(elem_type, shape)


def _complete_attributes(node: NodeProto, version: int) -> None:
    """States the operator's default attributes, which its body refers to by name."""
    given = {attribute.name for attribute in node.attribute}
    for name, attribute in onnx.defs.get_schema(node.op_type, version, "").attributes.items():
        if name not in given and attribute.default_value.name:
            node.attribute.append(attribute.default_value)
