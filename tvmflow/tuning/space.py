"""What MetaSchedule searches and how, per target: the choices that these machines reward."""

from __future__ import annotations

from typing import Any

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import ScheduleError

from tvmflow.host import cores
from tvmflow.kernels import tvm_intrinsics
from tvmflow.kernels.schedules import blocking, share_layouts
from tvmflow.kernels.schedules import default_schedule as cpu_default
from tvmflow.kernels.schedules.axes import Registers
from tvmflow.kernels.tf32 import schedule_tf32
from tvmflow.pipeline import plan
from tvmflow.target import machine_of
from tvmflow.tuning import tensor_cores

# EvolutionarySearch's defaults (512 x 4) take 17 to 70 s a round on one thread; these took 2 s with no loss seen.
POPULATION, GENERATIONS, UNMEASURED = 64, 2, 32
BATCH = 32  # candidates of one round: the first random ones hold a candidate near the best for dense kernels


UNROLL_STEPS = [0, 16, 64]  # MetaSchedule also tries 512: four times the compile time, and never ahead of 64
PARALLEL_JOBS, VECTOR_EXTENT = 16, 64  # per core; elements. As in MetaSchedule's own rule.


def context(mod: tvm.IRModule, target: tvm.target.Target, name: str, seed: int, tf32: bool = False) -> ms.TuneContext:
    """The search of one task: MetaSchedule's rules for the target, evolutionary search with a smaller population.

    `tf32` allows TF32 tensor cores for products.
    """
    _load_intrinsics(str(target.kind.name), str(target.attrs.get("mtriple", "")))
    strategy = ms.search_strategy.EvolutionarySearch(
        population_size=POPULATION, genetic_num_iters=GENERATIONS, init_min_unmeasured=UNMEASURED
    )

    def made(generator: ms.SpaceGenerator) -> ms.TuneContext:
        return ms.TuneContext(
            mod=mod,
            target=target,
            space_generator=generator,
            search_strategy=strategy,
            task_name=name,
            rand_state=seed,
            num_threads=cores(),
            logger=_silent(),
        )

    if target.kind.name == "cuda":
        # "from-target" would add tensor cores, whose intrinsics for float16 and int8 take 20 s to load.
        product = schedule_tf32.find(Schedule(mod)) if tf32 else None
        if product is not None:
            return made(
                ms.space_generator.PostOrderApply(
                    sch_rules=tensor_cores.rules(product), postprocs=tensor_cores.postprocs(), mutator_probs="cuda"
                )
            )
        return made(ms.space_generator.PostOrderApply(sch_rules="cuda", postprocs="cuda", mutator_probs="cuda"))
    chosen = made(ms.space_generator.PostOrderApply()).space_generator
    rules = [_rule(rule) for rule in chosen.sch_rules]
    postprocs = list(chosen.postprocs)
    if share_layouts.are_wanted(mod["main"]) and not _blocked(Schedule(mod, debug_mask="none"), target):
        postprocs = [postproc for postproc in postprocs if not isinstance(postproc, ms.postproc.RewriteLayout)]
    return made(
        ms.space_generator.PostOrderApply(
            sch_rules=rules, postprocs=postprocs, mutator_probs=dict(chosen.mutator_probs.items())
        )
    )


def default(mod: tvm.IRModule, target: tvm.target.Target, tf32: bool = False) -> Schedule:
    """The schedule that a kernel gets where it is not tuned: DLight's on a GPU, ours on a CPU; its loops if none fits.

    With `tf32`, a product's on a GPU is ours for tensor cores.
    """
    if target.kind.name == "cuda":
        if tf32 and (own := schedule_tf32.schedule_of(mod))[1]:
            return own[0]
        found = (rule.apply(mod["main"], target, False) for rule in plan.gpu_rules())
        fitting = next((scheduled for scheduled in found if scheduled is not None), None)
        return fitting or Schedule(mod, debug_mask="none")
    with target:
        return cpu_default.schedule_of(mod)[0]


def designs(context: ms.TuneContext) -> list[Schedule]:
    """The spaces of a task: MetaSchedule's, and for a product on a CPU our blocking; raises where no rule fits.

    Where weights are shared with other shapes, our blocking alone: it keeps their layout.
    """
    own = Schedule(context.mod, seed=context.rand_state, debug_mask="none")
    if not _blocked(own, context.target):
        return list(context.generate_design_space())
    return [own] if share_layouts.are_wanted(context.mod["main"]) else [*context.generate_design_space(), own]


def _blocked(schedule: Schedule, target: tvm.target.Target) -> bool:
    try:
        return target.kind.name == "llvm" and blocking.block(schedule, Registers.of(target), informed=False)
    except ScheduleError:  # a primitive does not apply to this kernel
        return False


def _rule(rule: ms.ScheduleRule) -> ms.ScheduleRule:
    """The rule that stands for one of those that MetaSchedule chose for the target."""
    if isinstance(rule, ms.schedule_rule.ParallelizeVectorizeUnroll):
        return ms.schedule_rule.ParallelizeVectorizeUnroll(PARALLEL_JOBS, VECTOR_EXTENT, UNROLL_STEPS, True)
    return rule


def _load_intrinsics(kind: str, mtriple: str) -> None:
    """Registers the tensor intrinsics that the rules of a CPU may name; a TuneContext would import those of all."""
    if kind == "llvm":
        tvm_intrinsics.load_of_cpu(machine_of(mtriple))
    else:
        tvm_intrinsics.hide_others()


def cost_model(seed: int) -> Any:
    """XGBoost on MetaSchedule's features, one for all tasks of a session."""
    return ms.cost_model.XGBModel(num_warmup_samples=BATCH, num_tuning_cores=1, config=_config(seed))


def _config(seed: int) -> Any:
    from tvm.s_tir.meta_schedule.cost_model.xgb_model import XGBConfig

    return XGBConfig(seed=seed)


def _silent() -> Any:
    import logging

    logger = logging.getLogger("tvmflow.tuning")
    logger.setLevel(logging.CRITICAL + 1)
    return logger
