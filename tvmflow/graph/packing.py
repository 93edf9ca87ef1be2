"""Weights into the layout that their kernels' schedules ask for."""

from __future__ import annotations

import tvm
from tvm.relax import transform
from tvm.tirx import PrimFunc

REPACKING = "meta_schedule.layout_rewrite_preproc"  # on a block that repacks a weight before the kernel proper


@tvm.transform.module_pass(opt_level=0, name="SplitLayoutRewritePreproc")
class SplitRepacking:
    """Takes the repacking of weights out of their kernels, so that constant folding does it once.

    TVM's pass fails on kernels that are no plain block nest (a sort, say), so that it only runs where there is
    something to take out.
    """

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        wanted = any(_repacks(function) for function in mod.functions.values() if isinstance(function, PrimFunc))
        return transform.SplitLayoutRewritePreproc()(mod) if wanted else mod


def _repacks(function: PrimFunc) -> bool:
    return "tirx.is_scheduled" in function.attrs and REPACKING in function.script()
