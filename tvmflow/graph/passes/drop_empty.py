"""Tensors without elements.

TVM's arithmetic on their loops divides by zero, and it cannot load a constant that is one.
"""

from __future__ import annotations

import tvm
from tvm import relax, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmflow.graph.mutation import mutated

# Operators that write their third operand into their first.
WRITES = frozenset({"relax.scatter_elements", "relax.scatter_nd", "relax.index_put"})


@tvm.transform.module_pass(opt_level=0, name="DropEmpty")
class DropEmpty:
    """A value without elements becomes memory that nothing writes; an operator that would write it changes nothing."""

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return mutated(mod, _Dropper) if any(map(_holds_empty, mod.functions.values())) else mod


@mutator
class _Dropper(PyExprMutator):  # type: ignore[misc] # TVM has no types
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if getattr(call.op, "name", "") in WRITES and is_empty(call.args[2].ty):
            return call.args[0]
        return _allocated(call.ty) if is_empty(call.ty) else call

    def visit_generic_const_(self, constant: tvm.ir.GenericConst) -> relax.Expr:
        return _allocated(constant.ty) if is_empty(constant.ty) else constant

    def visit_tuple_getitem_(self, item: relax.TupleGetItem) -> relax.Expr:
        return _allocated(item.ty) if is_empty(item.ty) else self.visit_expr_post_order(item)


def is_empty(typed: object) -> bool:
    """Whether a type is that of a tensor of known sizes, one of which is 0."""
    if not isinstance(typed, relax.TensorType) or not isinstance(typed.shape, relax.ShapeExpr):
        return False
    sizes = [int(size) if isinstance(size, tirx.IntImm) else None for size in typed.shape]
    return 0 in sizes and None not in sizes


def _holds_empty(function: tvm.ir.BaseFunc) -> bool:
    found: list[object] = []
    if isinstance(function, relax.Function):
        relax.analysis.post_order_visit(function, lambda node: found.append(node) if is_empty(node.ty) else None)
    return bool(found)


def _allocated(typed: relax.TensorType) -> relax.Expr:
    return relax.op.builtin.alloc_tensor(typed.shape, str(typed.dtype), runtime_device_index=0)
