"""Elementwise kernels on a CPU: all axes fused, blocks of them in parallel, SIMD-wide vectors innermost."""

from __future__ import annotations

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV, ScheduleError

from tvmflow.kernels.axes import extent_of, touches_bool, width

SMALLEST_PARALLEL = 8192  # iterations below which waking the threads costs more than they save


def schedule_elementwise(schedule: Schedule, block: SBlockRV) -> str:
    """All axes fused and in parallel, vectors innermost; returns the rule's name."""
    loops = schedule.get_loops(block)
    inner = 1 if touches_bool(schedule, block) else width(extent_of(schedule, loops[-1]))
    outer = list(loops[:-1])
    if inner >= 4:
        middle, vector = schedule.split(loops[-1], [None, inner])
        schedule.vectorize(vector)
        outer.append(middle)
    else:
        outer.append(loops[-1])
    parallel(schedule, outer, inner)
    return "elementwise"


def schedule_padding(schedule: Schedule, block: SBlockRV) -> None:
    """A copy into a larger buffer as two passes without conditions: its border filled, its inside copied.

    Any other elementwise block by the elementwise rule.
    """
    try:
        fill = schedule.decompose_padding(block, schedule.get_loops(block)[0])
    except ScheduleError:
        schedule_elementwise(schedule, block)
        return
    for part in (fill, block):
        *outer, last = schedule.get_loops(part)
        if width(extent_of(schedule, last)) < 4 and outer:
            schedule.fuse(outer[-1], last)
        schedule_elementwise(schedule, part)


def parallel(schedule: Schedule, loops: list[LoopRV], work: int) -> LoopRV:
    """Fuses the loops and spreads them over the threads where there is enough `work` (iterations below them)."""
    fused = schedule.fuse(*loops) if len(loops) > 1 else loops[0]
    extent = extent_of(schedule, fused)
    if extent == 1 or extent * work >= SMALLEST_PARALLEL:
        schedule.parallel(fused)
    return fused
