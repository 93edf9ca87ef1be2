"""The search of one task: candidates from MetaSchedule, what was measured of them, and the best so far."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import ScheduleError

from tvmflow.database import Record
from tvmflow.database.grammar import Where
from tvmflow.database.keys import fingerprint
from tvmflow.kernels.schedules import repacking, share_layouts
from tvmflow.replay import ReplayError, check_made, replay
from tvmflow.tasks import Task, trace_json
from tvmflow.tuning import space
from tvmflow.tuning.measure import Measured, Measurer
from tvmflow.tuning.transfer import Experience
from tvmflow.tuning.worker import Job, median_s

FINALISTS = 3  # candidates of a task that are measured once more, with its default schedule, when its search ends
TURNS = 4
CONFIRMED = f"; {TURNS} turns beside its rivals and the default"  # follows a measurer's protocol
PLATEAU_ROUNDS, PLATEAU_GAIN = 3, 0.01  # a task that gained less than this in so many rounds is left
# What MetaSchedule raises where its rules do not fit a kernel: the kernel keeps what it has.
REFUSED = (ScheduleError, RuntimeError, ValueError)


@dataclass(frozen=True)
class Candidate:
    """A schedule that runs, and its samples in seconds per call."""

    schedule: Schedule
    samples_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return median_s(self.samples_s)


@dataclass
class Search:
    """The state of one task's search. `best` holds the fastest candidates, fastest first."""

    task: Task
    seed: int
    limit: int = 256
    """Candidates to measure at most, over all sessions."""
    context: ms.TuneContext | None = None
    measured: ms.Database = field(default_factory=ms.database.MemoryDatabase)
    best: list[Candidate] = field(default_factory=list)
    default: Schedule | None = None
    start_s: float = float("inf")
    trials: int = 0
    gains: list[float] = field(default_factory=list)
    exhausted: bool = False
    confirmed: bool = False
    """Whether what is best was measured once more, beside its rivals."""

    @property
    def best_s(self) -> float:
        return self.best[0].median_s if self.best else float("inf")

    def worth_s(self) -> float:
        """Seconds of a model's run that another round may save: the task's cost times what its last rounds gained."""
        expected = max(self.gains[-1] if self.gains else 1.0, 0.3 / (len(self.gains) + 1))
        return self.task.weight * min(self.best_s, 1.0) * expected

    @property
    def is_open(self) -> bool:
        flat = len(self.gains) >= PLATEAU_ROUNDS and max(self.gains[-PLATEAU_ROUNDS:]) < PLATEAU_GAIN
        return not self.exhausted and not flat and self.trials < self.limit


def begin(
    search: Search,
    record: Record | None,
    experience: Experience,
    measurer: Measurer,
    machine: tuple[tvm.target.Target, Any],
) -> None:
    """Measures where the search starts, and lays out its space; `machine` is the target and the cost model.

    The starts are what the task would run with today, its record and its default schedule, and without a record the
    schedules of its nearest relatives. A task that MetaSchedule's rules do not fit is exhausted at once.
    """
    task, (target, model) = search.task, machine
    tf32 = task.parts.numerics["tf32"]
    search.default = space.default(task.mod, target, tf32)
    search.trials = record.provenance.trials if record else 0
    # A session that goes on must not draw what the one before it drew.
    search.context = space.context(task.mod, target, task.name, search.seed + search.trials, tf32)
    replayed = _replayed(task, record) if record is not None else None
    today = [schedule for schedule in (replayed, search.default) if schedule is not None]
    carried = experience.starts(task.mod, search.context) if record is None else []
    starts = today + [schedule for schedule in carried if _keeps_layouts(search, schedule)]
    results = measurer.measure([job_of(s.mod) for s in starts], None)
    for number, (schedule, result) in enumerate(zip(starts, results, strict=True)):
        take(search, schedule, result)
        if number < len(today) and result.samples_s:
            search.start_s = min(search.start_s, median_s(result.samples_s))
    careful = record is not None and record.provenance.protocol.startswith(measurer.protocol + CONFIRMED)
    search.confirmed = careful and bool(search.best) and search.best[0].schedule is replayed
    try:
        spaces = space.designs(search.context)
        search.context.pre_tuning(1 << 20, space.BATCH, spaces, search.measured, model)
    except REFUSED:
        search.exhausted = True
    for candidate in search.best:
        _commit(search, candidate, target)


def round_(
    search: Search, model: Any, measurer: Measurer, quarantined: Collection[str], accuse: Callable[[str, str], None]
) -> None:
    """One batch: candidates, measurements, and what the search and the cost model learn from them.

    Candidates whose trace's hash is `quarantined` are not run; `accuse` gets the hash and error of new killers.
    """
    assert search.context is not None
    try:
        # No more than the task's budget has left: a batch is smaller where some of it was measured before.
        candidates = list(search.context.generate_measure_candidates() or ())[: search.limit - search.trials]
    except REFUSED:
        candidates = []
    if not candidates:
        search.exhausted = True
        return
    before = search.best_s
    results = _measure(search, candidates, measurer, quarantined)
    answers = [ms.runner.RunnerResult(list(r.samples_s) or None, None if r.samples_s else r.error) for r in results]
    search.context.notify_runner_results(candidates, answers)
    model.update(search.context, candidates, answers)
    for candidate, result in zip(candidates, results, strict=True):
        if result.killed:
            accuse(trace_hash(candidate.sch), result.error)
        elif result.samples_s:
            _commit(search, Candidate(candidate.sch, result.samples_s), search.context.target)
        take(search, candidate.sch, result)
    search.trials += len(candidates)
    search.gains.append(1 - search.best_s / before if before < float("inf") else 0.0)


def confirm(search: Search, measurer: Measurer) -> None:
    """Measures the finalists and the default once more, in turns and with more samples, and sorts them by that."""
    rivals = [candidate.schedule for candidate in search.best]
    if search.default is not None and search.default not in rivals:
        rivals.append(search.default)
    results = measurer.measure([job_of(s.mod) for s in rivals], search.best_s, TURNS)
    search.best = []
    for schedule, result in zip(rivals, results, strict=True):
        take(search, schedule, result)
        if schedule is search.default and result.samples_s:
            search.start_s = median_s(result.samples_s)  # beside its rivals; before, the machine may have been another
    search.confirmed = True


def take(search: Search, schedule: Schedule, result: Measured) -> None:
    """Puts a measured candidate among the best, if it belongs there and can be a record."""
    if not result.samples_s or not can_be_record(search.task, schedule):
        return
    before = search.best_s
    search.best.append(Candidate(schedule, result.samples_s))
    search.best.sort(key=lambda candidate: candidate.median_s)
    del search.best[FINALISTS:]
    search.confirmed = search.confirmed and search.best_s == before


def can_be_record(task: Task, schedule: Schedule) -> bool:
    """Whether a schedule is one that records may hold: DLight's for float16 products on a GPU, say, are not."""
    try:
        check_made(task.mod, schedule, trace_json(schedule), Where.of(task.parts))
    except ReplayError:
        return False
    return True


def _replayed(task: Task, record: Record) -> Schedule | None:
    try:
        return replay(task.mod, record.trace, Where.of(task.parts))
    except ReplayError:  # `db verify` says why
        return None


def job_of(mod: tvm.IRModule) -> Job:
    """What a worker needs to build and run a module's `main`; weights are in the layout that the schedule wants."""
    stripped = tvm.s_tir.transform.RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(mod)["main"]
    args = tuple((str(p.ty.dtype), tuple(int(d) for d in p.ty.shape)) for p in stripped.params)
    weights = tuple(int(i) for i in (mod["main"].attrs or {}).get("layout_free_buffers", ()))
    return Job(tvm.ir.save_json(mod), args, weights)


def trace_hash(schedule: Schedule) -> str:
    """The sha256 of the trace's canonical JSON."""
    return fingerprint(trace_json(schedule))


def _measure(
    search: Search, candidates: Sequence[ms.MeasureCandidate], measurer: Measurer, quarantined: Collection[str]
) -> list[Measured]:
    faults = [_fault(search, candidate.sch, quarantined) for candidate in candidates]
    jobs = [job_of(c.sch.mod) for c, fault in zip(candidates, faults, strict=True) if not fault]
    results = iter(measurer.measure(jobs, search.best_s if search.best else None))
    return [Measured(error=fault) if fault else next(results) for fault in faults]


def _fault(search: Search, schedule: Schedule, quarantined: Collection[str]) -> str:
    """Why a candidate must not be run; "" if it may."""
    if not repacking.is_whole(schedule.mod["main"]):
        return "its layout of the weights loses some"
    if not _keeps_layouts(search, schedule):
        return "its layout of the weights is not that of the other buckets"
    return "in quarantine" if quarantined and trace_hash(schedule) in quarantined else ""


def _keeps_layouts(search: Search, schedule: Schedule) -> bool:
    """Whether weights that other shapes read too stay in the layout of the default schedule."""
    main = search.task.mod["main"]
    if search.default is None or not share_layouts.are_wanted(main):
        return True
    return share_layouts.of(schedule.mod["main"]) == share_layouts.of(search.default.mod["main"])


def _commit(search: Search, candidate: Candidate, target: tvm.target.Target) -> None:
    """Tells the search what was measured, so that it breeds from the best."""
    workload = search.measured.commit_workload(search.task.mod)
    args = ms.arg_info.ArgInfo.from_entry_func(search.task.mod, remove_preproc=True)
    search.measured.commit_tuning_record(
        ms.database.TuningRecord(candidate.schedule.trace, workload, list(candidate.samples_s), target, args)
    )
