"""The process that builds and runs candidates. A candidate that crashes it costs that candidate alone.

It is forked from a server that has imported TVM already, lives for many candidates, and keeps what it built in memory:
no linking, no files.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np
import tvm
from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock

from tvmflow.errors import SetupError, TargetError
from tvmflow.host import THREADING
from tvmflow.kernels.mathematics import vector_math
from tvmflow.pipeline import plan
from tvmflow.pipeline.context import Context

MEMORY_BYTES = 8 << 30  # of data; a candidate that asks for more fails alone
COLD_BYTES = 48 << 20  # weights rotate over copies of this size together, so that each run finds its own cold
MAX_COPIES = 16
SAMPLES, SAMPLE_S, BUDGET_S = 6, 1e-3, 0.1
# A candidate that takes this many times the task's best is not run again: warm, and in its very first run.
HOPELESS, HOPELESS_COLD = 1.5, 4.0


Arg = tuple[str, tuple[int, ...]]  # dtype and shape


@dataclass(frozen=True)
class Job:
    """One candidate: its module, the dtypes and shapes of its parameters, which of them are weights."""

    module_json: str
    args: tuple[Arg, ...]
    weights: tuple[int, ...]


class Place(Protocol):
    """Where a worker builds its candidates and runs them. Made in the worker, by what a Measurer was given."""

    def build(self, number: int, job: Job) -> Any:
        """What `run` needs of candidate `number`; raises anything for one that cannot be built."""

    def run(self, built: Any, job: Job, best_s: float | None) -> tuple[float, ...]:
        """Seconds per call, one value per sample; a single one where the first run was hopeless.

        Raises anything for a candidate that cannot run, KilledError where it brought its process down, and TargetError
        where nothing can be measured any more.
        """


class KilledError(Exception):
    """A candidate ended the process that ran it, which was not the worker."""


def serve(channel: Connection, make_place: Callable[[], Place]) -> None:
    """Says that it is there; then answers ("build", number, Job), ("run", number, best_s), ("drop", number, None)."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        place = make_place()
    except (TargetError, SetupError) as exc:
        channel.send(("stop", exc))
        return
    channel.send(("ok", ()))
    gc.freeze()  # what the imports left is never garbage, and looking through it takes longer than small builds
    built: dict[int, tuple[Any, Job]] = {}
    while True:
        try:
            action, number, payload = channel.recv()
        except EOFError:
            return
        try:
            if action == "build":
                built[number] = (place.build(number, payload), payload)
                channel.send(("ok", ()))
            elif action == "run":
                channel.send(("ok", place.run(*built[number], payload)))
            else:
                del built[number]
                channel.send(("ok", ()))
        except (TargetError, SetupError) as exc:
            channel.send(("stop", exc))
        except Exception as exc:  # whatever a candidate does wrong is its result
            text = f"{type(exc).__name__}: {(str(exc).strip().splitlines() or [''])[-1][:200]}"
            channel.send(("killed" if isinstance(exc, KilledError) else "error", text))


def library(job: Job, target: tvm.target.Target) -> Any:
    """The candidate as TVM's executable, its weights in the layout that the schedule wants.

    Without the checks of its arguments, which are ours: a sixth of what LLVM has to compile.
    """
    mod = RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(tvm.ir.load_json(job.module_json))
    if str(target.kind) == "llvm":
        vector_math.register()  # all as in the library that the schedule ends up in
    context = Context(str(target.kind), prepack=str(target.kind) == "llvm")
    with target:
        mod = plan.run(mod, plan.steps_of(context, "rewrite", "prefetch"))
    with tvm.transform.PassContext(opt_level=3, config={"tirx.disable_assert": True}):
        return tvm.tirx.build(mod, target=target)


class Cpu:
    """This machine's CPU."""

    def __init__(self, target_json: str, threads: int) -> None:
        """`target_json` is the tvm target as it prints itself; `threads` are those a candidate runs with."""
        os.environ |= {"TVM_NUM_THREADS": str(threads), **THREADING}
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        self._target = tvm.target.Target(json.loads(target_json))

    def build(self, number: int, job: Job) -> Any:
        """Looking the function up is what makes LLVM emit it, here, while all cores build."""
        return library(job, self._target)["main"]

    def run(self, built: Any, job: Job, best_s: float | None) -> tuple[float, ...]:
        return _run(built, job, best_s)


def _run(kernel: Any, job: Job, best_s: float | None) -> tuple[float, ...]:
    """Seconds per call, one value per sample; a single one where the first run was hopeless."""
    sets = _argument_sets(job.args, job.weights)
    first = _time(kernel, sets[:1])  # pages and caches warm up, and so do the threads
    if best_s is not None and first > HOPELESS_COLD * best_s:
        return (first,)
    first = _time(kernel, sets[1 % len(sets) :][:1])
    if best_s is not None and first > HOPELESS * best_s:
        return (first,)
    repeat = max(1, min(len(sets) if first < SAMPLE_S else 1, int(SAMPLE_S / max(first, 1e-7)) + 1))
    samples = []
    end = time.perf_counter() + BUDGET_S
    for index in range(SAMPLES):
        start = index * repeat % len(sets)
        samples.append(_time(kernel, (sets[start:] + sets[:start])[:repeat]))
        if time.perf_counter() > end and index >= 2:
            break
    return tuple(samples)


def _time(kernel: Any, sets: list[list[Any]]) -> float:
    started = time.perf_counter()
    for args in sets:
        kernel(*args)
    return (time.perf_counter() - started) / len(sets)


@functools.lru_cache(maxsize=1)  # the candidates of a batch are of one task, most with the same shapes
def _argument_sets(args: tuple[Arg, ...], weights: tuple[int, ...]) -> list[list[Any]]:
    """Arguments with a warm first input and cold weights: the same activations, weights from copies in turn."""
    weight_bytes = sum(_size_bytes(*args[i]) for i in weights)
    copies = min(MAX_COPIES, COLD_BYTES // weight_bytes + 1) if weight_bytes else 1
    shared = [None if i in weights else filled(*arg, i) for i, arg in enumerate(args)]
    return [[s if s is not None else filled(*args[i], i + c) for i, s in enumerate(shared)] for c in range(copies)]


def filled(dtype: str, shape: tuple[int, ...], seed: int) -> Any:
    kind = np.dtype(dtype) if dtype != "bfloat16" else np.dtype("uint16")
    rng = np.random.default_rng(seed)
    values = rng.random(shape, np.float32) if kind.kind == "f" else np.zeros(shape)
    tensor = tvm.runtime.tensor(np.asarray(values).astype(kind))
    return tensor._create_view(shape, dtype) if dtype == "bfloat16" else tensor


def _size_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape)) * max(int(tvm.DataType(dtype).bits) // 8, 1)


def median_s(samples: tuple[float, ...]) -> float:
    return statistics.median(samples)
