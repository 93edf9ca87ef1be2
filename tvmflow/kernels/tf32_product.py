"""Float32 matrix products and convolutions on TF32 tensor cores: the default schedule.

    for tiles of rows x columns            thread blocks
      for tiles of k                       both operands' tiles to shared memory, zeros where they reach outside
        for steps of k                     warps x fragments of 16 x 16 in registers, 8 of k at a time
      for rows of fragments                to shared memory, and from there with what follows to global memory

A convolution is the product of its windows (images x places) x (window x channels) by its filters, none of which is
stored. Tiles have in shared memory the order that their operand has in global memory, so that both are read in rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir.dlight.gpu.matmul import IterKind, IterTrait, detect_iter_traits, make_iter_fusion_index_map
from tvm.s_tir.schedule import LoopRV, SBlockRV, ScheduleError
from tvm.tirx import IntImm, PrimFunc

from tvmflow.kernels import tf32
from tvmflow.kernels.axes import blocks_of, lone_reduction
from tvmflow.kernels.default import RULE_ATTR

SMALLEST = 16  # rows, columns or depth below which padding would be most of the product
DEPTH = 32  # of a tile
# Rows and columns of a tile, and the warps that share it, the largest first: the more, the more often each element
# read from memory is used.
TILES = (((128, 128), (2, 4)), ((64, 128), (2, 4)), ((64, 64), (2, 2)), ((32, 64), (2, 2)), ((32, 32), (2, 2)))
ENOUGH = 100  # thread blocks: about as many as a GPU of this class has processors
VECTOR = 4  # elements of 16 bytes
S, I, J, K = IterKind.kIter_S, IterKind.kIter_I, IterKind.kIter_J, IterKind.kIter_K
Block: TypeAlias = SBlockRV


@dataclass(frozen=True)
class Product:
    """C[s, i, j] = sum over k of A[s, i, k] * B[s, j, k]: the axes of a block in these terms.

    `..._by_k` say whether an operand's memory runs along another axis than k, `by_column` the result's along i.
    """

    block: Block
    axes: list[IterTrait]
    a_by_k: bool
    b_by_k: bool
    c_by_column: bool

    def extent(self, kind: IterKind) -> int:
        return math.prod(int(axis.extent) for axis in self.axes if axis.kind == kind)

    @property
    def flop(self) -> int:
        return 2 * math.prod(int(axis.extent) for axis in self.axes)


def find(schedule: Schedule) -> Product | None:
    """The product of a function that is one, with at most elementwise blocks around it; None for any other."""
    blocks = blocks_of(schedule)
    place = lone_reduction(schedule, blocks)
    if place is None:
        return None
    block = schedule.get(blocks[place])
    if not all(isinstance(axis.dom.extent, IntImm) for axis in block.iter_vars):
        return None
    if any(str(region.source.ty.dtype) != "float32" for region in [*block.reads, *block.writes]):
        return None
    traits = detect_iter_traits(block)
    if traits is None:
        return None
    *_, axes = traits
    kinds = {axis.var: trait.kind for axis, trait in zip(block.iter_vars, axes, strict=True)}
    last = [_innermost(region, kinds) for region in [*block.reads, *block.writes]]
    found = Product(blocks[place], axes, last[0] != K, last[1] != K, last[2] == I)
    return found if min(found.extent(kind) for kind in (I, J, K)) >= SMALLEST else None


def _innermost(region: Any, kinds: dict[Any, IterKind]) -> IterKind:
    """The kind of axis along which memory runs in a region; of several, the last spatial one."""
    wide = [index.min for index, size in zip(region.region, region.source.ty.shape, strict=True) if int(size) > 1]
    found = [kinds[var] for var in tvm.tirx.analysis.undefined_vars(wide[-1]) if var in kinds] if wide else []
    return next((kind for kind in found if kind in (I, J)), K)


@tvm.transform.module_pass(opt_level=0, name="ScheduleTf32")
class ScheduleTf32:
    """Schedules every product of a module that has no schedule yet; what is none keeps its loops."""

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        functions = dict(mod.functions.items())
        for var, function in mod.functions.items():
            if isinstance(function, PrimFunc) and "tirx.is_scheduled" not in (function.attrs or {}):
                schedule, rule = schedule_of(tvm.IRModule({"main": function}))
                if rule:
                    functions[var] = schedule.mod["main"].with_attrs({RULE_ATTR: rule, "tirx.is_scheduled": True})
        return tvm.IRModule(functions, attrs=mod.attrs)


def schedule_of(mod: tvm.IRModule) -> tuple[Schedule, str]:
    """The schedule of a module's `main` on tensor cores, and the name of its rule, which is "" where it is no product.
    """
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
    tile, warps = _sizes(product)
    blocks = blocks_of(schedule)
    place = next(n for n, block in enumerate(blocks) if schedule.get(block).same_as(schedule.get(product.block)))
    for block in blocks[place + 1 : -1]:
        schedule.compute_inline(block)
    last = blocks[-1] if len(blocks) > place + 1 else None
    _normalise(schedule, product, (*tile, DEPTH))
    _schedule(schedule, product, tile, warps)
    return f"tf32 {'x'.join(map(str, (*tile, DEPTH)))}"


def _sizes(product: Product) -> tuple[tuple[int, int], tuple[int, int]]:
    """The largest tile with which there are enough thread blocks, else the smallest."""
    def count(tile: tuple[int, int]) -> int:
        return product.extent(S) * math.ceil(product.extent(I) / tile[0]) * math.ceil(product.extent(J) / tile[1])

    return next((shape for shape in TILES if count(shape[0]) >= ENOUGH), TILES[-1])


def _normalise(schedule: Schedule, product: Product, tile: tuple[int, int, int]) -> None:
    """Gives the product the axes s, i, j, k, in multiples of a tile, and its operands copies in order."""
    block = product.block
    a, b, c = (schedule.reindex(block, at) for at in (("read", 0), ("read", 1), ("write", 0)))
    order_a = [S, K, I] if product.a_by_k else [S, I, K]
    order_b = [S, K, J] if product.b_by_k else [S, J, K]
    axes_a, axes_b, axes_c, axes = detect_iter_traits(schedule.get(block))
    schedule.transform_layout(a, ("write", 0), make_iter_fusion_index_map(axes_a, order_a))
    schedule.transform_layout(b, ("write", 0), make_iter_fusion_index_map(axes_b, order_b))
    schedule.transform_layout(c, ("read", 0), make_iter_fusion_index_map(axes_c, [S, I, J]))
    schedule.transform_block_layout(block, make_iter_fusion_index_map(axes, [S, I, J, K]))
    schedule.pad_einsum(block, [1, *tile])


def _schedule(schedule: Schedule, product: Product, tile: tuple[int, int], warps: tuple[int, int]) -> None:
    rows, columns = tile[0] // warps[0] // tf32.M, tile[1] // warps[1] // tf32.N
    names = tf32.group(product.a_by_k, product.b_by_k)
    batch, i, j, k = schedule.get_loops(product.block)
    i0, i1, i2, i3 = schedule.split(i, [None, warps[0], rows, tf32.M])
    j0, j1, j2, j3 = schedule.split(j, [None, warps[1], columns, tf32.N])
    k0, k1, k2 = schedule.split(k, [None, DEPTH // tf32.K, tf32.K])
    schedule.reorder(batch, i0, j0, i1, j1, k0, k1, i2, j2, i3, j3, k2)
    outer = schedule.blockize(i3)
    schedule.bind(schedule.fuse(batch, i0), "blockIdx.x")
    schedule.bind(j0, "blockIdx.y")
    schedule.bind(schedule.fuse(i1, j1), "threadIdx.y")
    for loop in (k1, i2, j2):
        schedule.unroll(loop)
    for index, by_k in enumerate((product.a_by_k, product.b_by_k)):
        shared = schedule.cache_read(outer, index, tf32.SHARED)
        schedule.compute_at(shared, k0, preserve_unit_loops=True)
        _inline_producers(schedule, shared)
        _share(schedule, schedule.fuse(*schedule.get_loops(shared)[-2:]), math.prod(warps))
        schedule.storage_align(shared, 0, axis=-2, factor=32, offset=tf32.bank_offset(by_k))
        fragment = schedule.cache_read(outer, index, "local")
        schedule.compute_at(fragment, k1, preserve_unit_loops=True)
        inside = _tile(schedule, fragment, (tf32.K, tf32.M) if by_k else (tf32.M, tf32.K))
        schedule.tensorize(inside, names["load_a" if index == 0 else "load_b"])
    _write(schedule, outer, j0, (rows, columns), names["store"], product.c_by_column)
    init = schedule.decompose_reduction(outer, k0)
    schedule.tensorize(schedule.get_loops(schedule.get_child_blocks(init)[0])[-2], names["init"])
    schedule.tensorize(schedule.get_loops(product.block)[-3], names["compute"])


def _write(schedule, outer, place, fragments, intrinsic, by_column) -> None:
    rows, columns = fragments
    schedule.transform_layout(outer, ("write", 0), lambda s, i, j: (
        s, i // (16 * rows), j // (16 * columns), i // 16 % rows, j // 16 % columns, i % 16, j % 16))
    written = schedule.cache_write(outer, 0, tf32.SHARED)
    schedule.reverse_compute_at(written, place, preserve_unit_loops=True)
    store = schedule.cache_write(outer, 0, "local")
    warp_i, warp_j, row, column, i, j = schedule.get_loops(written)[-6:]
    order = (column, j, i) if by_column else (i, column, j)
    schedule.reorder(row, warp_i, warp_j, *order)
    schedule.compute_at(store, row, preserve_unit_loops=True)
    _inline_consumers(schedule, written)  # last, because computing it elsewhere would lose the condition of its edges
    schedule.bind(schedule.fuse(warp_i, warp_j), "threadIdx.y")
    _share(schedule, schedule.fuse(*order), 1)
    warp_i, warp_j, _, column, i, _ = schedule.get_loops(store)[-6:]
    schedule.bind(schedule.fuse(warp_i, warp_j), "threadIdx.y")
    schedule.unroll(column)
    schedule.unroll(row)
    schedule.tensorize(i, intrinsic)


def _inline_producers(schedule, block):
    while producers := schedule.get_producers(block):
        for producer in producers:
            schedule.compute_inline(producer)


def _inline_consumers(schedule, block):
    while consumers := schedule.get_consumers(block):
        schedule.reverse_compute_inline(consumers[0])


def _share(schedule: Schedule, loop: LoopRV, warps: int) -> None:
    """Spreads a loop over the lanes of `warps` warps, vectors innermost."""
    _, warp, lane, vector = schedule.split(loop, [None, warps, tf32.WARP, VECTOR])
    if warps > 1:
        schedule.bind(warp, "threadIdx.y")
    schedule.bind(lane, "threadIdx.x")
    schedule.vectorize(vector)


def _tile(schedule: Schedule, block: Block, shape: tuple[int, int]) -> LoopRV:
    """Tiles a copy; returns the outer one of the loops over a tile."""
    *_, i, j = schedule.get_loops(block)
    i0, i1 = schedule.split(i, [None, shape[0]])
    j0, j1 = schedule.split(j, [None, shape[1]])
    schedule.reorder(i0, j0, i1, j1)
    schedule.unroll(i0)
    schedule.unroll(j0)
    return i1
