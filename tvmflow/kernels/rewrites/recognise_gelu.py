"""Finds GELU in kernels, however it is written, and makes it one function of elementary.py.

As a product with 1 + erf it takes two polynomials where one will do, and loses its digits for negative numbers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call
from tvm.tirx import Add, Div, FloatImm, Mul, PrimFunc

from tvmflow.kernels.mathematics import vector_math
from tvmflow.kernels.mathematics.lanes import TABLE_SIZE, Expr
from tvmflow.kernels.rewriting import each_kernel
from tvmflow.kernels.schedules.axes import Registers


@tvm.transform.module_pass(opt_level=0, name="RecogniseGelu")
class RecogniseGelu:
    """Puts calls of GELU in the place of what computes it, in float32."""

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return recognised(mod, tvm.target.Target.current())


def recognised(mod: tvm.IRModule, target: tvm.target.Target) -> tvm.IRModule:
    """What the pass makes of a module for an `llvm` target."""
    vector_math.register()
    has_table = Registers.of(target).lanes == TABLE_SIZE
    gelu = vector_math.op_name("gelu_by_table" if has_table else "gelu")
    return each_kernel(mod, lambda function: _recognised(function, gelu))


def _recognised(function: PrimFunc, gelu: str) -> PrimFunc:
    calls: list[Call] = []
    tvm_ffi.structural_walk(function.body, (Call, calls.append))
    if not any(_is_erf(call) for call in calls):
        return function
    replace = functools.partial(_replaced, gelu)
    return function.with_body(tvm_ffi.structural_map(function.body, [(Mul, replace), (Div, replace)], order="pre"))


def _replaced(gelu: str, product: Expr) -> Expr:
    """A call of `gelu` for x (1 + erf(x / sqrt(2))) / 2, in any order; itself where it is something else."""
    scale, others = 1.0, []
    for factor, power in _factors(product, 1):
        if isinstance(factor, FloatImm):
            scale *= float(factor.value) ** power
        elif power == 1:
            others.append(factor)
        else:
            return product
    if len(others) != 2 or str(product.ty.dtype) != "float32":
        return product
    for x, sum_ in (others, others[::-1]):
        height = _height(sum_, x)
        if height is not None and math.isclose(height * scale, 0.5, rel_tol=1e-6):
            return tirx.call_intrin("float32", gelu, x)
    return product


def _factors(product: Expr, power: int) -> Iterator[tuple[Expr, int]]:
    """What is multiplied (1) and what it is divided by (-1)."""
    if isinstance(product, (Mul, Div)):
        yield from _factors(product.a, power)
        yield from _factors(product.b, power if isinstance(product, Mul) else -power)
    else:
        yield product, power


def _height(sum_: Expr, x: Expr) -> float | None:
    """c where `sum_` is c + c erf(x / sqrt(2)); else None."""
    if not isinstance(sum_, Add):
        return None
    for constant, term in ((sum_.a, sum_.b), (sum_.b, sum_.a)):
        if isinstance(constant, FloatImm):
            height = float(constant.value)
            factors = list(_factors(term, 1))
            erfs = [factor for factor, power in factors if power == 1 and _is_erf(factor)]
            if len(erfs) == 1 and _scale(factors, erfs[0]) == height and _is_scaled(erfs[0].args[0], x):
                return height
    return None


def _is_erf(value: Expr) -> bool:
    return isinstance(value, Call) and getattr(value.op, "name", "") == vector_math.op_name("erf")


def _scale(factors: list[tuple[Expr, int]], other: Expr) -> float | None:
    """The product of all factors but one, where they are numbers."""
    rest = [(factor, power) for factor, power in factors if not factor.same_as(other)]
    if not all(isinstance(factor, FloatImm) for factor, _ in rest):
        return None
    return math.prod(float(factor.value) ** power for factor, power in rest)


def _is_scaled(argument: Expr, x: Expr) -> bool:
    """Whether `argument` is x / sqrt(2)."""
    factors = list(_factors(argument, 1))
    same = [factor for factor, power in factors if power == 1 and tvm_ffi.structural_equal(factor, x)]
    scale = _scale(factors, same[0]) if len(same) == 1 else None
    return scale is not None and math.isclose(scale, 0.5**0.5, rel_tol=1e-6)
