"""Transposes that a graph could do without: what follows undoes them, and nothing between cares for the layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import tvm
from tvm import relax

from tvmflow.graph.passes.cancel_transposes import axes_of, undoes

# Operators that treat every element alike: they may run before a transpose or behind it.
ELEMENTWISE = frozenset(
    {
        "abs",
        "add",
        "astype",
        "ceil",
        "clip",
        "cos",
        "divide",
        "equal",
        "erf",
        "exp",
        "floor",
        "floor_divide",
        "greater",
        "greater_equal",
        "less",
        "less_equal",
        "log",
        "logical_and",
        "logical_or",
        "maximum",
        "minimum",
        "mod",
        "multiply",
        "negative",
        "nn.gelu",
        "nn.gelu_tanh",
        "nn.leakyrelu",
        "nn.relu",
        "nn.relu6",
        "nn.silu",
        "nn.softplus",
        "not_equal",
        "power",
        "round",
        "rsqrt",
        "sigmoid",
        "sign",
        "sin",
        "sqrt",
        "square",
        "subtract",
        "tanh",
        "where",
    }
)
# Operators that exist for either order of the axes, by an attribute or another axis.
ANY_LAYOUT = frozenset(
    {
        "concat",
        "split",
        "mean",
        "sum",
        "max",
        "min",
        "nn.adaptive_avg_pool2d",
        "nn.avg_pool2d",
        "nn.max_pool2d",
        "nn.pad",
        "nn.softmax",
        "image.resize2d",
    }
)


@dataclass(frozen=True)
class Reason:
    """Why a transpose is needless; not `certain` where an operator between would have to change its axes."""

    text: str
    certain: bool


@dataclass(frozen=True)
class _Permuted:
    """A value that is what it would be without the transposes in `by`, but for the order of its axes."""

    axes: tuple[int, ...]
    by: frozenset[relax.Var]
    between: frozenset[str]


def reasons(bindings: list[relax.VarBinding], outputs: list[relax.Var]) -> dict[relax.Var, Reason]:
    """The needless transposes among `bindings`, by the variable that each writes."""
    permuted: dict[relax.Var, _Permuted] = {}
    undone: dict[relax.Var, _Permuted] = {}
    readers = _readers(bindings)
    for binding in bindings:
        axes = axes_of(binding.value)
        if axes is None:
            if (joined := _through(binding.value, permuted)) is not None:
                permuted[binding.var] = joined
            continue
        source = permuted.get(binding.value.args[0])
        if source is not None and undoes(source.axes, axes):
            undone[binding.var] = source
        else:
            permuted[binding.var] = _Permuted(axes, frozenset({binding.var}), frozenset())
    found: dict[relax.Var, Reason] = {}
    for var, source in undone.items():
        if all(_ends_undone(first, readers, permuted, undone, outputs) for first in source.by):
            for member in (var, *source.by):
                found[member] = _reason(source)
    return found


def _reason(source: _Permuted) -> Reason:
    certain = source.between <= ELEMENTWISE
    between = f"only {', '.join(sorted(source.between))} between" if source.between else "nothing between"
    pair = "one of two transposes that undo each other"
    return Reason(f"{pair}, {between}" + ("" if certain else ", which any layout serves"), certain)


def _through(value: object, permuted: Mapping[relax.Var, _Permuted]) -> _Permuted | None:
    """The permutation of an operator's result, where all that it reads is permuted alike or constant."""
    if not isinstance(value, relax.Call):
        return None
    name = str(getattr(value.op, "name", "")).removeprefix("relax.")
    if name not in ELEMENTWISE | ANY_LAYOUT:
        return None
    inputs = [field for arg in value.args for field in (arg.fields if isinstance(arg, relax.Tuple) else [arg])]
    found = [permuted.get(arg) for arg in inputs if isinstance(arg, relax.Var)]
    known = [one for one in found if one is not None]
    if not known or len(known) != len(found) or len({one.axes for one in known}) != 1:
        return None
    by = frozenset().union(*(one.by for one in known))
    return _Permuted(known[0].axes, by, frozenset({name}).union(*(one.between for one in known)))


def _ends_undone(
    var: relax.Var,
    readers: Mapping[relax.Var, list[relax.Var]],
    permuted: Mapping[relax.Var, _Permuted],
    undone: Mapping[relax.Var, _Permuted],
    outputs: list[relax.Var],
) -> bool:
    """Whether everything that a permuted value reaches is permuted itself or undone."""
    if var in outputs:
        return False
    return all(
        reader in undone
        or (
            reader in permuted and permuted[reader].between and _ends_undone(reader, readers, permuted, undone, outputs)
        )
        for reader in readers[var]
    )


def _readers(bindings: list[relax.VarBinding]) -> Mapping[relax.Var, list[relax.Var]]:
    readers: dict[relax.Var, list[relax.Var]] = defaultdict(list)
    for binding in bindings:

        def visit(node: object, reader: relax.Var = binding.var) -> None:
            if isinstance(node, relax.Var):
                readers[node].append(reader)

        tvm.relax.analysis.post_order_visit(binding.value, visit)
    return readers
