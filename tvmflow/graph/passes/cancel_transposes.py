"""Pairs of transposes that undo each other, as changing layouts leaves them behind."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmflow.graph.mutation import mutated


@tvm.transform.module_pass(opt_level=0, name="CancelTransposes")
class CancelTransposes:
    """A transpose of a transpose that restores the order of the axes is what went into the first."""

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return mutated(mod, _Canceller)


@mutator
class _Canceller(PyExprMutator):  # type: ignore[misc] # TVM has no types
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        second = axes_of(call)
        if second is None or not isinstance(call.args[0], relax.Var):
            return call
        source: relax.Expr = self.lookup_binding(call.args[0])
        first = axes_of(source)
        return source.args[0] if first is not None and undoes(first, second) else call


def undoes(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    """Whether a transpose by `second` restores the order of axes that one by `first` changed."""
    return [first[axis] for axis in second] == sorted(first)


def axes_of(value: object) -> tuple[int, ...] | None:
    """The order in which a transpose puts the axes of its input; None for another operator, or an unknown rank."""
    if not isinstance(value, relax.Call) or getattr(value.op, "name", "") != "relax.permute_dims":
        return None
    rank = int(value.args[0].ty.ndim)
    if rank < 0:
        return None
    axes = value.attrs.axes
    return tuple(reversed(range(rank))) if axes is None else tuple(int(axis) % rank for axis in axes)
