"""Builds candidates on all cores and then runs them one at a time, alone on the machine."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from typing import Self

from tvmflow.errors import SetupError, TvmflowError
from tvmflow.host import SPIN_S, cpu_name
from tvmflow.tuning import worker
from tvmflow.tuning.worker import Job, Place

START_TIMEOUT_S = 120.0
BUILD_TIMEOUT_S = 30.0
RUN_TIMEOUT_S = 3.0
HOPELESS_TIMES = 20  # a run is killed at this many times the task's best


@dataclass(frozen=True)
class Measured:
    """Seconds per call of one candidate, or why there are none; `killed` if it took a process down with it."""

    samples_s: tuple[float, ...] = ()
    error: str = ""
    killed: bool = False


class Measurer:
    """A set of workers. Use as a context manager: they end with it."""

    protocol = "median of 3-6 samples of 1 ms, cold weights, warm first input"
    overhead_s = 0.0  # what a run may take beside the candidate

    def __init__(self, target_json: str, threads: int, workers: int) -> None:
        """`target_json` is the tvm target as it prints itself; `threads` are those a candidate runs with."""
        self.device = cpu_name()
        self._start(functools.partial(worker.Cpu, target_json, threads), workers)

    def _start(self, make_place: Callable[[], Place], workers: int) -> None:
        context: ForkServerContext = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tvmflow.tuning.forkserver"])
        self._workers = [_Worker(context, make_place) for _ in range(workers)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for item in self._workers:
            item.stop()

    def measure(self, jobs: Sequence[Job], best_s: float | None, turns: int = 1) -> list[Measured]:
        """Measures every job; `best_s` is the task's best so far and lets hopeless ones end early.

        With several `turns` all are built first and then run in turns by one worker, so that what disturbs the machine,
        and where the system happened to put a worker's memory, counts for all.
        """
        workers = self._workers[:1] if turns > 1 else self._workers
        results: list[Measured | None] = [None] * len(jobs)
        pending = list(range(len(jobs)))
        while pending:
            built = self._build_all(workers, jobs, pending, results)
            for turn in range(turns):
                for owner, numbers in built:
                    time.sleep(SPIN_S)  # until the threads of the worker before it are asleep
                    best_s = self._run_all(owner, numbers, results, best_s, last=turn == turns - 1)
            pending = [number for number in pending if results[number] is None]
        return [result if result is not None else Measured(error="not measured") for result in results]

    def _run_all(
        self, owner: _Worker, numbers: list[int], results: list[Measured | None], best_s: float | None, last: bool
    ) -> float | None:
        """One turn of what a worker has built; returns the best median seen. Leaves in `numbers` what it still has."""
        for number in list(numbers):
            result = owner.ask(("run", number, best_s), run_timeout_s(best_s) + self.overhead_s)
            if owner.fresh:  # it died of this candidate, and with it went all that it had built
                results[number] = result
                owner.fresh = False
                numbers.clear()
                break
            if last or result.error:
                owner.ask(("drop", number, None), RUN_TIMEOUT_S)
                numbers.remove(number)
            before = results[number]
            results[number] = result if result.error or not before else _joined(before, result)
            if result.samples_s:
                median = worker.median_s(result.samples_s)
                best_s = median if best_s is None else min(best_s, median)
        return best_s

    def _build_all(
        self, workers: Sequence[_Worker], jobs: Sequence[Job], numbers: Sequence[int], results: list[Measured | None]
    ) -> list[tuple[_Worker, list[int]]]:
        """Builds on all of `workers` at once, the largest first; failures go to `results`."""
        queue = sorted(numbers, key=lambda number: -len(jobs[number].module_json))
        busy: dict[_Worker, tuple[int, float]] = {}
        built: dict[_Worker, list[int]] = {item: [] for item in workers}
        while queue or busy:
            for item in workers:
                if item not in busy and queue:
                    number = queue.pop(0)
                    item.send(("build", number, jobs[number]))
                    busy[item] = (number, time.monotonic() + BUILD_TIMEOUT_S)
            multiprocessing.connection.wait([item.channel for item in busy], timeout=0.5)
            for item, (number, deadline) in list(busy.items()):
                if item.channel.poll() or time.monotonic() > deadline:
                    del busy[item]
                    result = item.receive(0.0)
                    if result.error:
                        results[number] = result
                    else:
                        built[item].append(number)
                    if item.fresh:
                        queue += built[item]
                        built[item] = []
                        item.fresh = False
        for item in workers:
            item.fresh = False
        return list(built.items())


def _joined(a: Measured, b: Measured) -> Measured:
    return Measured(samples_s=a.samples_s + b.samples_s)


def run_timeout_s(best_s: float | None) -> float:
    """Seconds for all runs of one candidate, its compilation to machine code included."""
    return RUN_TIMEOUT_S if best_s is None else min(RUN_TIMEOUT_S, max(1.0, HOPELESS_TIMES * best_s))


class _Worker:
    """One worker process and the pipe to it; replaced by a new one when it dies or hangs."""

    def __init__(self, context: ForkServerContext, make_place: Callable[[], Place]) -> None:
        self._start = (context, make_place)
        self.fresh = False
        self._begin()

    def _begin(self) -> None:
        context, make_place = self._start
        self.channel, theirs = context.Pipe()
        self._process = context.Process(target=worker.serve, args=(theirs, make_place), daemon=True)
        self._process.start()
        theirs.close()
        try:
            status, payload = self.channel.recv() if self.channel.poll(START_TIMEOUT_S) else ("late", None)
        except (EOFError, ConnectionResetError):
            status, payload = "dead", None
        if isinstance(payload, TvmflowError):
            raise payload
        if status != "ok":
            raise SetupError(
                f"a process for candidates did not start: {status} (exit code {self._process.exitcode})",
                "what it printed stands above; `tvmflow doctor` checks the installation",
            )

    def send(self, message: object) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `receive` finds it dead
            self.channel.send(message)

    def ask(self, message: object, timeout_s: float) -> Measured:
        self.send(message)
        return self.receive(timeout_s)

    def receive(self, timeout_s: float) -> Measured:
        """The answer to what was sent; a dead or hanging worker is replaced, and `fresh` says so.

        Raises the TvmflowError of a worker that can measure nothing any more.
        """
        try:
            if self.channel.poll(timeout_s):
                status, payload = self.channel.recv()
                if status == "stop":
                    raise payload
                if status == "ok":
                    return Measured(samples_s=payload)
                return Measured(error=str(payload), killed=status == "killed")
            error = "took too long"
        except (EOFError, ConnectionResetError):
            self._process.join(1)
            error = f"crashed (exit code {self._process.exitcode})"
        self.stop()
        self._begin()
        self.fresh = True
        return Measured(error=error, killed=True)

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self.channel.close()
