"""Decompositions of element-wise operators: operands of unlike dtypes, `alpha`, booleans, exactness near zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tvmflow.frontend.torch.rules import Decomposition, first_of

aten = torch.ops.aten
BOTH = ("Tensor", "Scalar")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
FLOAT_UNARY = (
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "cos",
    "cosh",
    "erf",
    "exp",
    "log",
    "log2",
    "log10",
    "reciprocal",
    "rsqrt",
    "sigmoid",
    "sin",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
)


def _promoting(op: Any, *, float_result: bool = False) -> Decomposition:
    """Casts the operands of `op` to the dtype in which PyTorch computes; it stays when they have it."""

    def decompose(a: Any, b: Any, **kwargs: Any) -> Any:
        left, right = _tensor_of(a, b), _tensor_of(b, a)
        dtype = torch.result_type(left, right)
        if float_result and not dtype.is_floating_point:
            dtype = torch.get_default_dtype()
        left, right = (value.to(dtype) if isinstance(value, Tensor) else value for value in (left, right))
        return NotImplemented if left is a and right is b else op(left, right, **kwargs)

    return decompose


def _tensor_of(value: Any, other: Any) -> Any:
    """A size of a dynamic dimension becomes a tensor of the other operand's dtype; the rest stays."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) and isinstance(other, Tensor):
        return torch.scalar_tensor(value, dtype=other.dtype)
    return value


def _scaled(op: Any) -> Decomposition:
    def decompose(a: Any, b: Any, alpha: Any = 1) -> Any:
        return NotImplemented if alpha == 1 else op(a, b * alpha)

    return decompose


def _logical(op: Any) -> Decomposition:
    """On booleans, addition is `or` and multiplication is `and`."""

    def decompose(a: Any, b: Any, **_: Any) -> Any:
        both = [
            value if isinstance(value, Tensor) else torch.scalar_tensor(value, dtype=torch.bool)
            for value in (a, b)
            if isinstance(value, Tensor | bool)
        ]
        booleans = len(both) == 2 and all(value.dtype == torch.bool for value in both)
        return op(*both) if booleans else NotImplemented

    return decompose


def _compare_flags(name: str) -> Decomposition:
    """Booleans compare as numbers."""

    def decompose(a: Any, b: Any) -> Any:
        flags = [
            value
            for value in (a, b)
            if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool)
        ]
        if len(flags) < 2:
            return NotImplemented
        left, right = (value.to(torch.int8) if isinstance(value, Tensor) else int(value) for value in flags)
        return getattr(torch, name)(left, right)

    return decompose


def _float_unary(op: Any) -> Decomposition:
    def decompose(x: Tensor) -> Any:
        return NotImplemented if x.dtype.is_floating_point else op(x.to(torch.get_default_dtype()))

    return decompose


def _pow(x: Tensor, exponent: Any) -> Any:
    """Small exponents as PyTorch computes them: by multiplication and square roots, not by powf."""
    if not x.dtype.is_floating_point and exponent not in (1, 2, 3):
        dtype = torch.result_type(x, exponent)
        return torch.pow(x.to(dtype), torch.scalar_tensor(exponent, dtype=dtype))
    exact: dict[Any, Decomposition] = {
        1: lambda v: v.clone(),
        2: lambda v: v * v,
        3: lambda v: v * v * v,
        0.5: torch.sqrt,
        -0.5: torch.rsqrt,
        -1: torch.reciprocal,
        -2: lambda v: torch.reciprocal(v * v),
    }
    return exact[exponent](x) if exponent in exact else NotImplemented


def _int_pow(x: Tensor, exponent: Tensor) -> Any:
    """Integers to integer powers: two tensors of one type, for which there is a converter of ours."""
    dtype = torch.result_type(x, exponent)
    if dtype.is_floating_point or (x.dtype == dtype == exponent.dtype):
        return NotImplemented
    return torch.pow(x.to(dtype), exponent.to(dtype))


def _power_of(base: Any, x: Tensor) -> Any:
    dtype = torch.result_type(base, x)
    return NotImplemented if dtype.is_floating_point else torch.pow(torch.scalar_tensor(base, dtype=dtype), x.to(dtype))


def _shifted_left(x: Tensor, bits: int) -> Tensor:
    return x * (1 << bits)


def _shifted_right(x: Tensor, bits: int) -> Tensor:
    return torch.div(x, 1 << bits, rounding_mode="floor")


def _clamp(x: Tensor, low: Any = None, high: Any = None) -> Any:
    dtype = x.dtype
    for bound in (low, high):
        if bound is not None:
            dtype = torch.promote_types(dtype, torch.result_type(x, bound))
    return NotImplemented if dtype == x.dtype else torch.clamp(x.to(dtype), low, high)


def _div_mode(a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    """A number as a tensor too: of one, TVM's importer makes an int32 whatever the other operand is."""
    given, dtype = (a, b), torch.result_type(a, b)
    a, b = (
        value.to(dtype) if isinstance(value, Tensor) else torch.scalar_tensor(value, dtype=dtype) for value in (a, b)
    )
    if rounding_mode is None:
        return a / b
    if not dtype.is_floating_point:
        if rounding_mode == "floor" and a is given[0] and b is given[1]:
            return NotImplemented
        exact = a if rounding_mode == "floor" else a - torch.fmod(a, b)
        return exact.div(b, rounding_mode="floor")
    if rounding_mode == "trunc":
        return torch.trunc(a / b)
    rest = torch.fmod(a, b)
    quotient = (a - rest) / b
    quotient = torch.where((rest != 0) & ((b < 0) != (rest < 0)), quotient - 1, quotient)
    lower = torch.floor(quotient)
    nearest = torch.where(quotient - lower > 0.5, lower + 1, lower)
    return torch.where(b == 0, a / b, torch.where(quotient == 0, quotient, nearest))


def _remainder(a: Any, b: Any) -> Any:
    """Of floats by fmod, which is exact; a - b * floor(a / b) is not."""
    if not torch.result_type(a, b).is_floating_point:
        return NotImplemented
    rest = torch.fmod(a, b)
    return torch.where((rest != 0) & ((b < 0) != (rest < 0)), rest + b, rest)


def _elu(x: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
    """exp(x) - 1 is off by half an ulp of 1, below what a network feels; expm1 would cost a logarithm."""
    return torch.where(x > 0, x * scale, (torch.exp(x * input_scale) - 1) * (alpha * scale))


def _log1p(x: Tensor) -> Tensor:
    """log(1 + x), with the rounding error of 1 + x put right where it matters (as in Kahan's log1p)."""
    u = 1 + x.to(torch.result_type(x, 1.0))
    return torch.log(u) + torch.where(torch.abs(x) < 0.5, (x - (u - 1)) / u, 0.0)


def _expm1(x: Tensor) -> Tensor:
    """exp(x) - 1 without cancellation, by Kahan's (u - 1) * x / log(u)."""
    x = x.to(torch.result_type(x, 1.0))
    u = torch.exp(x)
    small = (torch.abs(x) < 1) & (u != 1)
    careful = (u - 1) * x / torch.log(torch.where(small, u, 2.0))
    return torch.where(small, careful, torch.where(u == 1, x, u - 1))


def _rrelu(x: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, *rest: Any) -> Any:
    """Outside training the slope is the middle of its range."""
    training = bool(rest and rest[0])
    return NotImplemented if training else (torch.nn.functional.leaky_relu(x, (lower + upper) / 2), noise)


def _where(condition: Tensor, a: Any, b: Any) -> Any:
    dtype = torch.result_type(a, b)
    if condition.dtype == torch.bool and a.dtype == dtype and b.dtype == dtype:
        return NotImplemented
    return torch.where(condition.to(torch.bool), a.to(dtype), b.to(dtype))


def _cat(tensors: list[Tensor], dim: int = 0) -> Any:
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    kept = [tensor for tensor in tensors if tuple(tensor.shape) != (0,)] or tensors[:1]
    if len(kept) == len(tensors) and all(tensor.dtype == dtype for tensor in kept):
        return NotImplemented
    return torch.cat([tensor.to(dtype) for tensor in kept], dim)


def _bitwise_not(x: Tensor) -> Any:
    return torch.logical_not(x) if x.dtype == torch.bool else NotImplemented


def _bitwise(op: Any, logical: Any) -> Decomposition:
    return first_of(_logical(logical), _promoting(op))


ARITHMETIC: dict[Any, Decomposition] = {
    **{
        getattr(getattr(aten, name), overload): first_of(_compare_flags(name), _promoting(getattr(aten, name)))
        for name in COMPARISONS
        for overload in BOTH
    },
    **{getattr(aten, name).default: _float_unary(getattr(aten, name)) for name in FLOAT_UNARY},
    **{
        getattr(aten.add, overload): first_of(_logical(torch.logical_or), _scaled(aten.add), _promoting(aten.add))
        for overload in BOTH
    },
    **{getattr(aten.sub, overload): first_of(_scaled(aten.sub), _promoting(aten.sub)) for overload in BOTH},
    **{getattr(aten.mul, overload): first_of(_logical(torch.logical_and), _promoting(aten.mul)) for overload in BOTH},
    **{getattr(aten.div, overload): _promoting(aten.div, float_result=True) for overload in BOTH},
    **{getattr(aten.remainder, overload): first_of(_promoting(aten.remainder), _remainder) for overload in BOTH},
    **{getattr(aten.bitwise_and, overload): _bitwise(aten.bitwise_and, torch.logical_and) for overload in BOTH},
    **{getattr(aten.bitwise_or, overload): _bitwise(aten.bitwise_or, torch.logical_or) for overload in BOTH},
    **{getattr(aten.bitwise_xor, overload): _bitwise(aten.bitwise_xor, torch.logical_xor) for overload in BOTH},
    aten.bitwise_not.default: _bitwise_not,
    aten.fmod.Tensor: _promoting(aten.fmod),
    aten.fmod.Scalar: _promoting(aten.fmod),
    aten.atan2.default: _promoting(aten.atan2),
    aten.maximum.default: _promoting(aten.maximum),
    aten.minimum.default: _promoting(aten.minimum),
    aten.div.Tensor_mode: _div_mode,
    aten.div.Scalar_mode: _div_mode,
    aten.pow.Tensor_Scalar: first_of(_promoting(aten.pow), _pow),
    aten.pow.Tensor_Tensor: first_of(_int_pow, _promoting(aten.pow)),
    aten.pow.Scalar: _power_of,
    aten.__lshift__.Scalar: _shifted_left,
    aten.__rshift__.Scalar: _shifted_right,
    aten.clamp.default: _clamp,
    aten.rrelu_with_noise_functional.default: _rrelu,
    aten.elu.default: _elu,
    aten.log1p.default: _log1p,
    aten.expm1.default: _expm1,
    aten.where.self: _where,
    aten.cat.default: _cat,
}
