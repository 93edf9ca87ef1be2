"""Slices and paddings, of axes that may be symbolic."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax

from tvmflow.frontend.onnx.ops.guard import require_equal
from tvmflow.frontend.onnx.ops.node import FLOATS, Converters, Node, numpy_dtype
from tvmflow.frontend.sizes import Size, SizeArithmetic, is_size

INT_MAX = (2**31 - 1, 2**63 - 1)
# Exporters write such numbers for "to the end"; no axis is that long.
FAR = 10**9
FIX = "fix the axis with [shapes.dims] in the config"
SLICE_INPUTS = ("starts", "ends", "axes", "steps")
PAD_MODES = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}


def _pad_by_attributes(node: Node) -> Any:
    pads = node.ints("pads", node.attributes.get("paddings", ()))
    return padded(node, pads, list(range(node.rank())), node.number("value", 0.0))


def _pad(node: Node) -> Any:
    axes = node.optional(3, "axes")
    picked = list(range(node.rank())) if axes is None else [node.axis(int(axis)) for axis in axes]
    value = node.constant(2) if node.has(2) else np.array(0)
    pads = [int(pad) for pad in node.known(1, "pads")]
    if value is None:
        return _padded_with_tensor(node, pads, picked)
    return padded(node, pads, picked, value.item() if value.size else 0)


def padded(node: Node, pads: list[int], axes: list[int], value: float) -> Any:
    """Negative pads cut off first; then the others are added."""
    op, mode = node.op, node.text("mode", "constant")
    if mode not in PAD_MODES:
        raise node.refuse(f"mode = {mode!r} is none of the standard's", "correct the model")
    x, count = _cut(node, pads, axes), len(axes)
    widths = [0] * (2 * node.rank())
    for i, axis in enumerate(axes):
        widths[2 * axis], widths[2 * axis + 1] = max(pads[i], 0), max(pads[i + count], 0)
        _check_held(node, mode, axis, max(widths[2 * axis : 2 * axis + 2]))
    if not any(widths):
        return x
    if mode == "constant" and node.dtype() not in FLOATS:
        return _with_borders(op, x, widths, relax.const(np.array(value, numpy_dtype(node.dtype())), node.dtype()))
    return op.nn.pad(x, widths, PAD_MODES[mode], float(value))


def _check_held(node: Node, mode: str, axis: int, width: int) -> None:
    """These modes copy `width` elements of the axis itself, which must hold them."""
    if mode not in ("reflect", "wrap") or not width:
        return
    have = node.dims()[axis] - (mode == "reflect")
    if not isinstance(have, int):
        require_equal(node, SizeArithmetic().minimum(have, width), width, f"axis_{axis}_holds_what_{mode}_pads")
    elif width > have:
        raise node.refuse(f"mode = {mode!r} pads axis {axis} by more than it holds")


def _cut(node: Node, pads: list[int], axes: list[int]) -> Any:
    x, count = node.x, len(axes)
    cut = [(axis, -min(pads[i], 0), min(pads[i + count], 0)) for i, axis in enumerate(axes)]
    cut = [(axis, before, after) for axis, before, after in cut if before or after]
    if cut:
        ends = [node.dims()[axis] + after for axis, _, after in cut]
        x = node.op.strided_slice(x, [c[0] for c in cut], [c[1] for c in cut], ends)
    return x


def _padded_with_tensor(node: Node, pads: list[int], axes: list[int]) -> Any:
    if node.text("mode", "constant") != "constant":
        return padded(node, pads, axes, 0)
    widths = [0] * (2 * node.rank())
    for i, axis in enumerate(axes):
        widths[2 * axis], widths[2 * axis + 1] = max(pads[i], 0), max(pads[i + len(axes)], 0)
    return _with_borders(node.op, _cut(node, pads, axes), widths, node.op.reshape(node.tensor(2), ()))


def _with_borders(op: Any, x: Any, widths: list[int], value: Any) -> Any:
    """Concatenates borders of a value that nn.pad cannot take: a run-time one, or an integer (it holds doubles)."""
    for axis in range(len(widths) // 2):
        borders = [list(x.ty.shape) for _ in range(2)]
        borders[0][axis], borders[1][axis] = widths[2 * axis], widths[2 * axis + 1]
        before, after = (op.broadcast_to(value, border) if border[axis] else None for border in borders)
        parts = [part for part in (before, x, after) if part is not None]
        x = op.concat(parts, axis=axis) if len(parts) > 1 else x
    return x


def _slice(node: Node) -> Any:
    """Places as Python's slices clamp them, so that TVM gets none beyond the ends and none that run backwards."""
    starts: Any
    ends: Any
    if node.opset < 10:
        starts, ends = node.ints("starts", ()), node.ints("ends", ())
        axes: Any = node.ints("axes", range(len(starts)))
        steps: Any = None
    else:
        starts, ends, axes, steps = (_listed(node, i, name) for i, name in enumerate(SLICE_INPUTS, 1))
    axes = [node.axis(int(axis)) for axis in (range(len(starts)) if axes is None else axes)]
    steps = [1] * len(starts) if steps is None else [int(step) for step in steps]
    dims = node.dims()
    cuts = [
        (axis, *_cut_of(node, axis, (start, end), step), step)
        for axis, start, end, step in zip(axes, starts, ends, steps, strict=True)
        if not _is_all(dims[axis], start, end, step)
    ]
    x = node.x
    for inside in (False, True):
        group = [cut for cut in cuts if _is_symbolic(dims[cut[0]], cut) == inside]
        if group:
            x = node.op.strided_slice(x, *map(list, zip(*group, strict=True)), assume_inbound=inside)
    return x


def _is_symbolic(size: Size, cut: tuple[Any, ...]) -> bool:
    return not all(isinstance(value, int) for value in (size, *cut))


def _is_all(size: Size, start: Size, end: Size, step: int) -> bool:
    """Whether a slice takes all of a symbolic axis."""
    return not isinstance(size, int) and is_size(start, 0) and isinstance(end, int) and end >= FAR and step == 1


def _listed(node: Node, index: int, name: str) -> list[Any] | None:
    """The elements of an operand, which must be known as integers or sizes; None where it is omitted."""
    if node.has(index) and isinstance(node.inputs[index], relax.ShapeExpr):
        return list(node.inputs[index].values)
    values = node.optional(index, name)
    return None if values is None else [int(value) for value in values.flat]


def _cut_of(node: Node, axis: int, places: tuple[Any, Any], step: int) -> tuple[Any, Any]:
    """Where the slice of an axis starts and ends."""
    size, sizes = node.dims()[axis], SizeArithmetic()
    if all(isinstance(value, int) for value in (size, *places)):
        taken = _places(size, places[0], places[1], step)
        after = taken[-1] + (1 if step > 0 else -1) if taken else 0
        return taken[0] if taken else 0, after if after >= 0 else -size - 1
    if step < 0:
        raise node.refuse("a negative step along an axis of symbolic size", FIX)
    begin, end = (_clamped(node, sizes, size, place) for place in places)
    return begin, sizes.maximum(end, begin)


def _clamped(node: Node, sizes: SizeArithmetic, size: Size, place: Size) -> Size:
    """A place along an axis, of which one is symbolic, counted from the front and not beyond the end.

    A symbolic end within a table of fixed size is required to lie in it instead of being clamped: what is added to
    the part of the table has the size that was asked for, and must keep it.
    """
    size, place = sizes.axis(size), sizes.simple(place)
    if isinstance(place, int) and place >= FAR:
        return size
    if sizes.is_true(place < 0):
        return sizes.maximum(size + place, 0)
    if sizes.not_negative(sizes.simple(-place)):  # the 0 that it may be is the front
        return sizes.product((sizes.maximum(size + place, 0), sizes.minimum(-place, 1)))
    if not sizes.not_negative(place):
        raise node.refuse(f"a place {place} of unknown sign", FIX)
    if sizes.not_negative(sizes.simple(size - place)):
        return place
    if isinstance(size, int):
        require_equal(node, sizes.minimum(place, size), place, "place_in_range")
        return place
    return sizes.minimum(place, size)


def _places(size: int, start: int, stop: int, step: int) -> range:
    """What a slice takes: ends before the front or beyond the end are clamped, as the standard says, to elements.

    The highest integers mean the end in the direction of the step, as ONNX Runtime has it.
    """
    start, stop = (value + size if value < 0 else value for value in (start, stop))
    if step > 0:
        return range(min(max(start, 0), size), min(max(stop, 0), size), step)
    stop = -1 if stop in INT_MAX else min(max(stop, -1), size - 1)
    return range(min(max(start, 0), size - 1), stop, step)


def _center_crop_pad(node: Node) -> Any:
    axes = [node.axis(axis) for axis in node.ints("axes", range(node.rank()))]
    wanted = [int(size) for size in node.known(1, "shape")]
    pads = [[0] * len(axes), [0] * len(axes)]
    for i, (size, want) in enumerate(zip(node.shape(0, axes), wanted, strict=True)):
        difference = abs(want - size)
        sign = 1 if want >= size else -1
        pads[0][i], pads[1][i] = sign * (difference // 2), sign * (difference - difference // 2)
    return padded(node, pads[0] + pads[1], axes, 0)


CONVERTERS: Converters = {
    "Pad": {1: _pad_by_attributes, 11: _pad},
    "Slice": {1: _slice},
    "CenterCropPad": {18: _center_crop_pad},
}
