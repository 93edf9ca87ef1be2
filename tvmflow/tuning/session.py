"""One tuning session: which task to search next, until time, trials or hope run out. Winners are kept at once."""

from __future__ import annotations

import datetime
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Protocol

import tvm

from tvmflow.database import KeyParts, Provenance, Record, pack
from tvmflow.frozen import evolve
from tvmflow.tasks import Task, trace_json
from tvmflow.tuning import search, space
from tvmflow.tuning.measure import Measurer
from tvmflow.tuning.search import CONFIRMED, Candidate, Search
from tvmflow.tuning.transfer import Experience

CONFIRM_S = 1.5  # what measuring a task's finalists once more takes, about


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
    peak_share: float | None
    """`best_gflops` as a share of what the machine's multiply-adds can do."""
    gain: float
    """How many times as fast the sum of all tasks, weighted by calls, has become since the start."""
    expected_gain: float
    """The share of that sum which the next batches are expected to save."""
    left_s: float


class Keeper(Protocol):
    """Where records and killers go: a database's Store."""

    def keep(self, record: Record) -> None: ...

    def replace(self, record: Record, old: Record) -> None: ...

    def quarantined(self, parts: KeyParts) -> frozenset[str]: ...

    def accuse(self, parts: KeyParts, trace_sha256: str, error: str) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """What a session found for one task: records of its best candidates, the fastest first, and its default's last."""

    task: Task
    records: tuple[Record, ...]


@dataclass
class Session:
    """A set of tasks, the machine that measures them, and the database that gets what is found."""

    target: tvm.target.Target
    limits: Limits
    measurer: Measurer
    store: Keeper
    report: Callable[[Progress], None]
    peak_gflops: float | None = None

    def tune(self, tasks: Sequence[Task], known: Mapping[str, Record]) -> tuple[Outcome, ...]:
        """Searches schedules for `tasks` until the limits are reached; returns what was found for those that changed.

        `known` holds the database's records by key: a task that has one starts from it and counts its trials, any
        other also from those of kernels like it, of whatever target: they are only candidates. A record is kept
        whenever a task's best improves, and replaced when the finalists were measured once more.
        """
        self._end = time.monotonic() + self.limits.seconds
        self._kept = dict(known)
        self._experience = Experience(known.values())
        self._searches = [Search(task, self.limits.seed, self.limits.trials_per_task) for task in tasks]
        self._model = space.cost_model(self.limits.seed)
        for one in self._searches:
            self._begin(one)
            if self._left_s() <= 0:
                break
        while (chosen := self._next()) is not None:
            quarantined = self.store.quarantined(chosen.task.parts)
            accuse = functools.partial(self.store.accuse, chosen.task.parts)
            search.round_(chosen, self._model, self.measurer, quarantined, accuse)
            self._keep(chosen)
            if not chosen.is_open:
                self._confirm(chosen)
            self._report(chosen)
        for one in self._searches:
            self._confirm(one)
            self._report(one)
        return tuple(self._outcome(one) for one in self._searches if one.gains and one.best)

    def _next(self) -> Search | None:
        """The task with most to gain, while there is time beside that for measuring the finalists."""
        open_ = [s for s in self._searches if s.context is not None and s.is_open]
        spare_s = self._left_s() - CONFIRM_S * sum(bool(s.gains) and not s.confirmed for s in self._searches)
        return max(open_, key=Search.worth_s, default=None) if spare_s > 0 else None

    def _begin(self, one: Search) -> None:
        record = self._kept.get(one.task.key)
        search.begin(one, record, self._experience, self.measurer, (self.target, self._model))
        if record is None:
            self._keep(one)
        self._report(one)

    def _confirm(self, one: Search) -> None:
        if one.confirmed or not one.best or not one.gains:
            return
        search.confirm(one, self.measurer)
        if one.best:
            self._keep(one)

    def _keep(self, one: Search) -> None:
        """Writes the task's best to the database, and how many candidates were tried, so that a killed session goes on.

        What is faster, or was measured with more care, takes the place of what was kept before.
        """
        if not one.best:
            return
        record = self._record(one, one.best[0])
        old = self._kept.get(one.task.key)
        if old is None:
            self.store.keep(record)
        else:
            if not one.confirmed and record.median_s >= old.median_s:
                record = evolve(old, provenance=evolve(old.provenance, trials=one.trials))
            self.store.replace(record, old)
        self._kept[one.task.key] = record

    def _outcome(self, one: Search) -> Outcome:
        others = [candidate for candidate in one.best if candidate.schedule is not one.default]
        default = [candidate for candidate in one.best if candidate.schedule is one.default]
        measured = one.default is not None and one.start_s < float("inf")
        if not default and measured and search.can_be_record(one.task, one.default):
            default = [Candidate(one.default, (one.start_s,))]
        return Outcome(one.task, tuple(self._record(one, candidate) for candidate in [*others, *default]))

    def _record(self, one: Search, candidate: Candidate) -> Record:
        task = one.task
        protocol = self.measurer.protocol + CONFIRMED * one.confirmed
        return Record(
            parts=task.parts,
            name=task.name,
            workload_json=pack(tvm.ir.save_json(task.mod)),
            trace=trace_json(candidate.schedule),
            timings_s=candidate.samples_s,
            flop=task.flop,
            provenance=provenance(task.parts, self.measurer, self.limits.seed, one.trials, protocol),
        )

    def _left_s(self) -> float:
        return self._end - time.monotonic()

    def _report(self, one: Search) -> None:
        measured = [s for s in self._searches if s.start_s < float("inf")]
        start = sum(s.task.weight * s.start_s for s in measured)
        now = sum(s.task.weight * s.best_s for s in measured)
        open_ = [s for s in measured if s.is_open]
        gflops = one.task.flop / one.best_s / 1e9
        self.report(
            Progress(
                task=one.task.name,
                done_tasks=len(self._searches) - len(open_),
                tasks=len(self._searches),
                trials=sum(s.trials for s in self._searches),
                best_gflops=gflops,
                peak_share=gflops / self.peak_gflops if self.peak_gflops else None,
                gain=start / now if now else 1.0,
                expected_gain=min(1.0, sum(s.worth_s() for s in open_) / now) if now else 0.0,
                left_s=max(0.0, self._left_s()),
            )
        )


def provenance(parts: KeyParts, measurer: Measurer, seed: int | None, trials: int, protocol: str) -> Provenance:
    """Where timings come from that are measured here and now."""
    return Provenance(
        versions={name: version(name) for name in ("apache-tvm", "apache-tvm-ffi")},
        tvmflow=version("tvmflow"),
        machine=str(parts.target["machine"]),
        cpu=measurer.device,
        threads=int(str(parts.target["threads"])),
        seed=seed,
        trials=trials,
        protocol=protocol,
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )
