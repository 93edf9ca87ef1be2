"""Kernels that go over rows: softmax, normalisation, reductions along the last axes.

    for blocks of rows                    in parallel
      for rows
        each reduction and each elementwise block of the row, one after the other, in vectors

So a row is read from memory once and stays in the first-level cache. A sum along a row is that of `WIDE` partial sums,
added up as a tree: another order than from left to right, with a smaller error (Higham, "Accuracy and Stability of
Numerical Algorithms", 2002, 4.2). Rows of any length have whole vectors up to their last elements, which are apart.
"""

from __future__ import annotations

import itertools
import math
from typing import Literal, TypeAlias

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.tirx import IterVar

from tvmflow.kernels.schedules.axes import (
    LANES,
    Axis,
    axes_of,
    axis_kinds,
    blocks_of,
    calls_of,
    divisor,
    extent_of,
    is_cheap,
    is_static,
    reads_along,
)
from tvmflow.kernels.schedules.elementwise import SMALLEST_PARALLEL

NAME = "rows"
WIDE = 4 * LANES  # elements in flight: as many as hide the latency of an addition
WIDTHS = (WIDE, 2 * LANES, LANES, LANES // 2, LANES // 4)  # of vectors, where they divide a row
TREE = (LANES, LANES // 2, LANES // 4)  # what partial results are added up to in turn
LONG = 512  # elements of a row for which a remainder, or vectors of an odd length, cost little
PARTS = 32  # parallel parts, each of which allocates its buffers once
PARTITION = "pragma_loop_partition_hint"  # makes TVM compile the last elements of a row apart
Block: TypeAlias = SBlockRV
Step: TypeAlias = tuple[Block, Literal["elementwise", "partial", "total"]]


def apply(schedule: Schedule) -> str:
    """Schedules a function whose blocks share their rows and reduce along them; "" where they do not.

    Raises ScheduleError where a primitive does not apply.
    """
    blocks = blocks_of(schedule)
    kinds = [axis_kinds(schedule, block) for block in blocks]
    if not all(kind and kind <= {IterVar.DataPar, IterVar.CommReduce} for kind in kinds):
        return ""
    reductions = [block for block, kind in zip(blocks, kinds, strict=True) if IterVar.CommReduce in kind]
    if not reductions or not all(_is_along_rows(schedule, block) for block in reductions):
        return ""
    shared = _shared_axes(schedule, [*reductions, blocks[-1]])
    if not shared:
        return ""
    steps: list[Step] = []
    for block in blocks:
        if block in reductions:
            parts: list[Step] = [(part, "partial") for part in _factor(schedule, block)]
            if not parts:
                return ""
            steps += [*parts, (block, "total")]
        elif block is not blocks[-1] and _is_inlined(schedule, block, shared):
            schedule.compute_inline(block)
        else:
            steps.append((block, "elementwise"))
    return NAME if _fuse_rows(schedule, steps, len(shared)) else ""


def _is_along_rows(schedule: Schedule, block: Block) -> bool:
    """Whether the innermost reduced axis runs along the memory of all that has it.

    No other axis may run along it, but for long windows that need no padding (a filter over a signal).
    """
    axes = axes_of(schedule, block)
    reduced = [axis for axis in axes if axis.is_reduction]
    inner = next((axis for axis in reversed(reduced) if axis.extent > 1), None)
    padded = any(calls_of(schedule, producer) for producer in schedule.get_producers(block))
    is_filter = inner is not None and inner.extent >= WIDE and not padded
    return inner is not None and reads_along(schedule, block, inner, axes if is_filter else reduced)


def _shared_axes(schedule: Schedule, blocks: list[Block]) -> list[int]:
    """The extents of the leading axes that are the same in all blocks and reduced in none."""
    leading = [[axis.extent for axis in _leading(axes_of(schedule, block))] for block in blocks]
    alike = itertools.takewhile(lambda extents: len(set(extents)) == 1, zip(*leading, strict=False))
    return [extents[0] for extents in alike]


def _leading(axes: list[Axis]) -> list[Axis]:
    return axes[: next((place for place, axis in enumerate(axes) if axis.is_reduction), len(axes))]


def _is_inlined(schedule: Schedule, block: Block, shared: list[int]) -> bool:
    """Whether a block is computed where it is used: where that is cheap, or happens once for each element.

    One value for a whole row is kept: a division would become one for each element.
    """
    extents = [axis.extent for axis in axes_of(schedule, block)]
    if extents[: len(shared)] == shared and math.prod(extents[len(shared) :]) == 1:
        return False
    consumers = schedule.get_consumers(block)
    once = len(consumers) == 1 and math.prod(a.extent for a in axes_of(schedule, consumers[0])) == math.prod(extents)
    return once or is_cheap(schedule, block)


def _factor(schedule: Schedule, block: Block) -> list[Block]:
    """Splits a reduction into steps, which are returned: partial results of whole vectors first, then their tree."""
    axes = axes_of(schedule, block)
    places = sum(not axis.is_reduction for axis in axes)
    reduced = [axis.loop for axis in axes if axis.is_reduction]
    loop = reduced[-1]
    if len(reduced) > 1 and extent_of(schedule, loop) < LANES:
        loop = schedule.fuse(*reduced)
    if len(schedule.get(block).writes) > 1:  # a value and its index
        return []
    parts = []
    for width in _steps(extent_of(schedule, loop)):
        parts.append(schedule.rfactor(schedule.split(loop, [None, width])[1], places))
        loop = schedule.get_loops(block)[-1]
    return parts


def _steps(extent: int) -> list[int]:
    """The numbers of partial results: each divides the one before it, since a remainder cannot be computed by row.

    None for short rows that no vector divides; long ones have vectors of an odd length rather than none.
    """
    steps = [width for width in WIDTHS if width < extent and extent % width == 0]
    if not steps and extent >= LONG:
        steps = [divisor(extent, WIDE)]
    keep = [width for width in steps if width == steps[0] or width in TREE]
    return [width for width in keep if width >= 4]


def _fuse_rows(schedule: Schedule, steps: list[Step], depth: int) -> bool:
    """Computes all blocks row by row; False where that would compute something more than once."""
    work = [math.prod(extent_of(schedule, loop) for loop in schedule.get_loops(block)) for block, _ in steps]
    rows = schedule.get_loops(steps[-1][0])[:depth]
    row = schedule.fuse(*rows) if depth > 1 else rows[0]
    count = extent_of(schedule, row)
    outer, row = schedule.split(row, [None, divisor(count, max(1, count // PARTS))])
    if sum(work) >= SMALLEST_PARALLEL or not is_static(schedule, [outer]):
        schedule.parallel(outer)
    for block, _ in reversed(steps[:-1]):
        schedule.compute_at(block, row)
    for (block, kind), iterations in zip(steps, work, strict=True):
        loops = list(schedule.get_loops(block)[2:])
        if count * math.prod(extent_of(schedule, loop) for loop in loops) != iterations:
            return False
        if kind == "elementwise" and loops:
            _vectorize(schedule, loops[-1])
        elif kind == "partial":
            lane = loops.pop(0)
            schedule.reorder(*loops, lane)
            schedule.vectorize(lane)
            schedule.decompose_reduction(block, loops[0])
        elif kind == "total" and extent_of(schedule, loops[-1]) <= LANES:
            schedule.unroll(loops[-1])
    return True


def _vectorize(schedule: Schedule, loop: LoopRV) -> None:
    extent = extent_of(schedule, loop)
    width = next((width for width in WIDTHS if extent % width == 0), LANES if extent >= LONG else 1)
    if width == 1:
        return
    outer, lane = schedule.split(loop, [None, width])
    if extent % width:
        schedule.annotate(outer, PARTITION, 1)
    schedule.vectorize(lane)
