"""Takes the repacking of weights out of their kernels."""

from __future__ import annotations

import tvm
from tvm.relax import transform
from tvm.tirx import PrimFunc

from tvmflow.kernels.schedules import repacking


@tvm.transform.module_pass(opt_level=0, name="SplitRepacking")
class SplitRepacking:
    """Takes the repacking of weights out of their kernels, so that it can be done once, here.

    TVM's pass fails on kernels that are no plain block nest (a sort or running sum, say), so that it only gets to see
    those that have something to take out.
    """

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        others = {
            var: function
            for var, function in mod.functions.items()
            if isinstance(function, PrimFunc) and not _repacks(function)
        }
        rest = {var: function for var, function in mod.functions.items() if var not in others}
        if not any(isinstance(function, PrimFunc) for function in rest.values()):
            return mod
        split = transform.SplitLayoutRewritePreproc()(tvm.IRModule(rest, attrs=mod.attrs))
        split.update(others)
        return split


def _repacks(function: PrimFunc) -> bool:
    return "tirx.is_scheduled" in function.attrs and bool(repacking.blocks(function))
