"""Measuring on this machine's GPU."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import tvm

from tvmflow.tuning import evaluator, worker
from tvmflow.tuning.measure import Measurer
from tvmflow.tuning.worker import Job

STICKY_EXIT = 70  # of a worker whose CUDA context a candidate has broken


class GpuMeasurer(Measurer):
    """A Measurer whose workers build machine code for a GPU and run it on the first one."""

    protocol = "median of 3-6 single runs, device events, caches flushed"

    def __init__(self, target_json: str, building: Callable[[], AbstractContextManager[None]], workers: int) -> None:
        """`building` is what each candidate is built inside of: our CUDA compile step."""
        self.device = str(tvm.cuda(0).device_name)
        self._start(functools.partial(Gpu, target_json, building), workers)


class Gpu:
    """A worker's Place."""

    def __init__(self, target_json: str, building: Callable[[], AbstractContextManager[None]]) -> None:
        self._target = tvm.target.Target(json.loads(target_json))
        self._building = building

    def build(self, number: int, job: Job) -> tvm.runtime.Module:
        with self._building():
            return worker.library(job, self._target).jit()

    def run(self, built: tvm.runtime.Module, job: Job, best_s: float | None) -> tuple[float, ...]:
        device = tvm.cuda(0)
        args = _arguments(job.args)
        try:
            return evaluator.seconds(built, device, args, evaluator.conditions("cuda", bool(job.weights)), best_s)
        except Exception:
            self._leave_if_broken(device)
            raise

    def _leave_if_broken(self, device: Any) -> None:
        """Ends the process after a wrong memory access: every later call would fail, and a new worker replaces it."""
        try:
            device.sync()
        except Exception:  # whatever the driver reports
            os._exit(STICKY_EXIT)


@functools.lru_cache(maxsize=1)  # the candidates of a batch are of one task
def _arguments(args: tuple[worker.Arg, ...]) -> list[Any]:
    return [worker.filled(dtype, shape, seed).copyto(tvm.cuda(0)) for seed, (dtype, shape) in enumerate(args)]
