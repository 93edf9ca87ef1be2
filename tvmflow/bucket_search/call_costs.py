"""What a call costs at static sizes: estimated from the kernels that it takes, or measured. Each runs in a child."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tvmflow import bench, frontend
from tvmflow.config import Config, ShapesSection
from tvmflow.dtypes import itemsize
from tvmflow.errors import CompileError, TvmflowError, last_line
from tvmflow.frozen import evolve
from tvmflow.process import emit
from tvmflow.target import FLOP_PER_S

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

# What an estimate goes by beside FLOP_PER_S, on a CPU per thread.
BYTES_PER_S = {"llvm": 20e9, "cuda": 2e12}
KERNEL_S = 4e-6  # to start a kernel and wait for its threads
CALL_S = 30e-6  # of a call beside its kernels
MEASURED_S = 1.0  # for one size


@dataclass(frozen=True)
class Work:
    """What one call takes: floating-point operations, bytes that its kernels read and write, kernels; and seconds."""

    flop: float
    size_bytes: float
    kernels: int
    seconds: float


def static(cfg: Config, sizes: Mapping[str, int]) -> Config:
    """The config with sizes for open dimensions."""
    return evolve(cfg, shapes=ShapesSection(dims={**cfg.shapes.dims, **sizes}))


def estimated(cfg: Config, sizes: Sequence[Mapping[str, int]]) -> list[Work]:
    """What a call takes at each of the sizes of open dimensions, from the prepared module's kernels.

    Raises what import and preparation raise, with the sizes.
    """
    found = []
    for one in sizes:
        place = shown(one)
        emit(f"estimating {place}")
        try:
            found.append(_work(static(cfg, one)))
        except TvmflowError as exc:
            hint = f"leave such sizes out of the trace, or {exc.hint}"
            raise exc.within(f"at {place}: ", hint) from exc
        except Exception as exc:
            raise CompileError(
                f"at {place}: TVM failed: {last_line(exc)[:300]}",
                "leave such sizes out of the trace; --debug shows the whole trace",
            ) from exc
    return found


def timed(folder: Path, feeds: Mapping[str, np.ndarray]) -> float:
    """Median seconds of a call of the artifact in `folder`."""
    from tvmflow import runtime

    session = runtime.load(folder)
    (samples,) = bench.interleave({"library": lambda: session.run_list(feeds)}, MEASURED_S)
    return samples.median_s


def shown(sizes: Mapping[str, int]) -> str:
    """Sizes as messages name them."""
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def _work(cfg: Config) -> Work:
    model = frontend.load(cfg)

    from tvm.tirx import PrimFunc

    from tvmflow.codegen import library
    from tvmflow.pipeline.prepare import prepare, setting

    chosen = setting(cfg)
    with chosen.entered():
        prepared, _ = prepare(cfg, model)
        operations, calls = library.operations(prepared), library.calls(prepared)
    kernels = {var.name_hint: f for var, f in prepared.functions.items() if isinstance(f, PrimFunc)}
    flop = sum(operations.get(name, 0.0) * count for name, count in calls.items())
    size_bytes = sum(_bytes(kernels[name]) * count for name, count in calls.items() if name in kernels)
    kind, threads = chosen.target.kind, chosen.target.threads if chosen.target.kind == "llvm" else 1
    seconds = (flop / FLOP_PER_S[kind] + size_bytes / BYTES_PER_S[kind]) / threads
    return Work(flop, size_bytes, calls.total(), seconds + CALL_S + KERNEL_S * calls.total())


def _bytes(kernel: PrimFunc) -> float:
    """Bytes that a kernel reads and writes: all of its arguments, but of a table only what its loops can reach."""
    import tvm_ffi
    from tvm.s_tir import SBlock
    from tvm.tirx import IntImm

    steps: list[float] = []

    def visit(block: SBlock) -> None:
        extents = [axis.dom.extent for axis in block.iter_vars]
        if all(isinstance(extent, IntImm) for extent in extents):
            steps.append(math.prod(int(extent) for extent in extents))

    tvm_ffi.structural_walk(kernel.body, (SBlock, visit))
    total = 0.0
    for param in kernel.params:
        shape = getattr(param.ty, "shape", ())
        if all(isinstance(size, IntImm) for size in shape):
            elements = math.prod(int(size) for size in shape)
            total += min(elements, sum(steps) or elements) * itemsize(str(param.ty.dtype))
    return total
