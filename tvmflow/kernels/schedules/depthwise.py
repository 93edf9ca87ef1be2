"""Depthwise convolutions and pooling: each window is read along its channels, once for several output columns.

    for blocks of rows, vectors of channels   in parallel
      for rows, tiles of columns
        for the window                        its columns unrolled
          columns x lanes                     the tile, in registers

Padding is a condition on each load, the same for all lanes and well predicted: a padded copy would be one more pass
over memory. What follows (bias, activation, the division of a mean) is done tile by tile. The structure is that of
direct depthwise convolution in Zhang et al., "High Performance Depthwise and Pointwise Convolutions on Mobile
Devices", AAAI 2020.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import tvm
from tvm.s_tir import Schedule

from tvmflow.kernels.schedules.axes import (
    Axis,
    Registers,
    axes_of,
    blocks_of,
    divisor,
    is_cheap,
    is_outer_product,
    is_static,
    lone_reduction,
    reads_last,
    vector_axis,
)

NAME = "depthwise tile"
TILE = 4  # the part of all registers that holds outputs; the others hold a row of weights, and inputs
LARGEST_WINDOW = 16  # of one axis: larger ones are no windows, and unrolling them would be much code
BLOCK_ROWS = 16
TILES = 16  # parallel parts, so that threads end at about the same time
SMALLEST_PARALLEL = 65536  # multiply-adds below which waking the threads costs more than they save
Block: TypeAlias = tvm.s_tir.schedule.SBlockRV


def apply(schedule: Schedule) -> str:
    """Schedules the one windowed reduction of a function and the elementwise blocks around it; "" for any other.

    Raises ScheduleError where a primitive does not apply.
    """
    blocks = blocks_of(schedule)
    place = lone_reduction(schedule, blocks)
    if place is None:
        return ""
    window = blocks[place]
    if not _is_window(schedule, window):
        return ""
    if not all(is_cheap(schedule, block) for block in blocks[:place]):
        return ""
    for block in [*blocks[:place], *blocks[place + 1 : -1]]:
        schedule.compute_inline(block)
    last = blocks[-1] if place + 1 < len(blocks) else schedule.cache_write(window, 0, "global")
    _tile(schedule, window, last)
    return NAME


def _is_window(schedule: Schedule, block: Block) -> bool:
    """Whether the block reduces short axes along rows and columns of one input, its channels next to each other."""
    axes = axes_of(schedule, block)
    spatial = [axis for axis in axes if not axis.is_reduction]
    if len(spatial) < 3 or not is_static(schedule, [axis.loop for axis in axes if axis not in spatial[:-3]]):
        return False
    if spatial[-1] is not vector_axis(schedule, block, spatial) or _lanes(spatial[-1]) < 4:
        return False
    column, channel = spatial[-2:]
    window = [axis for axis in axes if axis.is_reduction and axis.extent > 1]
    if any(axis.extent > LARGEST_WINDOW for axis in window) or is_outer_product(schedule, block, column, channel):
        return False
    return not any(reads_last(schedule, block, axis) for axis in (column, *window))


def _tile(schedule: Schedule, window: Block, last: Block) -> None:
    """Tiles rows x columns x lanes, with `last` computed tile by tile."""
    axes = axes_of(schedule, window)
    *outer, row, column, channel = (axis for axis in axes if not axis.is_reduction)
    reductions = [axis.loop for axis in axes if axis.is_reduction and axis.extent > 1] or [axes[-1].loop]
    rest = [axis.loop for axis in axes if axis.is_reduction and axis.loop not in reductions]
    lanes = _lanes(channel)
    rows, inner_rows = _rows(schedule, axes, row, channel.extent // lanes)
    columns, inner_columns = schedule.split(column.loop, [None, _columns(column)])
    vectors, lane = schedule.split(channel.loop, [None, lanes])
    schedule.reorder(
        *(axis.loop for axis in outer), rows, vectors, inner_rows, columns, *rest, *reductions, inner_columns, lane
    )
    parts = schedule.fuse(*(axis.loop for axis in outer), rows, vectors)
    if math.prod(axis.extent for axis in axes) >= SMALLEST_PARALLEL or not is_static(schedule, [parts]):
        schedule.parallel(parts)
    schedule.reverse_compute_at(last, columns, preserve_unit_loops=True)
    for loop in (reductions[-1], inner_columns, schedule.get_loops(last)[-2]):
        schedule.unroll(loop)
    schedule.vectorize(lane)
    schedule.vectorize(schedule.get_loops(last)[-1])
    schedule.decompose_reduction(window, (rest + reductions)[0])


def _rows(schedule: Schedule, axes: list[Axis], row: Axis, vectors: int) -> list[tvm.s_tir.schedule.LoopRV]:
    """Splits the rows into blocks: large ones, which share what their windows overlap in, but enough of them."""
    images = math.prod(axis.extent for axis in axes[: axes.index(row)])
    most = max(1, min(BLOCK_ROWS, row.extent * vectors * images // TILES))
    return list(schedule.split(row.loop, [None, divisor(row.extent, most)]))


def _columns(column: Axis) -> int:
    """The columns of a tile: a quarter of the registers, up to twice as many where nothing smaller divides the row."""
    most = Registers.of(tvm.target.Target.current()).count // TILE
    columns = divisor(column.extent, most)
    return columns if columns >= most // 2 else divisor(column.extent, 2 * most - 2)


def _lanes(channel: Axis) -> int:
    """The widest vector of one register, or of a part of it, that divides the channels."""
    return math.gcd(channel.extent, Registers.of(tvm.target.Target.current()).lanes)
