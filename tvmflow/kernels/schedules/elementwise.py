"""Elementwise kernels on a CPU: one pass over memory, outer axes in parallel, SIMD-wide vectors innermost."""

from __future__ import annotations

import math

import tvm
import tvm_ffi
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV, ScheduleError
from tvm.tirx import IntImm, IterVar, Var

from tvmflow.kernels.schedules.axes import axis_kinds, blocks_of, extent_of, is_cheap, width

RULE = "elementwise"
SHARES = 64  # pieces of work that any number of threads share well enough
SMALLEST_PARALLEL = 8192  # iterations below which waking the threads costs more than they save


def apply(schedule: Schedule) -> str:
    """One pass for a function of nothing but elementwise blocks; "" for any other.

    A block that is read once goes into its reader; one that is read several times is computed beside its readers,
    vector by vector. A block whose readers would compute it again and again keeps a pass of its own.
    """
    *before, last = blocks_of(schedule)
    if any(axis_kinds(schedule, block) != {IterVar.DataPar} for block in [*before, last]):
        return ""
    beside, apart = [], []
    for block in reversed(before):
        repeated = not is_cheap(schedule, block) and 2 * _elements(schedule, block) <= _elements(schedule, last)
        loads = _loads(schedule, block)
        if not repeated and len(loads) == 1:
            schedule.compute_inline(block)
        elif not repeated and all(_is_plain(load) for load in loads):
            beside.append(block)
        else:
            apart.append(block)
    for block in apart:
        schedule_elementwise(schedule, block)
    schedule_elementwise(schedule, last)
    *outer, _ = schedule.get_loops(last)
    for block in beside:
        if outer:
            schedule.compute_at(block, outer[-1], preserve_unit_loops=True)
            _vectorize(schedule, schedule.get_loops(block)[-1])
        else:
            schedule_elementwise(schedule, block)
    return RULE


def schedule_elementwise(schedule: Schedule, block: SBlockRV) -> str:
    """Outer axes fused and in parallel, vectors innermost; returns the rule's name.

    Only as many axes are fused as give the threads enough to share: each takes a division to find its place again.
    """
    loops = schedule.get_loops(block)
    inner = width(extent_of(schedule, loops[-1]))
    outer = list(loops[:-1])
    if inner >= 4:
        middle, vector = schedule.split(loops[-1], [None, inner])
        schedule.vectorize(vector)
        outer.append(middle)
    else:
        outer.append(loops[-1])
    outer = fusable(schedule, outer)
    extents = [extent_of(schedule, loop) for loop in outer]
    shared = next((n for n in range(1, len(outer)) if math.prod(extents[:n]) >= SHARES), len(outer))
    parallel(schedule, outer[:shared], inner * math.prod(extents[shared:]))
    return RULE


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
    loops = fusable(schedule, loops)
    fused = schedule.fuse(*loops) if len(loops) > 1 else loops[0]
    extent = extent_of(schedule, fused)
    if extent == 1 or extent * work >= SMALLEST_PARALLEL:
        schedule.parallel(fused)
    return fused


def fusable(schedule: Schedule, loops: list[LoopRV]) -> list[LoopRV]:
    """The first loops, as far as TVM can tell where one fused loop stands in each of them.

    For that it divides by the extents of all but the first, and fails at symbolic ones that are sums.
    """
    extents = [schedule.get(loop).extent for loop in loops]
    sums = (n for n in range(1, len(loops)) if not isinstance(extents[n], IntImm | Var))
    return loops[: next(sums, len(loops))]


def _vectorize(schedule: Schedule, loop: LoopRV) -> None:
    if extent_of(schedule, loop) in (4, 8, 16, 32, 64):
        schedule.vectorize(loop)


def _elements(schedule: Schedule, block: SBlockRV) -> int:
    return math.prod(extent_of(schedule, loop) for loop in schedule.get_loops(block))


def _loads(schedule: Schedule, block: SBlockRV) -> list[tvm.ir.TensorLoad]:
    """Where the readers of a block load what it writes."""
    written = schedule.get(block).writes[0].source
    found: list[tvm.ir.TensorLoad] = []

    def visit(load: tvm.ir.TensorLoad) -> None:
        if load.source.same_as(written):
            found.append(load)

    for reader in schedule.get_consumers(block):
        tvm_ffi.structural_walk(schedule.get(reader).body, (tvm.ir.TensorLoad, visit))
    return found


def _is_plain(load: tvm.ir.TensorLoad) -> bool:
    """Whether where a load reads does not depend on data."""
    nested: list[tvm.ir.TensorLoad] = []
    for index in load.indices:
        tvm_ffi.structural_walk(index, (tvm.ir.TensorLoad, nested.append))
    return not nested
