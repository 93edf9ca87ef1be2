"""Default schedules on a CPU: for every kernel that was never tuned, deterministic and without measuring.

Without one, TVM emits the loops as legalised: one thread, scalar, each partial sum through memory. The rules for whole
functions come first:

    depthwise tile     depthwise convolutions and pooling: columns x channels in registers, padding as a condition
    product blocking   matrix products and convolutions: register and cache blocking, weights packed for it
    rows               softmax, normalisation, reductions along the last axes: one pass over each row
    columns            reductions along a middle axis, with what is computed before them

Then each block on its own:

    elementwise        all axes fused, blocks in parallel, SIMD-wide vectors innermost
    register tile      a reduction's rows x vectors, accumulated in registers over the whole reduction
    parallel rows      a reduction without vectors
"""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ScheduleError
from tvm.tirx import IterVar, PrimFunc

from tvmflow.kernels.schedules import blocking, columns, depthwise, elementwise, rows
from tvmflow.kernels.schedules.axes import (
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
from tvmflow.kernels.schedules.elementwise import parallel, schedule_elementwise
from tvmflow.kernels.schedules.lowering import can_lower, is_symbolic

RULE_ATTR = "tvmflow.rule"  # on a scheduled function: which rule made its schedule
KEY_ATTR = "tvmflow.key"  # on a function that can be tuned: its key
GFLOPS_ATTR = "tvmflow.gflops"  # on a function with a record's schedule: its speed when tuned
UNSCHEDULED = "loops as legalised"
ACCUMULATORS = 24  # registers that a tile may hold of the 32 that AVX-512 has
MAX_ROWS = 14


@tvm.transform.module_pass(opt_level=0, name="DefaultSchedule")
class DefaultSchedule:
    """Schedules every kernel of a module that has no schedule yet; one that no rule fits keeps its loops."""

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        functions = {var: scheduled(f) if is_open(f) else f for var, f in mod.functions.items()}
        return tvm.IRModule(functions, attrs=mod.attrs)


def scheduled(function: PrimFunc) -> PrimFunc:
    """The function under the default rules, its RULE_ATTR saying which; itself where none fits."""
    schedule, rule = schedule_of(tvm.IRModule({"main": function}))
    if rule == UNSCHEDULED:
        return function.with_attr(RULE_ATTR, UNSCHEDULED)
    return schedule.mod["main"].with_attrs({RULE_ATTR: rule, "tirx.is_scheduled": True})


def schedule_of(mod: tvm.IRModule) -> tuple[Schedule, str]:
    """The default schedule of a module's `main` for the current target, and the names of the rules it follows."""
    symbolic = is_symbolic(mod["main"])
    # Of symbolic sizes TVM also raises other errors than that a primitive does not apply to this kernel.
    misfit = (ScheduleError, RuntimeError) if symbolic else ScheduleError
    for rule in RULES:
        schedule = Schedule(mod, debug_mask="none")
        try:
            name = rule(schedule)
        except misfit:
            continue
        if name and (not symbolic or can_lower(schedule.mod["main"])):
            return schedule, name
    return Schedule(mod, debug_mask="none"), UNSCHEDULED


def block_by_block(schedule: Schedule) -> str:
    """Schedules each block of the function on its own; raises ScheduleError."""
    rules = [_schedule_block(schedule, block) for block in blocks_of(schedule)]
    return " + ".join(dict.fromkeys(rules)) or UNSCHEDULED


# Tried in order; each schedules a whole function and returns its name, or "" where it does not fit.
RULES: tuple[Callable[[Schedule], str], ...] = (
    depthwise.apply,
    blocking.apply,
    rows.apply,
    columns.apply,
    elementwise.apply,
    block_by_block,
)


def is_open(function: tvm.ir.BaseFunc) -> bool:
    """Whether a function is a kernel that has no schedule yet."""
    return isinstance(function, PrimFunc) and "tirx.is_scheduled" not in (function.attrs or {})


def _schedule_block(schedule: Schedule, block: tvm.s_tir.schedule.SBlockRV) -> str:
    kinds = axis_kinds(schedule, block)
    if kinds == {IterVar.DataPar}:
        return schedule_elementwise(schedule, block)
    if kinds == {IterVar.DataPar, IterVar.CommReduce}:
        return _reduction(schedule, block)
    return UNSCHEDULED


def _reduction(schedule: Schedule, block: tvm.s_tir.schedule.SBlockRV) -> str:
    axes = axes_of(schedule, block)
    spatial = [axis for axis in axes if not axis.is_reduction]
    vector = vector_axis(schedule, block, spatial)
    if vector is None:
        parallel(schedule, [axis.loop for axis in spatial], 1)
        # Apart, so that it also happens where the reduction turns out to be empty.
        schedule.decompose_reduction(block, next(axis.loop for axis in axes if axis.is_reduction))
        return "parallel rows"
    _register_tile(schedule, block, axes, vector)
    return "register tile"


def _register_tile(schedule: Schedule, block: tvm.s_tir.schedule.SBlockRV, axes: list[Axis], vector: Axis) -> None:
    """Tiles rows x vectors, accumulates the tile in a local buffer, and initialises it apart from the reduction."""
    lanes = width(vector.extent)
    most = min(MAX_ROWS, ACCUMULATORS // -(-lanes // LANES))

    def worth(axis: Axis) -> tuple[bool, int]:
        return is_outer_product(schedule, block, axis, vector), divisor(axis.extent, most)

    rest = [axis for axis in axes if not axis.is_reduction and axis is not vector]
    row = max(rest, key=worth, default=None)
    outer = [axis.loop for axis in rest if axis is not row]
    inner = []
    if row is not None:
        rows, within = schedule.split(row.loop, [None, divisor(row.extent, most)])
        outer.append(rows)
        inner.append(within)
    vectors, lane = schedule.split(vector.loop, [None, lanes])
    outer.append(vectors)
    reductions = [axis.loop for axis in axes if axis.is_reduction]
    schedule.reorder(*outer, *reductions, *inner, lane)
    written = schedule.cache_write(block, 0, "global")
    threads = parallel(schedule, outer, lanes * 64)
    schedule.reverse_compute_at(written, threads, preserve_unit_loops=True)
    for loop in inner:
        schedule.unroll(loop)
    schedule.vectorize(lane)
    schedule.vectorize(schedule.get_loops(written)[-1])
    schedule.decompose_reduction(block, reductions[0])
