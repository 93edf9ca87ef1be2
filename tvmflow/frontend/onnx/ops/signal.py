"""Fourier transforms as products with a matrix that is known at import."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax

from tvmflow.frontend.onnx.ops.linear import matmul
from tvmflow.frontend.onnx.ops.node import Converters, Node, dtype_of

MAX_LENGTH = 8192


def _transform(node: Node, x: Any, length: int, inverse: bool, kept: int) -> Any:
    """The DFT over the last axis but one of x [..., n, 1 or 2], cut or zero-padded to `length`; `kept` frequencies.

    A real signal is multiplied by (cos, sin); a complex one by the real matrix that multiplies by exp(i phi).
    """
    if length > MAX_LENGTH:
        raise node.refuse(f"a transform over {length} elements; at most {MAX_LENGTH} are supported")
    op, dtype = node.op, dtype_of(x)
    n, parts = int(x.ty.shape[-2]), int(x.ty.shape[-1])
    used = min(n, length)
    angle = 2 * np.pi * ((np.outer(np.arange(used), np.arange(kept)) % length) / length) * (1 if inverse else -1)
    cos, sin = np.cos(angle), np.sin(angle)
    columns = (
        np.stack([cos, sin], axis=-1)
        if parts == 1
        else np.stack([np.stack([cos, sin], axis=-1), np.stack([-sin, cos], axis=-1)], axis=1)
    )
    matrix = columns.reshape(used * parts, kept * 2) / (length if inverse else 1)
    lead = list(x.ty.shape)[:-2]
    x = op.strided_slice(x, [len(lead)], [0], [used]) if used < n else x
    y = matmul(op, op.reshape(x, (*lead, used * parts)), relax.const(matrix.astype(dtype), dtype))
    return op.reshape(y, (*lead, kept, 2))


def _dft(node: Node) -> Any:
    op, rank = node.op, node.rank()
    given = node.optional(2, "axis")
    axis = node.axis(node.integer("axis", 1) if node.opset < 20 else -2 if given is None else int(given.item()))
    length = int(node.known(1, "dft_length").item()) if node.has(1) else None
    onesided, inverse = bool(node.integer("onesided", 0)), bool(node.integer("inverse", 0))
    if onesided and inverse:
        return _inverse_onesided(node, axis, length)
    length = node.shape(0, [axis])[0] if length is None else length
    order = [a for a in range(rank - 1) if a != axis] + [axis, rank - 1]
    moved = op.permute_dims(node.x, order)
    y = _transform(node, moved, length, inverse, length // 2 + 1 if onesided else length)
    return op.permute_dims(y, [order.index(a) for a in range(rank)])


def _inverse_onesided(node: Node, axis: int, length: int | None) -> Any:
    """The real signal of half a spectrum: frequencies other than 0 and the middle stand for their mirror image too."""
    op, rank = node.op, node.rank()
    given = node.shape(0, [axis])[0]
    length = 2 * (given - 1) if length is None else length
    used = min(given, length // 2 + 1)
    angle = 2 * np.pi * ((np.outer(np.arange(used), np.arange(length)) % length) / length)
    twice = np.where((np.arange(used) == 0) | (np.arange(used) * 2 == length), 1.0, 2.0)[:, None]
    matrix = np.stack([twice * np.cos(angle), -twice * np.sin(angle)], axis=1).reshape(used * 2, length) / length
    order = [a for a in range(rank - 1) if a != axis] + [axis, rank - 1]
    moved = op.permute_dims(node.x, order)
    lead, dtype = list(moved.ty.shape)[:-2], node.dtype()
    moved = op.strided_slice(moved, [rank - 2], [0], [used]) if used < given else moved
    y = matmul(op, op.reshape(moved, (*lead, used * 2)), relax.const(matrix.astype(dtype), dtype))
    return op.permute_dims(op.reshape(y, (*lead, length, 1)), [order.index(a) for a in range(rank)])


def _stft(node: Node) -> Any:
    """Frames of the signal [B, n(, 1 or 2)], each times the window, transformed: [B, frames, frequencies, 2]."""
    op, step = node.op, int(node.known(1, "frame_step").item())
    if node.has(3):
        length = int(node.known(3, "frame_length").item())
    elif node.has(2):
        length = node.shape(2)[0]
    else:
        raise node.refuse("neither window nor frame_length is given", "correct the model")
    x = node.x if node.rank() == 3 else op.expand_dims(node.x, 2)
    frames = 1 + (int(x.ty.shape[1]) - length) // step
    places = np.arange(frames)[:, None] * step + np.arange(length)
    framed = op.take(x, relax.const(places, "int64"), 1)
    if node.has(2):
        framed = op.multiply(framed, op.reshape(node.tensor(2), (1, 1, length, 1)))
    onesided = bool(node.integer("onesided", 1)) and int(x.ty.shape[2]) == 1
    return _transform(node, framed, length, False, length // 2 + 1 if onesided else length)


CONVERTERS: Converters = {"DFT": {17: _dft}, "STFT": {17: _stft}}
