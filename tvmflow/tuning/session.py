"""One tuning session: which task to search next, until time, trials or hope run out. Winners are kept at once."""

from __future__ import annotations

import datetime
import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import ScheduleError

from tvmflow.database import Provenance, Record, pack
from tvmflow.kernels import default
from tvmflow.target import cpu_name
from tvmflow.tasks import Task, replay
from tvmflow.tuning import space
from tvmflow.tuning.measure import Measured, Measurer
from tvmflow.tuning.worker import Job, median_s

PROTOCOL = "median of 3-10 samples of 1 ms, cold weights, warm first input"
PLATEAU_ROUNDS, PLATEAU_GAIN = 3, 0.01  # a task that gained less than this in so many rounds is left


@dataclass(frozen=True)
class Limits:
    """When to stop: trials per task, seconds of the whole session, and the seed of everything random."""

    trials_per_task: int
    seconds: float
    seed: int


@dataclass(frozen=True)
class Progress:
    """What a session says after each batch."""

    task: str
    done_tasks: int
    tasks: int
    trials: int
    best_gflops: float
    gain: float
    """How many times as fast the sum of all tasks, weighted by calls, has become since the start."""
    left_s: float


@dataclass
class _Search:
    """The state of one task's search."""

    task: Task
    context: ms.TuneContext | None = None
    best_s: float = float("inf")
    start_s: float = float("inf")
    trials: int = 0
    gains: list[float] = field(default_factory=list)
    samples_s: tuple[float, ...] = ()
    trace: Any = None
    exhausted: bool = False

    def worth(self) -> float:
        """Seconds that another round may save: what the task costs now times what its last rounds gained."""
        expected = max(self.gains[-1] if self.gains else 1.0, 0.3 / (len(self.gains) + 1))
        return self.task.weight * min(self.best_s, 1.0) * expected

    def is_open(self, limits: Limits) -> bool:
        flat = len(self.gains) >= PLATEAU_ROUNDS and max(self.gains[-PLATEAU_ROUNDS:]) < PLATEAU_GAIN
        return not self.exhausted and not flat and self.trials < limits.trials_per_task


def tune(
    tasks: Sequence[Task], known: Mapping[str, Record], target: tvm.target.Target, limits: Limits,
    measurer: Measurer, keep: Callable[[Record], None], report: Callable[[Progress], None],
) -> None:  # fmt: skip
    """Searches schedules for `tasks` until `limits`.

    `known` holds the database's records by key: a task that has one starts from it and counts its trials. `keep` gets a
    record whenever a task's best improves. The default schedule is the first candidate of every task, so that what is
    kept is never slower than it was when measured beside it.
    """
    end = time.monotonic() + limits.seconds
    model = space.cost_model(limits.seed)
    searches = [_Search(task) for task in tasks]
    for search in searches:
        _begin(search, known.get(search.task.key), measurer, target, (limits, model))
        if search.trace is not None and search.task.key not in known:
            keep(_record(search, limits))
        report(_progress(search, searches, limits, end))
        if time.monotonic() > end:
            return
    while (open_ := [s for s in searches if s.is_open(limits)]) and time.monotonic() < end:
        search = max(open_, key=_Search.worth)
        before = search.best_s
        _round(search, model, measurer)
        search.gains.append(1 - search.best_s / before if before < float("inf") else 0.0)
        if search.best_s < before:
            keep(_record(search, limits))
        report(_progress(search, searches, limits, end))


def _begin(
    search: _Search, record: Record | None, measurer: Measurer, target: tvm.target.Target,
    shared: tuple[Limits, Any],
) -> None:  # fmt: skip
    """Measures what the task would run with today: its record, else the default schedule."""
    limits, model = shared
    task = search.task
    replayed = replay(task.mod, record.trace) if record is not None else None
    starts = [schedule for schedule in (replayed, _default(task)) if schedule is not None]
    results = measurer.measure([_job(s.mod, task) for s in starts], None)
    for schedule, result in zip(starts, results, strict=True):
        _take(search, schedule, result)
    search.start_s = search.best_s
    search.trials = record.provenance.trials if record else 0
    search.context = space.context(task.mod, target, task.name, limits.seed)
    database = ms.database.MemoryDatabase()
    try:
        spaces = search.context.generate_design_space()
        search.context.pre_tuning(limits.trials_per_task, space.BATCH, spaces, database, model)
    except (ScheduleError, RuntimeError, ValueError):  # MetaSchedule's rules do not fit this kernel
        search.exhausted = True


def _round(search: _Search, model: Any, measurer: Measurer) -> None:
    """One batch: candidates, measurements, and what the search and the cost model learn from them."""
    assert search.context is not None
    strategy = search.context.search_strategy
    try:
        candidates = strategy.generate_measure_candidates()
    except (ScheduleError, RuntimeError, ValueError):
        candidates = None
    if not candidates:
        search.exhausted = True
        return
    best = search.best_s if search.best_s < float("inf") else None
    results = measurer.measure([_job(c.sch.mod, search.task) for c in candidates], best)
    answers = [
        ms.runner.RunnerResult(list(r.samples_s) or None, None if r.samples_s else r.error) for r in results
    ]
    strategy.notify_runner_results(candidates, answers)
    model.update(search.context, candidates, answers)
    for candidate, result in zip(candidates, results, strict=True):
        _take(search, candidate.sch, result)
    search.trials += len(candidates)


def _take(search: _Search, schedule: Schedule, result: Measured) -> None:
    if result.samples_s and median_s(result.samples_s) < search.best_s:
        search.best_s = median_s(result.samples_s)
        search.samples_s = result.samples_s
        search.trace = schedule.trace


def _default(task: Task) -> Schedule | None:
    schedule = Schedule(task.mod, debug_mask="none")
    try:
        default.apply(schedule)
    except ScheduleError:
        return Schedule(task.mod, debug_mask="none")
    return schedule


def _job(mod: tvm.IRModule, task: Task) -> Job:
    function = mod["main"]
    stripped = tvm.s_tir.transform.RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(mod)["main"]
    args = tuple((str(p.ty.dtype), tuple(int(d) for d in p.ty.shape)) for p in stripped.params)
    weights = tuple(int(i) for i in function.attrs.get("layout_free_buffers", ()))
    return Job(tvm.ir.save_json(mod), args, weights)


def _record(search: _Search, limits: Limits) -> Record:
    task = search.task
    provenance = Provenance(
        versions={name: version(name) for name in ("apache-tvm", "apache-tvm-ffi")}, tvmflow=version("tvmflow"),
        machine=platform.machine(), cpu=cpu_name(), threads=task.threads, seed=limits.seed,
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), trials=search.trials,
        protocol=PROTOCOL,
    )  # fmt: skip
    return Record(
        parts=task.parts, name=task.name, workload_json=pack(tvm.ir.save_json(task.mod)),
        trace=json.loads(json.dumps(search.trace.as_json(), default=_plain)), timings_s=search.samples_s,
        flop=task.flop, provenance=provenance,
    )  # fmt: skip


def _plain(value: Any) -> Any:
    """TVM's numbers and containers as JSON's."""
    if isinstance(value, tvm.tirx.IntImm):
        return int(value)
    if isinstance(value, tvm.tirx.FloatImm):
        return float(value)
    if hasattr(value, "items"):
        return {str(key): item for key, item in value.items()}
    return str(value) if isinstance(value, str) else list(value)


def _progress(search: _Search, searches: Sequence[_Search], limits: Limits, end: float) -> Progress:
    measured = [s for s in searches if s.start_s < float("inf")]
    start = sum(s.task.weight * s.start_s for s in measured)
    now = sum(s.task.weight * s.best_s for s in measured)
    return Progress(
        task=search.task.name, done_tasks=sum(not s.is_open(limits) for s in searches), tasks=len(searches),
        trials=sum(s.trials for s in searches), best_gflops=search.task.flop / search.best_s / 1e9,
        gain=start / now if now else 1.0, left_s=max(0.0, end - time.monotonic()),
    )  # fmt: skip
