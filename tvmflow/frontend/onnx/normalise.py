"""ONNX to simpler ONNX: what every later stage may rely on.

`STEPS` is the pipeline; each step takes a valid model and returns a valid model with the same inputs, the same outputs
in the same order, and the same values. Only the last step changes the names of inputs and outputs. A step may change
its argument, which its caller gives up: weights can be most of the memory, and are not copied once more per step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir
import onnx_ir.passes.common as passes
from onnx import GraphProto, ModelProto, NodeProto
from onnx.helper import make_node
from onnxscript.optimizer._constant_folding import FoldConstantsPass

from tvmflow.errors import ModelError, innermost, last_line
from tvmflow.frontend.onnx import ops
from tvmflow.frontend.onnx.file import graphs, subgraphs
from tvmflow.frontend.onnx.functions import inline_local_functions, inline_operators, opset_of
from tvmflow.frontend.onnx.graph import RANDOM
from tvmflow.frontend.onnx.shapes import real_inputs, unique_name, value_types

IR_VERSION = 10
# Constants above these element counts are not folded: neither the library nor memory may grow without bound.
MAX_FOLDED_INPUT = 1 << 22
MAX_FOLDED_OUTPUT = 1 << 22
MAX_FILLED = 1 << 10
CHAINED = {"Sum": "Add", "Mean": "Add", "Max": "Max", "Min": "Min"}


@dataclass(frozen=True)
class Step:
    """One rewrite, with the words a report names it by."""

    name: str
    apply: Callable[[ModelProto], ModelProto]


def normalise(model: ModelProto) -> ModelProto:
    """`model`, which the caller gives up, after all STEPS."""
    for step in STEPS:
        model = step.apply(model)
    return model


def raise_ir_version(model: ModelProto) -> ModelProto:
    """One IR version for all; weights are initialisers only, the domain "ai.onnx" is written "", nodes have names."""
    model.ir_version = IR_VERSION
    inputs = real_inputs(model.graph)
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    used = {node.domain for graph in graphs(model) for node in graph.node}
    used |= {node.domain for function in model.functions for node in function.node}
    imports = {entry.domain: entry.version for entry in model.opset_import if entry.domain in used}
    imports.pop("ai.onnx", None)
    imports[""] = opset_of(model)
    del model.opset_import[:]
    model.opset_import.extend(onnx.helper.make_opsetid(domain, version) for domain, version in imports.items())
    for graph in graphs(model):
        for node in graph.node:
            node.domain = "" if node.domain == "ai.onnx" else node.domain
            node.name = node.name or next((name for name in node.output if name), node.op_type)
    return model


def own_outputs(model: ModelProto) -> ModelProto:
    """Each output gets a node of its own, where it was listed twice or is an input or a weight."""
    graph = model.graph
    seen = {value.name for value in (*graph.input, *graph.initializer)}
    taken = seen | {name for node in graph.node for name in node.output}
    for value in graph.output:
        if value.name in seen:
            name = unique_name(f"{value.name}_output", taken)
            graph.node.append(make_node("Identity", [value.name], [name], name=name))
            value.name = name
        seen.add(value.name)
    return model


def inline_missing_operators(model: ModelProto) -> ModelProto:
    """Operators without a converter of their own are replaced by the body that ONNX defines them by."""
    converters = ops.convert_map()

    def is_missing(node: NodeProto) -> bool:
        return (node.op_type not in converters or node.op_type in ops.INLINE) and node.op_type not in RANDOM

    return inline_operators(model, is_missing)


def fold_constants(model: ModelProto) -> ModelProto:
    """Computes what depends on constants alone, by ONNX's reference implementation; an `If` with a constant condition
    becomes its branch, a Constant node an initialiser. What would grow beyond MAX_FOLDED_OUTPUT elements stays."""
    ir = onnx_ir.serde.deserialize_model(model)
    pipeline = onnx_ir.passes.Sequential(
        onnx_ir.passes.PassManager(
            [
                FoldConstantsPass(
                    shape_inference=True,
                    input_size_limit=MAX_FOLDED_INPUT,
                    output_size_limit=MAX_FOLDED_OUTPUT,
                    should_fold=_may_fold,
                ),
                passes.RemoveUnusedNodesPass(),
            ],
            steps=4,
            early_stop=True,
        ),
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.LiftSubgraphInitializersToMainGraphPass(),
        passes.CommonSubexpressionEliminationPass(),
        passes.OutputFixPass(),
        passes.NameFixPass(),
    )
    with _quiet():
        try:
            pipeline(ir)
        except onnx_ir.passes.PassError as exc:
            if isinstance(innermost(exc), MemoryError):
                raise innermost(exc) from exc
            raise ModelError(
                f"the model's constants cannot be computed: {last_line(innermost(exc))[:300]}",
                "check that ONNX Runtime runs the model",
            ) from None
    return onnx_ir.serde.serialize_model(ir)


def chain_variadic(model: ModelProto) -> ModelProto:
    """Sum, Mean, Max and Min of many become chains of two, which fuse and pass layouts."""
    if not any(node.op_type in CHAINED for graph in graphs(model) for node in graph.node):
        return model
    taken = _value_names(model)
    elem_types = {name: elem_type for name, (elem_type, _) in value_types(model).items()}
    for graph in graphs(model):
        nodes = [link for node in graph.node for link in _chain(node, taken, elem_types.get(node.output[0]))]
        nodes = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(nodes)
    return model


def name_safely(model: ModelProto) -> ModelProto:
    """Every value gets a unique name that is an identifier: no dots, no slashes, no leading digit, no clash."""
    _rename(model.graph, {}, set())
    del model.graph.value_info[:]
    return model


STEPS: Sequence[Step] = (
    Step("raise the IR version", raise_ir_version),
    Step("give each output a node", own_outputs),
    Step("inline the model's functions", inline_local_functions),
    Step("inline operators without converter", inline_missing_operators),
    Step("fold constants", fold_constants),
    Step("chain Sum, Mean, Max, Min", chain_variadic),
    Step("give safe names", name_safely),
)


def _value_names(model: ModelProto) -> set[str]:
    names = {value.name for graph in graphs(model) for value in (*graph.input, *graph.initializer)}
    return names | {name for graph in graphs(model) for node in graph.node for name in node.output}


def _may_fold(node: onnx_ir.Node) -> bool | None:
    """False for what must not be computed now; None leaves it to onnxscript's own rules."""
    if node.op_type in RANDOM or node.domain not in ("", "ai.onnx"):
        return False
    sizes = [output.shape for output in node.outputs if output.shape is not None]
    if any(shape.is_static() and math.prod(shape.numpy()) > MAX_FOLDED_OUTPUT for shape in sizes):
        return False
    # onnxscript never folds these; the short ones are parts of shapes and paddings.
    is_short = all(shape.is_static() and math.prod(shape.numpy()) <= MAX_FILLED for shape in sizes)
    return True if node.op_type == "ConstantOfShape" and sizes and is_short else None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the optimiser's log and numpy's warnings: NaN and infinity are values like others."""
    logger = logging.getLogger("onnxscript")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        logger.setLevel(level)


def _chain(node: NodeProto, taken: set[str], elem_type: int | None) -> list[NodeProto]:
    """`node`, or the chain of binary nodes that computes the same. Mean needs to know its element type."""
    if node.domain or node.op_type not in CHAINED or (node.op_type == "Mean" and elem_type is None):
        return [node]
    links: list[NodeProto] = []
    total = node.input[0]
    for number, term in enumerate(node.input[1:]):
        result = unique_name(f"{node.output[0]}_{number}", taken)
        links.append(make_node(CHAINED[node.op_type], [total, term], [result], f"{node.name}_{number}"))
        total = result
    if node.op_type == "Mean":
        count = unique_name(f"{node.output[0]}_count", taken)
        value = onnx.helper.make_tensor(count, elem_type, [], [len(node.input)])
        links.append(make_node("Constant", [], [count], count, value=value))
        links.append(make_node("Div", [total, count], node.output, node.name))
    elif links:
        links[-1].output[:] = node.output
    return links or [make_node("Identity", node.input, node.output, node.name)]


def _rename(graph: GraphProto, outer: dict[str, str], taken: set[str]) -> None:
    """Renames in place; `outer` maps the names of the surrounding graphs."""
    names = dict(outer)
    for value in (*graph.input, *graph.initializer):
        names[value.name] = value.name = unique_name(value.name, taken)
    for node in graph.node:
        node.input[:] = [names[name] if name else "" for name in node.input]
        for body in subgraphs(node):
            _rename(body, names, taken)
        for index, name in enumerate(node.output):
            if name:
                names[name] = node.output[index] = unique_name(name, taken)
    for value in graph.output:
        value.name = names[value.name]
    del graph.value_info[:]
