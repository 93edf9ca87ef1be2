"""Takes the weights out of a module, so that a library is code and its weights are a file of their own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

SMALLEST_BYTES = 64  # smaller constants stay in the library: a parameter costs more than they do


@tvm.transform.module_pass(opt_level=0, name="TakeWeightsOut")
class TakeWeightsOut:
    """Makes the weights parameters of `main` behind its inputs, and hands them to `on_weights` in that order."""

    def __init__(self, on_weights: Callable[[tuple[tvm.runtime.Tensor, ...]], None]) -> None:
        self._on_weights = on_weights

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        stripped, weights = take_weights_out(mod)
        self._on_weights(weights)
        return stripped


def take_weights_out(mod: tvm.IRModule) -> tuple[tvm.IRModule, tuple[tvm.runtime.Tensor, ...]]:
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
