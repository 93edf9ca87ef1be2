"""Integers to integer powers, exact modulo the type's width, by a few multiplications."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax

from tvmflow.frontend.order import dtype_of

LOW_BITS = 6  # of an exponent; they are squared and multiplied over


def integer_power(op: Any, base: Any, exponent: Any, most: int | None = None) -> Any:
    """`base` to `exponent` in the type of `base`; `op` is an Emitter.

    `most` is the largest exponent, where all are known and none is negative. A negative exponent leaves powers of 1
    and -1 alone, and makes 0 of all else.
    """
    dtype, unsigned = dtype_of(base), dtype_of(exponent).startswith("u")
    wide = "uint64" if unsigned else "int64"
    exponent = op.astype(exponent, wide)
    zero, one = relax.const(0, dtype), relax.const(1, dtype)
    result, square = one, base
    for bit in range(LOW_BITS if most is None else min(LOW_BITS, max(most, 1).bit_length())):
        odd = op.bitwise_and(op.right_shift(exponent, relax.const(bit, wide)), relax.const(1, wide))
        result = op.where(op.equal(odd, relax.const(1, wide)), op.multiply(result, square), result)
        square = op.multiply(square, square)
    if most is None or most >> LOW_BITS:
        high = op.right_shift(exponent, relax.const(LOW_BITS, wide))
        odd = op.equal(op.bitwise_and(base, one), one)
        whole = op.multiply(result, _high_power(op, square, high))
        above = op.where(odd, whole, zero)  # an even number's power of 64 is 0 modulo 2^64
        result = op.where(op.equal(high, relax.const(0, wide)), result, above)
    if unsigned or most is not None:
        return result
    units = op.where(op.equal(base, one), one, zero)
    if not dtype.startswith("u"):
        units = op.where(op.equal(base, relax.const(-1, dtype)), _sign(op, exponent, dtype), units)
    return op.where(op.less(exponent, relax.const(0, wide)), units, result)


def _sign(op: Any, exponent: Any, dtype: str) -> Any:
    """-1 to an exponent: 1 for even ones, else -1."""
    odd = op.bitwise_and(exponent, relax.const(1, "int64"))
    return op.where(op.equal(odd, relax.const(1, "int64")), relax.const(-1, dtype), relax.const(1, dtype))


def _high_power(op: Any, power: Any, exponent: Any) -> Any:
    """A 64th power of an odd number to `exponent`, which is not negative.

    The 64th power is 1 + 256 u, so the binomial series ends with the eighth term: (256 u)^8 is 0 modulo 2^64. Its
    terms' quotients are (n - k + 1) / k * 256 u, where 256 takes what is even in k and the odd rest has an inverse.
    """
    dtype = dtype_of(power)
    width = np.dtype(dtype).itemsize * 8
    one = relax.const(1, dtype)
    if width == 8:
        return one
    n, u = op.astype(exponent, dtype), op.right_shift(op.subtract(power, one), relax.const(8, dtype))
    total: Any = one
    for k in range(7, 0, -1):
        even = k & -k
        factor = (256 // even * pow(k // even, -1, 1 << 64)) % (1 << width)
        known = relax.const(np.array(factor, f"uint{width}").view(dtype), dtype)
        quotient = op.multiply(op.multiply(op.subtract(n, relax.const(k - 1, dtype)), u), known)
        total = op.add(op.multiply(quotient, total), one)
    return total
