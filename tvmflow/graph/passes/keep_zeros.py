"""Constants that TVM would compute with while it makes kernels, although what it says is not what IEEE 754 says.

`x * 0` would become 0, `x + 0` x, and `0 / x` 0, which is wrong for NaN, infinity and -0; `x / 0` would be an error.
TVM looks into scalars only, so that such a constant becomes a tensor of one element. The 0 that it makes of `x * 0` is
right for integers, but it cannot subtract from one without a sign.
"""

from __future__ import annotations

import math

import numpy as np
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmflow.graph.mutation import mutated

# By operator, the values of its first and of its second operand with which TVM computes what is not exact.
INEXACT: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "relax.add": ((0.0,), (0.0,)),
    "relax.subtract": ((), (-0.0,)),
    "relax.multiply": ((0.0, -0.0), (0.0, -0.0)),
    "relax.divide": ((0.0, -0.0), (0.0, -0.0)),
    "relax.floor_divide": ((0.0, -0.0), (0.0, -0.0, 1.0)),
    "relax.mod": ((0.0, -0.0), (0.0, -0.0, 1.0)),
    "relax.floor_mod": ((0.0, -0.0), (0.0, -0.0, 1.0)),
}


@tvm.transform.module_pass(opt_level=0, name="KeepZeros")
class KeepZeros:
    """Scalar constants become tensors where TVM would compute with them otherwise than at run time."""

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return mutated(mod, _Keeper)


@mutator
class _Keeper(PyExprMutator):  # type: ignore[misc] # TVM has no types
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        values = INEXACT.get(str(getattr(call.op, "name", "")))
        if values is None:
            return call
        dtypes = ("float", "bfloat", "uint") if call.op.name == "relax.multiply" else ("float", "bfloat")
        kept = [
            _is_one_of(self.lookup_binding(arg) if isinstance(arg, relax.Var) else arg, found, dtypes)
            for arg, found in zip(call.args, values, strict=True)
        ]
        if not any(kept):
            return call
        rank = max(int(arg.ty.ndim) for arg in call.args)
        shape = [1] * max(rank, 1)
        args = [
            self._tensor(arg, shape) if keep or rank == 0 else arg for arg, keep in zip(call.args, kept, strict=True)
        ]
        result = relax.Call(call.op, args, call.attrs, call.ty_args)
        return result if rank else relax.op.reshape(self.builder_.emit(result), [])

    def _tensor(self, value: relax.Expr, shape: list[int]) -> relax.Expr:
        known = self.lookup_binding(value) if isinstance(value, relax.Var) else value
        if isinstance(known, tvm.ir.GenericConst):
            return relax.const(known.value.numpy().reshape(shape), str(known.value.dtype))
        return self.builder_.emit(relax.op.reshape(value, shape))


def _is_one_of(value: relax.Expr, found: tuple[float, ...], dtypes: tuple[str, ...]) -> bool:
    """Whether a value is a scalar constant of such dtypes that is one of those, sign of zero included."""
    if not isinstance(value, tvm.ir.GenericConst) or not isinstance(value.ty, relax.TensorType) or value.ty.ndim != 0:
        return False
    if not str(value.ty.dtype).startswith(dtypes):
        return False
    number = float(np.asarray(value.value.numpy()).astype("float64"))
    return any(number == one and math.copysign(1, number) == math.copysign(1, one) for one in found)
