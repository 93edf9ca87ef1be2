"""Counts the transposes and layout transforms of a graph, and chooses the layout that should take less time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import tvm
from tvm import relax
from tvm.tirx import IntImm

from tvmflow.errors import BudgetError, last_line
from tvmflow.graph import needless
from tvmflow.graph.passes.cancel_transposes import axes_of
from tvmflow.graph.passes.winograd import plan_of
from tvmflow.kernels.schedules.axes import Registers
from tvmflow.kernels.winograd.minimal_filtering import Measured
from tvmflow.manifest import LayoutTransform
from tvmflow.pipeline.context import Context
from tvmflow.pipeline.plan import AfterStep, has_convolution, ignore_step, run, steps_of

NOMINAL_DIM = 32  # what a symbolic axis counts for when bytes are compared
# What a choice goes by, per thread: measured with default schedules on 2 threads with AVX-512.
FLOP_PER_S = 100e9  # of a convolution whose vectors are whole registers
SCALAR = 0.01  # the share of that which a convolution without vectors reaches
STRIDED = 0.5  # and one whose vectors lie apart in what it reads
GROUPED = 0.25  # and one in groups, whose schedules want channels last
WINOGRAD = 2.5  # and one by Winograd's method
BYTES_PER_S = 1.5e9  # of a transpose


@dataclass(frozen=True)
class LayoutChoice:
    """The layout of convolutions that was taken and why; `mod` is the simplified graph in that layout.

    `transforms` are its transposes, `before` those of the graph as it was imported.
    """

    layout: str
    reason: str
    mod: tvm.IRModule
    transforms: tuple[LayoutTransform, ...]
    before: tuple[LayoutTransform, ...] = ()


def choose(mod: tvm.IRModule, wanted: str, context: Context, after: AfterStep = ignore_step) -> LayoutChoice:
    """Simplifies `mod` and settles the layout of its convolutions; `wanted` is "auto", "keep" or "nhwc".

    "auto" takes the layout with which convolutions and transposes should take less time. On a CPU vectors go along
    channels in NHWC and along the width otherwise, and fill their registers or not, and Winograd's method wants NHWC.
    Raises what ConvertLayout raises when NHWC was asked for.
    """
    return replace(_chosen(mod, wanted, context, after), before=transforms_of(mod))


def _chosen(mod: tvm.IRModule, wanted: str, context: Context, after: AfterStep) -> LayoutChoice:
    kept = run(mod, steps_of(context, "simplify"), after)
    before = transforms_of(kept)
    if wanted == "keep" or not has_convolution(kept):
        reason = "asked for" if wanted == "keep" else "no 2-D convolution"
        return LayoutChoice("keep", reason, kept, before)
    try:
        converted = run(kept, steps_of(replace(context, nhwc=True), "layout"), after)
    except Exception as exc:
        if wanted == "nhwc":
            raise
        return LayoutChoice("keep", f"ConvertLayout failed: {last_line(exc)[:200]}", kept, before)
    changed = transforms_of(converted)
    if wanted == "nhwc":
        return LayoutChoice("nhwc", "asked for", converted, changed)
    nhwc = LayoutChoice("nhwc", "", converted, changed)
    keep = LayoutChoice("keep", "", kept, before)
    measured = context.measured if context.convolutions == "winograd" else None
    takes_less, figures = _by_time(nhwc, keep, measured) if context.kind == "llvm" else _by_bytes(nhwc, keep)
    return replace(nhwc if takes_less else keep, reason=figures)


def _by_time(nhwc: LayoutChoice, keep: LayoutChoice, measured: Measured | None) -> tuple[bool, str]:
    """Whether NHWC should be faster on a CPU, and the figures that say so."""
    seconds = [_cost_s(choice, measured) for choice in (nhwc, keep)]
    figures = f"convolutions and transposes: about {seconds[0] * 1e3:.2g} ms with NHWC, {seconds[1] * 1e3:.2g} without"
    return seconds[0] <= seconds[1], figures


def _by_bytes(nhwc: LayoutChoice, keep: LayoutChoice) -> tuple[bool, str]:
    """Whether NHWC brings no more bytes of transposes than there were, those at the 4-D inputs and outputs aside."""
    bytes_ = [_bytes(choice.transforms) for choice in (nhwc, keep)]
    figures = f"{bytes_[0]:,} bytes of transposes with NHWC, {bytes_[1]:,} without"
    return bytes_[0] <= bytes_[1] + _edge_bytes(keep.mod), figures


def _cost_s(choice: LayoutChoice, measured: Measured | None) -> float:
    """Seconds of one thread for the convolutions and transposes of a graph, by the rates above."""
    registers = Registers.of(tvm.target.Target.current())
    calls = [
        binding.value
        for function in choice.mod.functions.values()
        if isinstance(function, relax.Function)
        for binding in _bindings(function)
        if _op_name(binding.value) == "nn.conv2d"
    ]
    return sum(_convolution_s(call, registers, measured) for call in calls) + _bytes(choice.transforms) / BYTES_PER_S


def _convolution_s(call: relax.Call, registers: Registers, measured: Measured | None) -> float:
    out = [int(d) if isinstance(d, IntImm) else NOMINAL_DIM for d in _dims(call)]
    kernel = [int(d) if isinstance(d, IntImm) else NOMINAL_DIM for d in _dims(call.args[1])]
    channels_last = str(call.attrs.data_layout) == "NHWC"
    filters = kernel[3] if channels_last else kernel[0]
    flop = 2 * math.prod(out) * math.prod(kernel) / filters
    wide = [size for size in (out[3:] if channels_last else out[2:]) if size > 1]
    lanes = registers.width(wide[-1]) if wide else 1
    share = lanes / registers.lanes if lanes >= 4 else SCALAR
    if not channels_last:
        share *= (STRIDED if int(call.attrs.strides[-1]) > 1 else 1) * (GROUPED if int(call.attrs.groups) > 1 else 1)
    elif measured is not None and plan_of(call, measured) is not None:
        share *= WINOGRAD
    return flop / FLOP_PER_S / share


def check_budget(transforms: tuple[LayoutTransform, ...], limit: int | None) -> None:
    """Raises BudgetError, with the largest ones, where there are more layout transforms than `limit`."""
    if limit is None or len(transforms) <= limit:
        return
    largest = sorted(transforms, key=lambda t: -t.size_bytes)[:5]
    listing = "".join(f"\n  {t.place}: {t.size_bytes} bytes" for t in largest)
    raise BudgetError(
        f"graph.max_layout_transforms: {len(transforms)} transposes are left, {limit} are allowed{listing}",
        'raise the budget, or try graph.layout = "keep" or "nhwc"',
    )


def transforms_of(mod: tvm.IRModule) -> tuple[LayoutTransform, ...]:
    """The transposes and layout transforms in the graph that move data (unit axes may move freely)."""
    return tuple(t for f in mod.functions.values() if isinstance(f, relax.Function) for t in _transforms_in(f))


def _transforms_in(function: relax.Function) -> Iterator[LayoutTransform]:
    producers: dict[relax.Var, str] = {}
    consumers = _consumers(function)
    reasons = needless.reasons(_bindings(function), _outputs(function))
    for binding in _bindings(function):
        producers[binding.var] = _op_name(binding.value)
        call = binding.value
        if not _moves_data(call):
            continue
        source = producers.get(call.args[0], "constant" if isinstance(call.args[0], tvm.ir.GenericConst) else "input")
        target = consumers.get(binding.var, "output")
        reason = reasons.get(binding.var)
        yield LayoutTransform(
            place=f"{source} -> {_op_name(call)} -> {target}",
            shape=tuple(int(d) if isinstance(d, IntImm) else str(d) for d in _dims(binding.var)),
            size_bytes=_size_bytes(binding.var),
            needless=reason.text if reason and reason.certain else "",
            avoidable=reason.text if reason and not reason.certain else "",
        )


def _bindings(function: relax.Function) -> list[relax.VarBinding]:
    return [
        binding for block in function.body.blocks for binding in block.bindings if isinstance(binding, relax.VarBinding)
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
    order = axes_of(value)
    if order is None:
        return False
    shape = _dims(value.args[0])
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
    return sum(_size_bytes(v) for v in [*main.params, *_outputs(main)] if getattr(v.ty, "ndim", -1) == 4)


def _outputs(function: relax.Function) -> list[relax.Var]:
    result = function.body.body
    return list(result.fields) if isinstance(result, relax.Tuple) else [result]
