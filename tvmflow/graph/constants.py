"""Takes the weights out of a module, so that a library is code and its weights are a file of their own."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

SMALLEST_BYTES = 64  # smaller constants stay in the library: a parameter costs more than they do


def externalise(mod: tvm.IRModule) -> tuple[tvm.IRModule, tuple[tvm.runtime.Tensor, ...]]:
    """Turns every constant of `main` of at least `SMALLEST_BYTES` into a further parameter.

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

    def visit_generic_const_(self, op: tvm.ir.GenericConst) -> relax.Expr:
        if op.value.numpy().nbytes < SMALLEST_BYTES:
            return op
        param = relax.Var(f"constant_{len(self.params)}", op.ty)
        self.params.append(param)
        self.constants.append(op.value)
        return param
