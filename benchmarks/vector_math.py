"""Mathematical functions of 196,608 float32 values: TVM's own code beside vector code.

    python benchmarks/vector_math.py [THREADS]      # default 2

Each function is one loop in vectors of 16 for this CPU, in parallel; medians of runs that take turns in one process.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence

from tvmflow.host import THREADING, cpu_name
from tvmflow.target import resolve, to_tvm

THREADS = int(sys.argv[1]) if len(sys.argv) > 1 else 2
os.environ |= {"TVM_NUM_THREADS": str(THREADS), **THREADING}  # TVM reads them when it is imported

import numpy as np  # noqa: E402
import tvm  # noqa: E402
from tvm import te, tirx  # noqa: E402
from tvm.s_tir import Schedule  # noqa: E402

from tvmflow import bench  # noqa: E402
from tvmflow.codegen import numerics  # noqa: E402
from tvmflow.config import NumericsSection, TargetSection  # noqa: E402
from tvmflow.kernels.mathematics import vector_math  # noqa: E402
from tvmflow.kernels.rewrites import recognise_gelu  # noqa: E402

Pass = Callable[[tvm.IRModule, tvm.target.Target], tvm.IRModule]
SIZE, LANES, BUDGET_S = 196_608, 16, 0.6
POSITIVE = ("log", "log2", "log10", "pow")
WITHIN_ONE = ("asin", "acos", "atanh")


def erf_gelu(x: tirx.Expr) -> tirx.Expr:
    return x * (0.5 + tirx.erf(x * 0.5**0.5) * 0.5)


def build(name: str, target: tvm.target.Target, passes: Sequence[Pass] = ()) -> tvm.runtime.Module:
    function = {"pow": tirx.power, "gelu": erf_gelu}.get(name) or getattr(tirx, name)
    places = [te.placeholder((SIZE,), "float32", name=f"x{i}") for i in range(2 if name == "pow" else 1)]
    result = te.compute((SIZE,), lambda i: function(*[place[i] for place in places]), name="result")
    schedule = Schedule(tvm.IRModule({"main": te.create_prim_func([*places, result])}))
    (loop,) = schedule.get_loops(schedule.get_sblock("result"))
    outer, inner = schedule.split(loop, [None, LANES])
    schedule.vectorize(inner)
    schedule.parallel(outer)
    mod = schedule.mod
    for change in passes:
        mod = change(mod, target)
    return tvm.tirx.build(mod, target=target)


def inputs(name: str) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    low, high = (1e-3, 10.0) if name in POSITIVE else (-1.0, 1.0) if name in WITHIN_ONE else (-10.0, 10.0)
    low = 1.0 if name == "acosh" else -0.9 if name == "log1p" else low
    values = [rng.uniform(low, high, SIZE).astype("float32") for _ in range(2 if name == "pow" else 1)]
    return [*values, np.empty(SIZE, "float32")]


def main() -> None:
    print(f"{cpu_name()}, {THREADS} thread(s); microseconds for {SIZE:,} values\n")
    target = to_tvm(resolve(TargetSection(threads=THREADS)), numerics.llvm_attributes(NumericsSection()))
    before = {name: _or_none(name, target) for name in vector_math.FUNCTIONS if name != "gelu_by_table"}
    vector_math.register()
    print("| function | TVM us | vector code us | ratio |\n|---|---|---|---|")
    for name, old in before.items():
        arrays = [tvm.runtime.tensor(array) for array in inputs(name)]
        kernels = {"before": old, "after": build(name, target, [recognise_gelu.recognised])["main"]}
        calls = {key: functools.partial(kernel, *arrays) for key, kernel in kernels.items() if kernel is not None}
        us = {samples.name: samples.median_s * 1e6 for samples in bench.interleave(calls, BUDGET_S)}
        cells = (f"{us['before']:.0f}", f"{us['before'] / us['after']:.0f}") if old else ("does not build", "")
        print(f"| {name} | {cells[0]} | {us['after']:.1f} | {cells[1]} |", flush=True)


def _or_none(name: str, target: tvm.target.Target) -> tvm.runtime.Function | None:
    """The kernel as TVM builds it; it has no vector form of some functions, and no other one in a vectorised loop."""
    try:
        return build(name, target)["main"]
    except tvm.error.InternalError:
        return None


if __name__ == "__main__":
    main()
