"""Float32 matrix products and convolutions on TF32 tensor cores: the default schedule.

    for tiles of rows x columns            thread blocks
      for tiles of k                       both operands' tiles to shared memory, zeros where they reach outside
        for steps of k                     warps x fragments of 16 x 16 in registers, 8 of k at a time
      for rows of fragments                to shared memory, and from there with what follows to global memory

A convolution is the product of its windows (images x places) x (window x channels) by its filters, none of which is
stored. Tiles have in shared memory the order that their operand has in global memory, so that both are read in rows.
The next tile is read while one is multiplied, first into registers, then into a second place in shared memory; that
and the writing of results follow TVM's own schedule for float16 (tvm/s_tir/dlight/gpu/matmul.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir.dlight.gpu.matmul import IterKind, IterTrait, detect_iter_traits, make_iter_fusion_index_map
from tvm.s_tir.schedule import LoopRV, SBlockRV, ScheduleError
from tvm.tirx import BufferRegion, Expr, IntImm, PrimFunc, Var
from tvm.tirx.analysis import undefined_vars

from tvmflow.kernels.schedules.axes import blocks_of, extent_of, lone_reduction
from tvmflow.kernels.schedules.default_schedule import RULE_ATTR, is_open
from tvmflow.kernels.tf32 import intrinsics

SMALLEST = 16  # rows, columns or depth below which padding would be most of the product
# Rows and columns of a tile, and the warps that share it in both directions.
TILES = {
    (128, 128): (2, 4),
    (128, 64): (4, 2),
    (64, 128): (2, 4),
    (64, 64): (2, 2),
    (128, 32): (4, 1),
    (32, 128): (1, 4),
    (64, 32): (2, 2),
    (32, 64): (2, 2),
    (32, 32): (2, 2),
    (64, 16): (4, 1),
    (16, 64): (1, 4),
}
DEEP = 128  # rows and columns, together, up to which two tiles of twice the depth fit into 48 KiB
PROCESSORS = 108  # of a GPU of this class, each with the tile of one thread block at a time
READING = 32  # multiply-adds in the time in which an element of a tile is read
VECTOR = 4  # elements of 16 bytes
BATCH, ROW, COLUMN, DEPTH = IterKind.kIter_S, IterKind.kIter_I, IterKind.kIter_J, IterKind.kIter_K
Block: TypeAlias = SBlockRV


@tvm.transform.module_pass(opt_level=0, name="ScheduleTf32")
class ScheduleTf32:
    """Schedules every product of a module that has no schedule yet; what is none keeps its loops."""

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        functions = dict(mod.functions.items())
        for var, function in mod.functions.items():
            if is_open(function):
                schedule, rule = schedule_of(tvm.IRModule({"main": function}))
                if rule:
                    functions[var] = schedule.mod["main"].with_attrs({RULE_ATTR: rule, "tirx.is_scheduled": True})
        return tvm.IRModule(functions, attrs=mod.attrs)


def names(mod: tvm.IRModule) -> frozenset[str]:
    """The names of a module's functions that are products."""
    functions = [(var, function) for var, function in mod.functions.items() if isinstance(function, PrimFunc)]
    return frozenset(
        str(var.name_hint) for var, function in functions if find(Schedule(tvm.IRModule({"main": function})))
    )


def schedule_of(mod: tvm.IRModule) -> tuple[Schedule, str]:
    """The schedule of a module's `main` on tensor cores, and the name of its rule, which is "" where it is no product."""
    schedule = Schedule(mod, debug_mask="none")
    try:
        return schedule, apply(schedule)
    except ScheduleError:  # a primitive does not apply to this kernel
        return Schedule(mod, debug_mask="none"), ""


def apply(schedule: Schedule) -> str:
    """Schedules the product that a function is; returns the rule's name, "" where it is none.

    Raises ScheduleError where a primitive does not apply.
    """
    product = find(schedule)
    if product is None:
        return ""
    tile = Tile.of(product)
    for block in product.between:
        schedule.compute_inline(block)
    _normalise(schedule, product, tile)
    _multiply(schedule, product, tile)
    kind = "matmul" if product.is_plain else "convolution"
    return f"tf32 {kind} {tile.rows}x{tile.columns}x{tile.depth}"


@dataclass(frozen=True)
class Product:
    """C[s, i, j] = sum over k of A[s, i, k] * B[s, j, k], its axes being batch, rows, columns and depth.

    `..._by_k` say whether an operand's memory runs along another axis than k, `by_row` whether the result's runs along
    i. `between` are the blocks that work on the result, without the last.
    """

    block: Block
    between: list[Block]
    axes: list[IterTrait]
    a_by_k: bool
    b_by_k: bool
    by_row: bool
    is_plain: bool
    """A product of matrices; else a convolution."""

    def extent(self, kind: IterKind) -> int:
        return math.prod(int(axis.extent) for axis in self.axes if axis.kind == kind)


@dataclass(frozen=True)
class Tile:
    """Rows, columns and depth of what a thread block multiplies at a time, and its warps in both directions."""

    rows: int
    columns: int
    depth: int
    warps: tuple[int, int]

    @staticmethod
    def of(product: Product) -> Tile:
        """The tile with which all processors are done soonest, one tile after the other."""

        def cost(shape: tuple[int, int]) -> int:
            across, down = product.extent(ROW) / shape[0], product.extent(COLUMN) / shape[1]
            tiles = product.extent(BATCH) * math.ceil(across) * math.ceil(down)
            return math.ceil(tiles / PROCESSORS) * (math.prod(shape) + READING * sum(shape))

        rows, columns = min(TILES, key=cost)
        return Tile(rows, columns, 32 if rows + columns <= DEEP else 16, TILES[rows, columns])

    @property
    def fragments(self) -> tuple[int, int]:
        """Of one warp, in both directions."""
        return self.rows // self.warps[0] // intrinsics.M, self.columns // self.warps[1] // intrinsics.N


def find(schedule: Schedule) -> Product | None:
    """The product that a function is, with at most elementwise blocks around it; None for any other, or a small one."""
    blocks = blocks_of(schedule)
    place = lone_reduction(schedule, blocks)
    if place is None:
        return None
    block = schedule.get(blocks[place])
    regions = [*block.reads, *block.writes]
    if not all(isinstance(axis.dom.extent, IntImm) for axis in block.iter_vars):
        return None
    if any(str(region.source.ty.dtype) != "float32" for region in regions):
        return None
    traits = detect_iter_traits(block)
    if traits is None:
        return None
    kinds = {axis.var: trait.kind for axis, trait in zip(block.iter_vars, traits[-1], strict=True)}
    a, b, c = (_innermost(region, kinds) for region in regions)
    is_plain = all(len(undefined_vars(index.min)) < 2 for region in regions for index in region.region)
    found = Product(blocks[place], blocks[place + 1 : -1], traits[-1], a != DEPTH, b != DEPTH, c == ROW, is_plain)
    return found if min(found.extent(kind) for kind in (ROW, COLUMN, DEPTH)) >= SMALLEST else None


def _innermost(region: BufferRegion, kinds: Mapping[Var, IterKind]) -> IterKind:
    """The kind of axis along which memory runs in a region; where several are added up, that of the spatial one."""
    wide = [index.min for index, size in zip(region.region, region.source.ty.shape, strict=True) if int(size) > 1]
    found = [kinds[var] for var in undefined_vars(wide[-1]) if var in kinds] if wide else []
    return next((kind for kind in found if kind in (ROW, COLUMN)), DEPTH)


def _normalise(schedule: Schedule, product: Product, tile: Tile) -> None:
    """Gives the product the axes of its terms, in multiples of a tile, and its operands copies in order."""
    block = product.block
    a, b, c = (schedule.reindex(block, at) for at in (("read", 0), ("read", 1), ("write", 0)))
    orders = (
        (a, "write", [BATCH, DEPTH, ROW] if product.a_by_k else [BATCH, ROW, DEPTH]),
        (b, "write", [BATCH, DEPTH, COLUMN] if product.b_by_k else [BATCH, COLUMN, DEPTH]),
        (c, "read", [BATCH, ROW, COLUMN]),
    )
    *operands, axes = detect_iter_traits(schedule.get(block))
    for (copy, side, order), traits in zip(orders, operands, strict=True):
        schedule.transform_layout(copy, (side, 0), make_iter_fusion_index_map(traits, order))
    schedule.transform_block_layout(block, make_iter_fusion_index_map(axes, [BATCH, ROW, COLUMN, DEPTH]))
    schedule.pad_einsum(block, [1, tile.rows, tile.columns, tile.depth])


def _multiply(schedule: Schedule, product: Product, tile: Tile) -> None:
    names = intrinsics.group(product.a_by_k, product.b_by_k)
    batch, i, j, k = schedule.get_loops(product.block)
    i0, i1, i2, i3 = schedule.split(i, [None, tile.warps[0], tile.fragments[0], intrinsics.M])
    j0, j1, j2, j3 = schedule.split(j, [None, tile.warps[1], tile.fragments[1], intrinsics.N])
    k0, k1, k2 = schedule.split(k, [None, tile.depth // intrinsics.K, intrinsics.K])
    schedule.reorder(batch, i0, j0, i1, j1, k0, k1, i2, j2, i3, j3, k2)
    outer = schedule.blockize(i3)
    schedule.bind(schedule.fuse(batch, i0), "blockIdx.x")
    schedule.bind(j0, "blockIdx.y")
    schedule.bind(schedule.fuse(i1, j1), "threadIdx.y")
    schedule.unroll(i2)
    schedule.unroll(j2)
    for index, by_k in enumerate((product.a_by_k, product.b_by_k)):
        shared = _read(schedule, outer, (index, by_k), (k0, k1), names["load_b" if index else "load_a"])
        _share(schedule, schedule.fuse(*schedule.get_loops(shared)[-2:]), math.prod(tile.warps))
        if extent_of(schedule, k0) > 1:
            schedule.annotate(shared, "tirx.manifest_shared_memory_local_stage", 1)
            schedule.annotate(shared, "double_buffer_scope", 0)
    if extent_of(schedule, k0) > 1:
        _overlap(schedule, k0, k1)
    _write(schedule, outer, j0, tile, product.by_row)
    init = schedule.decompose_reduction(outer, k0)
    schedule.tensorize(schedule.get_loops(schedule.get_child_blocks(init)[0])[-2], names["init"])
    schedule.tensorize(schedule.get_loops(product.block)[-3], names["compute"])


def _read(
    schedule: Schedule, outer: Block, operand: tuple[int, bool], k: tuple[LoopRV, LoopRV], intrinsic: str
) -> Block:
    """Reads an operand into shared memory at each tile of k, and into fragments at each step of it.

    `operand` is its index and whether it is by k. Returns the block that fills shared memory.
    """
    index, by_k = operand
    shared = schedule.cache_read(outer, index, intrinsics.SHARED)
    schedule.compute_at(shared, k[0], preserve_unit_loops=True)
    while producers := schedule.get_producers(shared):
        for producer in producers:
            schedule.compute_inline(producer)
    schedule.storage_align(shared, 0, -2, *intrinsics.alignment(by_k))
    fragment = schedule.cache_read(outer, index, "local")
    schedule.compute_at(fragment, k[1], preserve_unit_loops=True)
    *_, i, j = schedule.get_loops(fragment)
    i0, i1 = schedule.split(i, [None, intrinsics.K if by_k else intrinsics.M])
    j0, j1 = schedule.split(j, [None, intrinsics.M if by_k else intrinsics.K])
    schedule.reorder(i0, j0, i1, j1)
    schedule.unroll(i0)
    schedule.unroll(j0)
    schedule.tensorize(i1, intrinsic)
    return shared


def _overlap(schedule: Schedule, tiles: LoopRV, steps: LoopRV) -> None:
    """Has the next tile and the next step's fragments read while those before are multiplied.

    A step reads A, reads B, multiplies. A tile reads A into registers, then into shared memory, B likewise; then come
    the first reads, the body and the last product of its steps.
    """
    for loop, order, stage in ((tiles, [0, 3, 1, 4, 5, 2, 6], [0, 0, 0, 0, 0, 1, 1]), (steps, [0, 1, 2], [0, 0, 1])):
        schedule.annotate(loop, "software_pipeline_order", order)
        schedule.annotate(loop, "software_pipeline_stage", stage)


def _write(schedule: Schedule, outer: Block, place: LoopRV, tile: Tile, by_row: bool) -> None:
    """Writes the results, one row of fragments of all warps after the other, through shared memory."""
    rows, columns = tile.fragments
    m, n = intrinsics.M * rows, intrinsics.N * columns

    def by_fragments(s: Var, i: Var, j: Var) -> tuple[Expr, ...]:
        return (
            s,
            i // m,
            j // n,
            i // intrinsics.M % rows,
            j // intrinsics.N % columns,
            i % intrinsics.M,
            j % intrinsics.N,
        )

    schedule.cache_write(outer, 0, "global")  # a copy that takes rows and columns apart, apart from what follows
    schedule.transform_layout(outer, ("write", 0), by_fragments)
    written = schedule.cache_write(outer, 0, intrinsics.SHARED)
    schedule.reverse_compute_at(written, place, preserve_unit_loops=True)
    store = schedule.cache_write(outer, 0, "local")
    warp_i, warp_j, row, column, i, j = schedule.get_loops(written)[-6:]
    order = (column, j, i) if by_row else (i, column, j)
    schedule.reorder(row, warp_i, warp_j, *order)
    schedule.compute_at(store, row, preserve_unit_loops=True)
    while consumers := schedule.get_consumers(written):  # only now: computing it elsewhere would lose their conditions
        schedule.reverse_compute_inline(consumers[0])
    schedule.bind(schedule.fuse(warp_i, warp_j), "threadIdx.y")
    _share(schedule, schedule.fuse(*order), 1)
    warp_i, warp_j, _, column, i, _ = schedule.get_loops(store)[-6:]
    schedule.bind(schedule.fuse(warp_i, warp_j), "threadIdx.y")
    schedule.unroll(row)
    schedule.unroll(column)
    schedule.tensorize(i, "tf32_store")


def _share(schedule: Schedule, loop: LoopRV, warps: int) -> None:
    """Spreads a loop over the lanes of `warps` warps, vectors innermost."""
    _, warp, lane, vector = schedule.split(loop, [None, warps, intrinsics.WARP, VECTOR])
    if warps > 1:
        schedule.bind(warp, "threadIdx.y")
    schedule.bind(lane, "threadIdx.x")
    schedule.vectorize(vector)
