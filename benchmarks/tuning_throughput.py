"""Trials per second: tvmflow's workers against upstream's LocalBuilder and LocalRunner, on the same candidates.

    python benchmarks/tuning_throughput.py [CANDIDATES]      # default 64 per task

Both measure the same first batch of MetaSchedule's candidates for a matmul and a convolution, one after the other in
one run, with two threads. Prints a Markdown table with the best GFLOP/s that each found.
"""

from __future__ import annotations

import os
import sys
import time

import tvm
from tvm import te, topi
from tvm.s_tir import meta_schedule as ms

from tvmflow.tuning import space
from tvmflow.tuning.measure import Measurer
from tvmflow.tuning.worker import Job, median_s

THREADS = 2
TARGET = {"kind": "llvm", "mcpu": "x86-64-v4", "num-cores": THREADS}


def matmul() -> tvm.tirx.PrimFunc:
    a, b = te.placeholder((512, 512), name="A"), te.placeholder((512, 512), name="B")
    k = te.reduce_axis((0, 512), name="k")
    return te.create_prim_func([a, b, te.compute((512, 512), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="C")])


def convolution() -> tvm.tirx.PrimFunc:
    a, b = te.placeholder((1, 28, 28, 128), name="A"), te.placeholder((3, 3, 128, 128), name="B")
    return te.create_prim_func([a, b, topi.nn.conv2d_nhwc(a, b, 1, 1, 1)])


def candidates(function: tvm.tirx.PrimFunc, target: tvm.target.Target, count: int) -> list[ms.MeasureCandidate]:
    mod = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    context = space.context(mod, target, "task", seed=0)
    model = ms.cost_model.RandomModel(seed=0)
    context.pre_tuning(count, count, context.generate_design_space(), ms.database.MemoryDatabase(), model)
    return list(context.generate_measure_candidates())[:count]


def ours(batch: list[ms.MeasureCandidate], target: tvm.target.Target) -> tuple[float, float]:
    """(seconds, best seconds per call), the start of the workers included."""
    started = time.perf_counter()
    jobs = [
        Job(tvm.ir.save_json(c.sch.mod), tuple((str(a.dtype), tuple(map(int, a.shape))) for a in c.args_info), ())
        for c in batch
    ]
    with Measurer(str(target), THREADS, THREADS) as measurer:
        results = measurer.measure(jobs, None)
    best = min(median_s(result.samples_s) for result in results if result.samples_s)
    return time.perf_counter() - started, best


def upstream(batch: list[ms.MeasureCandidate], target: tvm.target.Target) -> tuple[float, float]:
    started = time.perf_counter()
    builder, runner = ms.builder.LocalBuilder(max_workers=THREADS), ms.runner.LocalRunner(timeout_sec=30)
    built = builder.build([ms.builder.BuilderInput(c.sch.mod, target) for c in batch])
    inputs = [
        ms.runner.RunnerInput(b.artifact_path, "cpu", c.args_info)
        for b, c in zip(built, batch, strict=True)
        if b.artifact_path
    ]
    results = [future.result() for future in runner.run(inputs)]
    best = min(median_s(tuple(map(float, r.run_secs))) for r in results if r.run_secs)
    return time.perf_counter() - started, best


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    os.environ["TVM_NUM_THREADS"] = str(THREADS)
    target = tvm.target.Target(TARGET)
    print("| task | candidates | ours trials/s | upstream trials/s | ratio | ours best GFLOP/s | upstream best |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name, function, flop in (
        ("matmul 512x512x512", matmul(), 2 * 512**3),
        ("conv2d NHWC 28x28x128, 3x3", convolution(), 2 * 28 * 28 * 128 * 128 * 9),
    ):
        batch = candidates(function, target, count)
        (our_s, our_best), (their_s, their_best) = ours(batch, target), upstream(batch, target)
        print(
            f"| {name} | {len(batch)} | {len(batch) / our_s:.2f} | {len(batch) / their_s:.2f} | {their_s / our_s:.1f} "
            f"| {flop / our_best / 1e9:.0f} | {flop / their_best / 1e9:.0f} |", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
