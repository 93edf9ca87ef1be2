"""The graph stage: named lists of passes from an imported module to one that is ready to be scheduled and built.

Up to `fuse_steps` they make the fused, legal kernels that keys, tuning and build all start from; `lower_steps` turns
those into calls of the virtual machine. All are plain tuples that can be printed; `run` applies one, and its callback
is the only hook between passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.relax import transform
from tvm.relax.backend import DispatchSampling, DispatchSortScan
from tvm.s_tir import Schedule, dlight
from tvm.s_tir.schedule import ScheduleError

from tvmflow.config import Config, KernelSection
from tvmflow.graph.passes.avoid_layout_faults import AvoidLayoutFaults
from tvmflow.graph.passes.cancel_transposes import CancelTransposes
from tvmflow.graph.passes.compute_in_float32 import ComputeInFloat32
from tvmflow.graph.passes.drop_empty import DropEmpty
from tvmflow.graph.passes.fold_exactly import FoldExactly
from tvmflow.graph.passes.fuse_kernels import FuseTIR
from tvmflow.graph.passes.guards import Guards
from tvmflow.graph.passes.keep_resizers_apart import KeepResizersApart
from tvmflow.graph.passes.replace_operators import OnReplaced, ReplaceOperators
from tvmflow.graph.passes.rewrite_reshapes import RewriteReshapes
from tvmflow.graph.passes.split_repacking import FoldRepacking, SplitRepacking
from tvmflow.graph.passes.split_transposed_convolutions import SplitTransposedConvolutions
from tvmflow.graph.passes.winograd import ScheduleWinograd, Winograd
from tvmflow.kernels.rewrites.compare_exactly import CompareExactly
from tvmflow.kernels.rewrites.prefetch import Prefetch
from tvmflow.kernels.rewrites.recognise_gelu import RecogniseGelu
from tvmflow.kernels.rewrites.start_from_infinity import StartFromInfinity
from tvmflow.kernels.schedules.default_schedule import DefaultSchedule
from tvmflow.kernels.schedules.share_layouts import ShareLayouts
from tvmflow.kernels.tf32.schedule_tf32 import ScheduleTf32
from tvmflow.kernels.winograd.minimal_filtering import Measured, unmeasured

# Transposed convolutions stay as they are: TVM has no kernel for them in NHWC.
CONV_LAYOUTS = {"relax.nn.conv2d": ["NHWC", "HWIO"], "relax.nn.conv2d_transpose": ["NCHW", "IOHW"]}


@dataclass(frozen=True)
class Step:
    """One pass of a pipeline and why it stands there."""

    name: str
    why: str
    apply: tvm.ir.transform.Pass | Callable[[tvm.IRModule], tvm.IRModule]


# Called after each step with the step, the module it made, and the seconds it took.
AfterStep = Callable[[Step, tvm.IRModule, float], None]


def opening_steps(cfg: Config) -> tuple[Step, ...]:
    """What is done to an imported graph first, whatever its layout will be."""
    empty = Step("DropEmpty", "what has no elements needs no kernel", DropEmpty())
    return (empty, *guard_steps(cfg.graph.guards), *widen_steps(cfg.target.kind, cfg.numerics.widen_half))


def kernel_steps(cfg: Config, on_replaced: OnReplaced, measured: Measured = unmeasured) -> tuple[Step, ...]:
    """From the graph in its layout to fused kernels."""
    kind = cfg.target.kind
    return (
        *user_steps(cfg.kernels, on_replaced),
        *winograd_steps(kind, cfg.numerics.winograd, measured),
        *fuse_steps(kind, cfg.graph.prepack),
    )


def guard_steps(guards: bool) -> tuple[Step, ...]:
    """Checks at run time, before anything else knows what they guard."""
    return (Step("Guards", "stop at indices out of range and division by zero", Guards()),) if guards else ()


def simplify_steps() -> tuple[Step, ...]:
    """What makes the graph smaller; BatchNorm first, while it still is one operator behind its convolution."""
    return (
        Step("DeadCodeElimination", "drop what no output needs", transform.DeadCodeElimination()),
        Step("CanonicalizeBindings", "one name per value", transform.CanonicalizeBindings()),
        Step(
            "FoldBatchnormToConv2D", "BatchNorm into the weights of its convolution", transform.FoldBatchnormToConv2D()
        ),
        Step("FoldExactly", "what depends on weights alone, where it is exact", FoldExactly()),
        Step("FoldConstant", "compute what depends on weights alone", transform.FoldConstant()),
        Step(
            "DecomposeOpsForInference", "operators that only training needs whole", transform.DecomposeOpsForInference()
        ),
        Step("FoldConstant", "compute what the decomposition left constant", transform.FoldConstant()),
        Step("EliminateCommonSubexpr", "compute equal values once", transform.EliminateCommonSubexpr()),
        Step(
            "SplitTransposedConvolutions",
            "no products with the zeros that a stride puts between inputs",
            SplitTransposedConvolutions(),
        ),
    )


def widen_steps(kind: str, widen_half: bool) -> tuple[Step, ...]:
    """Half precision to float32, for a CPU."""
    if kind != "llvm" or not widen_half:
        return ()
    return (Step("ComputeInFloat32", "CPUs convert half precision, they do not compute in it", ComputeInFloat32()),)


def layout_steps() -> tuple[Step, ...]:
    """Convolutions to NHWC, with the transposes this brings cancelled or folded into the weights."""
    return (
        Step("AvoidLayoutFaults", "ConvertLayout fails on stacks and on axes counted from behind", AvoidLayoutFaults()),
        Step("ConvertLayout", "convolutions to NHWC with HWIO weights", transform.ConvertLayout(CONV_LAYOUTS)),
        Step("CancelTransposes", "pairs of opposite transposes cancel", CancelTransposes()),
        Step("CanonicalizeBindings", "one name per value", transform.CanonicalizeBindings()),
        Step("FoldExactly", "transposed weights become the weights", FoldExactly()),
        Step("FoldConstant", "compute what became constant", transform.FoldConstant()),
        Step("DeadCodeElimination", "drop what the new layout left unused", transform.DeadCodeElimination()),
    )


def user_steps(kernels: Mapping[str, KernelSection], on_replaced: OnReplaced) -> tuple[Step, ...]:
    """The kernels that a config names, in place of the operators that they replace."""
    if not kernels:
        return ()
    return (
        Step("ReplaceOperators", f"user kernels: {', '.join(kernels)}", ReplaceOperators(kernels, on_replaced)),
        Step("DeadCodeElimination", "drop the operators that they replaced", transform.DeadCodeElimination()),
    )


def winograd_steps(kind: str, winograd: str, measured: Measured = unmeasured) -> tuple[Step, ...]:
    """Convolutions by fewer multiplications; `winograd` is "auto" or "off", `measured` what is known of them."""
    if kind != "llvm" or winograd == "off":
        return ()
    return (Step("Winograd", "3 x 3 convolutions by fewer multiplications, where that pays", Winograd(measured)),)


def fuse_steps(kind: str, prepack: bool | str) -> tuple[Step, ...]:
    """From operators to fused TensorIR kernels."""
    attach = Step(
        "AttachAttrLayoutFreeBuffers",
        "let a schedule choose its weights' layout",
        transform.AttachAttrLayoutFreeBuffers(),
    )
    share = Step("ShareLayouts", "weights that other buckets read too, in one layout", ShareLayouts())
    return (
        Step("DispatchSampling", "sampling operators to their run-time functions", DispatchSampling()),
        Step("DispatchSortScan", "sort and scan to their run-time functions", DispatchSortScan()),
        Step("LegalizeOps", "operators to TensorIR", transform.LegalizeOps()),
        Step("AnnotateTIROpPattern", "say what fuses with what", transform.AnnotateTIROpPattern()),
        Step("KeepResizersApart", "paddings are no epilogues: no tile is where they write", KeepResizersApart()),
        Step("FoldConstant", "compute what became constant", transform.FoldConstant()),
        Step("FuseOps", "group operators into kernels", transform.FuseOps()),
        Step("FuseTIR", "one TensorIR function per group", FuseTIR()),
        Step("DeadCodeElimination", "drop the unfused functions", transform.DeadCodeElimination()),
        *(
            [
                Step(
                    "ScheduleWinograd",
                    "they and what is fused into them have schedules of their own",
                    ScheduleWinograd(),
                )
            ]
            if kind == "llvm"
            else []
        ),
        *([attach] if prepack and kind == "llvm" else []),
        *([share] if prepack == "shared" and kind == "llvm" else []),
    )


def pack_steps(kind: str, prepack: bool | str) -> tuple[Step, ...]:
    """Weights into the layout that their kernels' schedules ask for."""
    if not prepack or kind != "llvm":
        return ()
    return (
        Step("SplitLayoutRewritePreproc", "repacking of weights apart from their kernels", SplitRepacking()),
        Step("FoldRepacking", "repacked weights become the weights", FoldRepacking()),
        Step("DeadCodeElimination", "drop the repacking functions", transform.DeadCodeElimination()),
        Step("Prefetch", "products ask for their next weights early", Prefetch()),
    )


def lower_steps() -> tuple[Step, ...]:
    """From scheduled kernels to the calls, shapes and memory plan of the virtual machine."""
    return (
        Step("RewriteDataflowReshape", "reshapes move no data", RewriteReshapes()),
        Step("ToNonDataflow", "the virtual machine runs in order", transform.ToNonDataflow()),
        Step("RemovePurityChecking", "purity was checked before", transform.RemovePurityChecking()),
        Step("CallTIRRewrite", "each kernel gets its output buffer", transform.CallTIRRewrite()),
        Step("StaticPlanBlockMemory", "plan and share buffers", transform.StaticPlanBlockMemory()),
        Step("LowerAllocTensor", "buffers to storage and views", transform.LowerAllocTensor()),
        Step("KillAfterLastUse", "free values early", transform.KillAfterLastUse()),
        Step("LowerRuntimeBuiltin", "to the run time's functions", transform.LowerRuntimeBuiltin()),
        Step("ComputePrimValue", "shape arithmetic to functions", transform.ComputePrimValue()),
        Step("VMShapeLower", "symbolic shapes to the shape heap", transform.VMShapeLower()),
        Step("AttachGlobalSymbol", "name what is exported", transform.AttachGlobalSymbol()),
    )


def schedule_steps(kind: str, tf32: bool) -> tuple[Step, ...]:
    """Default schedules for kernels that have none, and what follows any schedule; `tf32` allows TF32 tensor cores."""
    infinite = Step("StartFromInfinity", "of nothing but -inf the maximum is -inf", StartFromInfinity())
    exact = Step("CompareExactly", "conditions and extremes are right for NaN", CompareExactly(kind))
    if kind != "cuda":
        return (
            Step("DefaultSchedule", "register tiles and vectors for untuned kernels", DefaultSchedule()),
            Step("RecogniseGelu", "GELU as one function, however it is written", RecogniseGelu()),
            infinite,
            exact,
        )
    tensor_cores = Step("ScheduleTf32", "untuned products on TF32 tensor cores", ScheduleTf32())
    apply = dlight.ApplyDefaultSchedule(*gpu_rules())
    return (
        *([tensor_cores] if tf32 else []),
        Step("ApplyDefaultSchedule", "DLight schedules for untuned kernels", apply),
        infinite,
        exact,
    )


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


def run(mod: tvm.IRModule, steps: tuple[Step, ...], after: AfterStep) -> tvm.IRModule:
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
