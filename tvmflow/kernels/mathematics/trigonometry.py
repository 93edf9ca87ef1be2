"""Trigonometric functions of float32 vectors and their inverses, as TIR expressions.

Arguments below 4 million are reduced in float64 with pi/2 in two parts (Cody and Waite 1980); where a vector holds a
larger one, by multiplying with the bits of 2/pi that matter (M. Payne and R. Hanek, Radian Reduction for Trigonometric
Functions, SIGNUM Newsletter 18, 1983). Polynomials, special values and errors as in elementary.py; the inverse
functions are reduced as in Cephes (S. Moshier).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import tirx

from tvmflow.kernels.mathematics.elementary import log1p
from tvmflow.kernels.mathematics.lanes import (
    Expr,
    Scope,
    any_lane,
    bits,
    cast,
    choose,
    constant,
    horner,
    magnitude,
    sign_bit,
    typed,
    with_sign,
)

SIN = (-0.166666552, 0.00833218824, -0.000195180997)  # (sin r - r) / r^3 in r^2, 2^-28
COS = (0.0416666456, -0.00138873095, 2.44323273e-05)  # (cos r - 1 + r^2/2) / r^4 in r^2, 2^-33
ATAN = (
    -0.333332986,
    0.199985296,
    -0.142640159,
    0.109508805,
    -0.0839930624,
    0.0578813925,
    -0.0310970023,
    0.0108687095,
    -0.00178283197,
)  # (atan t - t) / t^3 in t^2, 2^-28
ASIN = (0.166667521, 0.0749530941, 0.0454691499, 0.0241847783, 0.0421583056)  # (asin t - t) / t^3 in t^2, 2^-28
HALF_PI_HI, HALF_PI_LO = 1.5707963267341256, 6.077100506506192e-11  # 31 bits, and the next 53
TWO_OVER_PI = 0.6366197723675814
FIRST_LARGE = 2.0**22
# The binary digits of 2/pi after the point, three zeros before them.
TWO_OVER_PI_BITS = (0x145F306D, 0xC9C882A5, 0x3F84EAFA, 0x3EA69BB8, 0x1B6C52B3, 0x27887208, 0x3FCA2C75)
LN2 = math.log(2)

Evaluate = Callable[[Scope, Expr, Expr], Expr]  # of the reduced argument and the quadrant


def sin(let: Scope, x: Expr) -> Expr:
    x = let(x)
    value = _of_angle(let, let(magnitude(x)), lambda inner, r, q: _circular(inner, r, q))
    return with_sign(value, sign_bit(x))


def cos(let: Scope, x: Expr) -> Expr:
    return _of_angle(let, let(magnitude(x)), lambda inner, r, q: _circular(inner, r, inner(q + 1)))


def tan(let: Scope, x: Expr) -> Expr:
    x = let(x)
    return with_sign(_of_angle(let, let(magnitude(x)), _tangent), sign_bit(x))


def _of_angle(let: Scope, x: Expr, evaluate: Evaluate) -> Expr:
    """`evaluate` of x >= 0 after reduction: of |r| <= pi/4 and the quadrant. A branch for all lanes together."""
    usual, rare = Scope(), Scope()
    near = usual.close(evaluate(usual, *_cody_waite(usual, x)))
    far = rare.close(evaluate(rare, *_reduced_any(rare, x)))
    return let(tirx.if_then_else(any_lane(tirx.Not(x < FIRST_LARGE)), far, near))


def _reduced_any(let: Scope, x: Expr) -> tuple[Expr, Expr]:
    """(r, quadrant) where some lanes may be too large for Cody and Waite's reduction; NaN of what is not finite."""
    small = x < FIRST_LARGE
    (r, quadrant), (large_r, large_quadrant) = _cody_waite(let, x), _payne_hanek(let, x)
    large_r = choose(x < math.inf, large_r, math.nan)
    return let(choose(small, r, large_r)), let(choose(small, quadrant, large_quadrant))


def _circular(let: Scope, r: Expr, quadrant: Expr) -> Expr:
    """sin(r + quadrant * pi/2)."""
    sine, cosine = _sine_cosine(let, r)
    value = choose(tirx.EQ(quadrant & 1, constant(0, quadrant)), sine, cosine)
    return with_sign(value, (quadrant & 2) << 30)


def _tangent(let: Scope, r: Expr, quadrant: Expr) -> Expr:
    sine, cosine = map(let, _sine_cosine(let, r))
    even = tirx.EQ(quadrant & 1, constant(0, quadrant))
    return choose(even, sine, cosine) / choose(even, cosine, -sine)


def _sine_cosine(let: Scope, r: Expr) -> tuple[Expr, Expr]:
    s = let(r * r)
    return s * r * horner(s, SIN) + r, horner(s, (1.0, -0.5, *COS))


def _cody_waite(let: Scope, x: Expr) -> tuple[Expr, Expr]:
    """(r, quadrant) for 0 <= x < 2^22."""
    wide = let(cast("float64", x))
    quadrant = let(cast("int32", wide * TWO_OVER_PI + 0.5))
    whole = let(cast("float64", quadrant))
    return let(cast("float32", whole * -HALF_PI_LO + (whole * -HALF_PI_HI + wide))), quadrant


def _payne_hanek(let: Scope, x: Expr) -> tuple[Expr, Expr]:
    """(r, quadrant) for x >= 1/2: the 64 bits of x * 2/pi modulo 4, from the 96 bits of 2/pi that they depend on."""
    pattern = let(bits(x))
    mantissa = let(cast("uint64", (pattern & 0x7FFFFF) | 0x800000))
    start = let((pattern >> 23) - 149)  # x = mantissa * 2^(start - 1): digits before it give multiples of 4
    word, shift = let(start >> 5), let(cast("uint64", start & 31))
    digits = [let(_digits(let, word, place)) for place in range(4)]
    windows = [let((((digits[i] << 32) | digits[i + 1]) << shift) >> 32) for i in range(3)]
    low = let(mantissa * windows[1] + (mantissa * windows[2] >> 32))
    high = mantissa * windows[0] + (low >> 32)  # bits above 32 are further multiples of 4
    turns = let((high << 32) | ((low << 32) >> 32))
    fraction = tirx.reinterpret(typed("int64", x), turns << 2)  # of a quadrant, from -1/2 to 1/2, in 2^-64
    r = let(cast("float32", cast("float64", fraction) * (math.pi / 2 * 2.0**-64)))
    return r, let(cast("int32", (turns >> 62) + ((turns >> 61) & 1)))


def _digits(let: Scope, word: Expr, place: int) -> Expr:
    """32 digits of 2/pi: word number `word` + `place`, `word` being 0 to 3."""
    value = tirx.const(TWO_OVER_PI_BITS[place + 3], typed("uint64", word))
    for first in (2, 1, 0):
        other = tirx.const(TWO_OVER_PI_BITS[place + first], typed("uint64", word))
        value = choose(word <= first, other, value)
    return value


def atan(let: Scope, x: Expr) -> Expr:
    """A polynomial up to 1; pi/2 - atan(1 / x) beyond."""
    x = let(x)
    size = let(magnitude(x))
    large = size > 1.0
    t = let(choose(large, 1.0, size) / choose(large, size, 1.0))
    s = let(t * t)
    angle = let(s * t * horner(s, ATAN) + t)
    return with_sign(choose(large, constant(math.pi / 2, x) - angle, angle), sign_bit(x))


def asin(let: Scope, x: Expr) -> Expr:
    """A polynomial up to 1/2; pi/2 - 2 asin(sqrt((1 - x) / 2)) beyond."""
    x = let(x)
    size = let(magnitude(x))
    large, angle = _asin_reduced(let, size)
    return with_sign(choose(large, angle * -2 + math.pi / 2, angle), sign_bit(x))


def acos(let: Scope, x: Expr) -> Expr:
    """pi/2 - asin x up to 1/2; 2 asin(sqrt((1 - |x|) / 2)) or pi minus it beyond."""
    x = let(x)
    large, angle = _asin_reduced(let, let(magnitude(x)))
    signed = let(with_sign(angle, sign_bit(x)))
    double = let(angle + angle)
    outer = choose(x < 0.0, constant(math.pi, x) - double, double)
    return choose(large, outer, constant(math.pi / 2, x) - signed)


def _asin_reduced(let: Scope, size: Expr) -> tuple[Expr, Expr]:
    """(whether |x| > 1/2, asin of |x| or of sqrt((1 - |x|) / 2)). NaN beyond 1: the root of a negative number."""
    large = size > 0.5
    s = let(choose(large, size * -0.5 + 0.5, size * size))
    t = let(choose(large, tirx.sqrt(s), size))
    return large, let(s * t * horner(s, ASIN) + t)


def asinh(let: Scope, x: Expr) -> Expr:
    """log1p(|x| + x^2 / (1 + sqrt(x^2 + 1))); log(2 |x|) where x^2 would overflow."""
    x = let(x)
    size = let(magnitude(x))
    huge = size > 2.0**60
    s = let(size * size)
    argument = let(choose(huge, size, s / (tirx.sqrt(s + 1) + 1) + size))
    return with_sign(choose(huge, LN2, constant(0, x)) + log1p(let, argument), sign_bit(x))


def acosh(let: Scope, x: Expr) -> Expr:
    """log1p(t + sqrt(2 t + t^2)) with t = x - 1; log(2 x) where t^2 would overflow."""
    x = let(x)
    t = let(x - 1)
    huge = t > 2.0**60
    argument = let(choose(huge, x, tirx.sqrt(t * (t + 2)) + t))
    value = choose(huge, LN2, constant(0, x)) + log1p(let, argument)
    return choose(x < 1.0, math.nan, value)


def atanh(let: Scope, x: Expr) -> Expr:
    """log1p(2 |x| / (1 - |x|)) / 2."""
    x = let(x)
    size = let(magnitude(x))
    value = log1p(let, let((size + size) / (constant(1, x) - size))) * 0.5
    return with_sign(value, sign_bit(x))
