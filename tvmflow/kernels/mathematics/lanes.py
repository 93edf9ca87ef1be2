"""TIR expressions for one call of a mathematical function, over all lanes of a vector at once, or over one value.

What is used more than once has a name (`Scope`), so that it is computed once. There are no branches: results for
different ranges are all computed and selected from. Comparisons are ordered, false for NaN, and `at_least` and
`at_most` let NaN through.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.tirx import FloatImm, Let, Select

TABLE_SIZE = 16
Expr = Any  # a tvm PrimExpr: a scalar, or a vector of 2 lanes or more


class Scope:
    """Names for intermediate values; `close` makes an expression of the result in which all are bound."""

    def __init__(self) -> None:
        self._bound: list[tuple[tirx.Var, Expr]] = []

    def __call__(self, value: Expr) -> Expr:
        """A variable that stands for `value`, numbers (not conditions), which may use the variables before it."""
        var = tirx.Var(f"t{len(self._bound)}", str(value.ty.dtype))
        self._bound.append((var, value))
        return var

    def close(self, result: Expr) -> Expr:
        for var, value in reversed(self._bound):
            result = Let(var, _opaque(value), result)
        return result


def _opaque(value: Expr) -> Expr:
    """`value`, into which TVM's simplifier does not look.

    Wherever a Let occurs, TVM simplifies it with what is bound put in place of each variable, to learn about integers.
    Where names build upon names that takes time and memory exponential in their number. The simplifier holds that
    NaN != NaN and sees an unknown number here. LLVM's comparison is an ordered one, thus false for constants, and its
    IR builder leaves `value` alone.
    """
    nan = FloatImm("float32", math.nan)
    return Select(tirx.NE(nan, nan), _unknown(str(value.ty.dtype)), value)


def _unknown(dtype: str) -> Expr:
    """A number of which TVM's simplifier knows nothing, each time another one."""
    element, _, lanes = dtype.partition("x")
    same_size = f"{'int' if element.startswith('float') else 'float'}{element[-2:]}"
    return tirx.reinterpret(dtype, tirx.const(next(_numbers), f"{same_size}x{lanes}" if lanes else same_size))


_numbers = itertools.count(1)


def constant(value: float, like: Expr) -> Expr:
    """A constant of the type and lanes of `like`."""
    return tirx.const(value, str(like.ty.dtype))


def typed(element: str, like: Expr) -> str:
    """The dtype of as many lanes as `like` has, e.g. "int32x16"."""
    lanes = int(like.ty.dtype.lanes)
    return element if lanes == 1 else f"{element}x{lanes}"


def cast(element: str, value: Expr) -> Expr:
    return value.astype(typed(element, value))


def bits(value: Expr) -> Expr:
    """The bits of float32 values as int32."""
    return tirx.reinterpret(typed("int32", value), value)


def from_bits(value: Expr) -> Expr:
    """The float32 values whose bits are given, as int32."""
    return tirx.reinterpret(typed("float32", value), value)


def at_least(low: float, x: Expr) -> Expr:
    return tirx.Max(constant(low, x), x)  # `low > x ? low : x`


def at_most(high: float, x: Expr) -> Expr:
    return tirx.Min(constant(high, x), x)


def choose(condition: Expr, yes: Expr | float, no: Expr | float) -> Expr:
    """Per lane; one of the two may be a number."""
    like = no if isinstance(yes, (int, float)) else yes
    values = [constant(v, like) if isinstance(v, (int, float)) else v for v in (yes, no)]
    return Select(condition, *values)


def magnitude(x: Expr) -> Expr:
    return from_bits(bits(x) & 0x7FFFFFFF)


def sign_bit(x: Expr) -> Expr:
    """The sign of float32 values in its place in an int32."""
    return bits(x) & -0x80000000


def with_sign(x: Expr, sign: Expr) -> Expr:
    """x >= 0 with the sign bit given; -x for x < 0."""
    return from_bits(bits(x) ^ sign)


def any_lane(condition: Expr) -> Expr:
    """Whether a condition holds in any lane, as a scalar."""
    if int(condition.ty.dtype.lanes) == 1:
        return condition
    return tirx.call_llvm_pure_intrin("bool", "llvm.vector.reduce.or", condition)


def horner(x: Expr, coefficients: Sequence[float]) -> Expr:
    """The polynomial with the given coefficients, that of the constant term first; every step can be one FMA."""
    result: Expr = constant(coefficients[-1], x)
    for coefficient in reversed(coefficients[:-1]):
        result = result * x + coefficient
    return result


def looked_up(table: Sequence[float], index: Expr) -> Expr:
    """Numbers of a table of TABLE_SIZE by the last four bits of an int32x16: one instruction, of AVX-512 alone."""
    values = tirx.Shuffle([FloatImm("float32", value) for value in table], list(range(TABLE_SIZE)))
    return tirx.call_llvm_pure_intrin("float32x16", "llvm.x86.avx512.permvar.sf.512", values, index)


def power_of_two(exponent: Expr) -> Expr:
    """2^exponent as float32 for int32 exponents from -126 to 127."""
    return from_bits((exponent + 127) << 23)
