"""The pipeline, from an imported graph to calls of the virtual machine: one value, a tuple of phases of named steps.

`phases` is the only place where an order of passes stands. A build runs all of them; `tvmflow passes` prints them;
keys and tuning start from the module after "fuse"; tuning's workers, the check of users' kernels, bisection and
attribution run the phases that `steps_of` gives them, or steps of some names. `run` applies steps, and its callback is
the only hook between them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import tvm
from tvm import relax
from tvm.relax import transform
from tvm.relax.backend import DispatchSampling, DispatchSortScan
from tvm.s_tir import Schedule, dlight
from tvm.s_tir.schedule import ScheduleError

from tvmflow.graph.passes.avoid_layout_faults import AvoidLayoutFaults
from tvmflow.graph.passes.cancel_transposes import CancelTransposes
from tvmflow.graph.passes.compute_in_float32 import ComputeInFloat32
from tvmflow.graph.passes.drop_empty import DropEmpty
from tvmflow.graph.passes.fold_exactly import FoldExactly
from tvmflow.graph.passes.fold_repacking import FoldRepacking
from tvmflow.graph.passes.fuse_kernels import FuseKernels
from tvmflow.graph.passes.guards import Guards
from tvmflow.graph.passes.keep_resizers_apart import KeepResizersApart
from tvmflow.graph.passes.mark_direct import MarkDirect
from tvmflow.graph.passes.replace_operators import ReplaceOperators
from tvmflow.graph.passes.rewrite_reshapes import RewriteReshapes
from tvmflow.graph.passes.schedule_winograd import ScheduleWinograd
from tvmflow.graph.passes.split_repacking import SplitRepacking
from tvmflow.graph.passes.split_transposed_convolutions import SplitTransposedConvolutions
from tvmflow.graph.passes.take_weights_out import TakeWeightsOut
from tvmflow.graph.passes.winograd import Winograd
from tvmflow.kernels.rewrites.compare_exactly import CompareExactly
from tvmflow.kernels.rewrites.prefetch import Prefetch
from tvmflow.kernels.rewrites.recognise_gelu import RecogniseGelu
from tvmflow.kernels.rewrites.start_from_infinity import StartFromInfinity
from tvmflow.kernels.schedules.default_schedule import DefaultSchedule
from tvmflow.kernels.schedules.share_layouts import ShareLayouts
from tvmflow.kernels.tf32.schedule_tf32 import ScheduleTf32
from tvmflow.pipeline.context import Context

# Transposed convolutions stay as they are: TVM has no kernel for them in NHWC.
CONV_LAYOUTS = {"relax.nn.conv2d": ["NHWC", "HWIO"], "relax.nn.conv2d_transpose": ["NCHW", "IOHW"]}


Early = Literal["open", "simplify", "layout", "replace", "fuse"]
Late = Literal["records", "schedule", "rewrite", "pack", "prefetch", "weights", "lower"]
PhaseName = Early | Late


@dataclass(frozen=True)
class Step:
    """One pass of the pipeline and why it stands there."""

    name: str
    why: str
    apply: Callable[[tvm.IRModule], tvm.IRModule]


@dataclass(frozen=True)
class Phase:
    """Steps that belong together, and what the module is when they are done."""

    name: PhaseName
    gives: str
    steps: tuple[Step, ...]


# Called after each step with the step, the module it made, and the seconds it took.
AfterStep = Callable[[Step, tvm.IRModule, float], None]


def phases(context: Context) -> tuple[Phase, ...]:
    """The whole pipeline, in order; phases for which the context asks for nothing have no steps."""
    return (
        Phase("open", "an imported graph, guarded, in the dtypes that are computed in", _open(context)),
        Phase("simplify", "a smaller graph with the same values", _simplify()),
        Phase("layout", "convolutions in NHWC, where that takes less time", _change_layout() if context.nhwc else ()),
        Phase("replace", "operators replaced by kernels of the user's and by Winograd's", _replace(context)),
        Phase("fuse", "fused TensorIR kernels: what keys, tuning and builds start from", _fuse(context)),
        Phase("records", "kernels under the schedules of the tuning database", _apply_records(context)),
        Phase("schedule", "kernels that all have a schedule", _schedule(context)),
        Phase("rewrite", "kernels that are exact, under whatever schedule", _rewrite(context)),
        Phase("pack", "weights in the layout that their kernels ask for", _pack(context)),
        Phase("prefetch", "kernels that ask early for their weights", _prefetch(context)),
        Phase("weights", "a library without weights, and its weights", _take_weights_out(context)),
        Phase("lower", "calls, shapes and a memory plan for the virtual machine", _lower()),
    )


def steps_of(context: Context, *names: PhaseName) -> tuple[Step, ...]:
    """The steps of the phases of these names, in the pipeline's order."""
    return tuple(step for phase in phases(context) if phase.name in names for step in phase.steps)


def _open(context: Context) -> tuple[Step, ...]:
    return (
        _step(DropEmpty(), "what has no elements needs no kernel"),
        *([_step(Guards(), "stop at indices out of range and division by zero")] if context.guards else []),
        *(
            [_step(ComputeInFloat32(), "CPUs convert half precision, they do not compute in it")]
            if context.widen_half
            else []
        ),
    )


def _simplify() -> tuple[Step, ...]:
    """BatchNorm first, while it still is one operator behind its convolution."""
    return (
        _step(transform.DeadCodeElimination(), "drop what no output needs"),
        _step(transform.CanonicalizeBindings(), "one name per value"),
        _step(transform.FoldBatchnormToConv2D(), "BatchNorm into the weights of its convolution"),
        _step(FoldExactly(), "what depends on weights alone, where it is exact"),
        _step(transform.FoldConstant(), "compute what depends on weights alone"),
        Step(
            "DecomposeOpsForInference",
            "operators that only training needs whole",
            transform.DecomposeOpsForInference(),
        ),
        _step(transform.FoldConstant(), "compute what the decomposition left constant"),
        _step(transform.EliminateCommonSubexpr(), "compute equal values once"),
        _step(SplitTransposedConvolutions(), "no products with the zeros that a stride puts between inputs"),
    )


def _change_layout() -> tuple[Step, ...]:
    """Convolutions to NHWC, with the transposes this brings cancelled or folded into the weights."""
    return (
        _step(AvoidLayoutFaults(), "ConvertLayout fails on stacks and on axes counted from behind"),
        _step(transform.ConvertLayout(CONV_LAYOUTS), "convolutions to NHWC with HWIO weights"),
        _step(CancelTransposes(), "pairs of opposite transposes cancel"),
        _step(transform.CanonicalizeBindings(), "one name per value"),
        _step(FoldExactly(), "transposed weights become the weights"),
        _step(transform.FoldConstant(), "compute what became constant"),
        _step(transform.DeadCodeElimination(), "drop what the new layout left unused"),
    )


def _replace(context: Context) -> tuple[Step, ...]:
    steps: list[Step] = []
    if context.kernels:
        replace = ReplaceOperators(context.kernels, context.on_replaced)
        steps += [
            Step("ReplaceOperators", f"user kernels: {', '.join(context.kernels)}", replace),
            _step(transform.DeadCodeElimination(), "drop the operators that they replaced"),
        ]
    if context.convolutions == "winograd":
        why = "3 x 3 convolutions by fewer multiplications, where that pays"
        steps.append(_step(Winograd(context.measured), why))
    if context.convolutions == "marked":
        steps.append(_step(MarkDirect(), "convolutions that can be told from one another"))
    return tuple(steps)


def _fuse(context: Context) -> tuple[Step, ...]:
    steps = [
        _step(DispatchSampling(), "sampling operators to their run-time functions"),
        _step(DispatchSortScan(), "sort and scan to their run-time functions"),
        _step(transform.LegalizeOps(), "operators to TensorIR"),
        _step(transform.AnnotateTIROpPattern(), "say what fuses with what"),
        _step(KeepResizersApart(), "paddings are no epilogues: no tile is where they write"),
        _step(transform.FoldConstant(), "compute what became constant"),
        _step(transform.FuseOps(), "group operators into kernels"),
        _step(FuseKernels(), "one TensorIR function per group"),
        _step(transform.DeadCodeElimination(), "drop the unfused functions"),
    ]
    if context.kind == "llvm":
        why = "they and what is fused into them have schedules of their own"
        steps.append(_step(ScheduleWinograd(), why))
    if context.prepack:
        steps.append(_step(transform.AttachAttrLayoutFreeBuffers(), "let a schedule choose its weights' layout"))
    if context.prepack == "shared":
        steps.append(_step(ShareLayouts(), "weights that other buckets read too, in one layout"))
    return tuple(steps)


def _apply_records(context: Context) -> tuple[Step, ...]:
    if context.records is None:
        return ()
    return (Step("ApplyRecords", "schedules of the tuning database, where one fits", context.records),)


def _schedule(context: Context) -> tuple[Step, ...]:
    if context.kind == "llvm":
        return (_step(DefaultSchedule(), "register tiles and vectors for untuned kernels"),)
    return (
        *([_step(ScheduleTf32(), "untuned products on TF32 tensor cores")] if context.tf32 else []),
        _step(dlight.ApplyDefaultSchedule(*gpu_rules()), "DLight schedules for untuned kernels"),
    )


def _rewrite(context: Context) -> tuple[Step, ...]:
    exact = _step(CompareExactly(context.kind), "conditions and extremes are right for NaN")
    if context.kind != "llvm":
        return (exact,)
    return (
        _step(RecogniseGelu(), "GELU as one function, however it is written"),
        _step(StartFromInfinity(), "of nothing but -inf the maximum is -inf"),
        exact,
    )


def _pack(context: Context) -> tuple[Step, ...]:
    if not context.prepack:
        return ()
    return (
        _step(SplitRepacking(), "repacking of weights apart from their kernels"),
        _step(FoldRepacking(), "repacked weights become the weights"),
        _step(transform.DeadCodeElimination(), "drop the repacking functions"),
    )


def _prefetch(context: Context) -> tuple[Step, ...]:
    return (_step(Prefetch(), "products ask for their next weights early"),) if context.prepack else ()


def _take_weights_out(context: Context) -> tuple[Step, ...]:
    return (_step(TakeWeightsOut(context.on_weights), "a library is code, its weights are a file of their own"),)


def _lower() -> tuple[Step, ...]:
    return (
        _step(RewriteReshapes(), "reshapes move no data"),
        _step(transform.ToNonDataflow(), "the virtual machine runs in order"),
        _step(transform.RemovePurityChecking(), "purity was checked before"),
        _step(transform.CallTIRRewrite(), "each kernel gets its output buffer"),
        _step(transform.StaticPlanBlockMemory(), "plan and share buffers"),
        _step(transform.LowerAllocTensor(), "buffers to storage and views"),
        _step(transform.KillAfterLastUse(), "free values early"),
        _step(transform.LowerRuntimeBuiltin(), "to the run time's functions"),
        _step(transform.ComputePrimValue(), "shape arithmetic to functions"),
        _step(transform.VMShapeLower(), "symbolic shapes to the shape heap"),
        _step(transform.AttachGlobalSymbol(), "name what is exported"),
    )


def _step(apply: tvm.ir.transform.Pass, why: str) -> Step:
    """A pass under the name that it gives itself."""
    return Step(str(apply.info.name), why, apply)


def gpu_rules() -> tuple[dlight.ScheduleRule, ...]:
    """DLight's rules for a GPU; the first that fits a kernel schedules it."""
    gpu = dlight.gpu
    return tuple(map(GpuRule, (gpu.Matmul(), gpu.GEMV(), gpu.Reduction(), gpu.GeneralReduction(), gpu.Fallback())))


class GpuRule(dlight.ScheduleRule):  # type: ignore[misc]  # TVM's modules have no types
    """A rule of DLight's that says of a kernel that it does not fit, instead of failing on it.

    They take for granted that epilogues can be inlined, that last indices are plain, and the like.
    """

    def __init__(self, rule: dlight.ScheduleRule) -> None:
        self._rule = rule

    def apply(self, func: tvm.tirx.PrimFunc, target: tvm.target.Target, tunable: bool) -> Schedule | None:
        try:
            return self._rule.apply(func, target, tunable)
        except (ScheduleError, AssertionError, AttributeError, RuntimeError, ValueError, TypeError, IndexError):
            return None


def ignore_step(_step: Step, _mod: tvm.IRModule, _seconds: float) -> None:
    """Nothing is done between steps."""


def run(mod: tvm.IRModule, steps: Iterable[Step], after: AfterStep = ignore_step) -> tvm.IRModule:
    """Applies `steps` in order; call it inside `with target:`. `after` is called between them.

    What a pass raises carries the pass's name as a note.
    """
    for step in steps:
        started = time.monotonic()
        try:
            mod = step.apply(mod)
        except Exception as exc:
            exc.add_note(f"pass {step.name}")
            raise
        after(step, mod, time.monotonic() - started)
    return mod


def has_convolution(mod: tvm.IRModule) -> bool:
    """Whether the graph holds a convolution whose layout could be chosen."""
    found: list[bool] = []

    def visit(node: object) -> None:
        if isinstance(node, relax.Call) and getattr(node.op, "name", "") == "relax.nn.conv2d":
            found.append(True)

    for function in mod.functions.values():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, visit)
    return bool(found)
