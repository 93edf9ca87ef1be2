"""Around what ConvertLayout of TVM fails on, or reads strange memory for: stacks, and axes counted from behind."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmflow.graph.mutation import mutated


@tvm.transform.module_pass(opt_level=0, name="AvoidLayoutFaults")
class AvoidLayoutFaults:
    """A stack is a concatenation along a new axis; squeezes and transposes count their axes from the front."""

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return mutated(mod, _Avoider)


@mutator
class _Avoider(PyExprMutator):  # type: ignore[misc] # TVM has no types
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        name = getattr(call.op, "name", "")
        if name not in ("relax.stack", "relax.squeeze", "relax.permute_dims"):
            return call
        operand = call.args[0]
        if name == "relax.stack" and isinstance(operand, relax.Tuple):
            axis = int(call.attrs.axis or 0) % int(call.ty.ndim)
            parts = [self.builder_.emit(relax.op.expand_dims(part, axis)) for part in operand.fields]
            return relax.op.concat(parts, axis)
        if name == "relax.squeeze" and _any_from_behind(call.attrs.axis):
            return relax.op.squeeze(operand, [int(axis) % int(operand.ty.ndim) for axis in call.attrs.axis])
        if name == "relax.permute_dims" and _any_from_behind(call.attrs.axes):
            return relax.op.permute_dims(operand, [int(axis) % int(operand.ty.ndim) for axis in call.attrs.axes])
        return call


def _any_from_behind(axes: Sequence[int] | None) -> bool:
    return axes is not None and any(int(axis) < 0 for axis in axes)
