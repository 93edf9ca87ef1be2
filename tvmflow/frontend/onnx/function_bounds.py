"""What the functions of an ONNX model become when every call is replaced by the body, found out without doing it.

Functions that call others twice double their size at each level: a small file may stand for any number of nodes.
"""

from __future__ import annotations

import graphlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from onnx import AttributeProto, FunctionProto, ModelProto, NodeProto

from tvmflow.errors import ModelError, UnsupportedError
from tvmflow.frontend.onnx.file import MAX_NESTING, subgraphs

EXPORT_AGAIN = "the exporter wrote a broken model; export it again, without functions if you can"
WITHOUT = "export the model without functions, or with fewer calls"
# Real models stay far below: the largest transformers have some ten thousand nodes.
MAX_NODES = 100_000
MAX_BYTES = 1 << 30

Key = tuple[str, str, str]


@dataclass(frozen=True)
class Size:
    """After inlining: nodes, bytes of attributes, references to the caller's attributes, graphs inside graphs."""

    nodes: int = 0
    attribute_bytes: int = 0
    references: int = 0
    depth: int = 0


def check_functions(model: ModelProto) -> None:
    """Raises ModelError for functions that call themselves, UnsupportedError for those that would become too large."""
    functions = {_key(function): function for function in model.functions}
    if len(functions) < len(model.functions):
        twice = next(f for f in model.functions if functions[_key(f)] is not f)
        raise ModelError(f"two functions are called {_name(_key(twice))}", EXPORT_AGAIN)
    sizes: dict[Key, Size] = {}
    for key in _order(functions):
        sizes[key] = _size_of(functions[key].node, sizes)
        _check(f"the function {_name(key)}", sizes[key])
    whole = _size_of(model.graph.node, sizes)
    calls = Counter(_callee(node) for _, node in _nodes(model.graph.node) if _callee(node) in sizes)
    if calls:
        largest = max(calls, key=lambda key: sizes[key].nodes * calls[key])
        _check(
            f"the model, mostly by {calls[largest]:,} calls of the function {_name(largest)},",
            whole,
            sum(1 for _ in _nodes(model.graph.node)),
        )


def _check(what: str, size: Size, own_nodes: int = 0) -> None:
    if size.nodes - own_nodes > MAX_NODES:
        raise UnsupportedError(
            f"{what} would become {size.nodes:,} nodes when functions are inlined; {MAX_NODES:,} are the most", WITHOUT
        )
    if size.attribute_bytes > MAX_BYTES:
        raise UnsupportedError(
            f"{what} would have {size.attribute_bytes:,} bytes of attributes when functions are "
            f"inlined; {MAX_BYTES:,} are the most",
            WITHOUT,
        )
    if size.depth > MAX_NESTING:
        raise UnsupportedError(
            f"{what} would nest branches {size.depth} deep when functions are inlined; "
            f"{MAX_NESTING} levels are the most",
            "export it with fewer levels",
        )


def _order(functions: Mapping[Key, FunctionProto]) -> list[Key]:
    """The functions, each behind those that it calls."""
    calls = {
        key: {_callee(node) for _, node in _nodes(function.node)} & functions.keys()
        for key, function in functions.items()
    }
    try:
        return list(graphlib.TopologicalSorter(calls).static_order())
    except graphlib.CycleError as exc:
        circle = [_name(key) for key in reversed(exc.args[1])]
        text = (
            f"the function {circle[0]} calls itself"
            if len(circle) == 2
            else (f"functions call each other in a circle: {' -> '.join(circle)}")
        )
        raise ModelError(text, EXPORT_AGAIN) from None


def _size_of(body: Iterable[NodeProto], sizes: Mapping[Key, Size]) -> Size:
    nodes = size_bytes = references = deepest = 0
    for depth, node in _nodes(body):
        called = sizes.get(_callee(node), Size(nodes=1))
        copies = max(1, called.references)  # of the attributes that a call hands on
        nodes += called.nodes
        size_bytes += called.attribute_bytes + sum(a.ByteSize() for a in node.attribute if not _has_graphs(a)) * copies
        references += sum(1 for attribute in node.attribute if attribute.ref_attr_name) * copies
        deepest = max(deepest, depth + called.depth + bool(subgraphs(node)))
    return Size(nodes, size_bytes, references, deepest)


def _has_graphs(attribute: AttributeProto) -> bool:
    return attribute.HasField("g") or bool(attribute.graphs)


def _nodes(body: Iterable[NodeProto]) -> Iterator[tuple[int, NodeProto]]:
    """The nodes of a body and of the graphs inside them, with how deep they stand."""
    pending = [(0, node) for node in body]
    while pending:
        depth, node = pending.pop()
        yield depth, node
        pending += [(depth + 1, inner) for graph in subgraphs(node) for inner in graph.node]


def _key(function: FunctionProto) -> Key:
    return function.domain, function.name, function.overload


def _callee(node: NodeProto) -> Key:
    return node.domain, node.op_type, node.overload


def _name(key: Key) -> str:
    return "'" + "::".join(filter(None, key)) + "'"
