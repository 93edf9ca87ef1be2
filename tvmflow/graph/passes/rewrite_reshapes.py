"""Reshapes that move no data, in modules of symbolic sizes too."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmflow.graph.mutation import mutated

RESHAPE = "T_reshape"  # the block that TVM makes of a reshape


@tvm.transform.module_pass(opt_level=0, name="RewriteReshapes")
class RewriteReshapes:
    """TVM's RewriteDataflowReshape, but for the kernels that it cannot judge: of some symbolic sizes it raises.

    Those of them that are nothing but a reshape become one here; TVM could not compile them either.
    """

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        strange = {var: f for var, f in mod.functions.items() if isinstance(f, tirx.PrimFunc) and not _can_judge(f)}
        lone = {var for var, function in strange.items() if _blocks(function) == [RESHAPE]}
        if lone:
            mod = mutated(mod, lambda module: _Reshaper(module, {var.name_hint for var in lone}))
        hidden = tvm.IRModule({var: f for var, f in mod.functions.items() if var not in lone}, attrs=mod.attrs)
        strange = {var: function for var, function in strange.items() if var not in lone}
        for var, function in strange.items():
            hidden[var] = function.with_body(tirx.Evaluate(0))
        result = relax.transform.RewriteDataflowReshape()(hidden)
        for var, function in strange.items():
            result[var] = function
        return result


def _can_judge(function: tirx.PrimFunc) -> bool:
    try:
        relax.analysis.has_reshape_pattern(function)
    except RuntimeError:
        return False
    return True


def _blocks(function: tirx.PrimFunc) -> list[str]:
    """The names of a kernel's blocks but the root."""
    names: list[str] = []
    tvm_ffi.structural_walk(function.body, (tvm.s_tir.SBlock, lambda block: names.append(str(block.name_hint))))
    return [name for name in names if name != "root"]


@mutator
class _Reshaper(PyExprMutator):  # type: ignore[misc] # TVM has no types
    """Makes a reshape of each call of the kernels of these names."""

    def __init__(self, mod: tvm.IRModule, names: set[str]) -> None:
        super().__init__(mod)
        self._names = names

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if getattr(call.op, "name", "") != "relax.call_tir" or call.args[0].name_hint not in self._names:
            return call
        return relax.op.reshape(call.args[1][0], call.ty_args[0].shape)
