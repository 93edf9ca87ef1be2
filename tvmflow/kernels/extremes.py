"""Maxima and minima over many elements on a CPU: NaN where one of them is, and -inf where there is nothing else.

TVM starts from the lowest finite number and compiles max(a, b) to `a > b ? a : b`, which loses a NaN in a, the maximum
so far. Changed once kernels are scheduled: schedules are made for, and records are kept of, what TVM makes of them.
A softmax needs none of it: its sum is NaN where its maximum should be.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import TensorLoad
from tvm.tirx import Buffer, BufferStore, FloatImm, Max, Min, PrimFunc

SOFTMAX = "T_softmax_maxelem"
PADDED = "pad_temp"  # TVM's buffer for the padded input of a pool


@tvm.transform.module_pass(opt_level=0, name="KeepExtremes")
class KeepExtremes:
    """Reductions by max and min start from infinity and keep NaN."""

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return kept(mod)


def kept(mod: tvm.IRModule) -> tvm.IRModule:
    """What the pass makes of a module."""
    functions = {var: _kept(f) if isinstance(f, PrimFunc) else f for var, f in mod.functions.items()}
    return tvm.IRModule(functions, attrs=mod.attrs)


def _kept(function: PrimFunc) -> PrimFunc:
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
            picked = type(value)(value.a, _from_infinity(value.b, type(value)))
            return BufferStore(store.buffer, tirx.Select(tirx.isnan(value.a), value.a, picked), store.indices)
        kinds = [kind for buffer, kind in reduced if buffer.same_as(store.buffer) or store.buffer.name == PADDED]
        return BufferStore(store.buffer, _from_infinity(value, kinds[0]), store.indices) if kinds else store

    return function.with_body(tvm_ffi.structural_map(function.body, [(BufferStore, exact)], order="post"))


def _is_update(store: BufferStore) -> bool:
    """Whether a store combines a float with what was there before."""
    value = store.value
    if not isinstance(value, (Max, Min)) or not isinstance(value.a, TensorLoad) or SOFTMAX in store.buffer.name:
        return False
    same = value.a.source.same_as(store.buffer) and tvm_ffi.structural_equal(value.a.indices, store.indices)
    return same and str(value.ty.dtype).startswith(("float", "bfloat"))


def _from_infinity(value: tirx.PrimExpr, kind: type) -> tirx.PrimExpr:
    """The identity that TVM gives `kind`, bare or as what stands for padding, as an infinity; else `value` itself."""
    dtype = str(value.ty.dtype)
    finite = tirx.min_value(dtype) if kind is Max else tirx.max_value(dtype)
    if isinstance(value, FloatImm) and value.value == finite.value:
        return tirx.const(float("-inf") if kind is Max else float("inf"), dtype)
    if isinstance(value, tvm.ir.Call) and getattr(value.op, "name", "") == "prim.if_then_else":
        condition, inside, outside = value.args
        return tirx.if_then_else(condition, inside, _from_infinity(outside, kind))
    return value
