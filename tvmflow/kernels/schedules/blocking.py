"""Register and cache blocking of a product: a default schedule, and a space for tuning that starts from it.

    for blocks of rows, vectors of columns   in parallel: each thread a run of them, one after the other
      for tiles of rows                      a block of rows stays in the second-level cache for all columns
        for k, by steps                      unrolled, so that a step's loads and multiply-adds overlap
          rows x registers x lanes           the tile, in registers

The order of Goto & van de Geijn 2008 without packing the rows. What follows the product (bias, activation) is done
tile by tile; what comes before it (padding) is done apart. MetaSchedule's own structure has no unrolled steps of
k around the tile, and its draws seldom hit a tile that just fills the registers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvmflow.kernels.schedules import repacking
from tvmflow.kernels.schedules.axes import (
    Axis,
    Registers,
    axes_of,
    blocks_of,
    divisor,
    is_copy,
    is_outer_product,
    is_static,
    lone_reduction,
    vector_axis,
)
from tvmflow.kernels.schedules.elementwise import schedule_padding

RULE = "product blocking"
MAX_ROWS, MAX_VECTORS, MAX_STEPS = 16, 4, 16
BLOCK_ROWS = 256
BUSY = 10  # multiply-adds in flight that keep two units of four cycles' latency busy, and some more
SHARED_ATTR = "tvmflow.shared_layouts"  # on a function whose weights other shapes of it read too
FEW = 1 << 18  # multiply-adds that one thread has done before another has woken
Loops: TypeAlias = list[LoopRV]


def apply(schedule: Schedule) -> str:
    """The default schedule of a product, its constant weights in the layout that it wants; "" where it is none."""
    registers = Registers.of(tvm.target.Target.current())
    if not block(schedule, registers, informed=True):
        return ""
    schedule.enter_postproc()
    packed = ms.postproc.RewriteLayout().apply(schedule) and repacking.is_whole(schedule.mod["main"])
    return RULE if packed else ""


def block(schedule: Schedule, registers: Registers, informed: bool) -> bool:
    """Blocks the one product of the function under `schedule`; False where it is no such function.

    `informed` takes sizes by rule; otherwise they are drawn, and tuning goes on from there. Raises ScheduleError where
    a primitive does not apply to the kernel.
    """
    blocks = blocks_of(schedule)
    place = lone_reduction(schedule, blocks)
    if place is None or len(schedule.get(blocks[place]).reads) < 2:
        return False
    tile = Tile.of(schedule, blocks[place], registers)
    if tile is None:
        return False
    for before in blocks[:place]:
        if is_copy(schedule, before):  # what TVM makes of a convolution without padding
            schedule.compute_inline(before)
        else:
            schedule_padding(schedule, before)
    for after in blocks[place + 1 : -1]:
        schedule.compute_inline(after)
    _block(schedule, tile, blocks[-1] if len(blocks) > place + 1 else None, informed)
    return True


@dataclass(frozen=True)
class Tile:
    """The axes of a product, and the tile of it that is held in registers: `rows` x `vectors` x `lanes`."""

    product: SBlockRV
    row: Axis | None
    vector: Axis
    k: Axis
    outer: list[Axis]
    reductions: list[Axis]
    is_large: bool
    is_shared: bool
    """Whether other shapes read the same weights: then their layout, which columns and steps of k make, is fixed."""
    rows: int
    vectors: int
    lanes: int

    @staticmethod
    def of(schedule: Schedule, product: SBlockRV, registers: Registers) -> Tile | None:
        """The tile that keeps the multiply-add units busiest; None where no axis makes vectors.

        Where weights are shared, its columns follow from theirs alone, so that all shapes want them in one layout.
        """
        axes = axes_of(schedule, product)
        spatial = [axis for axis in axes if not axis.is_reduction]
        reductions = [axis for axis in axes if axis.is_reduction]
        vector = vector_axis(schedule, product, spatial)
        if vector is None:
            return None
        lanes = registers.width(vector.extent)
        panels = vector.extent // lanes
        shared = SHARED_ATTR in (schedule.mod["main"].attrs or {})
        panel = _shared_panel(panels, registers) if shared else None
        shapes: list[tuple[float, int, int, Axis | None]] = []
        for row in [None, *reversed(_possible_rows(schedule, product, spatial, vector))]:
            for rows in _divisors(row.extent, MAX_ROWS) if row is not None else [1]:
                for vectors in _divisors(panels, 2 * MAX_VECTORS if rows == 1 else MAX_VECTORS):
                    if rows * vectors <= registers.count - 4 and vectors == (panel or vectors):
                        shapes.append((_busy(rows, vectors), rows * vectors, rows, row))
        _, total, rows, row = max(shapes, key=lambda shape: shape[:3])
        k = max(reductions, key=lambda axis: axis.extent)
        return Tile(
            product,
            row,
            vector,
            k,
            [a for a in spatial if a is not vector and a is not row],
            [a for a in reductions if a is not k],
            _is_large(schedule, axes),
            panel is not None,
            rows,
            total // rows,
            lanes,
        )


def _shared_panel(panels: int, registers: Registers) -> int:
    """Vectors of a tile's columns that suit any number of rows: those that are best for eight."""
    shapes = [
        (_busy(rows, vectors), rows * vectors, rows)
        for rows in _divisors(8, MAX_ROWS)
        for vectors in _divisors(panels, MAX_VECTORS)
        if rows * vectors <= registers.count - 4
    ]
    _, total, rows = max(shapes)
    return total // rows


def _possible_rows(schedule: Schedule, product: SBlockRV, spatial: list[Axis], vector: Axis) -> list[Axis]:
    wide = [axis for axis in spatial if axis is not vector and axis.extent > 1]
    return [axis for axis in wide if is_outer_product(schedule, product, axis, vector)]


def _is_large(schedule: Schedule, axes: list[Axis]) -> bool:
    """Whether a product is worth more than one thread; one of unknown size may be."""
    return not is_static(schedule, [axis.loop for axis in axes]) or math.prod(axis.extent for axis in axes) > FEW


def _busy(rows: int, vectors: int) -> float:
    """The share of its cycles in which a tile multiplies: as many loads, and BUSY results, fit into one step of k."""
    return rows * vectors / max(rows * vectors, rows + vectors, BUSY)


def _block(schedule: Schedule, tile: Tile, last: SBlockRV | None, informed: bool) -> None:
    rule = _sizes(tile)
    sizes = rule if informed else (None, None, None)
    block_rows, tiles, within = _split_rows(schedule, tile, sizes[0])
    vectors, lane = schedule.split(tile.vector.loop, [None, tile.lanes])
    if tile.is_shared:
        columns, vectors = schedule.split(vectors, rule[1])
        outer_k, *step = schedule.split(tile.k.loop, rule[2]) if tile.k.extent > 1 else [tile.k.loop]
    else:
        columns, vectors = _split(schedule, vectors, (2, 2 * MAX_VECTORS), sizes[1])
        outer_k, *step = _split(schedule, tile.k.loop, (2, MAX_STEPS), sizes[2]) if tile.k.extent > 1 else [tile.k.loop]
    around = [*(axis.loop for axis in tile.outer), *block_rows]
    outer = [columns, *around] if _is_heavy(tile) else [*around, columns]
    reductions = [*(axis.loop for axis in tile.reductions), outer_k]
    schedule.reorder(*outer, *tiles, *reductions, *step, *within, vectors, lane)
    written = last if last is not None else schedule.cache_write(tile.product, 0, "global")
    place = schedule.fuse(*outer)
    if tile.is_large:
        schedule.parallel(place)
    schedule.reverse_compute_at(written, tiles[0] if tiles else place, preserve_unit_loops=True)
    for loop in (*step, *within, vectors):
        schedule.unroll(loop)
    schedule.vectorize(lane)
    _, lane = schedule.split(schedule.get_loops(written)[-1], [None, tile.lanes])
    schedule.vectorize(lane)
    schedule.decompose_reduction(tile.product, reductions[0])


def _is_heavy(tile: Tile) -> bool:
    """Whether the weights are what should be read once, columns outermost: where they are more than the rows are."""
    rows = math.prod(axis.extent for axis in [*tile.outer, *([tile.row] if tile.row else [])])
    return tile.vector.extent * math.prod(axis.extent for axis in tile.reductions) > rows


def _split_rows(schedule: Schedule, tile: Tile, sizes: list[int] | None) -> tuple[Loops, Loops, Loops]:
    if tile.row is None:
        return [], [], []
    block_rows, tiles, within = _split(schedule, tile.row.loop, (3, MAX_ROWS), sizes)
    return [block_rows], [tiles], [within]


def _split(schedule: Schedule, loop: LoopRV, parts: tuple[int, int], sizes: list[int] | None) -> Loops:
    """Splits a loop into parts[0] loops, the innermost at most parts[1] long, as a decision that tuning may change."""
    return list(schedule.split(loop, schedule.sample_perfect_tile(loop, parts[0], parts[1], sizes)))


def _sizes(tile: Tile) -> tuple[list[int], list[int], list[int]]:
    """Blocks of rows that stay in the second-level cache, eight steps of k at once."""
    step = divisor(tile.k.extent, 8)
    columns = tile.vector.extent // tile.lanes // tile.vectors
    rows: list[int] = []
    if tile.row is not None:
        tiles = divisor(tile.row.extent // tile.rows, max(1, BLOCK_ROWS // tile.rows))
        rows = [tile.row.extent // tile.rows // tiles, tiles, tile.rows]
    return rows, [columns, tile.vectors], [tile.k.extent // step, step]


def _divisors(extent: int, limit: int) -> list[int]:
    return [d for d in range(1, min(extent, limit) + 1) if extent % d == 0]
