"""Comparisons, conditions, maxima and minima that are right for NaN and in vectors, whatever the schedule.

TVM's simplifier takes floating-point numbers to be ordered: `not x < y` becomes `y <= x`, and `x <= y or y < x` becomes
true. LLVM code of its `x != y` is false for NaN, and that of its `max` keeps a NaN in the second operand alone. So once
a kernel is scheduled, these become calls that the simplifier does not see through, and when code is generated of them,
comparisons are those of IEEE 754, and extremes are NaN where an operand is. Vectors of booleans that come from memory
are bytes in LLVM code, of which `not` makes 0xFE: they become the results of comparisons with 0.

Up to then kernels stay as they are, so that neither schedules nor tuning records depend on this. In CUDA, `!=` is right
as it is, `not` has no form for vectors, and extremes are mended in what is printed of them (kernels/rewrites/cuda_nan.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, TensorLoad
from tvm.tirx import EQ, GE, GT, LE, LT, NE, Cast, FloatImm, IntImm, Max, Min, Not, Select

from tvmflow.kernels.mathematics.lanes import Expr, Scope
from tvmflow.kernels.rewriting import PRIORITY, define, each_kernel

COMPARISONS = (EQ, NE, LT, LE, GT, GE)
EXTREMES = (Max, Min)


@tvm.transform.module_pass(opt_level=0, name="CompareExactly")
class CompareExactly:
    """Makes the conditions and extremes in scheduled kernels for a kind of target exact."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return exact(mod, self._kind)


def exact(mod: tvm.IRModule, kind: str) -> tvm.IRModule:
    """What the pass makes of a module."""
    register()
    rules: list[tuple[type[Expr], Callable[[Expr], Expr]]] = [(comparison, _call) for comparison in COMPARISONS]
    if kind == "llvm":
        rules += [(TensorLoad, _condition), *((extreme, _extreme) for extreme in EXTREMES)]
    else:
        rules.append((Not, _negation))
    return each_kernel(mod, lambda f: f.with_body(tvm_ffi.structural_map(f.body, rules)))


def _condition(load: Expr) -> Expr:
    return NE(Cast("int8", load), IntImm("int8", 0)) if str(load.ty.dtype) == "bool" else load


def _negation(negated: Expr) -> Expr:
    """A comparison with 0 in place of `not`, where numbers are compared in what it negates."""
    calls: list[Call] = []
    tvm_ffi.structural_walk(negated.a, (Call, calls.append))
    names = {op_name(comparison) for comparison in COMPARISONS}
    compares = any(getattr(call.op, "name", "") in names for call in calls)
    return EQ(Cast("int32", negated.a), IntImm("int32", 0)) if compares else negated


def _call(node: Expr) -> Expr:
    if "float" not in str(node.a.ty.dtype):
        return node
    return tirx.call_intrin(node.ty, op_name(type(node)), node.a, node.b)


def _extreme(node: Expr) -> Expr:
    """A call, but for a bound: TVM's own keeps the NaN of what comes second."""
    for bound, other in ((node.a, node.b), (node.b, node.a)):
        if isinstance(bound, FloatImm) and not math.isnan(float(bound.value)):
            return type(node)(bound, other)
    return _call(node)


def op_name(kind: type[Expr]) -> str:
    """What the call for a kind of node is named."""
    return f"tirx.float_{kind.__name__.lower()}"


@functools.cache
def register() -> None:
    """Makes code of this process do what the calls say; every process that builds or reads such kernels calls it."""
    for kind in (*COMPARISONS, *EXTREMES):
        name = op_name(kind)
        define(name, f"{kind.__name__} of floating-point numbers, among them NaN")
        rule = _of_extreme if kind in EXTREMES else _of_comparison
        tirx.register_intrin_lowering(name, target="llvm", f=functools.partial(rule, kind), level=PRIORITY)
        tirx.register_intrin_lowering(name, target="cuda", f=functools.partial(_in_cuda, kind), level=PRIORITY)


def _of_comparison(kind: Callable[..., Expr], call: Expr) -> Expr:
    return Not(EQ(*call.args)) if kind is NE else kind(*call.args)


def _in_cuda(kind: Callable[..., Expr], call: Expr) -> Expr:
    return kind(*call.args)


def _of_extreme(kind: Callable[..., Expr], call: Expr) -> Expr:
    """`kind(b, a)` is `a` where either is NaN."""
    let = Scope()
    a, b = map(let, call.args)
    return let.close(Select(EQ(b, b), kind(b, a), b))
