"""Decompositions of reductions, normalisations and products: dtypes, wide sums, and what has no converter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tvmflow.frontend.torch.rules import HALF, Decomposition, first_of, wide

aten = torch.ops.aten
NOWHERE = 2**62  # a place beyond every axis


def _to_dtype(op: Any) -> Decomposition:
    """The `dtype` argument of a reduction, and the widening of integers to int64, as a cast before it."""

    def decompose(x: Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        wanted = dtype or (x.dtype if x.dtype.is_floating_point else torch.int64)
        return NotImplemented if dtype is None and wanted == x.dtype else op(x.to(wanted), *args, **kwargs)

    return decompose


def _any(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    dims = list(range(x.ndim)) if dim is None else dim
    flags = x if x.dtype == torch.bool else x != 0
    return torch.amax(flags.to(torch.int8), dims, keepdim).to(torch.bool)


def _extreme(op: Any, arg: Any) -> Decomposition:
    def decompose(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
        return op(x, dim, keepdim), arg(x, dim, keepdim)

    return decompose


def _arg(op: Any) -> Decomposition:
    """Where the extreme stands that `op` (amax, amin) finds: the first NaN where there is one.

    TVM's argmax is wrong beside -inf and for NaN.
    """

    def decompose(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        if dim is None or x.ndim == 0:
            found = decompose(x.reshape([-1]), 0)
            return found.reshape([1] * x.ndim) if keepdim else found
        extreme = op(x, [dim], True)
        reached = x >= extreme if op is torch.amax else x <= extreme
        if x.dtype.is_floating_point:
            reached = reached | torch.isnan(x)
        places = torch.arange(x.shape[dim], dtype=torch.int64).reshape([-1] + [1] * (x.ndim - dim % x.ndim - 1))
        found = torch.amin(torch.where(reached, places, NOWHERE), [dim], keepdim)
        return torch.where(found == NOWHERE, 0, found)

    return decompose


def _median(x: Tensor) -> Tensor:
    """The lower of the two middle values, NaN where there is any: it is sorted to the end."""
    values = torch.sort(x.flatten())[0]
    middle, last = values[(x.numel() - 1) // 2], values[-1]
    return torch.where(torch.isnan(last), last, middle) if x.dtype.is_floating_point else middle


def _median_dim(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    values, indices = torch.sort(x, dim=dim, stable=True)
    middle = (x.shape[dim] - 1) // 2
    value, index = values.narrow(dim, middle, 1), indices.narrow(dim, middle, 1)
    if x.dtype.is_floating_point:
        nan = torch.isnan(values.narrow(dim, x.shape[dim] - 1, 1))
        value = torch.where(nan, torch.nan, value)
        index = torch.where(nan, torch.argmax(x, dim, True), index)
    return (value, index) if keepdim else (value.squeeze(dim), index.squeeze(dim))


def _vector_norm(
    x: Tensor, order: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    size = torch.abs(x.to(dtype or (torch.float32 if x.dtype in HALF else x.dtype)))
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


def _cdist(a: Tensor, b: Tensor, p: float, compute_mode: int | None) -> Tensor:  # noqa: ARG001 # how, not what
    return _vector_norm(a.unsqueeze(-2) - b.unsqueeze(-3), p, [-1])


def _var(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return _var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def _var_mean(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    dims = list(range(x.ndim)) if dim is None or dim == [] else [dim] if isinstance(dim, int) else list(dim)
    values = x.float() if x.dtype in HALF else x
    mean = values.mean(dims, keepdim=True)
    centred = values - mean
    count: Any = 1
    for axis in dims:
        count = count * x.shape[axis]
    correction = 1 if correction is None else correction
    divisor = count - (int(correction) if correction == int(correction) else correction)
    if isinstance(divisor, int | float):
        divisor = float(max(divisor, 0))
    var = (centred * centred).sum(dims, keepdim=keepdim) / divisor
    return var.to(x.dtype), (mean if keepdim else mean.squeeze(dims)).to(x.dtype)


def _batch_statistics_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any) -> Any:
    """What InstanceNorm becomes; TVM's importer needs a channel count that is known."""
    _training, _momentum, eps = rest
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


def _softmax(op: Any) -> Decomposition:
    def decompose(x: Tensor, dim: int, half_to_float: bool) -> Any:
        if x.dtype not in HALF:
            return NotImplemented
        return op(x.float(), dim, False).to(torch.float32 if half_to_float else x.dtype)

    return decompose


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    product = a @ b if alpha == 1 else (a @ b) * alpha
    if beta == 0:
        return product
    return product + (bias if beta == 1 else bias * beta)


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> Any:
    """Other dtypes than float32 take their bias in an addition of its own."""
    if bias is None or x.dtype == torch.float32:
        return NotImplemented
    plain = aten.convolution.default(x, weight, None, *args)
    return plain + bias.reshape([-1] + [1] * (x.ndim - 2))


REDUCTIONS: dict[Any, Decomposition] = {
    aten.any.default: _any,
    aten.any.dim: _any,
    aten.any.dims: _any,
    aten.max.dim: _extreme(torch.amax, torch.argmax),
    aten.min.dim: _extreme(torch.amin, torch.argmin),
    aten.argmax.default: _arg(torch.amax),
    aten.argmin.default: _arg(torch.amin),
    aten.median.default: _median,
    aten.median.dim: _median_dim,
    aten.linalg_vector_norm.default: _vector_norm,
    aten._cdist_forward.default: _cdist,
    aten.var.correction: _var,
    aten.var_mean.correction: _var_mean,
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _addmm,
    aten.convolution.default: _convolution,
    aten._softmax.default: _softmax(aten._softmax),
    aten._log_softmax.default: _softmax(aten._log_softmax),
    aten.native_group_norm.default: first_of(_group_norm, wide(aten.native_group_norm)),
    aten._native_batch_norm_legit.no_stats: first_of(
        _batch_statistics_norm, wide(aten._native_batch_norm_legit.no_stats)
    ),
    **{
        op: wide(op)
        for op in (
            aten.mean.dim,
            aten.mean.default,
            aten.native_layer_norm.default,
            aten._native_batch_norm_legit_no_training.default,
            aten._adaptive_avg_pool2d.default,
            aten._adaptive_avg_pool3d.default,
        )
    },
    **{
        op: first_of(wide(op), _to_dtype(op))
        for op in (
            aten.sum.dim_IntList,
            aten.prod.default,
            aten.prod.dim_int,
            aten.cumsum.default,
            aten.cumprod.default,
        )
    },
}
