"""The structure of an ONNX graph: every value defined once, before its use."""

from __future__ import annotations

import graphlib
from collections.abc import Iterable, Set

from onnx import GraphProto, ModelProto, NodeProto

from tvmflow.errors import ModelError
from tvmflow.frontend.onnx.file import subgraphs

EXPORT_AGAIN = "the exporter wrote a broken graph; export it again, with a newer exporter if you can"
# Their values differ from run to run, so no run at compile time may stand for them.
RANDOM = frozenset(
    {
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
        "Bernoulli",
        "Multinomial",
    }
)


def describe(node: NodeProto) -> str:
    """How messages name a node: its operator, and its name or else its first output."""
    output = next((name for name in node.output if name), "")
    return f"{operator_key(node)} '{node.name}'" if node.name else f"{operator_key(node)} (output '{output}')"


def operator_key(node: NodeProto) -> str:
    """The name that converters are looked up by: the operator's own in ai.onnx, "domain::name" in other domains."""
    return node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}::{node.op_type}"


def uses(node: NodeProto) -> set[str]:
    """The names that `node` reads, those used inside its subgraphs but defined outside of them included."""
    names = {name for name in node.input if name}
    return names.union(*(outer_uses(graph) for graph in subgraphs(node)))


def outer_uses(graph: GraphProto) -> set[str]:
    """The names that a subgraph reads from the graphs around it."""
    inside = {value.name for value in (*graph.input, *graph.initializer)}
    inside |= {name for node in graph.node for name in node.output}
    return {value.name for value in graph.output}.union(*(uses(node) for node in graph.node)) - inside


def sort_nodes(model: ModelProto) -> None:
    """Sorts the nodes of every graph, in place, so that each value is defined before its use.

    Raises ModelError for values defined twice or never, and for cycles, naming the nodes.
    """
    _order(model.graph, set())


def _order(graph: GraphProto, outer: Set[str]) -> None:
    given = _unique("input", (value.name for value in graph.input))
    given |= _unique(
        "initialiser",
        [value.name for value in graph.initializer] + [value.values.name for value in graph.sparse_initializer],
    )
    makers = _makers(graph, given)
    known = outer | given | makers.keys()
    for index, node in enumerate(graph.node):
        for name in sorted(uses(node) - known):
            raise ModelError(
                f"node {describe(node)}, number {index}, reads '{name}', which nothing defines", EXPORT_AGAIN
            )
    for value in graph.output:
        if value.name not in known:
            raise ModelError(f"output '{value.name}' is defined by nothing", EXPORT_AGAIN)
    for node in graph.node:
        for body in subgraphs(node):
            _order(body, known)
    order = _sorted(graph, makers)
    if order != list(range(len(order))):
        nodes = [NodeProto.FromString(graph.node[index].SerializeToString()) for index in order]
        del graph.node[:]
        graph.node.extend(nodes)


def _unique(kind: str, names: Iterable[str]) -> set[str]:
    seen: set[str] = set()
    for name in names:
        if not name:
            raise ModelError(f"an {kind} has no name", EXPORT_AGAIN)
        if name in seen:
            raise ModelError(f"two {kind}s are called '{name}'", EXPORT_AGAIN)
        seen.add(name)
    return seen


def _makers(graph: GraphProto, given: Set[str]) -> dict[str, int]:
    """The index of the node that defines each value."""
    makers: dict[str, int] = {}
    for index, node in enumerate(graph.node):
        for name in filter(None, node.output):
            if name in makers or name in given:
                first = describe(graph.node[makers[name]]) if name in makers else "an input or initialiser"
                raise ModelError(f"value '{name}' is defined twice, by {first} and by {describe(node)}", EXPORT_AGAIN)
            makers[name] = index
    return makers


def _sorted(graph: GraphProto, makers: dict[str, int]) -> list[int]:
    """Indices of the nodes in an order that respects their uses; the given order where that is right already."""
    before = [sorted({makers[name] for name in uses(node) if name in makers}) for node in graph.node]
    if all(maker < index for index, needed in enumerate(before) for maker in needed):
        return list(range(len(graph.node)))
    try:
        return list(graphlib.TopologicalSorter(dict(enumerate(before))).static_order())
    except graphlib.CycleError as exc:
        cycle = " -> ".join(describe(graph.node[index]) for index in reversed(exc.args[1]))
        raise ModelError(f"the graph has a cycle: {cycle}", EXPORT_AGAIN) from None
