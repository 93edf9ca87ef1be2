"""Checks at run time that indices lie within what they pick from and that integers are not divided by zero.

Without them TVM's kernels read and write wherever an index points, or clip it, and a division by zero ends the process
(SIGFPE). The error names the operator. Bad values are replaced before the operator sees them, for kernels may run
before the check does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import GenericConst
from tvm.relax import op
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.tirx import IntImm

from tvmflow.errors import UnsupportedError
from tvmflow.graph import run_time_check
from tvmflow.graph.mutation import mutated

DIVISIONS = ("relax.divide", "relax.floor_divide", "relax.mod", "relax.floor_mod")


@tvm.transform.module_pass(opt_level=0, name="Guards")
class Guards:
    """Puts a check before every operator that reads or writes at computed places, and every integer division."""

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return mutated(mod, _Mutator)


def _take(call: relax.Call) -> list[Any]:
    axis = call.attrs.axis
    return [_dims(call.args[0])[0 if axis is None else int(axis)]]


def _along_axis(call: relax.Call) -> list[Any]:
    return [_dims(call.args[0])[int(call.attrs.axis)]]


def _gather_nd(call: relax.Call) -> list[Any]:
    batch = int(call.attrs.batch_dims)
    return _dims(call.args[0])[batch : batch + int(_dims(call.args[1])[-1])]


def _scatter_nd(call: relax.Call) -> list[Any]:
    return _dims(call.args[0])[: int(_dims(call.args[1])[-1])]


# Which argument holds the indices, the sizes that they must stay below, and whether they may count from the end.
INDEXING: Mapping[str, tuple[Callable[[relax.Call], list[Any]], bool]] = {
    "relax.take": (_take, False),
    "relax.gather_elements": (_along_axis, False),
    "relax.gather_nd": (_gather_nd, False),
    "relax.scatter_elements": (_along_axis, True),
    "relax.scatter_nd": (_scatter_nd, False),
}
LISTS = ("relax.index_tensor", "relax.index_put")  # they take one tensor of indices per axis, which may be negative


@mutator
class _Mutator(PyExprMutator):  # type: ignore[misc] # TVM has no types
    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self._place = ""

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        self._place = str(binding.var.name)
        super().visit_var_binding_(binding)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        name = str(getattr(call.op, "name", ""))
        args = list(call.args)
        if name in INDEXING:
            sizes, from_end = INDEXING[name]
            args[1] = self._in_range(name, args[1], sizes(call), from_end)
        elif name in LISTS and isinstance(args[1], relax.Tuple):
            sizes_ = _dims(args[0])
            args[1] = relax.Tuple(
                [self._in_range(name, index, [size], True) for index, size in zip(args[1].fields, sizes_, strict=False)]
            )
        elif name in DIVISIONS and _is_integer(args[1]):
            args[1] = self._divisor(name, args[0], args[1])
        else:
            return call
        return relax.Call(call.op, args, call.attrs, call.ty_args)

    def _in_range(self, name: str, index: Any, sizes: Sequence[Any], from_end: bool) -> Any:
        """The indices, after a check that they are below `sizes` (along their last axis where there are several)."""
        if not _is_integer(index):
            return index  # a mask
        known = _constant(index)
        if known is not None and all(isinstance(size, IntImm) for size in sizes):
            limits = np.array([int(size) for size in sizes])
            wrong = known[(known >= limits) | (known < (-limits if from_end else 0))]
            if wrong.size:
                raise UnsupportedError(
                    f"{name}, {self._place}: index {wrong.flat[0]} is out of range for size {limits.tolist()}",
                    "correct the model",
                )
            return index
        dtype = str(index.ty.dtype)
        bound = self._emit(op.astype(self._emit(op.shape_to_tensor(relax.ShapeExpr(list(sizes)))), dtype))
        lowest = self._emit(op.negative(bound)) if from_end else relax.const(0, dtype)
        not_above, not_below = self._emit(op.less(index, bound)), self._emit(op.greater_equal(index, lowest))
        good = self._emit(op.logical_and(not_above, not_below))
        self._require(good, name, "index_in_range")
        return self._emit(op.where(good, index, relax.const(0, dtype)))

    def _divisor(self, name: str, dividend: Any, divisor: Any) -> Any:
        """The divisor, after a check that it is not 0, nor -1 where the quotient would be too large."""
        known, dtype = _constant(divisor), str(divisor.ty.dtype)
        if known is not None and (known != 0).all() and (known != -1).all():
            return divisor
        good = self._emit(op.not_equal(divisor, relax.const(0, dtype)))
        if not dtype.startswith("u"):
            lowest = relax.const(np.iinfo(dtype).min, dtype)
            overflows = self._emit(
                op.logical_and(
                    self._emit(op.equal(dividend, lowest)), self._emit(op.equal(divisor, relax.const(-1, dtype)))
                )
            )
            good = self._emit(op.logical_and(good, self._emit(op.logical_not(overflows))))
        self._require(good, name, "divisor_not_zero")
        return self._emit(op.where(good, divisor, relax.const(1, dtype)))

    def _require(self, good: Any, operator: str, what: str) -> None:
        run_time_check.require(self.builder_, good, f"{operator.removeprefix('relax.')}_{self._place}_{what}")

    def _emit(self, value: Any) -> Any:
        return self.builder_.emit(value)


def _dims(value: relax.Expr) -> list[Any]:
    shape = value.ty.shape
    if not isinstance(shape, relax.ShapeExpr):
        raise UnsupportedError(
            "graph.guards: a tensor that is indexed has no sizes before the run",
            "fix the model's shapes, or set graph.guards = false",
        )
    return list(shape.values)


def _is_integer(value: Any) -> bool:
    return isinstance(value.ty, relax.TensorType) and str(value.ty.dtype).startswith(("int", "uint"))


def _constant(value: Any) -> np.ndarray | None:
    return value.value.numpy() if isinstance(value, GenericConst) else None
