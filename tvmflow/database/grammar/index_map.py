"""The index maps in a trace: where a buffer's elements go, by whole-number arithmetic of the map's own variables."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

from tvmflow.database.grammar.graph import INT64, Field, Grammar, GrammarError, Graph, Limits, parse, whole
from tvmflow.database.grammar.workload import ARITHMETIC, ELEMENTS, EXPRESSIONS, LEAVES, SPAN, is_word, node, one

LIMITS = Limits(nodes=2_000, depth=64, unfolded=10_000)  # real maps: 100 nodes, 10 deep
_ARITHMETIC = ("Add", "Sub", "Mul", "FloorDiv", "FloorMod", "Div", "Mod", "Min", "Max", "Cast")
_PLACE = whole(range(1 << 31))
_FIELDS: dict[str, dict[str, Field]] = {
    "ir.Span": node(source_name=one("ir.SourceName"), line=_PLACE, column=_PLACE, end_line=_PLACE, end_column=_PLACE),
    **{f"prim.{name}": ARITHMETIC[f"prim.{name}"] for name in _ARITHMETIC},
    "ir.PrimType": node(span=SPAN, dtype=lambda value: value in ("int32", "int64")),
    "ir.IntImm": node(span=SPAN, ty=one("ir.PrimType"), value=one("int")),
    "ir.Var": node(span=SPAN, ty=one("ir.PrimType"), name=one("ffi.String")),
    "tirx.IndexMap": node(
        initial_indices=one("[variable]", "[]"),
        inverse_index_map=one("None", "tirx.IndexMap"),
        final_indices=one("[variable]", "[expression]", "[]"),
    ),
}
_LITERALS = {"None": lambda value: value is None, "int": whole(INT64), "ffi.String": is_word, "ir.SourceName": is_word}


def check(text: object, taken: Collection[str], may_use: Collection[str], may_state_inverse: bool) -> None:
    """Raises GrammarError where a text is no index map.

    `taken` are the names that mean something else in the trace; of them it may use the numbers `may_use`, as
    MetaSchedule's rule for tensor cores does with sampled sizes. TVM believes an inverse that a map states. Whether it
    is one depends on the buffer, so that only a replay can tell.
    """
    if not isinstance(text, str):
        raise GrammarError("no index map")
    own, free, states_inverse = _names(text)
    if states_inverse and not may_state_inverse:
        raise GrammarError("an index map with an inverse of its own has no place here")
    if free - set(may_use):
        raise GrammarError("an index map of variables that are not its own")
    if shared := own & set(taken):
        raise GrammarError(f"an index map's variable is called {min(shared)}, as a value of the trace")


@functools.lru_cache(maxsize=1024)  # the same few maps are in many records
def _names(text: str) -> tuple[frozenset[str], frozenset[str], bool]:
    """The names of a map's own variables, of others that it uses, and whether it states an inverse."""
    graph = parse(text, _GRAMMAR, {"tirx.IndexMap"})
    used: list[frozenset[int]] = []
    own: set[int] = set()
    free: set[int] = set()
    for index, label in graph.labels.items():
        data = graph.value(index)
        if label == "tirx.IndexMap":
            initial = set(graph.value(data["initial_indices"]))
            own |= initial
            free |= used[data["final_indices"]] - initial
        used.append(
            frozenset({index})
            if label == "variable"
            else frozenset().union(*(used[child] for child in _children(data, label)))
        )
    own_names, free_names = ({graph.value(graph.value(index)["name"]) for index in some} for some in (own, free))
    if own_names & free_names:
        raise GrammarError("an index map with two variables of one name")
    states_inverse = graph.labels[graph.value(len(graph.nodes) - 1)["inverse_index_map"]] != "None"
    return frozenset(own_names), frozenset(free_names), states_inverse


def _children(data: Any, label: str) -> Collection[int]:
    """The nodes of a node's own expressions."""
    if label.startswith("["):
        return list(data)
    if label == "ir.IntImm" or label not in EXPRESSIONS:
        return ()
    return [data[name] for name in ("a", "b", "value") if name in data]


def _label(graph: Graph, data: dict[str, Any]) -> str:
    return "variable"


def _mapping(graph: Graph, named: list[int]) -> str:
    raise GrammarError("ffi.Map has no place here")


_GRAMMAR = Grammar(_FIELDS, _LITERALS, LEAVES, ELEMENTS, _mapping, "ir.Var", _label, LIMITS)
