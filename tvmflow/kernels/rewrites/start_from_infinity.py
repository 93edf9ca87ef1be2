"""Maxima and minima over many elements: -inf where there is nothing else.

TVM starts from the lowest finite number. Changed once kernels are scheduled: schedules are made for, and records are
kept of, what TVM makes of them. That a NaN stays is comparisons.py's.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import TensorLoad
from tvm.tirx import Buffer, BufferStore, FloatImm, Max, Min, PrimFunc

from tvmflow.kernels.rewriting import each_kernel

PADDED = "pad_temp"  # TVM's buffer for the padded input of a pool


@tvm.transform.module_pass(opt_level=0, name="StartFromInfinity")
class StartFromInfinity:
    """Reductions by max and min start from infinity."""

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return from_infinity(mod)


def from_infinity(mod: tvm.IRModule) -> tvm.IRModule:
    """What the pass makes of a module."""
    register()
    return each_kernel(mod, _changed)


@functools.cache
def register() -> None:
    """Makes TVM take maxima from -inf and minima from inf for reductions, also across the threads of a GPU's block."""
    add = tvm_ffi.get_global_func("s_tir.schedule.RegisterReducer")
    for kind, start in ((Max, "-inf"), (Min, "inf")):
        add(
            1,
            _lasting(lambda a, b, kind=kind: [kind(a[0], b[0])]),
            _lasting(lambda values, start=start: [tirx.const(float(start), str(values[0].ty.dtype))]),
        )


def _lasting(function: Callable[..., object]) -> tvm_ffi.Function:
    """A function that TVM may hold for good: it would let go of it when Python has ended, and crash."""
    held = tvm_ffi.convert_func(function)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    return held


def _changed(function: PrimFunc) -> PrimFunc:
    reduced: list[tuple[Buffer, type]] = []

    def note(store: BufferStore) -> None:
        if _is_update(store):
            reduced.append((store.buffer, type(store.value)))

    tvm_ffi.structural_walk(function.body, (BufferStore, note))
    if not reduced:
        return function

    def exact(store: BufferStore) -> BufferStore:
        value = store.value
        if _is_update(store):
            whole = type(value)(value.a, _infinity_in(value.b, type(value)))
            return BufferStore(store.buffer, whole, store.indices)
        kinds = [kind for buffer, kind in reduced if buffer.same_as(store.buffer) or store.buffer.name == PADDED]
        return BufferStore(store.buffer, _infinity_in(value, kinds[0]), store.indices) if kinds else store

    return function.with_body(tvm_ffi.structural_map(function.body, [(BufferStore, exact)], order="post"))


def _is_update(store: BufferStore) -> bool:
    """Whether a store combines a float with what was there before."""
    value = store.value
    if not isinstance(value, (Max, Min)) or not isinstance(value.a, TensorLoad):
        return False
    same = value.a.source.same_as(store.buffer) and tvm_ffi.structural_equal(value.a.indices, store.indices)
    return same and str(value.ty.dtype).startswith(("float", "bfloat"))


def _infinity_in(value: tirx.PrimExpr, kind: type) -> tirx.PrimExpr:
    """The identity that TVM gives `kind`, bare or as what stands for padding, as an infinity; else `value` itself."""
    dtype = str(value.ty.dtype)
    finite = tirx.min_value(dtype) if kind is Max else tirx.max_value(dtype)
    if isinstance(value, FloatImm) and value.value == finite.value:
        return tirx.const(float("-inf") if kind is Max else float("inf"), dtype)
    if isinstance(value, tvm.ir.Call) and getattr(value.op, "name", "") == "prim.if_then_else":
        condition, inside, outside = value.args
        return tirx.if_then_else(condition, inside, _infinity_in(outside, kind))
    return value
