"""Takes the weights out of a module, so that a library is code and its weights are a file of their own."""

from __future__ import annotations

import hashlib

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
SMALLEST_BYTES = 64  # smaller constants stay in the library: a parameter costs more than they do


def externalise(mod: tvm.IRModule) -> tuple[tvm.IRModule, tuple[tvm.runtime.Tensor, ...]]:
    """Turns every constant of `main` of at least `SMALLEST_BYTES` into a further parameter; equal ones become one.

    Returns the module and the constants, in the order of those parameters behind the inputs.
    """
    lifter = _Lifter(mod)
    main = mod["main"]
    body = lifter.visit_expr(main.body)
    lifted = relax.Function([*main.params, *lifter.params], body, main.ret_ty, main.is_pure, main.attrs)
    functions = {var: lifted if var.name_hint == "main" else function for var, function in mod.functions.items()}
    return tvm.IRModule(functions, attrs=mod.attrs), tuple(lifter.constants)


@mutator
class _Lifter(PyExprMutator):  # type: ignore[misc] # TVM has no types
    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self.params: list[relax.Var] = []
        self.constants: list[tvm.runtime.Tensor] = []
        self._lifted: dict[tuple[object, ...], relax.Var] = {}

    def visit_generic_const_(self, op: tvm.ir.GenericConst) -> relax.Expr:
        array = op.value.numpy() if isinstance(op.ty, relax.TensorType) else None
        if array is None or array.nbytes < SMALLEST_BYTES:
            return op
        content = (str(op.value.dtype), array.shape, hashlib.sha256(array.reshape(-1).view("uint8")).digest())
        if content in self._lifted:
            return self._lifted[content]
        param = relax.Var(f"constant_{len(self.params)}", op.ty)
        self.params.append(param)
        self.constants.append(op.value)
        self._lifted[content] = param
        return param


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
