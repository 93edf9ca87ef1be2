"""A library made with only the first of a config's steps: what bisection and attribution hold against the whole.

After those steps the way to a library is the plainest there is: operators legalised one by one, loops as legalised, C's
mathematical functions, a buffer for each value, precise arithmetic. A GPU cannot run such loops, so that a build for
one is for this machine's CPU up to its schedules. The functions here run in processes of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmflow import artifact, frontend
from tvmflow.artifact import CONSTANTS, LIBRARY
from tvmflow.config import Config, TargetSection
from tvmflow.frozen import evolve
from tvmflow.manifest import Manifest
from tvmflow.pipeline import building
from tvmflow.pipeline.context import Context, context_of
from tvmflow.pipeline.records import ApplyRecords

if TYPE_CHECKING:
    import tvm

    from tvmflow.graph.passes.replace_operators import Replacement
    from tvmflow.pipeline.plan import PhaseName, Step
    from tvmflow.pipeline.prepare import Setting

WINOGRAD = ("Winograd", "ScheduleWinograd")
VECTOR_MATH, SCHEDULES, RECORDS = "VectorMath", "DefaultSchedule", "TuningRecords"
PLANNING = "StaticPlanBlockMemory"
GELU = "RecogniseGelu"
EXACT = ("CompareExactly", "ComputeExactly")  # of the values, not of the schedules: done whatever is taken
# One step: its first pass leaves functions behind that only its last one takes away.
PACKING: tuple[PhaseName, ...] = ("pack", "prefetch")
REPLACEMENT = "ReplaceOperators"
FAST_MATH, TF32 = "numerics.fast_math", "numerics.tf32"
# Without these no graph becomes kernels; where one of them is not among the steps taken, it is done all the same.
NEEDED = ("DecomposeOpsForInference", "DispatchSampling", "DispatchSortScan", "LegalizeOps", "FuseKernels")


@dataclass(frozen=True)
class Part:
    """The first `count` steps of a config (None: all), but for those of some names, in its whole build's layout."""

    cfg: Config
    layout: str
    count: int | None = None
    without: tuple[str, ...] = ()


def steps(part: Part) -> tuple[str, ...]:
    """The names of a part's steps, in order."""
    graph, later = _graph_steps(part.cfg, part.layout), _later_steps(part.cfg)
    return (*(step.name for step in graph), *later)[: part.count]


def build(part: Part, folder: Path, whole: Manifest) -> Manifest:
    """Builds the part's library in `folder` as an artifact; its manifest is that of the whole, as far as it holds."""
    from tvmflow.codegen import library
    from tvmflow.pipeline import plan

    weights: list[tvm.runtime.Tensor] = []
    with _scheduled(part) as (mod, setting, taken):
        context = context_of(part.cfg, on_weights=weights.extend)
        packed = plan.run(mod, [step for step in plan.steps_of(context, *PACKING) if step.name in taken])
        last = plan.steps_of(context, "weights", "lower")
        lowered = plan.run(packed, [step for step in last if step.name != PLANNING or PLANNING in taken])
        library.write_library(lowered, setting.tvm_target, library.linker(setting.target), folder)
        entries = library.write_constants(weights, folder)
    manifest = evolve(
        whole,
        target=building.target_info(setting.target),
        constants=entries,
        weights=CONSTANTS,
        files={name: artifact.file_entry(folder / name) for name in (LIBRARY, CONSTANTS)},
        kernels=library.contents(packed, lowered).kernels,
    )
    artifact.write_manifest(folder, manifest)
    return manifest


def module(part: Part) -> tuple[tvm.IRModule, Setting]:
    """The part's module before weights are packed, and what it is built for."""
    with _scheduled(part) as (mod, setting, _):
        return mod, setting


@contextlib.contextmanager
def _scheduled(part: Part) -> Iterator[tuple[tvm.IRModule, Setting, frozenset[str]]]:
    """The part's module, as far as it is scheduled; inside, the passes that follow may be run."""
    import tvm

    from tvmflow.kernels.mathematics import vector_math
    from tvmflow.pipeline import plan
    from tvmflow.pipeline.prepare import setting

    graph, taken = _taken(part)
    model, cfg = frontend.load(part.cfg), _effective(part.cfg, taken)
    chosen = setting(cfg)
    if VECTOR_MATH in taken:
        vector_math.register()
    with (
        tvm.transform.PassContext(opt_level=3, config=chosen.pass_config),
        chosen.tvm_target,
        building.cuda_step(cfg, chosen.target),
    ):
        mod = plan.run(model.mod, [*graph, *_missing(graph, part.cfg.target.kind)])
        # Keys hold the numerics that they were tuned for, whatever is built here; but TF32 is in the schedules.
        use_records = RECORDS in taken and (TF32 in taken or not part.cfg.numerics.tf32)
        context = context_of(cfg, records=ApplyRecords(part.cfg, chosen.target) if use_records else None)
        mod = plan.run(mod, plan.steps_of(context, "records"))
        if SCHEDULES in taken:
            steps_ = plan.steps_of(context, "schedule", "rewrite")
            mod = plan.run(mod, [step for step in steps_ if step.name != GELU or VECTOR_MATH in taken])
        else:
            exact = set(EXACT) - set(part.without)
            mod = plan.run(mod, [step for step in plan.steps_of(context, "rewrite") if step.name in exact])
        yield mod, chosen, taken


def _taken(part: Part) -> tuple[list[Step], frozenset[str]]:
    """The part's steps: those of the graph, and the names of the later ones."""
    graph, later = _graph_steps(part.cfg, part.layout), _later_steps(part.cfg)
    count = len(graph) + len(later) if part.count is None else part.count
    kept = [step for step in graph[:count] if step.name not in part.without]
    return kept, frozenset(later[: max(0, count - len(graph))]) - set(part.without)


def _effective(cfg: Config, taken: frozenset[str]) -> Config:
    """The config with precise arithmetic, and this CPU for its target, unless the steps taken say otherwise."""
    numerics = evolve(cfg.numerics, fast_math=FAST_MATH in taken, tf32=TF32 in taken)
    target = cfg.target if SCHEDULES in taken or cfg.target.kind == "llvm" else TargetSection()
    return evolve(cfg, numerics=numerics, target=target)


def replacements(part: Part) -> tuple[list[Replacement], Setting]:
    """The places where the part's last step puts kernels of the user's, and what they are built for."""
    from tvmflow.pipeline import plan
    from tvmflow.pipeline.prepare import setting

    found: list[Replacement] = []
    steps_ = _graph_steps(part.cfg, part.layout, on_replaced=found.append)[: part.count]
    chosen = setting(_effective(part.cfg, frozenset()))
    model = frontend.load(part.cfg)
    with chosen.entered():
        plan.run(model.mod, steps_)
    return found, chosen


def _graph_steps(cfg: Config, layout: str, **known: Any) -> tuple[Step, ...]:
    from tvmflow.pipeline import plan
    from tvmflow.pipeline.prepare import build_context

    context = replace(build_context(cfg, **known), nhwc=layout == "nhwc")
    return plan.steps_of(context, "open", "simplify", "layout", "replace", "fuse")


def _later_steps(cfg: Config) -> tuple[str, ...]:
    from tvmflow.pipeline import plan

    on_cpu = cfg.target.kind == "llvm"
    return (
        *([VECTOR_MATH] if on_cpu else []),
        SCHEDULES,
        *([RECORDS] if cfg.tuning.database else []),
        *(step.name for step in plan.steps_of(context_of(cfg), *PACKING)),
        PLANNING,
        *([FAST_MATH] if cfg.numerics.fast_math else []),
        *([TF32] if cfg.numerics.tf32 else []),
    )


def _missing(graph: Sequence[Step], kind: str) -> list[Step]:
    """What no graph becomes kernels without, of the steps not taken; last, unused functions are dropped."""
    from tvmflow.pipeline import plan

    done = {step.name for step in graph}
    plainest = plan.steps_of(Context(kind), "simplify", "fuse")
    drop_unused = next(step for step in plainest if step.name == "DeadCodeElimination")
    return [*(step for step in plainest if step.name in NEEDED and step.name not in done), drop_unused]
