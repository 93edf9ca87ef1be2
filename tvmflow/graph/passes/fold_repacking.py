"""Puts weights into the layout that their kernels' schedules ask for."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.s_tir import Schedule
from tvm.tirx import PrimFunc

from tvmflow.graph.mutation import mutated

ARITHMETIC = {
    tirx.Add: np.add,
    tirx.Sub: np.subtract,
    tirx.Mul: np.multiply,
    tirx.FloorDiv: np.floor_divide,
    tirx.FloorMod: np.mod,
}


@tvm.transform.module_pass(opt_level=0, name="FoldRepacking")
class FoldRepacking:
    """Repacks constant weights with numpy. TVM's FoldConstant would compile a kernel for each."""

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return mutated(mod, _Folder)


@mutator
class _Folder(PyExprMutator):  # type: ignore[misc] # TVM has no types
    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self._functions = mod.functions

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if getattr(call.op, "name", "") != "relax.call_tir" or not str(call.args[0].name_hint).endswith("_prepack"):
            return call
        sources = list(call.args[1].fields)
        if not all(isinstance(source, tvm.ir.GenericConst) for source in sources):
            return call
        packed = [relax.const(array) for array in _packed(self._functions[call.args[0]], [s.value for s in sources])]
        return packed[0] if len(packed) == 1 else relax.Tuple(packed)

    def visit_tuple_getitem_(self, item: relax.TupleGetItem) -> relax.Expr:
        item = self.visit_expr_post_order(item)
        found = self.lookup_binding(item.tuple_value) if isinstance(item.tuple_value, relax.Var) else None
        return found.fields[item.index] if isinstance(found, relax.Tuple) else item


def _packed(function: PrimFunc, sources: list[tvm.runtime.Tensor]) -> list[np.ndarray]:
    """What a function of copies makes of its inputs: each of its blocks writes target[f(v)] = source[v]."""
    arrays = {param: tensor.numpy() for param, tensor in zip(function.params, sources, strict=False)}
    outputs = function.params[len(sources) :]
    arrays |= {out: np.zeros([int(size) for size in out.ty.shape], str(out.ty.dtype)) for out in outputs}
    schedule = Schedule(tvm.IRModule({"main": function}), debug_mask="none")
    for block in schedule.get_child_blocks(schedule.get_sblock("root")):
        statement = schedule.get(block)
        store, ranges = statement.body, [int(axis.dom.extent) for axis in statement.iter_vars]
        grid = dict(zip((axis.var for axis in statement.iter_vars), np.ogrid[tuple(map(slice, ranges))], strict=True))
        index = tuple(np.broadcast_to(_value(i, grid), ranges) for i in store.indices)
        source = tuple(np.broadcast_to(_value(i, grid), ranges) for i in store.value.indices)
        arrays[store.buffer][index] = arrays[store.value.source][source]
    return [arrays[out] for out in outputs]


def _value(expr: tvm.ir.PrimExpr, grid: Mapping[tvm.ir.Var, np.ndarray]) -> np.ndarray | int:
    """An index expression over a grid of its variables' values."""
    if isinstance(expr, tirx.IntImm):
        return int(expr)
    if isinstance(expr, tvm.ir.Var):
        return grid[expr]
    return ARITHMETIC[type(expr)](_value(expr.a, grid), _value(expr.b, grid))
