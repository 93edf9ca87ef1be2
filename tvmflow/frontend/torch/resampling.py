"""Decompositions of pooling, resizing and sampling, where TVM's importer drops an argument or rounds otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table

from tvmflow.frontend.torch.rules import Decomposition, first_of, wide

aten = torch.ops.aten
Sizes = Sequence[int]


def _avg_pool(op: Any, spatial: int) -> Decomposition:
    """divisor_override and ceil_mode, by explicit zero padding and a division by what each window covers."""

    def decompose(x: Tensor, kernel: Sizes, stride: Sizes = (), padding: Sizes = (0,), *rest: Any) -> Any:
        ceil_mode, count_include_pad, divisor_override = list(rest) + [False, True, None][len(rest) :]
        if not ceil_mode and divisor_override is None:
            return NotImplemented
        kernel, pads = _per_axis(kernel, spatial), _per_axis(padding, spatial)
        steps = _per_axis(stride or kernel, spatial)
        sizes = x.shape[-spatial:]
        overhang = [_overhang(sizes[i], kernel[i], steps[i], pads[i]) if ceil_mode else 0 for i in range(spatial)]
        border = [side for i in reversed(range(spatial)) for side in (pads[i], pads[i] + overhang[i])]
        mean = op(aten.constant_pad_nd.default(x, border, 0.0), kernel, steps)
        if divisor_override is not None:
            window = 1
            for size in kernel:
                window *= size
            return mean * (window / divisor_override)
        inside = [side for i in reversed(range(spatial)) for side in (pads[i], pads[i])]
        ones = torch.ones([1, 1, *sizes], dtype=x.dtype)
        ones = aten.constant_pad_nd.default(ones, inside, 1.0 if count_include_pad else 0.0)
        excess = [side for i in reversed(range(spatial)) for side in (0, overhang[i])]
        covered = op(aten.constant_pad_nd.default(ones, excess, 0.0), kernel, steps)
        return mean / (covered if x.ndim == spatial + 2 else covered.squeeze(0))

    return decompose


def _overhang(size: int, kernel: int, step: int, pad: int) -> int:
    """How far the last window of a ceil_mode pool reaches beyond the padded input.

    It is left out where it would start in the padding behind.
    """
    count = (size + 2 * pad - kernel + step - 1) // step + 1
    if (count - 1) * step >= size + pad:
        count -= 1
    return max((count - 1) * step + kernel - size - 2 * pad, 0)


def _per_axis(value: Any, spatial: int) -> list[int]:
    values = list(value) if isinstance(value, list | tuple) else [value]
    return values * spatial if len(values) == 1 else values


def _adaptive_max_pool2d(x: Tensor, output_size: Sizes) -> Any:
    """Equal windows only; then it is an ordinary pool."""
    sizes = x.shape[-2:]
    if any(not isinstance(size, int) or size % out for size, out in zip(sizes, output_size, strict=True)):
        return NotImplemented
    window = [size // out for size, out in zip(sizes, output_size, strict=True)]
    return aten.max_pool2d_with_indices.default(x, window, window)


def _resized(name: str) -> Decomposition:
    """TVM derives the scale from the sizes, PyTorch takes the one given: only a whole one is surely the same."""
    vector = getattr(aten, name).vec
    exact: Decomposition = decomposition_table[vector]

    def decompose(x: Tensor, output_size: Sizes | None, *args: Any) -> Any:
        sizes = x.shape[-2:]
        if name == "upsample_nearest2d" and args[-1] and all(scale == int(scale) >= 1 for scale in args[-1]):
            return _repeated(x, [int(scale) for scale in args[-1]]) if not _static(sizes) else NotImplemented
        target = output_size or [int(size * scale) for size, scale in zip(sizes, args[-1], strict=True)]
        whole = _static([*sizes, *target]) and all(out % size == 0 for size, out in zip(sizes, target, strict=True))
        return NotImplemented if whole and x.dtype == torch.float32 else exact(x, output_size, *args)

    return decompose


def _static(sizes: Sequence[Any]) -> bool:
    return all(isinstance(size, int) for size in sizes)


def _repeated(x: Tensor, times: Sequence[int]) -> Tensor:
    """Each pixel `times` over."""
    batch, channels, height, width = x.shape
    tall = x.reshape([batch, channels, height, 1, width, 1])
    return tall.expand(batch, channels, height, times[0], width, times[1]).reshape(
        [batch, channels, height * times[0], width * times[1]]
    )


def _bilinear_antialias(
    x: Tensor, output_size: Sizes, align_corners: bool, scale_h: float | None = None, scale_w: float | None = None
) -> Any:
    """Resizing as two matrix products; the filter is a triangle of half-width max(1, 1 / scale), as in Pillow."""
    height, width = x.shape[-2:]
    if align_corners or not _static([height, width, *output_size]):
        return NotImplemented
    rows = _triangle_weights(height, output_size[0], scale_h).to(x.dtype)
    columns = _triangle_weights(width, output_size[1], scale_w).to(x.dtype)
    return torch.matmul(torch.matmul(rows, x), columns.transpose(0, 1))


def _triangle_weights(size: int, out: int, scale: float | None) -> Tensor:
    """[out, size]: how much each input sample counts for each output sample."""
    step = 1 / scale if scale else size / out
    centers = (torch.arange(out, dtype=torch.float32) + 0.5) * step
    samples = torch.arange(size, dtype=torch.float32) + 0.5
    weights = (1 - (samples - centers.unsqueeze(1)).abs() / max(step, 1.0)).clamp(min=0.0)
    return weights / weights.sum(1, keepdim=True)


RESAMPLING: dict[Any, Decomposition] = {
    aten.avg_pool2d.default: first_of(wide(aten.avg_pool2d.default), _avg_pool(aten.avg_pool2d.default, 2)),
    aten.avg_pool3d.default: first_of(wide(aten.avg_pool3d.default), _avg_pool(aten.avg_pool3d.default, 3)),
    aten.adaptive_max_pool2d.default: _adaptive_max_pool2d,
    aten.upsample_bilinear2d.vec: _resized("upsample_bilinear2d"),
    aten.upsample_nearest2d.vec: _resized("upsample_nearest2d"),
    aten.grid_sampler_2d.default: decomposition_table[aten.grid_sampler_2d.default],
    aten._upsample_bilinear2d_aa.default: _bilinear_antialias,
}
