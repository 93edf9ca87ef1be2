"""Trials per second: tvmflow's sessions and workers against upstream's tuner with its LocalBuilder and LocalRunner.

    python benchmarks/tuning_throughput.py [TRIALS] [SEED]      # default 128 per task, seed 0

Two tables, two threads, everything in one run. "Sessions": each side tunes the same tasks from the same seed with its
own search; upstream's is `tune_tir` with its defaults. "Measuring": the same batch of candidates, built and run by each
side's builder and runner, search left out. Starting workers counts on both sides, once, with the first task. The best
schedules that the two sides found are then measured in turns by one measurer.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tvm
from tvm import te, topi
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms

from tvmflow import tasks
from tvmflow.config import NumericsSection, TargetSection
from tvmflow.database import Store
from tvmflow.database.grammar import Where
from tvmflow.replay import replay
from tvmflow.target import resolve, to_tvm
from tvmflow.tuning import space
from tvmflow.tuning.measure import Measured, Measurer
from tvmflow.tuning.search import FINALISTS, TURNS, job_of
from tvmflow.tuning.session import Limits, Session
from tvmflow.tuning.worker import median_s

THREADS = 2


@dataclass(frozen=True)
class Tuned:
    """What one side's session took and found."""

    trials: int
    seconds: float
    best: Schedule


def kernels() -> dict[str, tuple[tvm.tirx.PrimFunc, float]]:
    """Each kernel and its FLOP."""
    a, b = te.placeholder((512, 512), name="A"), te.placeholder((512, 512), name="B")
    k = te.reduce_axis((0, 512), name="k")
    matmul = te.compute((512, 512), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="C")
    x, w = te.placeholder((1, 28, 28, 128), name="X"), te.placeholder((3, 3, 128, 128), name="W")
    convolution = topi.nn.conv2d_nhwc(x, w, 1, 1, 1)
    return {
        "matmul 512x512x512": (te.create_prim_func([a, b, matmul]), 2 * 512**3),
        "conv2d NHWC 28x28x128, 3x3": (te.create_prim_func([x, w, convolution]), 2 * 28 * 28 * 128 * 128 * 9),
    }


def our_session(mod: tvm.IRModule, target: tvm.target.Target, trials: int, seed: int) -> Tuned:
    resolved = resolve(TargetSection(mcpu="x86-64-v4", threads=THREADS))
    parts = tasks.key_parts(tasks.canonical(mod["main"])[1], resolved, NumericsSection())
    task = tasks.Task("task", parts, mod, 1, 1.0, THREADS)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, Measurer(str(target), THREADS, THREADS) as measurer:
        session = Session(target, Limits(trials, 3600, seed), measurer, Store(Path(folder)), lambda progress: None)
        (outcome,) = session.tune([task], {})
    best = replay(mod, outcome.records[0].trace, Where.of(parts))
    return Tuned(outcome.records[0].provenance.trials, time.perf_counter() - started, best)


def upstream_session(mod: tvm.IRModule, target: tvm.target.Target, trials: int, seed: int) -> Tuned:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        database = ms.tir_integration.tune_tir(
            mod,
            target,
            folder,
            trials,
            num_trials_per_iter=64,
            seed=seed,
            builder=ms.builder.LocalBuilder(max_workers=THREADS, timeout_sec=300),
            runner=ms.runner.LocalRunner(),
        )
        seconds = time.perf_counter() - started
        best = database.query_schedule(mod, target, "main")
        return Tuned(len(database.get_all_tuning_records()), seconds, best)


def sessions(trials: int, seed: int, target: tvm.target.Target) -> None:
    print(
        "Sessions\n\n| task | ours: trials, s, trials/s | upstream: trials, s, trials/s | ratio | ours best GFLOP/s "
        "| upstream best |\n|---|---|---|---|---|---|",
        flush=True,
    )
    for name, (function, flop) in kernels().items():
        mod = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
        ours, theirs = (tune(mod, target, trials, seed) for tune in (our_session, upstream_session))
        best = speeds([ours.best, theirs.best], flop, target)
        rates = [side.trials / side.seconds for side in (ours, theirs)]
        cells = [f"{s.trials}, {s.seconds:.0f}, {rate:.2f}" for s, rate in zip((ours, theirs), rates, strict=True)]
        print(
            f"| {name} | {cells[0]} | {cells[1]} | {rates[0] / rates[1]:.1f} | {best[0]:.0f} | {best[1]:.0f} |",
            flush=True,
        )


def candidates(mod: tvm.IRModule, target: tvm.target.Target, count: int) -> list[ms.MeasureCandidate]:
    context = space.context(mod, target, "task", seed=0)
    model = ms.cost_model.RandomModel(seed=0)
    context.pre_tuning(count, count, context.generate_design_space(), ms.database.MemoryDatabase(), model)
    return list(context.generate_measure_candidates())[:count]


def our_measuring(batch: list[ms.MeasureCandidate], measurer: Measurer) -> int:
    """The number of the best: the finalists are measured once more, in turns, as a session does."""
    jobs = [job_of(c.sch.mod) for c in batch]
    first = _ranked(measurer.measure(jobs, None))[:FINALISTS]
    again = measurer.measure([jobs[n] for n in first], None, TURNS)
    return first[_ranked(again)[0]]


def _ranked(results: list[Measured]) -> list[int]:
    """The numbers of what ran, fastest first."""
    return [n for _, n in sorted((median_s(r.samples_s), n) for n, r in enumerate(results) if r.samples_s)]


def upstream_measuring(
    batch: list[ms.MeasureCandidate], target: tvm.target.Target, builder: ms.Builder, runner: ms.Runner
) -> int:
    """The number of the best."""
    built = builder.build([ms.builder.BuilderInput(c.sch.mod, target) for c in batch])
    numbers = [number for number, result in enumerate(built) if result.artifact_path]
    inputs = [ms.runner.RunnerInput(built[n].artifact_path, "cpu", batch[n].args_info) for n in numbers]
    results = [future.result() for future in runner.run(inputs)]
    found = zip(numbers, results, strict=True)
    return min((median_s(tuple(map(float, r.run_secs))), n) for n, r in found if r.run_secs)[1]


def speeds(schedules: list[Schedule], flop: float, target: tvm.target.Target) -> list[float]:
    """GFLOP/s of each, measured in turns."""
    with Measurer(str(target), THREADS, THREADS) as measurer:
        results = measurer.measure([job_of(schedule.mod) for schedule in schedules], None, turns=8)
    return [flop / median_s(result.samples_s) / 1e9 for result in results]


def measuring(count: int, target: tvm.target.Target) -> None:
    print(
        "\nMeasuring\n\n| task | candidates | ours trials/s | upstream trials/s | ratio | ours best GFLOP/s "
        "| upstream best |\n|---|---|---|---|---|---|---|",
        flush=True,
    )
    totals = [0, 0.0, 0.0]
    clock = time.perf_counter
    started = clock()
    with Measurer(str(target), THREADS, THREADS) as measurer:
        starts = [clock() - started]
        started = clock()
        builder, runner = ms.builder.LocalBuilder(max_workers=THREADS, timeout_sec=300), ms.runner.LocalRunner()
        starts.append(clock() - started)
        for name, (function, flop) in kernels().items():
            batch = candidates(tvm.IRModule({"main": function.with_attr("global_symbol", "main")}), target, count)
            times = [clock()]
            best = [our_measuring(batch, measurer)]
            times.append(clock())
            best.append(upstream_measuring(batch, target, builder, runner))
            times.append(clock())
            seconds = [times[1] - times[0] + starts[0], times[2] - times[1] + starts[1]]
            starts = [0.0, 0.0]  # once, with the first task
            totals = [totals[0] + len(batch), totals[1] + seconds[0], totals[2] + seconds[1]]
            found = speeds([batch[n].sch for n in best], flop, target)
            print(f"| {name} | {_rates(len(batch), *seconds)} | {found[0]:.0f} | {found[1]:.0f} |", flush=True)
    print(f"| both | {_rates(*totals)} | | |")


def _rates(count: float, ours_s: float, theirs_s: float) -> str:
    return f"{count} | {count / ours_s:.2f} | {count / theirs_s:.2f} | {theirs_s / ours_s:.1f}"


def main() -> None:
    trials, seed = (int(text) for text in [*sys.argv[1:], *["128", "0"][len(sys.argv) - 1 :]])
    os.environ["TVM_NUM_THREADS"] = str(THREADS)
    target = to_tvm(resolve(TargetSection(mcpu="x86-64-v4", threads=THREADS)), {})
    sessions(trials, seed, target)
    measuring(min(trials, 64), target)


if __name__ == "__main__":
    main()
