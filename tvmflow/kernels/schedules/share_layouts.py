"""Weights that kernels of several shapes read: all want them in one layout, which follows from the weights alone."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm.s_tir import Schedule
from tvm.tirx import PrimFunc

from tvmflow.kernels.schedules import default_schedule, repacking
from tvmflow.kernels.schedules.blocking import SHARED_ATTR


@tvm.transform.module_pass(opt_level=0, name="ShareLayouts")
class ShareLayouts:
    """Says of each kernel with weights that other shapes of it read them too; part of what its key stands for."""

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        functions = {var: _shared(function) for var, function in mod.functions.items()}
        return tvm.IRModule(functions, attrs=mod.attrs)


def _shared(function: tvm.ir.BaseFunc) -> tvm.ir.BaseFunc:
    has_weights = isinstance(function, PrimFunc) and "layout_free_buffers" in (function.attrs or {})
    return function.with_attr(SHARED_ATTR, True) if has_weights else function


def are_wanted(function: PrimFunc) -> bool:
    return SHARED_ATTR in (function.attrs or {})


def alone(function: PrimFunc) -> PrimFunc:
    """The function as it is where no other shape reads its weights."""
    return function.without_attr(SHARED_ATTR)


def of(function: PrimFunc) -> frozenset[tuple[int, int]]:
    """Which of a scheduled function's parameters are repacked, and a hash of the layout that each gets."""
    places = {param: index for index, param in enumerate(function.params)}
    return frozenset(
        (places[block.reads[0].source], tvm_ffi.structural_hash(block, map_free_vars=True))
        for block in repacking.blocks(function)
    )


def of_default(function: PrimFunc) -> frozenset[tuple[int, int]]:
    """The same of a function's default schedule, which all shapes of it follow."""
    schedule: Schedule = default_schedule.schedule_of(tvm.IRModule({"main": function}))[0]
    return of(schedule.mod["main"])
