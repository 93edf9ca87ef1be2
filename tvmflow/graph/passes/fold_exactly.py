"""Computes what depends on weights alone, where the result is exact."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.tirx import FloatImm, IntImm

from tvmflow.graph.mutation import mutated

VIEWS = ("relax.permute_dims", "relax.reshape", "relax.expand_dims", "relax.squeeze")
EXACT = {
    "relax.add": np.add,
    "relax.subtract": np.subtract,
    "relax.multiply": np.multiply,
    "relax.divide": np.divide,
    "relax.sqrt": np.sqrt,
    "relax.negative": np.negative,
}


@tvm.transform.module_pass(opt_level=0, name="FoldExactly")
class FoldExactly:
    """Computes with numpy what depends on weights alone and has only one right result, to the last bit.

    Reshapes, transposes and IEEE 754's basic operations: what folding BatchNorm and changing layouts leave behind.
    TVM's FoldConstant would compile a kernel for each, which on a convolutional model takes most of a build.
    """

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return mutated(mod, _Folder)


@mutator
class _Folder(PyExprMutator):  # type: ignore[misc] # TVM has no types
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        name = str(getattr(call.op, "name", ""))
        if name not in VIEWS and name not in EXACT:
            return call
        args = [self.lookup_binding(arg) if isinstance(arg, relax.Var) else arg for arg in call.args]
        if name in VIEWS and isinstance(args[0], tvm.ir.GenericConst):
            return _view(call, name, args[0].value.numpy())
        if name in EXACT and all(_is_float32(arg) for arg in args):
            with np.errstate(all="ignore"):
                return relax.const(EXACT[name](*(_float32(arg) for arg in args)))
        return call


def _view(call: relax.Call, name: str, data: np.ndarray) -> relax.Expr:
    if name == "relax.permute_dims":
        axes = call.attrs.axes
        return relax.const(data.transpose(None if axes is None else [int(a) for a in axes]).copy(order="C"))
    shape = call.ty.shape
    if not isinstance(shape, relax.ShapeExpr) or not all(isinstance(d, IntImm) for d in shape.values):
        return call
    return relax.const(data.reshape([int(d) for d in shape.values]))


def _is_float32(arg: relax.Expr) -> bool:
    return isinstance(arg, tvm.ir.GenericConst | FloatImm) and str(arg.ty.dtype) == "float32"


def _float32(arg: relax.Expr) -> np.ndarray | np.float32:
    return np.float32(arg.value) if isinstance(arg, FloatImm) else arg.value.numpy()
