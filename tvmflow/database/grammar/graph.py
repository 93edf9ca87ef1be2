"""TVM's JSON of an object: a list of nodes, each of which names others by index. Checked node by node, never unfolded.

TVM loads any class that it knows from such a text, follows an index into itself until its stack ends, and unfolds
what is shared. So every node must be of a known kind, hold exactly its kind's fields, and name earlier nodes of the
kinds that fit; and what it becomes when unfolded is counted, not made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from pydantic_core import from_json

Literal: TypeAlias = Callable[[Any], bool]
Field: TypeAlias = frozenset[str] | Literal
"""The labels of the nodes that a field may name, or what says whether the field's own value is right."""
INT64 = range(-(1 << 63), 1 << 63)


class GrammarError(ValueError):
    """A text that holds more than its grammar allows: where, and what."""


@dataclass(frozen=True)
class Limits:
    """How large an object may be: nodes, how deep they are nested, and how many nodes it has when it is unfolded."""

    nodes: int
    depth: int
    unfolded: int


@dataclass(frozen=True)
class Grammar:
    """What a graph may consist of.

    `fields` are those of each kind of node, `literals` the kinds that are a value and not fields, `leaves` the kinds
    that count as one node wherever they are named. `element` says what a node is in a list; lists of expressions and of
    variables are labelled `[expression]` and `[variable]`, empty ones `[]`. `mapping` labels a map by the nodes of its
    names and values; it raises GrammarError where there is no such map. Nodes of the kind `split` are told apart by
    `label`.
    """

    fields: Mapping[str, Mapping[str, Field]]
    literals: Mapping[str, Literal]
    leaves: frozenset[str]
    element: Mapping[str, str]
    mapping: Callable[[Graph, list[int]], str]
    split: str
    label: Callable[[Graph, dict[str, Any]], str]
    limits: Limits


@dataclass(frozen=True)
class Graph:
    """The nodes of a checked graph and their labels, in order; the last one is the root."""

    nodes: list[dict[str, Any]]
    labels: dict[int, str]

    def value(self, index: int) -> Any:
        """What a node holds."""
        return self.nodes[index].get("data")


def parse(text: str, grammar: Grammar, root: Collection[str]) -> Graph:
    """The graph of a text whose root has one of these labels; raises GrammarError for anything else."""
    try:
        body = from_json(text)
    except ValueError as exc:
        raise GrammarError(f"no JSON: {exc}") from None
    nodes = body.get("nodes") if isinstance(body, dict) else None
    if not isinstance(nodes, list) or set(body) - {"root_index", "nodes", "metadata"}:
        raise GrammarError("no list of nodes")
    if not 0 < len(nodes) <= grammar.limits.nodes:
        raise GrammarError(f"{len(nodes)} nodes, not 1 to {grammar.limits.nodes}")
    _check_metadata(body.get("metadata"))
    graph = Graph(nodes, {})
    _label_all(graph, grammar)
    last = len(nodes) - 1
    if body.get("root_index") != last or graph.labels[last] not in root:
        raise GrammarError(f"its root is no {' or '.join(sorted(root))}, or not its last node")
    return graph


def whole(values: range) -> Literal:
    """Says whether a value is a whole number among these."""
    return lambda value: type(value) is int and value in values


def _label_all(graph: Graph, grammar: Grammar) -> None:
    """Labels each node, in order; raises GrammarError at the first that is not of the grammar."""
    labels, limits, leaves = graph.labels, grammar.limits, grammar.leaves
    sizes: list[tuple[int, int]] = []  # of each node: how deep it is nested, how many it becomes when unfolded
    for index, node in enumerate(graph.nodes):
        try:
            if len(node) > 2:
                raise GrammarError("more than a type and data")
            kind, data = node["type"], node.get("data")
            label, named = _labelled(graph, kind, data, grammar)
        except GrammarError as exc:
            raise GrammarError(f"node {index}: {exc}") from None
        except (AttributeError, KeyError, TypeError):
            raise GrammarError(f"node {index}: not a type and data") from None
        depth = unfolded = 1
        if kind not in leaves:
            for child in named:
                deep, many = sizes[child]
                unfolded += many
                depth = deep + 1 if deep >= depth else depth
        if depth > limits.depth:
            raise GrammarError(f"node {index}: nested more than {limits.depth} deep")
        if unfolded > limits.unfolded:
            raise GrammarError(f"node {index}: becomes more than {limits.unfolded} nodes when it is unfolded")
        sizes.append((depth, unfolded))
        labels[index] = label


def _labelled(graph: Graph, kind: str, data: Any, grammar: Grammar) -> tuple[str, Collection[int]]:
    """The label of a node and the nodes that it names."""
    if (fields := grammar.fields.get(kind)) is not None:
        named = _named(graph.labels, kind, data, fields)
        return (kind if kind != grammar.split else grammar.label(graph, data)), named
    if kind == "ffi.Array":
        return _list_label(graph, data, grammar), data
    if kind == "ffi.Map":
        if not all(type(child) is int and child in graph.labels for child in data):
            raise GrammarError("names no earlier node")
        return grammar.mapping(graph, data), data
    if (literal := grammar.literals.get(kind)) is None:
        raise GrammarError(f"{kind[:60]} has no place here")
    if not literal(data):
        raise GrammarError(f"{kind} {str(data)[:60]} has no place here")
    return kind, ()


def _named(labels: Mapping[int, str], kind: str, data: dict[str, Any], fields: Mapping[str, Field]) -> list[int]:
    """The nodes that the fields of a node name, once all of them are right."""
    if data.keys() != fields.keys():
        raise GrammarError(f"{kind} has other fields than {', '.join(fields)}")
    named = []
    for name, allowed in fields.items():
        value = data[name]
        if type(allowed) is frozenset:
            if type(value) is not int or (label := labels.get(value)) is None:
                raise GrammarError(f"{kind}.{name}: names no earlier node")
            if label not in allowed:
                raise GrammarError(f"{kind}.{name}: a {label} has no place here")
            named.append(value)
        elif not allowed(value):  # type: ignore[operator]  # the other half of a Field
            raise GrammarError(f"{kind}.{name}: {str(value)[:60]} has no place here")
    return named


def _list_label(graph: Graph, named: list[int], grammar: Grammar) -> str:
    if not isinstance(named, list) or not all(type(child) is int for child in named):
        raise GrammarError("no list of nodes")
    found = {grammar.element.get(label, label) for label in (graph.labels.get(child, "?") for child in named)}
    if "?" in found:
        raise GrammarError("names no earlier node")
    if len(found) == 2 and found == {"expression", "variable"}:
        return "[expression]"
    if len(found) > 1:
        raise GrammarError(f"a list of different things: {', '.join(sorted(found))}")
    return f"[{found.pop()}]" if found else "[]"


def _check_metadata(metadata: Any) -> None:
    if metadata is None:
        return
    if (
        not isinstance(metadata, dict)
        or metadata.keys() - {"tvm_version"}
        or not isinstance(metadata.get("tvm_version", ""), str)
    ):
        raise GrammarError("metadata beside TVM's version")
