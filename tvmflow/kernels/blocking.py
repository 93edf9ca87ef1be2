"""Register and cache blocking of a product: a space for tuning to search, and a point in it to start from.

    for blocks of rows, vectors of columns   in parallel: each thread a run of them, one after the other
      for tiles of rows                      a block of rows stays in the second-level cache for all columns
        for k, by steps                      unrolled, so that a step's loads and multiply-adds overlap
          rows x lanes                       the tile, in registers

The order of Goto & van de Geijn 2008 without packing the rows. What follows the product (bias, activation) is done
tile by tile; what comes before it (padding) is done apart. MetaSchedule's own structure has no unrolled steps of
k around the tile, and its draws seldom hit a tile that just fills the registers.
"""

from __future__ import annotations

from typing import TypeAlias

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ScheduleError
from tvm.tirx import IterVar

from tvmflow.kernels.axes import (
    LANES,
    Axis,
    axes_of,
    axis_kinds,
    blocks_of,
    divisor,
    is_outer_product,
    vector_axis,
    width,
)
from tvmflow.kernels.elementwise import schedule_elementwise

REGISTERS = 28  # accumulators of a tile, of the 32 registers that AVX-512 has
MAX_ROWS, MAX_LANES, MAX_STEPS = 16, 64, 16
BLOCK_ROWS = 256
Block: TypeAlias = tvm.s_tir.schedule.SBlockRV


def apply(schedule: Schedule, informed: bool) -> bool:
    """Blocks the one product of the function under `schedule`; False where it is no such function.

    `informed` takes sizes by rule; otherwise they are drawn, and tuning goes on from there.
    """
    try:
        blocks = blocks_of(schedule)
        products = [block for block in blocks if _is_product(schedule, block)]
        if len(products) != 1 or not all(_is_elementwise(schedule, block) for block in blocks if block not in products):
            return False
        place = blocks.index(products[0])
        for block in blocks[place + 1 : -1]:
            schedule.compute_inline(block)
        for block in blocks[:place]:
            schedule_elementwise(schedule, block)
        return _block(schedule, products[0], blocks[-1] if len(blocks) > place + 1 else None, informed)
    except ScheduleError:  # a primitive does not apply to this kernel
        return False


def _is_product(schedule: Schedule, block: Block) -> bool:
    statement = schedule.get(block)
    return axis_kinds(schedule, block) == {IterVar.DataPar, IterVar.CommReduce} and len(statement.reads) >= 2


def _is_elementwise(schedule: Schedule, block: Block) -> bool:
    return axis_kinds(schedule, block) == {IterVar.DataPar}


def _block(schedule: Schedule, product: Block, last: Block | None, informed: bool) -> bool:
    axes = axes_of(schedule, product)
    spatial = [axis for axis in axes if not axis.is_reduction]
    vector = vector_axis(schedule, product, spatial)
    rows = [axis for axis in spatial if axis is not vector]
    if vector is None or not rows:
        return False
    most = max(1, REGISTERS // -(-width(vector.extent) // LANES))
    row = max(rows, key=lambda axis: (is_outer_product(schedule, product, axis, vector), divisor(axis.extent, most)))
    k = max((axis for axis in axes if axis.is_reduction), key=lambda axis: axis.extent)
    sizes = _sizes(row, vector, k) if informed else (None, None, None)
    block_rows, tiles, within = _split(schedule, row, (3, MAX_ROWS), sizes[0])
    columns, lane = _split(schedule, vector, (2, MAX_LANES), sizes[1])
    outer_k, step = _split(schedule, k, (2, MAX_STEPS), sizes[2])
    outer = [*(axis.loop for axis in rows if axis is not row), block_rows, columns]
    reductions = [*(axis.loop for axis in axes if axis.is_reduction and axis is not k), outer_k]
    schedule.reorder(*outer, tiles, *reductions, step, within, lane)
    written = last if last is not None else schedule.cache_write(product, 0, "global")
    schedule.parallel(schedule.fuse(*outer))
    schedule.reverse_compute_at(written, tiles, preserve_unit_loops=True)
    for loop in (step, within):
        schedule.unroll(loop)
    schedule.vectorize(lane)
    schedule.vectorize(schedule.get_loops(written)[-1])
    schedule.decompose_reduction(product, reductions[0])
    return True


def _split(
    schedule: Schedule, axis: Axis, parts: tuple[int, int], sizes: list[int] | None
) -> list[tvm.s_tir.schedule.LoopRV]:
    """Splits an axis into parts[0] loops, the innermost at most parts[1] long, as a decision that tuning may change."""
    factors = schedule.sample_perfect_tile(axis.loop, parts[0], parts[1], sizes)
    return list(schedule.split(axis.loop, factors))


def _sizes(row: Axis, vector: Axis, k: Axis) -> tuple[list[int], list[int], list[int]]:
    """As many rows as fill the registers, blocks that stay in the second-level cache, eight steps of k at once."""
    lanes = width(vector.extent)
    if lanes > 2 * LANES and vector.extent % (2 * LANES) == 0:
        lanes = 2 * LANES  # fewer loads per multiply-add than one or four registers of lanes
    within = divisor(row.extent, min(MAX_ROWS, max(1, REGISTERS // -(-lanes // LANES))))
    tiles = divisor(row.extent // within, max(1, BLOCK_ROWS // within))
    step = divisor(k.extent, 8)
    return (
        [row.extent // within // tiles, tiles, within], [vector.extent // lanes, lanes], [k.extent // step, step],
    )  # fmt: skip
