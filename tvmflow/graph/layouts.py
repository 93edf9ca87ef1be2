"""Counts the transposes and layout transforms of a graph, and chooses the layout that leaves fewer bytes of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.tirx import IntImm

from tvmflow.errors import BudgetError
from tvmflow.graph.passes import AfterStep, has_convolution, layout_steps, run, simplify_steps
from tvmflow.manifest import LayoutTransform

NOMINAL_DIM = 32  # what a symbolic axis counts for when bytes are compared


@dataclass(frozen=True)
class LayoutChoice:
    """The layout of convolutions that was taken and why; `mod` is the simplified graph in that layout."""

    layout: str
    reason: str
    mod: tvm.IRModule
    transforms: tuple[LayoutTransform, ...]


def choose(mod: tvm.IRModule, wanted: str, after: AfterStep) -> LayoutChoice:
    """Simplifies `mod` and settles the layout of its convolutions; `wanted` is "auto", "keep" or "nhwc".

    "auto" takes NHWC only where it brings no more bytes of transposes inside the graph than it had: those at its 4-D
    inputs and outputs are allowed, since each is paid once. Raises what ConvertLayout raises when NHWC was asked for.
    """
    kept = run(mod, simplify_steps(), after)
    before = transforms_of(kept)
    if wanted == "keep" or not has_convolution(kept):
        reason = "asked for" if wanted == "keep" else "no 2-D convolution"
        return LayoutChoice("keep", reason, kept, before)
    try:
        converted = run(kept, layout_steps(), after)
    except Exception as exc:
        if wanted == "nhwc":
            raise
        return LayoutChoice("keep", f"ConvertLayout failed: {_first_line(exc)}", kept, before)
    changed = transforms_of(converted)
    if wanted == "nhwc":
        return LayoutChoice("nhwc", "asked for", converted, changed)
    allowed = _bytes(before) + _edge_bytes(kept)
    figures = f"{_bytes(changed):,} bytes of transposes with NHWC, {_bytes(before):,} without"
    if _bytes(changed) <= allowed:
        return LayoutChoice("nhwc", figures, converted, changed)
    return LayoutChoice("keep", figures, kept, before)


def check_budget(transforms: tuple[LayoutTransform, ...], limit: int | None) -> None:
    """Raises BudgetError, with the largest ones, where there are more layout transforms than `limit`."""
    if limit is None or len(transforms) <= limit:
        return
    largest = sorted(transforms, key=lambda t: -t.size_bytes)[:5]
    listing = "".join(f"\n  {t.place}: {t.size_bytes} bytes" for t in largest)
    raise BudgetError(
        f"graph.max_layout_transforms: {len(transforms)} transposes are left, {limit} are allowed{listing}",
        "raise the budget, or try graph.layout = \"keep\" or \"nhwc\"",
    )


def transforms_of(mod: tvm.IRModule) -> tuple[LayoutTransform, ...]:
    """The transposes and layout transforms in the graph that move data (unit axes may move freely)."""
    return tuple(t for f in mod.functions.values() if isinstance(f, relax.Function) for t in _transforms_in(f))


def _transforms_in(function: relax.Function) -> Iterator[LayoutTransform]:
    producers: dict[relax.Var, str] = {}
    consumers = _consumers(function)
    for binding in _bindings(function):
        producers[binding.var] = _op_name(binding.value)
        call = binding.value
        if not _moves_data(call):
            continue
        source = producers.get(call.args[0], "constant" if isinstance(call.args[0], tvm.ir.GenericConst) else "input")
        target = consumers.get(binding.var, "output")
        yield LayoutTransform(
            place=f"{source} -> {_op_name(call)} -> {target}",
            shape=tuple(int(d) if isinstance(d, IntImm) else str(d) for d in _dims(binding.var)),
            size_bytes=_size_bytes(binding.var),
        )


def _bindings(function: relax.Function) -> list[relax.VarBinding]:
    return [
        binding
        for block in function.body.blocks
        for binding in block.bindings
        if isinstance(binding, relax.VarBinding)
    ]


def _consumers(function: relax.Function) -> dict[relax.Var, str]:
    names: dict[relax.Var, str] = {}
    for binding in _bindings(function):
        if isinstance(binding.value, relax.Call):
            for arg in binding.value.args:
                if isinstance(arg, relax.Var):
                    names.setdefault(arg, _op_name(binding.value))
    return names


def _op_name(value: object) -> str:
    if not isinstance(value, relax.Call):
        return type(value).__name__.lower()
    if value.op.name == "relax.call_tir":
        return str(value.args[0].name_hint)
    return str(value.op.name).removeprefix("relax.") if hasattr(value.op, "name") else "call"


def _moves_data(value: object) -> bool:
    if not isinstance(value, relax.Call) or not hasattr(value.op, "name"):
        return False
    if value.op.name == "relax.layout_transform":
        return True
    if value.op.name != "relax.permute_dims":
        return False
    shape = _dims(value.args[0])
    axes = value.attrs.axes
    order = [int(a) for a in axes] if axes is not None else list(reversed(range(len(shape))))
    moved = [axis for axis in order if not (isinstance(shape[axis], IntImm) and int(shape[axis]) == 1)]
    return moved != sorted(moved)


def _dims(value: relax.Expr) -> list[tvm.ir.PrimExpr]:
    """The axes of a tensor; none where its rank is not known."""
    shape = value.ty.shape
    return list(shape.values) if isinstance(shape, relax.ShapeExpr) else []


def _size_bytes(var: relax.Var) -> int:
    """Bytes of a tensor, symbolic axes counted as `NOMINAL_DIM`."""
    sizes = [int(d) if isinstance(d, IntImm) else NOMINAL_DIM for d in _dims(var)]
    return math.prod(sizes) * max(int(tvm.DataType(var.ty.dtype).bits) // 8, 1)


def _bytes(transforms: tuple[LayoutTransform, ...]) -> int:
    return sum(t.size_bytes for t in transforms)


def _edge_bytes(mod: tvm.IRModule) -> int:
    """Bytes of the 4-D inputs and outputs, whose layout a library's interface fixes."""
    main = mod["main"]
    result = main.body.body
    outputs = list(result.fields) if isinstance(result, relax.Tuple) else [result]
    return sum(_size_bytes(v) for v in [*main.params, *outputs] if getattr(v.ty, "ndim", -1) == 4)


def _first_line(exc: Exception) -> str:
    return str(exc).strip().splitlines()[-1][:200]
