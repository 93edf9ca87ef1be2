"""What MetaSchedule searches and how, per target: the choices that these machines reward."""

from __future__ import annotations

from typing import Any

import tvm
from tvm.s_tir import meta_schedule as ms

# EvolutionarySearch's defaults (512 x 4) take 17 to 70 s a round on one thread; these took 2 s with no loss seen.
POPULATION, GENERATIONS, UNMEASURED = 128, 2, 32
BATCH = 32  # candidates of one round: the first random ones hold a candidate near the best for dense kernels


def context(mod: tvm.IRModule, target: tvm.target.Target, name: str, seed: int) -> ms.TuneContext:
    """The search of one task: MetaSchedule's rules for the target, evolutionary search with a smaller population."""
    return ms.TuneContext(
        mod=mod, target=target, space_generator=ms.space_generator.PostOrderApply(),
        search_strategy=ms.search_strategy.EvolutionarySearch(
            population_size=POPULATION, genetic_num_iters=GENERATIONS, init_min_unmeasured=UNMEASURED
        ),
        task_name=name, rand_state=seed, num_threads=1, logger=_silent(),
    )  # fmt: skip


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
