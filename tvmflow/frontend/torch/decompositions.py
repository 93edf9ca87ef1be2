"""Decompositions of PyTorch operators, in PyTorch: what TVM's importer gets wrong or does not know, said in what it knows.

Each function has the signature of the ATen overload it stands for and returns an equal value, or NotImplemented where
the operator may stay as it is. So each can be tested against PyTorch without any compiler. What they cure, with
apache-tvm 0.27: operands of unlike dtypes (a scalar is cast to the tensor's dtype, 2.5 becomes 2), `alpha`, `scale`,
divisor_override, antialias, indices below zero, several index tensors, masks, sums of float16 in float16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tvmflow.frontend.torch.indexing import INDEXING
from tvmflow.frontend.torch.resampling import RESAMPLING

aten = torch.ops.aten
Decomposition = Callable[..., Any]
HALF = (torch.float16, torch.bfloat16)


def table() -> dict[Any, Decomposition]:
    """PyTorch's own decompositions into Core ATen, and ours over them."""
    decompositions: dict[Any, Decomposition] = torch.export.default_decompositions()
    decompositions.update(OURS)
    return decompositions


def _promoting(op: Any, *, float_result: bool = False) -> Decomposition:
    """Casts the operands of `op` to the dtype in which PyTorch computes; it stays when they have it already."""

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


def _first(*steps: Decomposition) -> Decomposition:
    """The first of `steps` that applies."""

    def decompose(*args: Any, **kwargs: Any) -> Any:
        for step in steps:
            result = step(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return NotImplemented

    return decompose


def _scaled(op: Any) -> Decomposition:
    def decompose(a: Any, b: Any, alpha: Any = 1) -> Any:
        return NotImplemented if alpha == 1 else op(a, b * alpha)

    return decompose


def _logical(op: Any) -> Decomposition:
    """On booleans, addition is `or` and multiplication is `and`."""

    def decompose(a: Any, b: Any, **_: Any) -> Any:
        both = [value if isinstance(value, Tensor) else torch.scalar_tensor(value, dtype=torch.bool)
                for value in (a, b) if isinstance(value, Tensor | bool)]
        booleans = len(both) == 2 and all(value.dtype == torch.bool for value in both)
        return op(*both) if booleans else NotImplemented

    return decompose


def _float_unary(op: Any) -> Decomposition:
    def decompose(x: Tensor) -> Any:
        return NotImplemented if x.dtype.is_floating_point else op(x.to(torch.get_default_dtype()))

    return decompose


def _wide(op: Any) -> Decomposition:
    """float16 and bfloat16 are summed in float32, as PyTorch does, and rounded once at the end."""

    def decompose(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dtype not in HALF:
            return NotImplemented
        dtype = kwargs.pop("dtype", None) or x.dtype
        wide = [arg.float() if isinstance(arg, Tensor) and arg.dtype in HALF else arg for arg in args]
        result = op(x.float(), *wide, **kwargs)
        if isinstance(result, tuple):
            return tuple(part.to(dtype) for part in result)
        return result.to(dtype)

    return decompose


def _to_dtype(op: Any) -> Decomposition:
    """The `dtype` argument of a reduction, and PyTorch's widening of integers to int64, as a cast before it."""

    def decompose(x: Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        wanted = dtype or (x.dtype if x.dtype.is_floating_point else torch.int64)
        return NotImplemented if dtype is None and wanted == x.dtype else op(x.to(wanted), *args, **kwargs)

    return decompose


def _pow(x: Tensor, exponent: Any) -> Any:
    """Small exponents as PyTorch computes them: by multiplication and square roots, not by powf."""
    if not x.dtype.is_floating_point:
        return NotImplemented
    exact: dict[Any, Decomposition] = {
        1: lambda v: v.clone(), 2: lambda v: v * v, 3: lambda v: v * v * v, 0.5: torch.sqrt,
        -0.5: torch.rsqrt, -1: torch.reciprocal, -2: lambda v: torch.reciprocal(v * v),
    }
    return exact[exponent](x) if exponent in exact else NotImplemented


def _int_pow(x: Tensor, exponent: Tensor) -> Any:
    """Integers to integer powers by float64, which is exact up to 2**53; TVM's power is for floats only."""
    dtype = torch.result_type(x, exponent)
    if dtype.is_floating_point:
        return NotImplemented
    return torch.round(torch.pow(x.double(), exponent.double())).to(dtype)


def _clamp(x: Tensor, low: Any = None, high: Any = None) -> Any:
    dtype = x.dtype
    for bound in (low, high):
        if bound is not None:
            dtype = torch.promote_types(dtype, torch.result_type(x, bound))
    return NotImplemented if dtype == x.dtype else torch.clamp(x.to(dtype), low, high)


def _div_mode(a: Tensor, b: Any, *, rounding_mode: str | None = None) -> Any:
    if not isinstance(b, Tensor):
        b = torch.scalar_tensor(b, dtype=torch.result_type(a, b))
    dtype = torch.result_type(a, b)
    a, b = a.to(dtype), b.to(dtype)
    if rounding_mode is None:
        return a / b
    if not dtype.is_floating_point:
        return NotImplemented if rounding_mode == "floor" else (a - torch.fmod(a, b)).div(b, rounding_mode="floor")
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
    """exp(x) - 1 is off by half a unit of 1, which is far below what a network feels; expm1 would cost a logarithm."""
    return torch.where(x > 0, x * scale, (torch.exp(x * input_scale) - 1) * (alpha * scale))


def _log1p(x: Tensor) -> Tensor:
    """log(1 + x), with the rounding error of 1 + x put right where it matters (Higham, Accuracy and Stability, 1.14)."""
    u = 1 + x.to(torch.result_type(x, 1.0))
    return torch.log(u) + torch.where(torch.abs(x) < 0.5, (x - (u - 1)) / u, 0.0)


def _expm1(x: Tensor) -> Tensor:
    """exp(x) - 1 without cancellation, by Kahan's (u - 1) * x / log(u)."""
    x = x.to(torch.result_type(x, 1.0))
    u = torch.exp(x)
    small = (torch.abs(x) < 1) & (u != 1)
    return torch.where(small, (u - 1) * x / torch.log(torch.where(small, u, 2.0)), torch.where(u == 1, x, u - 1))


def _any(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    dims = list(range(x.ndim)) if dim is None else dim
    flags = x if x.dtype == torch.bool else x != 0
    return torch.amax(flags.to(torch.int8), dims, keepdim).to(torch.bool)


def _extreme(op: Any, arg: Any) -> Decomposition:
    def decompose(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
        return op(x, dim, keepdim), arg(x, dim, keepdim)

    return decompose


def _median(x: Tensor) -> Tensor:
    """The lower of the two middle values."""
    return torch.sort(x.flatten())[0][(x.numel() - 1) // 2]


def _median_dim(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    values, indices = torch.sort(x, dim=dim, stable=True)
    middle = (x.shape[dim] - 1) // 2
    picked = (values.narrow(dim, middle, 1), indices.narrow(dim, middle, 1))
    return picked if keepdim else (picked[0].squeeze(dim), picked[1].squeeze(dim))


def _vector_norm(x: Tensor, order: float = 2, dim: Any = None, keepdim: bool = False,
                 *, dtype: torch.dtype | None = None) -> Tensor:
    wide = torch.float32 if x.dtype in HALF else x.dtype
    size = torch.abs(x.to(dtype or wide))
    dims = list(range(x.ndim)) if dim is None else dim
    if order == float("inf"):
        norm = torch.amax(size, dims, keepdim)
    elif order == float("-inf"):
        norm = torch.amin(size, dims, keepdim)
    elif order == 0:
        norm = (size != 0).to(size.dtype).sum(dims, keepdim)
    elif order == 1:
        norm = size.sum(dims, keepdim)
    elif order == 2:
        norm = torch.sqrt((size * size).sum(dims, keepdim))
    else:
        norm = torch.pow(torch.pow(size, order).sum(dims, keepdim), 1 / order)
    return norm.to(dtype or x.dtype)


def _var(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return _var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def _var_mean(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
              ) -> tuple[Tensor, Tensor]:
    dims = list(range(x.ndim)) if dim is None or dim == [] else [dim] if isinstance(dim, int) else list(dim)
    wide = x.float() if x.dtype in HALF else x
    mean = wide.mean(dims, keepdim=True)
    centred = wide - mean
    count: Any = 1
    for axis in dims:
        count = count * x.shape[axis]
    correction = 1 if correction is None else correction
    divisor = count - (int(correction) if correction == int(correction) else correction)
    if isinstance(divisor, int | float):
        divisor = float(max(divisor, 0))
    var = (centred * centred).sum(dims, keepdim=keepdim) / divisor
    return var.to(x.dtype), (mean if keepdim else mean.squeeze(dims)).to(x.dtype)


def _batch_statistics_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float,
                           eps: float) -> Any:
    """What InstanceNorm becomes; TVM's importer needs a channel count that is known."""
    if isinstance(x.shape[1], int):
        return NotImplemented
    dims = [0, *range(2, x.ndim)]
    var, mean = _var_mean(x, dims, correction=0, keepdim=True)
    scale = torch.rsqrt(var + eps)
    shape = [1, -1] + [1] * (x.ndim - 2)
    result = (x - mean) * scale
    if weight is not None:
        result = result * weight.reshape(shape)
    if bias is not None:
        result = result + bias.reshape(shape)
    return result, mean.reshape([-1]), scale.reshape([-1])


def _group_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *args: Any) -> Any:
    if weight is not None and bias is not None:
        return NotImplemented
    channels = x.shape[1]
    weight = x.new_ones([channels]) if weight is None else weight
    bias = x.new_zeros([channels]) if bias is None else bias
    return aten.native_group_norm.default(x, weight, bias, *args)


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    product = a @ b if alpha == 1 else (a @ b) * alpha
    if beta == 0:
        return product
    return product + (bias if beta == 1 else bias * beta)


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> Any:
    """Other dtypes than float32 take their bias in an addition of its own; TVM's importer convolves in float32."""
    if bias is None or x.dtype == torch.float32:
        return NotImplemented
    plain = aten.convolution.default(x, weight, None, *args)
    return plain + bias.reshape([-1] + [1] * (x.ndim - 2))


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


def _softmax(op: Any) -> Decomposition:
    def decompose(x: Tensor, dim: int, half_to_float: bool) -> Any:
        if x.dtype not in HALF:
            return NotImplemented
        return op(x.float(), dim, False).to(torch.float32 if half_to_float else x.dtype)

    return decompose


def _compare_flags(name: str) -> Decomposition:
    """Booleans compare as numbers."""

    def decompose(a: Any, b: Any) -> Any:
        flags = [value for value in (a, b)
                 if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool)]
        if len(flags) < 2:
            return NotImplemented
        left, right = (value.to(torch.int8) if isinstance(value, Tensor) else int(value) for value in flags)
        return getattr(torch, name)(left, right)

    return decompose


def _cdist(a: Tensor, b: Tensor, p: float, compute_mode: int | None) -> Tensor:
    return _vector_norm(a.unsqueeze(-2) - b.unsqueeze(-3), p, [-1])


def _rrelu(x: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False,
           generator: Any = None) -> Any:
    """Outside training the slope is the middle of its range."""
    return NotImplemented if training else (torch.nn.functional.leaky_relu(x, (lower + upper) / 2), noise)


def _bitwise_not(x: Tensor) -> Any:
    return torch.logical_not(x) if x.dtype == torch.bool else NotImplemented


COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
FLOAT_UNARY = ["acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "erf", "exp", "log", "log2", "log10", "reciprocal", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh"]

OURS: dict[Any, Decomposition] = {
    **{getattr(getattr(aten, name), overload): _first(_compare_flags(name), _promoting(getattr(aten, name)))
       for name in COMPARISONS for overload in ("Tensor", "Scalar")},
    **{op: _promoting(op) for op in (aten.fmod.Tensor, aten.fmod.Scalar, aten.atan2.default, aten.maximum.default,
                                     aten.minimum.default)},
    **{getattr(aten, name).default: _float_unary(getattr(aten, name)) for name in FLOAT_UNARY},
    **{getattr(aten.add, overload): _first(_logical(torch.logical_or), _scaled(aten.add), _promoting(aten.add))
       for overload in ("Tensor", "Scalar")},
    **{getattr(aten.sub, overload): _first(_scaled(aten.sub), _promoting(aten.sub)) for overload in ("Tensor", "Scalar")},
    **{getattr(aten.mul, overload): _first(_logical(torch.logical_and), _promoting(aten.mul))
       for overload in ("Tensor", "Scalar")},
    **{getattr(aten.div, overload): _promoting(aten.div, float_result=True) for overload in ("Tensor", "Scalar")},
    **{getattr(aten.remainder, overload): _first(_promoting(aten.remainder), _remainder)
       for overload in ("Tensor", "Scalar")},
    **{getattr(op, overload): _first(_logical(logical), _promoting(op))
       for op, logical in ((aten.bitwise_and, torch.logical_and), (aten.bitwise_or, torch.logical_or),
                           (aten.bitwise_xor, torch.logical_xor)) for overload in ("Tensor", "Scalar")},
    aten.div.Tensor_mode: _div_mode,
    aten.div.Scalar_mode: _div_mode,
    aten.pow.Tensor_Scalar: _first(_promoting(aten.pow), _pow),
    aten.pow.Tensor_Tensor: _first(_int_pow, _promoting(aten.pow)),
    aten.clamp.default: _clamp,
    aten.var.correction: _var,
    aten.var_mean.correction: _var_mean,
    aten.bitwise_not.default: _bitwise_not,
    aten._cdist_forward.default: _cdist,
    aten.rrelu_with_noise_functional.default: _rrelu,
    aten.elu.default: _elu,
    aten.log1p.default: _log1p,
    aten.expm1.default: _expm1,
    aten.any.default: _any,
    aten.any.dim: _any,
    aten.any.dims: _any,
    aten.max.dim: _extreme(torch.amax, torch.argmax),
    aten.min.dim: _extreme(torch.amin, torch.argmin),
    aten.median.default: _median,
    aten.median.dim: _median_dim,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _addmm,
    aten.convolution.default: _convolution,
    aten.where.self: _where,
    aten.cat.default: _cat,
    aten._softmax.default: _softmax(aten._softmax),
    aten._log_softmax.default: _softmax(aten._log_softmax),
    **{op: _wide(op) for op in (
        aten.mean.dim, aten.mean.default, aten.native_layer_norm.default,
        aten._native_batch_norm_legit_no_training.default, aten._adaptive_avg_pool2d.default,
        aten._adaptive_avg_pool3d.default)},
    aten.native_group_norm.default: _first(_group_norm, _wide(aten.native_group_norm)),
    aten._native_batch_norm_legit.no_stats: _first(
        _batch_statistics_norm, _wide(aten._native_batch_norm_legit.no_stats)),
    **{op: _first(_wide(op), _to_dtype(op)) for op in (
        aten.sum.dim_IntList, aten.prod.default, aten.prod.dim_int, aten.cumsum.default, aten.cumprod.default)},
    **INDEXING,
    **RESAMPLING,
}
