"""Rewriting every Relax function of a module with one mutator."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator


def mutated(mod: tvm.IRModule, make: Callable[[tvm.IRModule], PyExprMutator]) -> tvm.IRModule:
    """The module that the mutator of `make` builds: all of its Relax functions visited, its kernels as they are."""
    visitor = make(mod)
    for var, function in mod.functions.items():
        if isinstance(function, relax.Function):
            visitor.builder_.update_func(var, visitor.visit_expr(function))
    return visitor.builder_.get()
