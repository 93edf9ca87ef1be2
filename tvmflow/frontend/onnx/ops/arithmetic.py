"""Elementwise arithmetic: integers as ONNX means them, NaN, huge values, and operand order."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import tvm
from tvm import relax

from tvmflow.frontend.onnx.ops.activation import larger, smaller
from tvmflow.frontend.onnx.ops.guard import no_zero
from tvmflow.frontend.onnx.ops.node import (
    FLOATS,
    SIGNED,
    Converters,
    Node,
    Refusal,
    dtype_of,
    in_float32,
    numpy_dtype,
    scalar,
)
from tvmflow.frontend.powers import integer_power


def _is_tensor(value: Any) -> bool:
    return isinstance(value.ty, relax.TensorType) and not tvm.ir.is_prim_expr(value)


def _are_tensors(node: Node) -> bool:
    return _is_tensor(node.inputs[0]) and _is_tensor(node.inputs[1])


def _arithmetic(node: Node, commutative: bool) -> Any:
    """A constant comes second and with the tensor's rank; otherwise layout conversion fences the operator in."""
    a, b = node.inputs[0], node.inputs[1]
    constants = [isinstance(value, tvm.ir.GenericConst) for value in (a, b)]
    if not _are_tensors(node) or all(constants) or not any(constants):
        return node.upstream()
    if constants[0] and commutative:
        a, b = b, a
    return node.upstream([aligned(a, b), aligned(b, a)])


def aligned(value: Any, other: Any) -> Any:
    """A constant of lower rank than the other operand gets leading axes; one of a single element loses them all."""
    if not isinstance(value, tvm.ir.GenericConst) or other.ty.ndim < 1:
        return value
    array = value.value.numpy()
    if array.size == 1 and 0 < array.ndim <= other.ty.ndim:
        return relax.const(array.reshape(()), dtype_of(value))
    if 0 < array.ndim < other.ty.ndim:
        return relax.const(array.reshape((1,) * (other.ty.ndim - array.ndim) + array.shape), dtype_of(value))
    return value


def _add_or_mul(node: Node) -> Any:
    return _arithmetic(node, commutative=True)


def _sub(node: Node) -> Any:
    return _arithmetic(node, commutative=False)


def _div(node: Node) -> Any:
    """Integers divide towards zero."""
    if not _are_tensors(node) or node.dtype() in FLOATS or node.constant(0) is not None is not node.constant(1):
        return _arithmetic(node, commutative=False)
    return _integer_division(node, node.op.divide, node.op.negative)


def _integer_division(node: Node, function: Any, by_minus_one: Any) -> Any:
    """`function(a, b)` of integers. b = 0, and the lowest a by b = -1, would end the process with SIGFPE on x86.

    So a zero is an error (at import if constant, else at run time), and -1 is computed by `by_minus_one(a)`.
    """
    op, a, b, divisor, dtype = node.op, node.tensor(0), node.tensor(1), node.constant(1), node.dtype()
    if divisor is None:
        b = no_zero(node, b)
    elif not divisor.all():
        raise node.refuse("division by the constant 0", "correct the model")
    if dtype not in SIGNED or (divisor is not None and not (divisor == -1).any()):
        return function(a, b)
    negative = op.equal(b, scalar(-1, dtype))
    return op.where(negative, by_minus_one(a), function(a, op.where(negative, scalar(1, dtype), b)))


def _mod(node: Node) -> Any:
    """fmod = 0: the sign is the divisor's, as in Python; fmod = 1: the sign is the dividend's, as in C."""
    op, dtype, fmod = node.op, node.dtype(), node.integer("fmod", 0)
    if not _are_tensors(node):
        return node.upstream()
    if dtype not in FLOATS:
        return _integer_division(node, op.mod if fmod else op.floor_mod, op.zeros_like)
    a, b = in_float32(node, node.tensor(0)), in_float32(node, node.tensor(1))
    remainder, zero = op.mod(a, b), scalar(0, dtype_of(a))
    if not fmod:
        differs = op.logical_xor(op.less(remainder, zero), op.less(b, zero))
        other_sign = op.logical_and(op.not_equal(remainder, zero), differs)
        remainder = op.where(other_sign, op.add(remainder, b), remainder)
    return op.astype(remainder, dtype)


def _pow(node: Node) -> Any:
    """The result has the base's type; integers to an integer power are exact (modulo the type's width)."""
    if not _are_tensors(node):
        return node.upstream()
    op, base, exponent, dtype, known = node.op, node.tensor(0), node.tensor(1), node.dtype(), node.constant(1)
    if known is not None and known.size == 1 and known.ndim <= base.ty.ndim and known.item() in (1, 2, 3):
        return functools.reduce(op.multiply, [base] * int(known.item()))
    if dtype in FLOATS:
        return op.power(base, aligned(op.astype(exponent, dtype) if dtype_of(exponent) != dtype else exponent, base))
    if dtype_of(exponent) in FLOATS:
        return op.astype(op.power(op.astype(base, "float64"), op.astype(exponent, "float64")), dtype)
    most = int(known.max(initial=0)) if known is not None and not (known < 0).any() else None
    return integer_power(op, base, exponent, most)


def _bit_shift(node: Node) -> Any:
    """Shifting by the width or more leaves 0, or the sign where a signed integer is shifted right."""
    op, dtype, width = node.op, node.dtype(), numpy_dtype(node.dtype()).itemsize * 8
    x, amount, zero = node.tensor(0), node.tensor(1), scalar(0, node.dtype())
    left = node.text("direction", "LEFT") == "LEFT"
    inside = op.less(amount, scalar(width, dtype))
    if dtype in SIGNED:
        inside = op.logical_and(inside, op.greater_equal(amount, zero))
    safe = op.where(inside, amount, zero)
    shifted = op.left_shift(x, safe) if left else op.right_shift(x, safe)
    sign_remains = dtype in SIGNED and not left
    return op.where(inside, shifted, op.where(op.less(x, zero), scalar(-1, dtype), zero) if sign_remains else zero)


def _sum(node: Node) -> Any:
    """A variadic operator as a chain of binary ones, which layout conversion and fusion see through."""
    return functools.reduce(node.op.add, [node.tensor(i) for i in range(len(node.inputs))])


def _mean(node: Node) -> Any:
    return node.op.divide(_sum(node), scalar(len(node.inputs), node.dtype()))


def _extreme(select: Any, name: str) -> Any:
    """Max or Min: a constant without NaN goes first, where TVM's operator keeps the other operand's NaN by itself."""

    def convert(node: Node) -> Any:
        op, dtype, result = node.op, node.dtype(), None
        constants = [node.constant(i) for i in range(len(node.inputs))]
        simple = [value is not None and not np.isnan(value.astype("float64")).any() for value in constants]
        for index in sorted(range(len(node.inputs)), key=lambda i: simple[i]):
            value, known = node.tensor(index), constants[index]
            if result is None:
                result = value
            elif simple[index] and known is not None:
                result = getattr(op, name)(scalar(known.item(), dtype) if known.size == 1 else value, result)
            else:
                result = select(op, result, value)
        return result

    return convert


def _sign(node: Node) -> Any:
    op, x, dtype = node.op, node.x, node.dtype()
    if dtype.startswith("u"):  # TVM compares with -1 too, which no unsigned type holds
        return op.minimum(x, scalar(1, dtype))
    return op.where(op.isnan(x), x, op.sign(x)) if dtype in FLOATS else op.sign(x)


def _is_inf(node: Node) -> Any:
    op, x = node.op, in_float32(node, node.x)
    signs = (("detect_positive", np.inf), ("detect_negative", -np.inf))
    wanted = [op.equal(x, scalar(value, dtype_of(x))) for name, value in signs if node.integer(name, 1)]
    return functools.reduce(op.logical_or, wanted) if wanted else op.zeros_like(op.isnan(x))


def _asinh(node: Node) -> Any:
    """sign(x) * log(|x| + sqrt(x^2 + 1)); a series near 0, and log(2|x|) where x^2 would overflow."""
    op, x, dtype = node.op, node.x, node.dtype()
    a = op.abs(x)
    square = op.multiply(a, a)
    middle = op.log(op.add(a, op.sqrt(op.add(square, scalar(1, dtype)))))
    series = op.multiply(a, op.subtract(scalar(1, dtype), op.multiply(square, scalar(1 / 6, dtype))))
    result = op.where(op.less(a, scalar(0.02, dtype)), series, middle)
    result = op.where(op.greater(a, scalar(_huge(dtype), dtype)), _log_of_twice(op, a), result)
    return op.where(op.less(x, scalar(0, dtype)), op.negative(result), result)


def _acosh(node: Node) -> Any:
    op, x, dtype = node.op, node.x, node.dtype()
    root = op.sqrt(op.multiply(op.subtract(x, scalar(1, dtype)), op.add(x, scalar(1, dtype))))
    return op.where(op.greater(x, scalar(_huge(dtype), dtype)), _log_of_twice(op, x), op.log(op.add(x, root)))


def _huge(dtype: str) -> float:
    return 100.0 if dtype == "float16" else 1e9


def _log_of_twice(op: Any, x: Any) -> Any:
    return op.add(op.log(x), scalar(math.log(2), dtype_of(x)))


def _alignment_refusal(attributes: Mapping[str, Any]) -> str | None:
    """Before opset 7 a second operand of lower rank could start at any axis of the first."""
    return (
        "`axis` aligns its operands as before opset 7; onnx.version_converter makes a newer model of it"
        if "axis" in attributes
        else None
    )


REFUSALS: Mapping[str, Refusal] = dict.fromkeys(
    ("Add", "Sub", "Mul", "Div", "Pow", "And", "Or", "Xor", "Equal", "Greater", "Less"), _alignment_refusal
)
CONVERTERS: Converters = {
    "Add": {1: _add_or_mul},
    "Mul": {1: _add_or_mul},
    "Sub": {1: _sub},
    "Div": {1: _div},
    "Mod": {10: _mod},
    "Pow": {1: _pow},
    "BitShift": {11: _bit_shift},
    "Sum": {1: _sum},
    "Mean": {1: _mean},
    "Max": {1: _extreme(larger, "maximum")},
    "Min": {1: _extreme(smaller, "minimum")},
    "Sign": {9: _sign},
    "IsInf": {10: _is_inf},
    "Asinh": {9: _asinh},
    "Acosh": {9: _acosh},
}
