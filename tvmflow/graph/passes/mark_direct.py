"""Direct convolutions that can be told from one another after fusion, to be measured beside Winograd's."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.s_tir import Schedule
from tvm.tirx import PrimFunc

from tvmflow.graph.mutation import mutated
from tvmflow.graph.passes.winograd import shape_of
from tvmflow.kernels.schedules.axes import blocks_of
from tvmflow.kernels.winograd import minimal_filtering

SHAPE_ATTR = "tvmflow.shape"  # on the last block of a direct convolution that is to be found again after fusion


@tvm.transform.module_pass(opt_level=0, name="MarkDirect")
class MarkDirect:
    """Makes the convolutions that Winograd's method could serve direct kernels, marked with their shapes."""

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return mutated(mod, _Marker)


@mutator
class _Marker(PyExprMutator):  # type: ignore[misc] # TVM has no types
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        shape = shape_of(call)
        if shape is None or not minimal_filtering.fits(shape):
            return call
        legal = call.op.get_attr("FLegalize")(self.builder_, call)
        made = Schedule(tvm.IRModule({"main": self.builder_.get()[legal.args[0]]}), debug_mask="none")
        made.annotate(blocks_of(made)[-1], SHAPE_ATTR, str(shape))
        return relax.call_tir(self.builder_.add_func(made.mod["main"], "conv2d"), legal.args[1], call.ty)


def unmarked(function: PrimFunc) -> tuple[PrimFunc, str | None]:
    """A function without the mark that `MarkDirect` made, and that, if there was one."""
    made = Schedule(tvm.IRModule({"main": function}), debug_mask="none")
    for block in blocks_of(made):
        if (mark := made.get(block).annotations.get(SHAPE_ATTR)) is not None:
            made.unannotate(block, SHAPE_ATTR)
            return made.mod["main"], str(mark)
    return function, None
