"""Reductions of columns: means over an image with its channels last, maxima over time.

    for vectors of columns        in parallel
      for the reduced axes        what is computed before the reduction, element by element
        lanes                     accumulated in registers

What is computed before the reduction would otherwise be a pass over memory of its own, and what comes after it too.
"""

from __future__ import annotations

import math
from typing import TypeAlias

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import SBlockRV

from tvmflow.kernels.schedules.axes import (
    LANES,
    Axis,
    axes_of,
    blocks_of,
    extent_of,
    is_cheap,
    is_shared,
    is_static,
    lone_reduction,
    vector_axis,
)
from tvmflow.kernels.schedules.elementwise import parallel

NAME = "columns"
PARTS = 8  # as many vectors as keep the threads equally busy; then wider ones, which read memory in longer runs
WIDTHS = (4 * LANES, 2 * LANES, LANES, LANES // 2, LANES // 4)
Block: TypeAlias = SBlockRV


def apply(schedule: Schedule) -> str:
    """Schedules the one reduction of a function along its columns, with what is before and after; "" for any other.

    Raises ScheduleError where a primitive does not apply.
    """
    blocks = blocks_of(schedule)
    place = lone_reduction(schedule, blocks)
    if place is None:
        return ""
    reduction = blocks[place]
    columns = _columns(schedule, reduction) if place else None  # without anything before it, its own rule is as good
    if columns is None:
        return ""
    if not all(is_cheap(schedule, block) or _is_read_once(schedule, block) for block in blocks[:place]):
        return ""
    if place + 1 < len(blocks) and _extent(schedule, blocks[-1]) != _extent(schedule, reduction):
        return ""
    for block in [*blocks[:place], *blocks[place + 1 : -1]]:
        schedule.compute_inline(block)
    last = blocks[-1] if place + 1 < len(blocks) else schedule.cache_write(reduction, 0, "global")
    _vectorize(schedule, reduction, last, columns)
    return NAME


def _columns(schedule: Schedule, block: Block) -> Axis | None:
    """The axis of the columns; None where the reduction is a product, or goes along them."""
    axes = axes_of(schedule, block)
    columns = vector_axis(schedule, block, [axis for axis in axes if not axis.is_reduction])
    if columns is None or columns.extent % WIDTHS[-1] or not is_static(schedule, [axis.loop for axis in axes]):
        return None
    reduced = [axis for axis in axes if axis.is_reduction]
    return None if any(is_shared(schedule, block, axis, columns) for axis in reduced) else columns


def _is_read_once(schedule: Schedule, block: Block) -> bool:
    consumers = schedule.get_consumers(block)
    return len(consumers) == 1 and _all(schedule, consumers[0]) == _all(schedule, block)


def _extent(schedule: Schedule, block: Block) -> int:
    return math.prod(axis.extent for axis in axes_of(schedule, block) if not axis.is_reduction)


def _all(schedule: Schedule, block: Block) -> int:
    return math.prod(axis.extent for axis in axes_of(schedule, block))


def _vectorize(schedule: Schedule, reduction: Block, last: Block, columns: Axis) -> None:
    axes = axes_of(schedule, reduction)
    reduced = [axis.loop for axis in axes if axis.is_reduction]
    rows = [axis.loop for axis in axes if not axis.is_reduction and not axis.var.same_as(columns.var)]
    count = math.prod(extent_of(schedule, loop) for loop in rows)
    widths = [width for width in WIDTHS if columns.extent % width == 0]
    narrowest = LANES if columns.extent % LANES == 0 else widths[0]
    width = next((w for w in widths if w > narrowest and count * columns.extent // w >= PARTS), narrowest)
    vectors, lane = schedule.split(columns.loop, [None, width])
    schedule.reorder(*rows, vectors, *reduced, lane)
    part = parallel(schedule, [*rows, vectors], width * math.prod(extent_of(schedule, loop) for loop in reduced))
    schedule.reverse_compute_at(last, part, preserve_unit_loops=True)
    schedule.vectorize(lane)
    schedule.vectorize(schedule.get_loops(last)[-1])
    schedule.decompose_reduction(reduction, reduced[0])
