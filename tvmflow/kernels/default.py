"""Default schedules on a CPU: for every kernel that was never tuned, deterministic and without measuring.

Without one, TVM emits the loops as legalised: one thread, scalar, each partial sum through memory. Two rules:

    elementwise   all axes fused, blocks in parallel, SIMD-wide vectors innermost
    reduction     a register tile of rows x vectors per thread, accumulated in registers over the whole reduction
                  (the register blocking of Goto & van de Geijn 2008, without its cache blocking)
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ScheduleError
from tvm.tirx import IntImm, IterVar, PrimFunc, Var

RULE_ATTR = "tvmflow.rule"  # on a scheduled function: which rule made its schedule
KEY_ATTR = "tvmflow.key"  # on a function that can be tuned: its key
GFLOPS_ATTR = "tvmflow.gflops"  # on a function with a record's schedule: its speed when tuned
UNSCHEDULED = "loops as legalised"
LANES = 16  # elements of a vector: one AVX-512 or two AVX2 registers of float32
ACCUMULATORS = 24  # registers that a tile may hold of the 32 that AVX-512 has
MAX_ROWS = 14
SMALLEST_PARALLEL = 8192  # iterations below which waking the threads costs more than they save


@tvm.transform.module_pass(opt_level=0, name="DefaultSchedule")
class DefaultSchedule:
    """Schedules every kernel of a module that has no schedule yet; one that no rule fits keeps its loops."""

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        functions = {var: scheduled(f) if _is_open(f) else f for var, f in mod.functions.items()}
        return tvm.IRModule(functions, attrs=mod.attrs)


def scheduled(function: PrimFunc) -> PrimFunc:
    """The function under the default rules, its RULE_ATTR saying which; itself where TVM rejects them."""
    schedule = Schedule(tvm.IRModule({"main": function}), debug_mask="none")
    try:
        rule = apply(schedule)
    except ScheduleError:  # a primitive does not apply to this kernel
        return function.with_attr(RULE_ATTR, UNSCHEDULED)
    return schedule.mod["main"].with_attrs({RULE_ATTR: rule, "tirx.is_scheduled": True})


def apply(schedule: Schedule) -> str:
    """Transforms the function under `schedule` by the default rules and returns their names; raises ScheduleError."""
    rules = [_schedule_block(schedule, block) for block in _blocks(schedule)]
    return " + ".join(dict.fromkeys(rules)) or UNSCHEDULED


def _is_open(function: tvm.ir.BaseFunc) -> bool:
    return isinstance(function, PrimFunc) and "tirx.is_scheduled" not in (function.attrs or {})


def _blocks(schedule: Schedule) -> list[tvm.s_tir.schedule.SBlockRV]:
    return list(schedule.get_child_blocks(schedule.get_sblock("root")))


def _schedule_block(schedule: Schedule, block: tvm.s_tir.schedule.SBlockRV) -> str:
    kinds = {iter_var.iter_type for iter_var in schedule.get(block).iter_vars}
    if len(schedule.get_loops(block)) != len(schedule.get(block).iter_vars):
        return UNSCHEDULED  # a scalar, or loops that are no plain iteration over the block's axes
    if kinds == {IterVar.DataPar}:
        return _elementwise(schedule, block)
    if kinds == {IterVar.DataPar, IterVar.CommReduce}:
        return _reduction(schedule, block)
    return UNSCHEDULED


def _elementwise(schedule: Schedule, block: tvm.s_tir.schedule.SBlockRV) -> str:
    loops = schedule.get_loops(block)
    inner = 1 if _touches_bool(schedule, block) else _width(_extent(schedule, loops[-1]))
    outer = list(loops[:-1])
    if inner >= 4:
        middle, vector = schedule.split(loops[-1], [None, inner])
        schedule.vectorize(vector)
        outer.append(middle)
    else:
        outer.append(loops[-1])
    _parallel(schedule, outer, inner)
    return "elementwise"


def _touches_bool(schedule: Schedule, block: tvm.s_tir.schedule.SBlockRV) -> bool:
    """Whether a block reads or writes a buffer of booleans: TVM's vectors of them are wrong for intermediate buffers.

    It takes their bytes for single bits, so that `not` gives 0xFE and `or` does not compile. Inlining them is no way
    out: `not x == y` becomes an ordered `x != y`, which is false for NaN.
    """
    regions = [*schedule.get(block).reads, *schedule.get(block).writes]
    return any(str(region.source.ty.dtype) == "bool" for region in regions)


def _reduction(schedule: Schedule, block: tvm.s_tir.schedule.SBlockRV) -> str:
    pairs = zip(schedule.get_loops(block), schedule.get(block).iter_vars, strict=True)
    axes = [_Axis.of(schedule, loop, iter_var) for loop, iter_var in pairs]
    spatial = [axis for axis in axes if not axis.is_reduction]
    vector = None if _touches_bool(schedule, block) else _vector_axis(schedule, block, spatial)
    if vector is None:
        _parallel(schedule, [axis.loop for axis in spatial], 1)
        # Apart, so that it also happens where the reduction turns out to be empty.
        schedule.decompose_reduction(block, next(axis.loop for axis in axes if axis.is_reduction))
        return "parallel rows"
    _register_tile(schedule, block, axes, vector)
    return "register tile"


def _register_tile(
    schedule: Schedule, block: tvm.s_tir.schedule.SBlockRV, axes: list[_Axis], vector: _Axis
) -> None:
    """Tiles rows x vectors, accumulates the tile in a local buffer, and initialises it apart from the reduction."""
    width = _width(vector.extent)
    most = min(MAX_ROWS, ACCUMULATORS // -(-width // LANES))

    def worth(axis: _Axis) -> tuple[bool, int]:
        return _is_outer_product(schedule, block, axis, vector), _divisor(axis.extent, most)

    rest = [axis for axis in axes if not axis.is_reduction and axis is not vector]
    row = max(rest, key=worth, default=None)
    outer = [axis.loop for axis in rest if axis is not row]
    inner = []
    if row is not None:
        rows, within = schedule.split(row.loop, [None, _divisor(row.extent, most)])
        outer.append(rows)
        inner.append(within)
    vectors, lane = schedule.split(vector.loop, [None, width])
    outer.append(vectors)
    reductions = [axis.loop for axis in axes if axis.is_reduction]
    schedule.reorder(*outer, *reductions, *inner, lane)
    written = schedule.cache_write(block, 0, "global")
    threads = _parallel(schedule, outer, width * 64)
    schedule.reverse_compute_at(written, threads, preserve_unit_loops=True)
    for loop in inner:
        schedule.unroll(loop)
    schedule.vectorize(lane)
    schedule.vectorize(schedule.get_loops(written)[-1])
    schedule.decompose_reduction(block, reductions[0])


@dataclass(frozen=True)
class _Axis:
    """One loop of a reduction: its block variable, its extent (1 where symbolic), and whether it is reduced."""

    loop: tvm.s_tir.schedule.LoopRV
    var: Var
    extent: int
    is_reduction: bool

    @staticmethod
    def of(schedule: Schedule, loop: tvm.s_tir.schedule.LoopRV, iter_var: IterVar) -> _Axis:
        return _Axis(loop, iter_var.var, _extent(schedule, loop), iter_var.iter_type == IterVar.CommReduce)


def _vector_axis(
    schedule: Schedule, block: tvm.s_tir.schedule.SBlockRV, spatial: list[_Axis]
) -> _Axis | None:
    """The axis whose neighbours lie next to each other in the output and in all that is read; None without one."""
    statement = schedule.get(block)
    for axis in reversed(spatial):
        if _width(axis.extent) < 4:
            continue
        written_last = _position(statement.writes[0], axis.var) == "last"
        read_well = all(_position(region, axis.var) != "earlier" for region in statement.reads)
        if written_last and read_well:
            return axis
    return None


def _is_outer_product(schedule: Schedule, block: tvm.s_tir.schedule.SBlockRV, row: _Axis, vector: _Axis) -> bool:
    """Whether rows and vectors are read from different buffers, so that each load serves a whole row or column."""
    reads = schedule.get(block).reads
    return not any(_position(r, row.var) != "nowhere" and _position(r, vector.var) != "nowhere" for r in reads)


def _position(region: tvm.s_tir.BufferRegion, var: Var) -> str:
    """Where a buffer's indices use a variable: in the "last" axis, in an "earlier" one, or "nowhere".

    Axes of size 1 do not count: 1x64x512x1 is as good as 64x512.
    """
    wide = [
        index for index, size in zip(region.region, region.source.ty.shape, strict=True)
        if not (isinstance(size, IntImm) and int(size) == 1)
    ]  # fmt: skip
    holds = [any(v.same_as(var) for v in tvm.tirx.analysis.undefined_vars(index.min)) for index in wide]
    if any(holds[:-1]):
        return "earlier"
    return "last" if holds and holds[-1] else "nowhere"


def _parallel(schedule: Schedule, loops: list[tvm.s_tir.schedule.LoopRV], work: int) -> tvm.s_tir.schedule.LoopRV:
    """Fuses the loops and spreads them over the threads where there is enough `work` (iterations below them)."""
    fused = schedule.fuse(*loops) if len(loops) > 1 else loops[0]
    extent = _extent(schedule, fused)
    if extent == 1 or extent * work >= SMALLEST_PARALLEL:
        schedule.parallel(fused)
    return fused


def _extent(schedule: Schedule, loop: tvm.s_tir.schedule.LoopRV) -> int:
    extent = schedule.get(loop).extent
    return int(extent) if isinstance(extent, IntImm) else 1


def _width(extent: int) -> int:
    """The vector width for an axis: 4, 2 or 1 whole registers where they divide it, else the most of one register.

    Three registers as one vector cost LLVM a factor of ten: it knows powers of two.
    """
    return next((LANES * n for n in (4, 2, 1) if extent % (LANES * n) == 0), _divisor(extent, LANES))


def _divisor(extent: int, limit: int) -> int:
    return max(d for d in range(1, limit + 1) if extent % d == 0)
