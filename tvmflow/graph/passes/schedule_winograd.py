"""Schedules Winograd's kernels, once it is known what is fused into them."""

from __future__ import annotations

import tvm
from tvm.tirx import PrimFunc

from tvmflow.kernels.winograd import tir


@tvm.transform.module_pass(opt_level=0, name="ScheduleWinograd")
class ScheduleWinograd:
    """Schedules Winograd's kernels with what was fused into them."""

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        functions = {
            var: tir.schedule(function) if isinstance(function, PrimFunc) else function
            for var, function in mod.functions.items()
        }
        return tvm.IRModule(functions, attrs=mod.attrs)
