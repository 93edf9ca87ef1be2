"""A library made with only the first of a config's steps: what bisection and attribution hold against the whole.

After those steps the way to a library is the plainest there is: operators legalised one by one, loops as legalised, C's
mathematical functions, a buffer for each value, precise arithmetic. A GPU cannot run such loops, so that a build for
one is for this machine's CPU up to its schedules. The functions here run in processes of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tvmflow import artifact, frontend
from tvmflow.artifact import CONSTANTS, LIBRARY
from tvmflow.config import Config, TargetSection
from tvmflow.frozen import evolve
from tvmflow.manifest import Manifest
from tvmflow.pipeline import building

if TYPE_CHECKING:
    import tvm

    from tvmflow.graph.passes.replace_operators import OnReplaced, Replacement
    from tvmflow.pipeline.plan import Step
    from tvmflow.pipeline.prepare import Setting

WINOGRAD = ("Winograd", "ScheduleWinograd")
VECTOR_MATH, SCHEDULES, RECORDS = "VectorMath", "DefaultSchedule", "TuningRecords"
PLANNING = "StaticPlanBlockMemory"
REPLACEMENT = "ReplaceOperators"
FAST_MATH, TF32 = "numerics.fast_math", "numerics.tf32"
# Without these no graph becomes kernels; where one of them is not among the steps taken, it is done all the same.
NEEDED = ("DecomposeOpsForInference", "DispatchSampling", "DispatchSortScan", "LegalizeOps", "FuseTIR")


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
    from tvmflow.graph.passes import fold_exactly

    with _scheduled(part) as (mod, setting, taken):
        packed = _run(mod, [step for step in _pack_steps(part.cfg) if step.name in taken])
        stripped, weights = fold_exactly.externalise(packed)
        lowered = _run(stripped, _lower_steps(planned=PLANNING in taken))
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
        mod = _run(model.mod, [*graph, *_missing(graph, part.cfg.target.kind)])
        # Keys hold the numerics that they were tuned for, whatever is built here; but TF32 is in the schedules.
        if RECORDS in taken and (TF32 in taken or not part.cfg.numerics.tf32):
            mod = building.with_records(part.cfg, mod, chosen.target).mod
        if SCHEDULES in taken:
            steps_ = plan.schedule_steps(chosen.target.kind, cfg.numerics.tf32)
            mod = _run(mod, [step for step in steps_ if step.name != "RecogniseGelu" or VECTOR_MATH in taken])
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
    from tvmflow.pipeline.prepare import setting

    found: list[Replacement] = []
    steps_ = _graph_steps(part.cfg, part.layout, found.append)[: part.count]
    chosen = setting(_effective(part.cfg, frozenset()))
    model = frontend.load(part.cfg)
    with chosen.entered():
        _run(model.mod, steps_)
    return found, chosen


def _graph_steps(cfg: Config, layout: str, on_replaced: OnReplaced = lambda replacement: None) -> tuple[Step, ...]:
    from tvmflow.pipeline import plan
    from tvmflow.pipeline.prepare import measured

    return (
        *plan.opening_steps(cfg),
        *plan.simplify_steps(),
        *(plan.layout_steps() if layout == "nhwc" else ()),
        *plan.kernel_steps(cfg, on_replaced, measured(cfg)),
    )


def _later_steps(cfg: Config) -> tuple[str, ...]:
    on_cpu = cfg.target.kind == "llvm"
    return (
        *([VECTOR_MATH] if on_cpu else []),
        SCHEDULES,
        *([RECORDS] if cfg.tuning.database else []),
        *(step.name for step in _pack_steps(cfg)),
        PLANNING,
        *([FAST_MATH] if cfg.numerics.fast_math else []),
        *([TF32] if cfg.numerics.tf32 else []),
    )


def _pack_steps(cfg: Config) -> tuple[Step, ...]:
    """Packing is one step: its first pass leaves functions behind that only its last one takes away."""
    from tvmflow.pipeline import plan

    return plan.pack_steps(cfg.target.kind, cfg.graph.prepack)


def _lower_steps(planned: bool) -> list[Step]:
    from tvmflow.pipeline import plan

    return [step for step in plan.lower_steps() if planned or step.name != PLANNING]


def _missing(graph: Sequence[Step], kind: str) -> list[Step]:
    from tvmflow.pipeline import plan

    done = {step.name for step in graph}
    steps_ = {step.name: step for step in (*plan.simplify_steps(), *plan.fuse_steps(kind, prepack=False))}
    return [steps_[name] for name in (*NEEDED, "DeadCodeElimination") if name not in done or name not in NEEDED]


def _run(mod: tvm.IRModule, chosen: Sequence[Step]) -> tvm.IRModule:
    from tvmflow.pipeline import plan

    return plan.run(mod, tuple(chosen), lambda step, made, seconds: None)
