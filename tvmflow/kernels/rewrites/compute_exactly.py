"""Arithmetic that is IEEE 754's for floating-point numbers and wraps around for integers, whatever the schedule.

TVM's simplifier does algebra: `(x + y) - y` becomes x, `x * 0` becomes 0, and `x < x + 1` true. That is right for loop
variables, not for data. So once a kernel is scheduled, operations on its data become calls that the simplifier does not
see through; when code is generated of them, they are the operations again (kernels/operations.py). What LLVM does after
that is exact, but for one liberty: it may round a product and a sum once, in a fused multiply-add.

Data is every number that is neither int32 nor int64, and what comes from such a number or from memory. Integers made of
loop variables and sizes alone stay as they are, so that indices are simplified. Up to that point kernels are TVM's own,
so that neither schedules nor tuning records depend on this.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np
import tvm
import tvm_ffi
from tvm.ir import Call, TensorLoad, Var
from tvm.s_tir import SBlock
from tvm.tirx import Add, Bind, BufferStore, Cast, Div, FloatImm, FloorDiv, FloorMod, IntImm, Let, Mod, Mul, Sub

from tvmflow.kernels import operations
from tvmflow.kernels.mathematics.lanes import Expr
from tvmflow.kernels.operations import CAST, call, name_of, node_of
from tvmflow.kernels.rewriting import each_kernel

BINARY = (Add, Sub, Mul, Div, Mod, FloorDiv, FloorMod)
PARTS = ("a", "b", "value", "body", "condition", "true_value", "false_value", "args", "vectors")
PICKS = ("prim.if_then_else", "tirx.reinterpret", "tirx.float_max", "tirx.float_min", "tirx.fabs")
NARROW = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@tvm.transform.module_pass(opt_level=0, name="ComputeExactly")
class ComputeExactly:
    """Makes the arithmetic in scheduled kernels for a kind of target exact."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return exact(mod, self._kind)


def exact(mod: tvm.IRModule, kind: str) -> tvm.IRModule:
    """What the pass makes of a module."""
    operations.register()
    return each_kernel(mod, lambda f: f.with_body(_exact_body(f.body, kind)))


def _exact_body(body: tvm.tirx.Stmt, kind: str) -> tvm.tirx.Stmt:
    values = _bound_values(body)
    operation = functools.partial(_operation, values, kind == "llvm")
    rules: list[tuple[type[Expr], Callable[[Expr], Expr]]] = [(node, operation) for node in (*BINARY, Cast)]
    rules.append((FloatImm, functools.partial(_constant, kind)))
    if kind == "llvm":
        rules += [(Call, _function), (Bind, _kept), (Let, _kept)]
    if kind == "cuda":  # a reduction across threads is recognised by what it stores
        rules.append((SBlock, _with_plain_updates))
    return tvm_ffi.structural_map(body, rules)


def _bound_values(body: tvm.tirx.Stmt) -> dict[Var, Expr]:
    """What each name in a kernel stands for."""
    values: dict[Var, Expr] = {}

    def note(node: Let | Bind) -> None:
        values[node.var] = node.value

    tvm_ffi.structural_walk(body, ((Let, Bind), note))
    return values


def _operation(values: dict[Var, Expr], widens_bfloat16: bool, node: Expr) -> Expr:
    """A call for an operation on data; other nodes stay."""
    operands = [node.value] if isinstance(node, Cast) else [node.a, node.b]
    dtype = str(node.ty.dtype)
    if not _holds_data(dtype) and not any(_is_data(operand, values) for operand in operands):
        return node
    name = CAST if isinstance(node, Cast) else name_of(type(node))
    if widens_bfloat16:
        operands = [operations.widened(operand) for operand in operands]
        if operations.is_bfloat16(dtype):
            return operations.rounded(call(name, operations.with_element("float32", dtype), *operands))
    return call(name, dtype, *operands)


def _kept(node: Bind | Let) -> Bind | Let:
    """What is computed once and has a name stays so."""
    if not isinstance(node.value, Call) or not operations.is_ours(node.value):
        return node
    value = operations.named(node.value)
    return Bind(node.var, value) if isinstance(node, Bind) else Let(node.var, value, node.body)


def _function(value: Call) -> Expr:
    """A function of bfloat16 as that of float32, rounded; what only picks one of its arguments stays."""
    dtype = str(getattr(value.ty, "dtype", ""))
    name = getattr(value.op, "name", "")
    if not operations.is_bfloat16(dtype) or name in PICKS:
        return value
    wide = call(name, operations.with_element("float32", dtype), *map(operations.widened, value.args))
    return operations.rounded(wide)


def _is_data(value: Expr, values: dict[Var, Expr]) -> bool:
    """Whether a value comes from memory or from what is no index. What was rewritten already is a call."""
    if isinstance(value, TensorLoad) or _holds_data(str(getattr(value.ty, "dtype", ""))):
        return True
    if isinstance(value, Call) and operations.is_ours(value):
        return True
    if isinstance(value, Var):
        return value in values and _is_data(values[value], values)
    return any(_is_data(part, values) for part in _parts(value))


def _holds_data(dtype: str) -> bool:
    """Whether indices and conditions never have a dtype."""
    return dtype.partition("x")[0] not in ("int32", "int64", "bool", "handle", "void", "")


def _parts(value: Expr) -> Iterator[Expr]:
    for name in PARTS:
        part = getattr(value, name, None)
        if isinstance(part, tvm.ir.Array):
            yield from (each for each in part if isinstance(each, tvm.ir.Expr))
        elif isinstance(part, tvm.ir.Expr):
            yield part


def _constant(kind: str, value: FloatImm) -> Expr:
    """The constant as its dtype has it; TVM keeps it as it was written, and prints 15 decimals of float64 in CUDA."""
    dtype = str(value.ty.dtype)
    if dtype in NARROW:
        with np.errstate(all="ignore"):
            return FloatImm(dtype, float(NARROW[dtype](value.value)))
    if kind == "cuda" and dtype == "float64" and math.isfinite(value.value) and not _is_printed(value.value):
        bits = IntImm("int64", int(np.float64(value.value).view("int64")))
        return tvm.tirx.call_intrin("float64", "tirx.reinterpret", bits)
    return value


def _is_printed(value: float) -> bool:
    return float(f"{value:.15f}") == value


def _with_plain_updates(block: SBlock) -> SBlock:
    """A block of a reduction that combines the next element by a plain operation, which nothing simplifies there."""
    if block.init is None:
        return block

    def plain(node: BufferStore | Bind) -> BufferStore | Bind:
        value = node.value
        if not isinstance(value, Call) or not operations.is_ours(value) or not isinstance(value.args[0], TensorLoad):
            return node
        whole = node_of(value)(*value.args)
        return Bind(node.var, whole) if isinstance(node, Bind) else BufferStore(node.buffer, whole, node.indices)

    changed = tvm_ffi.structural_map(block.body, [((BufferStore, Bind), plain)])
    return SBlock(
        block.iter_vars,
        block.reads,
        block.writes,
        block.name_hint,
        changed,
        block.init,
        block.alloc_buffers,
        block.match_buffers,
        block.annotations,
    )
