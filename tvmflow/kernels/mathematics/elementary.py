"""Exponentials, logarithms, powers, hyperbolic functions and erf of float32 vectors, as TIR expressions.

Methods: argument reduction and polynomials as in W. J. Cody and W. Waite, Software Manual for the Elementary Functions
(1980), and J.-M. Muller, Elementary Functions (3rd ed., 2016), chapters 3, 4 and 11. Every polynomial is a minimax
approximation in relative error over its interval, made for this file (Lawson's weighted least squares, coefficients
rounded to float32 one by one); beside each stands its own error. Special values as in C99, Annex F.

Largest errors, in units in the last place, are stated and tested in tests/tvm/test_vector_math.py. Every function takes
an open Scope and arguments of any form, and returns a value that is valid within the Scope.
"""

from __future__ import annotations

import math

from tvm import tirx
from tvm.tirx import FloatImm

from tvmflow.kernels.mathematics.lanes import (
    TABLE_SIZE,
    Expr,
    Scope,
    at_least,
    at_most,
    bits,
    cast,
    choose,
    constant,
    from_bits,
    horner,
    looked_up,
    magnitude,
    power_of_two,
    sign_bit,
    with_sign,
)

LN2_HI, LN2_LO = 0.693359375, -2.12194440e-4  # ln 2; 10 bits, so that its product with an exponent is exact
LOG10_2_HI, LOG10_2_LO = 0.30078125, 2.48745663e-4  # log10 2; 8 bits
LOG2_E, LOG10_E, LOG2_10 = 1.44269504, 0.434294482, 3.32192809

EXPM1 = (0.5, 0.166666657, 0.0416664928, 0.00833354611, 0.00139323261, 0.000197616551)  # (e^r-1-r)/r^2, 2^-31
EXP2 = (0.693147182, 0.240226477, 0.0555035956, 0.00961850118, 0.00133909867, 0.000153285815)  # (2^r-1)/r, 2^-28
EXP10 = (2.30258512, 2.65094876, 2.03465605, 1.17129517, 0.541826129, 0.206165746)  # (10^r-1)/r, 2^-28
LOG = (  # (log(1+f) - f + f^2/2) / f^3, 2^-30
    0.333333135,
    -0.250000089,
    0.20002073,
    -0.166679919,
    0.142203107,
    -0.124061145,
    0.118838735,
    -0.116711758,
    0.0674985722,
)
ERF_SMALL = (0.128379151, -0.376124918, 0.112817667, -0.0267643146, 0.00498935999, -0.000596986734)  # 2^-26
ERF_LARGE = (  # erfc(t)^(1/8) for t from 0.9 to 4; its 8th power is right to 2^-27
    1.00023520,
    -0.142320320,
    -0.0666884705,
    -0.00587534299,
    0.00955260079,
    -0.00125540001,
    -8.75053229e-05,
    1.94230761e-05,
)
GELU_SPLIT = 1.3  # two polynomials of as many terms meet here; one coefficient is the same
GELU_SMALL = (  # P(X > t) of the standard normal distribution for t from 0; 2^-26
    0.5,
    -0.398942679,
    7.43447799e-06,
    0.0664440989,
    0.000127031497,
    -0.0101132169,
    -5.15606553e-05,
    0.00148104923,
    -0.000296902203,
)
GELU_LARGE = (  # P(X > t)^(1/8) up to 5.3; its 8th power is right to 2^-22, up to 2 to 2^-23
    0.917134643,
    -0.0918847173,
    -0.0313396081,
    -0.00111598754,
    0.00170416001,
    -2.02051324e-05,
    -5.15606553e-05,
    6.75343244e-06,
    -2.72752658e-07,
)
GELU_VANISHES = 7.5  # there GELU_LARGE's 8th power is 1e-16
GELU_STEP, GELU_END = 0.4375, 6.78
GELU_TAILS = (  # t P(X > t) around 16 multiples of GELU_STEP, term by term; 2^-28 up to 4, 2^-23 to 5.4, then 2^-19
    (
        0.0,
        0.144757539,
        0.166938588,
        0.124261916,
        0.0701035261,
        0.0313972346,
        0.0113726771,
        0.00336103979,
        0.000814201776,
        0.000162096898,
        2.65633553e-05,
        3.58660873e-06,
        3.99260415e-07,
        3.66595181e-08,
        2.7771847e-09,
        1.7362084e-10,
    ),
    (
        0.5,
        0.172266498,
        -0.047261171,
        -0.126602814,
        -0.110926151,
        -0.0654050484,
        -0.0290685277,
        -0.0101325903,
        -0.00282176025,
        -0.000634137832,
        -0.000115702278,
        -1.72068976e-05,
        -2.09139921e-06,
        -2.08153494e-07,
        -1.69888672e-08,
        -1.1382898e-09,
    ),
    (
        -0.398942292,
        -0.327834755,
        -0.167910531,
        -0.0233802516,
        0.0458342209,
        0.0507746115,
        0.0311145633,
        0.01352908,
        0.00447249832,
        0.00115800078,
        0.000238546156,
        3.94671479e-05,
        5.27672364e-06,
        5.72538738e-07,
        5.0569966e-08,
        3.64441388e-09,
    ),
    (
        7.55827841e-07,
        0.100680649,
        0.128323123,
        0.0839888677,
        0.0235920921,
        -0.0104375426,
        -0.016091628,
        -0.0100674964,
        -0.00419980194,
        -0.00129477691,
        -0.00030728773,
        -5.73270117e-05,
        -8.51146979e-06,
        -1.01382693e-06,
        -9.74191678e-08,
        -7.58211094e-09,
    ),
    (
        0.0664737374,
        0.0406218953,
        -0.00867603067,
        -0.035700094,
        -0.0289361142,
        -0.0100277914,
        0.00172306492,
        0.0040205135,
        0.00248406664,
        0.000970797031,
        0.000274149148,
        5.87858267e-05,
        9.81511403e-06,
        1.29464445e-06,
        1.36192142e-07,
        1.15014975e-08,
    ),
    (
        0.000164670404,
        -0.0211740062,
        -0.0201825127,
        -0.0037791552,
        0.00789541379,
        0.00782167539,
        0.00286982674,
        -0.000265289069,
        -0.000847251154,
        -0.000494195381,
        -0.00017645261,
        -4.48531791e-05,
        -8.58202566e-06,
        -1.26991483e-06,
        -1.47692276e-07,
        -1.36431471e-08,
    ),
    (
        -0.0107613467,
        -0.00284241699,
        0.00330824032,
        0.00552256498,
        0.00155660091,
        -0.0014870204,
        -0.00177214574,
        -0.000629835646,
        4.8781043e-05,
        0.000154204943,
        8.15792519e-05,
        2.62442245e-05,
        5.94728817e-06,
        1.00936143e-06,
        1.31904443e-07,
        1.34923361e-08,
    ),
    (
        0.00170145044,
        0.00482526701,
        0.00237093796,
        3.72616923e-05,
        -0.00100113288,
        -0.000805916206,
        0.000330317213,
        0.000379168778,
        9.85257211e-05,
        -1.36960089e-05,
        -2.39450528e-05,
        -1.09820894e-05,
        -3.01135378e-06,
        -5.87356055e-07,
        -8.56123208e-08,
        -9.5680841e-09,
    ),
)
POW_LOG2 = (2.8853900817779268, 0.9617966791191516, 0.5770828723063245, 0.41170486495287784, 0.34024961001151016)
POW_EXP2 = (
    1.0,
    0.6931472029329853,
    0.24022647903584413,
    0.05550332286257348,
    0.009618438103816651,
    0.001339895184440562,
    0.00015353299454757587,
)
ROUNDER, ROUNDER_BITS = 1.5 * 2.0**23, 0x4B400000
SQRT_HALF_BITS = 0x3F3504F3
SMALLEST_NORMAL = 1.17549435e-38
SINH_OVERFLOWS = 89.5


def exp(let: Scope, x: Expr) -> Expr:
    x = let(x)
    n, r = _reduced(let, _in_range(let, x, -104.0, 89.0), LOG2_E, (LN2_HI, LN2_LO))
    return choose(x < -104.0, 0.0, _scaled(let, _expm1_of_reduced(r), n))


def exp2(let: Scope, x: Expr) -> Expr:
    x = let(x)
    n, r = _reduced(let, _in_range(let, x, -151.0, 129.0), 1.0, (1.0,))
    return choose(x < -151.0, 0.0, _scaled(let, r * horner(r, EXP2), n))


def exp10(let: Scope, x: Expr) -> Expr:
    x = let(x)
    n, r = _reduced(let, _in_range(let, x, -45.5, 39.0), LOG2_10, (LOG10_2_HI, LOG10_2_LO))
    return choose(x < -45.5, 0.0, _scaled(let, r * horner(r, EXP10), n))


def _in_range(let: Scope, x: Expr, vanishes: float, overflows: float) -> Expr:
    """x, at most where e^x overflows; and 0 where it vanishes (attention's masks): a CPU takes 150 cycles to underflow."""
    return let(choose(x < vanishes, 0.0, at_most(overflows, x)))


def _reduced(let: Scope, x: Expr, scale: float, parts: tuple[float, ...]) -> tuple[Expr, Expr]:
    """(n, r): the int32 n nearest to x * scale, and r = x - n / scale, `parts` adding up to 1 / scale.

    The sum with ROUNDER has no digits after the point; its last digits are those of n.
    """
    n = let(bits(x * scale + ROUNDER) - ROUNDER_BITS)
    for part in parts:
        x = cast("float32", n) * -part + x
    return n, let(x)


def _expm1_of_reduced(r: Expr) -> Expr:
    return r * r * horner(r, EXPM1) + r


def _scaled(let: Scope, p: Expr, n: Expr) -> Expr:
    """(1 + p) * 2^n in two steps: results that are denormal are rounded once, and too large ones become infinite."""
    scale = let(power_of_two(n >> 1))
    return (p * scale + scale) * power_of_two(n - (n >> 1))


def _expm1(let: Scope, x: Expr, shift: int) -> Expr:
    """(e^x - 1) * 2^shift for x >= 0, as long as the exponent of e^x * 2^shift is a float's."""
    n, r = _reduced(let, x, LOG2_E, (LN2_HI, LN2_LO))
    scale = let(power_of_two(n + shift))
    return let(_expm1_of_reduced(r) * scale + (scale - 2.0**shift))


def sigmoid(let: Scope, x: Expr) -> Expr:
    """1 / (1 + e^-x); for negative x as e^x / (1 + e^x), which keeps denormal results."""
    x = let(x)
    size = let(-magnitude(x))
    n, r = _reduced(let, _in_range(let, size, -104.0, 0.0), LOG2_E, (LN2_HI, LN2_LO))
    z = let(choose(size < -104.0, 0.0, _scaled(let, _expm1_of_reduced(r), n)))
    return choose(x < 0.0, z, 1.0) / (z + 1)


def tanh(let: Scope, x: Expr) -> Expr:
    """expm1(2|x|) / (expm1(2|x|) + 2)."""
    x = let(x)
    e = _expm1(let, let(at_most(20.0, magnitude(x) * 2)), 0)
    return with_sign(e / (e + 2), sign_bit(x))


def sinh(let: Scope, x: Expr) -> Expr:
    """With e = expm1(|x|): (e + e / (e + 1)) / 2. e is held as a quarter, which does not overflow before the result."""
    x = let(x)
    size = let(magnitude(x))
    e = _expm1(let, let(at_most(SINH_OVERFLOWS, size)), -2)
    large = (e / (e * 4 + 1) + e) * 2
    return with_sign(choose(size < 2.0**-13, size, large), sign_bit(x))


def cosh(let: Scope, x: Expr) -> Expr:
    """(e^|x| + 1 / e^|x|) / 2, e^|x| held as a quarter."""
    n, r = _reduced(let, let(at_most(SINH_OVERFLOWS, magnitude(x))), LOG2_E, (LN2_HI, LN2_LO))
    scale = let(power_of_two(n - 2))
    quarter = let(_expm1_of_reduced(r) * scale + scale)
    return (constant(0.0625, x) / quarter + quarter) * 2


def _decomposed(let: Scope, x: Expr) -> tuple[Expr, Expr]:
    """(k, m): x = m * 2^k with m between sqrt(1/2) and sqrt(2), both float32; for positive finite x."""
    tiny = x < SMALLEST_NORMAL
    shifted = let(bits(choose(tiny, x * 2.0**23, x)) - SQRT_HALF_BITS)
    k = cast("float32", shifted >> 23) - choose(tiny, constant(23.0, x), 0.0)
    return let(k), from_bits((shifted & 0x7FFFFF) + SQRT_HALF_BITS)


def _log_fraction(f: Expr) -> Expr:
    """log(1 + f) - f between sqrt(1/2) - 1 and sqrt(2) - 1."""
    return f * f * horner(f, (-0.5, *LOG))


def _log_special(x: Expr, result: Expr) -> Expr:
    """`result` where x is positive and finite; -inf at 0, NaN below it, infinity and NaN themselves."""
    result = choose(x < math.inf, result, x)
    return choose(x > 0.0, result, choose(tirx.EQ(x, constant(0, x)), constant(-math.inf, x), math.nan))


def _log_sum(let: Scope, k: Expr, f: Expr) -> Expr:
    """k ln 2 + log(1 + f), the small terms first."""
    return k * LN2_HI + (k * LN2_LO + _log_fraction(f) + f)


def log(let: Scope, x: Expr) -> Expr:
    x = let(x)
    k, m = _decomposed(let, x)
    return _log_special(x, _log_sum(let, k, let(m - 1)))


def log2(let: Scope, x: Expr) -> Expr:
    x = let(x)
    k, m = _decomposed(let, x)
    f = let(m - 1)
    return _log_special(x, (_log_fraction(f) + f) * LOG2_E + k)


def log10(let: Scope, x: Expr) -> Expr:
    x = let(x)
    k, m = _decomposed(let, x)
    f = let(m - 1)
    return _log_special(x, k * LOG10_2_HI + (k * LOG10_2_LO + (_log_fraction(f) + f) * LOG10_E))


def log1p(let: Scope, x: Expr) -> Expr:
    """Without reduction where 1 + x needs none; elsewhere the rounding of 1 + x does not matter."""
    x = let(x)
    one_more = let(x + 1)
    k, m = _decomposed(let, one_more)
    near = tirx.And(x > -0.29, x < 0.41)
    k, f = let(choose(near, 0.0, k)), let(choose(near, x, m - 1))
    result = _log_special(one_more, _log_sum(let, k, f))
    return choose(magnitude(x) < 2.0**-25, x, result)  # also keeps -0


def erf(let: Scope, x: Expr) -> Expr:
    """An odd polynomial near 0, and 1 - p(x)^8 from there to 4, where erf rounds to 1: products cost less than exp."""
    x = let(x)
    size = let(magnitude(x))
    t = let(at_most(4.0, size))
    small = size * horner(let(t * t), ERF_SMALL) + size
    root = let(horner(t, ERF_LARGE))
    square = let(root * root)
    fourth = let(square * square)
    large = constant(1, x) - fourth * fourth
    return with_sign(choose(size > 0.9277, large, small), sign_bit(x))


def gelu(let: Scope, x: Expr) -> Expr:
    """max(x, 0) - |x| P(X > |x|): no difference of near numbers, which x (1 + erf) / 2 is for negative x.

    The polynomial's coefficients are selected, not its values: one evaluation serves both ranges. NaN at -inf, where
    the formula with erf multiplies it by 0.
    """
    x = let(x)
    size = let(magnitude(x))
    is_large = size > GELU_SPLIT
    t = let(at_most(GELU_VANISHES, size))
    tail: Expr = constant(0, x)
    for small, large in zip(reversed(GELU_SMALL), reversed(GELU_LARGE), strict=True):
        tail = tail * t + choose(is_large, constant(large, x), small)
    for _ in range(2):
        tail = let(tail)
        tail = choose(is_large, tail * tail, tail)
    tail = let(tail)
    return x - choose(x < 0.0, x, 0.0) - choose(is_large, t * tail, t) * tail


def gelu_by_table(let: Scope, x: Expr) -> Expr:
    """max(x, 0) - |x| P(X > |x|), the product by polynomials around 16 points, for CPUs that look up 16 at once.

    Shorter and more precise than `gelu`, which serves vectors of other sizes.
    """
    if int(x.ty.dtype.lanes) != TABLE_SIZE:
        return gelu(let, x)
    x = let(x)
    t = let(at_most(GELU_END, magnitude(x)))
    shifted = let(t * (1 / GELU_STEP) + ROUNDER)  # its last digits are the number of the point
    distance = let((shifted - ROUNDER) * -GELU_STEP + t)
    tail: Expr = constant(0, x)
    for terms in reversed(GELU_TAILS):
        tail = tail * distance + looked_up(terms, bits(shifted))
    return x - choose(x < 0.0, x, 0.0) - tail


def power(let: Scope, x: Expr, y: Expr) -> Expr:
    """2^(y log2|x|) in float64, and the sign that C99 gives it; a few constant exponents by products."""
    x = let(x)
    if (simple := _simple_power(x, y)) is not None:
        return simple
    y = let(y)
    size = let(magnitude(x))
    exponent = let(cast("float64", at_least(-3.4e38, at_most(3.4e38, y))))
    t = let(at_least(-170.0, at_most(140.0, let(exponent * _log2_float64(let, size)))))
    n = let(cast("int32", t + 256.5) - 256)
    p = horner(let(t - cast("float64", n)), POW_EXP2)
    scale = tirx.reinterpret(str(t.ty.dtype), (cast("int64", n) + 1023) << 52)
    result = let(cast("float32", p * scale))

    near = let(at_least(-(2.0**24), at_most(2.0**24, y)))  # all floats beyond are even
    whole = let(cast("int32", near))
    is_whole = tirx.EQ(cast("float32", whole), near)
    odd = choose(is_whole, whole << 31, 0)
    negative = tirx.And(x < 0.0, x > -math.inf)
    result = choose(tirx.Or(tirx.Not(negative), is_whole), with_sign(result, sign_bit(x) & odd), math.nan)
    return choose(tirx.Or(tirx.EQ(y, constant(0, y)), tirx.EQ(x, constant(1, x))), 1.0, result)


def _log2_float64(let: Scope, x: Expr) -> Expr:
    """log2 x in float64 with a relative error of 2^-37, for x >= 0: 2 atanh((m - 1) / (m + 1)) / ln 2 + k."""
    k, m = _decomposed(let, x)
    f = let(cast("float64", m - 1))
    s = let(f / (f + 2))
    result = s * horner(let(s * s), POW_LOG2) + cast("float64", k)
    result = choose(x < math.inf, result, cast("float64", x))
    return let(choose(tirx.EQ(x, constant(0, x)), -math.inf, result))


def _simple_power(x: Expr, y: Expr) -> Expr | None:
    """x^y where y is a constant that products, a division or a root serve."""
    value = getattr(y, "value", None)  # of a Broadcast
    value = y if isinstance(y, FloatImm) else value
    if not isinstance(value, FloatImm):
        return None
    number = float(value.value)
    if number == 0.5:
        root = choose(tirx.EQ(x, constant(-math.inf, x)), math.inf, tirx.sqrt(x))
        return choose(tirx.EQ(x, constant(0, x)), 0.0, root)  # sqrt(-0) is -0
    products = {1.0: x, 2.0: x * x, 3.0: x * x * x, 4.0: (x * x) * (x * x)}
    return constant(1, x) / x if number == -1.0 else products.get(number)
