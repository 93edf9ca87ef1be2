"""Decompositions of PyTorch's indexing into operators of places.py, scatter and where, for static and dynamic sizes.

Several index tensors become one index into the merged axes; indices below zero count from the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tvmflow.frontend.torch.rules import Decomposition

aten = torch.ops.aten
Index = Sequence[Tensor | None]


def _index(checked: bool) -> Decomposition:
    """x[indices], None standing for a whole axis. Masks stay: their result has no size before the run."""

    def decompose(x: Tensor, indices: Index) -> Any:
        axes = [axis for axis, index in enumerate(indices) if index is not None]
        picked = [index for index in indices if index is not None]
        if not picked or any(index.dtype in (torch.bool, torch.uint8) for index in picked):
            return NotImplemented
        adjacent = axes == list(range(axes[0], axes[-1] + 1))
        place = axes[0] if adjacent else 0
        moved = x if adjacent else x.permute(axes + [axis for axis in range(x.ndim) if axis not in axes])
        flat, shape = _merged_index([x.shape[axis] for axis in axes], picked, checked)
        before, after = moved.shape[:place], moved.shape[place + len(axes) :]
        merged = moved.reshape([*before, _product([x.shape[axis] for axis in axes]), *after])
        return torch.ops.tvmflow.take(merged, place, flat).reshape([*before, *shape, *after])

    return decompose


def _index_put(x: Tensor, indices: Index, values: Tensor, accumulate: bool = False) -> Any:
    """x with `values` written (or added) at x[indices]."""
    picked = [index for index in indices if index is not None]
    if not picked:
        return NotImplemented
    if any(index.dtype in (torch.bool, torch.uint8) for index in picked):
        return _masked_put(x, indices, values, accumulate)
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    rest = [axis for axis in range(x.ndim) if axis not in axes]
    order = axes + rest
    flat, shape = _merged_index([x.shape[axis] for axis in axes], picked, checked=True)
    rest_shape = [x.shape[axis] for axis in rest]
    columns = _product(rest_shape)
    rows = x.permute(order).reshape([_product([x.shape[axis] for axis in axes]), columns])
    values = _index_first(values.to(x.dtype), axes, shape, rest_shape).reshape([flat.shape[0], columns])
    target = flat.unsqueeze(1).expand(flat.shape[0], columns)
    written = rows.scatter_add(0, target, values) if accumulate else rows.scatter(0, target, values)
    inverse = [order.index(axis) for axis in range(x.ndim)]
    return written.reshape([x.shape[axis] for axis in order]).permute(inverse)


def _index_first(values: Tensor, axes: list[int], shape: Sequence[Any], rest_shape: Sequence[Any]) -> Tensor:
    """`values`, broadcast to the shape of x[indices], with the axes that the indices made in front."""
    adjacent = axes == list(range(axes[0], axes[-1] + 1))
    place = axes[0] if adjacent else 0
    full = values.expand([*rest_shape[:place], *shape, *rest_shape[place:]])
    made = list(range(place, place + len(shape)))
    return full.permute(made + [axis for axis in range(full.ndim) if axis not in made])


def _masked_put(x: Tensor, indices: Index, values: Tensor, accumulate: bool) -> Any:
    """A single mask with one value is a choice per element; several values have no place before the run."""
    mask = indices[0]
    if len(indices) != 1 or mask is None or values.numel() != 1:
        return NotImplemented
    wide = mask.to(torch.bool).reshape([*mask.shape, *[1] * (x.ndim - mask.ndim)])
    value = values.reshape([]).to(x.dtype)
    return torch.where(wide, x + value if accumulate else value, x)


def _merged_index(sizes: Sequence[Any], indices: Sequence[Tensor], checked: bool) -> tuple[Tensor, Sequence[Any]]:
    """One flat index into the product of `sizes`, and the shape that the indices broadcast to.

    Each index is checked by itself: out of range it may still lie within the product.
    """
    from_start = torch.ops.tvmflow.in_range if checked else _from_start
    wrapped = [from_start(index.to(torch.int64), size) for index, size in zip(indices, sizes, strict=True)]
    wrapped = list(torch.broadcast_tensors(*wrapped))
    merged = wrapped[0]
    for index, size in zip(wrapped[1:], sizes[1:], strict=True):
        merged = merged * size + index
    return merged.reshape([-1]), wrapped[0].shape


def _from_start(index: Tensor, size: Any) -> Tensor:
    return torch.where(index < 0, index + size, index)


def _product(sizes: Sequence[Any]) -> Any:
    product: Any = 1
    for size in sizes:
        product = product * size
    return product


def _select(x: Tensor, dim: int, index: Any) -> Tensor:
    """TVM's `take` reads before the tensor for an index below zero; a slice of one does not."""
    start = index + x.shape[dim] if index < 0 else index
    return aten.slice.Tensor(x, dim, start, start + 1).squeeze(dim)


def _scatter(op: Any) -> Decomposition:
    """The source may be larger than the index; only its leading part is used."""

    def decompose(x: Tensor, dim: int, index: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tuple(source.shape) == tuple(index.shape):
            return NotImplemented
        for axis, size in enumerate(index.shape):
            source = source.narrow(axis, 0, size)
        return op(x, dim, index, source, *args, **kwargs)

    return decompose


def _unfold(x: Tensor, dim: int, size: int, step: int) -> Tensor:
    dim = dim % max(x.ndim, 1)
    count = (x.shape[dim] - size) // step + 1
    starts = torch.arange(count, dtype=torch.int64) * step
    windows = (starts.unsqueeze(1) + torch.arange(size, dtype=torch.int64)).reshape([-1])
    picked = x.index_select(dim, windows).reshape([*x.shape[:dim], count, size, *x.shape[dim + 1 :]])
    return picked.movedim(dim + 1, -1)


def _as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Any:
    """Of a tensor that is contiguous from the start of its storage: the elements picked one by one."""
    if not x.is_contiguous() or x.storage_offset() != 0:
        return NotImplemented
    index = torch.full([], storage_offset or 0, dtype=torch.int64)
    for axis, (count, step) in enumerate(zip(size, stride, strict=True)):
        along = torch.arange(count, dtype=torch.int64) * step
        index = index + along.reshape([-1] + [1] * (len(size) - 1 - axis))
    return x.reshape([-1]).index_select(0, index.reshape([-1])).reshape(size)


def _constant_pad(x: Tensor, pad: Sequence[Any], value: Any = 0) -> Any:
    """A negative pad crops."""
    if not any(isinstance(amount, int) and amount < 0 for amount in pad):
        return NotImplemented
    for pair in range(len(pad) // 2):
        axis, (front, back) = x.ndim - 1 - pair, pad[2 * pair : 2 * pair + 2]
        x = x.narrow(axis, max(-front, 0), x.shape[axis] - max(-front, 0) - max(-back, 0))
    return aten.constant_pad_nd.default(x, [max(amount, 0) for amount in pad], value)


INDEXING: dict[Any, Decomposition] = {
    aten.index.Tensor: _index(checked=True),
    aten._unsafe_index.Tensor: _index(checked=False),
    aten.index_put.default: _index_put,
    aten._unsafe_index_put.default: _index_put,
    aten.select.int: _select,
    aten.scatter.src: _scatter(aten.scatter.src),
    aten.scatter_add.default: _scatter(aten.scatter_add.default),
    aten.scatter_reduce.two: _scatter(aten.scatter_reduce.two),
    aten.unfold.default: _unfold,
    aten.as_strided.default: _as_strided,
    aten.constant_pad_nd.default: _constant_pad,
}
