"""Operations on data as calls, and the code that is generated of the calls.

On integers of 32 and 64 bits LLVM code by TVM says that no operation overflows, and so does C++ of signed integers. So
they are computed in twice as many bits by LLVM, which makes one instruction of it, and without a sign in CUDA.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import tvm
from tvm import tirx
from tvm.ir import Call
from tvm.tirx import Add, Broadcast, Cast, Div, FloatImm, FloorDiv, FloorMod, Mod, Mul, Sub

from tvmflow.kernels.mathematics.lanes import Expr
from tvmflow.kernels.rewriting import PRIORITY, PURE, READS, define

NODES = {"add": Add, "sub": Sub, "mul": Mul, "div": Div, "mod": Mod, "floor_div": FloorDiv, "floor_mod": FloorMod}
NAMES = {node: f"tirx.exact_{name}" for name, node in NODES.items()}
BY_NAME: dict[str, type[Expr]] = {name: node for node, name in NAMES.items()}
CAST, ROUND, NAMED = "tirx.exact_cast", "tirx.exact_bfloat16", "tirx.exact_named"
OVERFLOWING, DIVISIONS = (Add, Sub, Mul), (Div, Mod, FloorDiv, FloorMod)
SIGN = 2**63


def call(name: str, dtype: str, *args: Expr) -> Call:
    return tirx.call_intrin(dtype, name, *args)


def name_of(kind: type[Expr]) -> str:
    return NAMES[kind]


def node_of(value: Call) -> type[Expr]:
    """The kind of node that a call stands for, which is no cast."""
    return BY_NAME[str(value.op.name)]


def is_ours(value: Call) -> bool:
    return getattr(value.op, "name", "") in (*BY_NAME, CAST, ROUND, NAMED)


def is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


def is_bfloat16(dtype: str) -> bool:
    return dtype.startswith("bfloat16")


def with_element(element: str, dtype: str) -> str:
    """A dtype of as many lanes as `dtype` has."""
    lanes = dtype.partition("x")[2]
    return f"{element}x{lanes}" if lanes else element


def widened(value: Expr) -> Expr:
    """bfloat16 as float32, other values as they are."""
    dtype = str(value.ty.dtype)
    return call(CAST, with_element("float32", dtype), value) if is_bfloat16(dtype) else value


def named(value: Expr) -> Expr:
    """A value that has a name and is not put in place of it by TVM, which would have to be found equal again."""
    return call(NAMED, str(value.ty.dtype), value)


def rounded(value: Expr) -> Expr:
    """float32 rounded to bfloat16. TVM's own conversion is left out where code is generated, and wrong for NaN."""
    dtype = str(value.ty.dtype)
    return call("tirx.reinterpret", with_element("bfloat16", dtype), call(ROUND, with_element("uint16", dtype), value))


@functools.cache
def register() -> None:
    """Makes code of this process do what the calls say; every process that builds or reads such kernels calls it."""
    for name in (*BY_NAME, CAST, ROUND, NAMED):
        define(name, "an operation on data, which is not simplified", READS if name == NAMED else PURE)
        for target, lowered in (("llvm", _in_llvm), ("cuda", _in_cuda)):
            rule = functools.partial(_lower, lowered)
            tirx.register_intrin_lowering(name, target=target, f=rule, level=PRIORITY)


def _lower(integers: Callable[[type[Expr], Expr, Expr], Expr], value: Expr) -> Expr:
    """The operation itself, and those of its operands: a product within a sum must be seen as one."""
    if isinstance(value, Broadcast):
        return Broadcast(_lower(integers, value.value), value.lanes)
    if not isinstance(value, Call) or not is_ours(value):
        return value
    dtype, name = str(value.ty.dtype), value.op.name
    args = [_lower(integers, arg) for arg in value.args]
    if name == NAMED:
        return args[0]
    if name == ROUND:
        return _bits_of_bfloat16(args[0])
    if name == CAST:
        return _converted(_hidden(args[0]), dtype)
    a, b = (_converted(arg, dtype) for arg in args)  # indices may have become narrower
    if is_float(dtype):
        return BY_NAME[name](a, _divisor(b) if BY_NAME[name] in DIVISIONS else b)
    return integers(BY_NAME[name], a, b)


def _converted(value: Expr, dtype: str) -> Expr:
    """A value in another dtype.

    TVM fails on conversions of constants below zero to a dtype without a sign, even where it only looks at a condition
    and does algebra in it. So such conversions read bits.
    """
    before = value.ty.dtype
    if str(before) == dtype:
        return value
    if _is_integer(value) or not str(before).startswith("int") or not dtype.startswith("uint"):
        return Cast(dtype, value)
    bits = tvm.DataType(dtype).bits
    signed = value if before.bits >= bits else Cast(with_element(f"int{bits}", dtype), value)
    unsigned = with_element(f"u{signed.ty.dtype}".partition("x")[0], dtype)
    same = call("tirx.reinterpret", unsigned, signed)
    return same if unsigned == dtype else Cast(dtype, same)


def _hidden(value: Expr) -> Expr:
    """`value`, of which TVM sees no constant: it fails on constants without a sign that would be below zero.

    In CUDA only a constant of 64 bits has a place in memory, which such a call reads; in LLVM code 0 must be a pointer.
    """
    if isinstance(value, Broadcast):
        return Broadcast(_hidden(value.value), value.lanes)
    if not _is_integer(value) or int(value.value) == 0:
        return value
    number = tirx.IntImm("int64", (int(value.value) + SIGN) % (2 * SIGN) - SIGN)
    return _converted(call("tirx.reinterpret", "int64", number), str(value.ty.dtype))


def _divisor(value: Expr) -> Expr:
    """`value`, of which TVM does not see that it is 0: it fails on that, even where it only looks at a condition."""
    dtype = str(value.ty.dtype)
    if isinstance(value, Broadcast):
        return Broadcast(_divisor(value.value), value.lanes)
    if not isinstance(value, FloatImm):
        return call("tirx.reinterpret", dtype, value)
    if value.value != 0:
        return value
    zero = call("tirx.fabs", dtype, FloatImm(dtype, -0.0))
    return zero if math.copysign(1, value.value) > 0 else Sub(FloatImm(dtype, -0.0), zero)


def _is_integer(value: Expr) -> bool:
    return isinstance(value.value if isinstance(value, Broadcast) else value, tirx.IntImm)


def _in_llvm(kind: type[Expr], a: Expr, b: Expr) -> Expr:
    dtype = a.ty.dtype
    if kind in (FloorDiv, FloorMod):
        return kind(_unbounded(a), _unbounded(b))
    if kind not in OVERFLOWING:
        return kind(a, b)
    if dtype.bits < 32:
        return kind(_hidden(a), _hidden(b))
    signed, wide = (with_element(f"int{bits}", str(dtype)) for bits in (dtype.bits, 2 * dtype.bits))
    return _converted(Cast(wide, kind(*(Cast(wide, _converted(_hidden(arg), signed)) for arg in (a, b)))), str(dtype))


def _in_cuda(kind: type[Expr], a: Expr, b: Expr) -> Expr:
    dtype = a.ty.dtype
    if kind not in OVERFLOWING:
        return kind(a, b)
    between = with_element("int32" if dtype.bits < 32 else f"uint{dtype.bits}", str(dtype))
    return _converted(kind(*(_converted(_hidden(arg), between) for arg in (a, b))), str(dtype))


def _unbounded(value: Expr) -> Expr:
    """`value`, of which TVM knows no bounds: those that it finds do not hold for what wraps around."""
    return value if _is_integer(value) else call("tirx.reinterpret", str(value.ty.dtype), value)


def _bits_of_bfloat16(value: Expr) -> Expr:
    """The upper half of float32 values, rounded to the nearest, to even between two; of NaN one that stays NaN."""
    dtype = str(value.ty.dtype)
    wide, narrow = with_element("uint32", dtype), with_element("uint16", dtype)

    def number(of: int, like: str) -> Expr:
        return tirx.const(of, like)

    bits = tirx.reinterpret(wide, value)
    is_nan = Cast(wide, tirx.GT(bits & number(0x7FFFFFFF, wide), number(0x7F800000, wide)))
    odd = (bits >> number(16, wide)) & number(1, wide)
    half = Mul(Add(odd, number(0x7FFF, wide)), is_nan ^ number(1, wide))
    return Cast(narrow, (Add(bits, half) >> number(16, wide)) | (is_nan << number(6, wide)))
