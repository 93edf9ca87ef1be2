"""Resize and Upsample of every version.

Interpolation is separable and its coordinates are known at import: along each axis every output element is a weighted
sum of a few input elements, whose places and weights are computed here as the standard defines them. TVM's own
operator, through which layout conversion passes, is used where it is exact.
Method: the ONNX operator's text, and Keys, "Cubic convolution interpolation for digital image processing" (1981).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import relax, tirx

from tvmflow.frontend.onnx.ops.node import FLOATS, Converters, Node, dtype_of, in_float32, numpy_dtype, scalar
from tvmflow.frontend.onnx.ops.resize_symbolic import Plan, along, size_after
from tvmflow.frontend.sizes import Size

Array = np.ndarray[Any, Any]
F = np.float32


def _resize(node: Node) -> Any:
    axes = [node.axis(axis) for axis in node.ints("axes", range(node.rank()))]
    before = [node.dims()[axis] for axis in axes]
    scales, sizes, roi = node.optional(2, "scales"), _wanted_sizes(node), node.optional(1, "roi")
    if sizes:
        after, factors = _from_sizes(node, before, sizes)
    elif scales is not None and scales.size == len(axes):
        factors = [float(scale) for scale in scales]
        after = [_scaled(node, size, scale) for scale, size in zip(factors, before, strict=True)]
    else:
        raise node.refuse("neither `scales` nor `sizes` fits the axes", "correct the model")
    coordinates, region = node.text("coordinate_transformation_mode", "half_pixel"), [(0.0, 1.0)] * len(axes)
    if coordinates == "tf_crop_and_resize":
        if roi is None or roi.size != 2 * len(axes):
            raise node.refuse("tf_crop_and_resize needs a constant `roi` of two values per axis")
        region = [(float(roi[i]), float(roi[i + len(axes)])) for i in range(len(axes))]
    whole = all(_is_whole(s, b, a) for s, b, a in zip(factors, before, after, strict=True))
    if coordinates == "align_corners" and not whole:
        raise node.refuse(
            "align_corners with scales that give no whole sizes: the standard and ONNX Runtime disagree",
            "give `sizes` instead of `scales`",
        )
    nearest = node.text("nearest_mode", "round_prefer_floor")
    return _apply(node, Plan(axes, before, after, factors, region, coordinates, node.text("mode", "nearest"), nearest))


def _wanted_sizes(node: Node) -> list[Size] | None:
    """The operand `sizes`: integers, and expressions where they are symbolic."""
    if node.has(3) and isinstance(node.inputs[3], relax.ShapeExpr) and node.constant(3) is None:
        return [int(size) if isinstance(size, tirx.IntImm) else size for size in node.inputs[3].values]
    sizes = node.optional(3, "sizes")
    return None if sizes is None else [int(size) for size in sizes]


def _from_sizes(node: Node, before: list[Size], sizes: list[Size]) -> tuple[list[Size], list[float]]:
    known = [isinstance(want, int) and isinstance(size, int) for want, size in zip(sizes, before, strict=True)]
    scales = [
        float(F(want) / F(size)) if fixed else math.nan for want, size, fixed in zip(sizes, before, known, strict=True)
    ]
    policy = node.text("keep_aspect_ratio_policy", "stretch")
    if policy == "stretch":
        return sizes, scales
    if not all(known):
        raise node.refuse(
            f"keep_aspect_ratio_policy = {policy!r} needs sizes that are known",
            "fix them with [shapes.dims] in the config",
        )
    scale = min(scales) if policy == "not_larger" else max(scales)
    return [math.floor(scale * size + 0.5) for size in before], [scale] * len(before)


def _is_whole(scale: float, before: Size, after: Size) -> bool:
    """Whether the scale gives this size without rounding."""
    if isinstance(before, int) and isinstance(after, int):
        return bool(F(scale) * F(before) == after)
    return math.isnan(scale) or scale.is_integer()


def _scaled(node: Node, size: Size, scale: float) -> Size:
    return math.floor(F(scale) * F(size)) if isinstance(size, int) else size_after(node, size, scale)


def _upsample(node: Node) -> Any:
    """Upsample, and Resize-10: asymmetric coordinates; nearest is the floor, the ceiling where the axis shrinks."""
    if "scales" in node.attributes:
        scales = [float(scale) for scale in node.attributes["scales"]]
    else:
        scales = [float(scale) for scale in node.known(1, "scales")]
    before, axes = node.dims(), list(range(node.rank()))
    after = [_scaled(node, size, scale) for scale, size in zip(scales, before, strict=True)]
    whole = [(0.0, 1.0)] * len(axes)
    mode = node.text("mode", "nearest")
    return _apply(node, Plan(axes, before, after, scales, whole, "asymmetric", mode, "simple"))


def _apply(node: Node, plan: Plan) -> Any:
    if plan.mode not in ("nearest", "linear", "cubic"):
        raise node.refuse(f"mode = {plan.mode!r} is none of the standard's", "correct the model")
    if any(isinstance(size, int) and size == 0 for size in (*plan.after, *plan.before)):
        raise node.refuse("an axis of size 0 cannot be resized", "correct the model")
    if _relax_is_exact(node, plan):
        return _relax_resize(node, plan)
    x = node.x if plan.mode == "nearest" else in_float32(node, node.x)
    x = x if plan.mode == "nearest" or dtype_of(x) in FLOATS else node.op.astype(x, "float32")
    outside = np.zeros((1,) * node.rank(), bool)
    for i in range(len(plan.axes)):
        if plan.is_unchanged(i):
            continue
        if plan.is_symbolic(i):
            x = along(node, plan, i, x)
            continue
        places = _coordinates(plan, i)
        x = _along(node, plan, i, x, places)
        if plan.coordinates == "tf_crop_and_resize":
            out = (places < 0) | (places > plan.before[i] - 1)
            outside = outside | out.reshape((-1,) + (1,) * (node.rank() - plan.axes[i] - 1))
    if outside.any():
        value = scalar(node.number("extrapolation_value", 0.0), dtype_of(x))
        x = node.op.where(relax.const(outside, "bool"), value, x)
    return x if dtype_of(x) == node.dtype() else node.op.astype(x, node.dtype())


def _coordinates(plan: Plan, i: int) -> Array:
    """Where each output element of axis i lies among the input's elements, in float32 as ONNX Runtime computes it."""
    out, size, scale = np.arange(plan.after[i], dtype=F), F(plan.before[i]), F(plan.scales[i])
    length = F(plan.after[i])
    half_pixel = (out + F(0.5)) / scale - F(0.5)
    match plan.coordinates:
        case "half_pixel":
            return half_pixel
        case "pytorch_half_pixel":
            return half_pixel if length > 1 else np.zeros(1, F)
        case "asymmetric":
            return out / scale
        case "align_corners":
            return out * (size - F(1)) / (length - F(1)) if length > 1 else np.zeros(1, F)
        case "half_pixel_symmetric":
            return size / F(2) * (F(1) - length / (scale * size)) + half_pixel
        case _:
            start, end = map(F, plan.region[i])
            if length > 1:
                return start * (size - F(1)) + out * (end - start) * (size - F(1)) / (length - F(1))
            return np.array([F(0.5) * (start + end) * (size - F(1))], F)


def _along(node: Node, plan: Plan, i: int, x: Any, places: Array) -> Any:
    op, axis, last = node.op, plan.axes[i], plan.before[i] - 1
    if plan.mode == "nearest":
        return op.take(x, relax.const(np.clip(_nearest(plan, i, places), 0, last), "int64"), axis)
    antialias = bool(node.integer("antialias", 0)) and plan.scales[i] < 1
    taps, weights = _taps(node, plan, i, places, antialias)
    if antialias:
        return _summed(op, x, axis, taps, weights)
    total = None
    for k in range(taps.shape[1]):
        weight = weights[:, k].reshape((-1,) + (1,) * (node.rank() - axis - 1)).astype(numpy_dtype(dtype_of(x)))
        term = op.multiply(op.take(x, relax.const(taps[:, k], "int64"), axis), relax.const(weight, dtype_of(x)))
        total = term if total is None else op.add(total, term)
    return total


def _nearest(plan: Plan, i: int, places: Array) -> Array:
    lower = np.floor(places)
    match plan.nearest:
        case "floor":
            return lower.astype("int64")
        case "ceil":
            return np.ceil(places).astype("int64")
        case "round_prefer_ceil":
            return np.floor(places + F(0.5)).astype("int64")
        case "simple":
            return (np.ceil(places) if plan.scales[i] < 1 else np.trunc(places)).astype("int64")
        case _:
            return np.where(places == lower + F(0.5), lower, np.floor(places + F(0.5))).astype("int64")


def _taps(node: Node, plan: Plan, i: int, places: Array, antialias: bool) -> tuple[Array, Array]:
    """The places [out, taps] and weights [out, taps] of one axis; the edge stands for what lies beyond it."""
    places = places.astype("float64")
    base, scale = np.floor(places), min(plan.scales[i], 1.0) if antialias else 1.0
    reach = math.ceil((1 if plan.mode == "linear" else 2) / scale)
    taps = base[:, None] + np.arange(1 - reach, reach + 1)
    distance = np.abs(taps - places[:, None]) * scale
    if plan.mode == "linear":
        weights = np.clip(1 - distance, 0, None)
    else:
        weights = _cubic(distance, node.number("cubic_coeff_a", -0.75))
    inside = (taps >= 0) & (taps < plan.before[i])
    if node.integer("exclude_outside", 0) and (antialias or plan.mode == "cubic"):
        weights = np.where(inside, weights, 0)
    weights = weights / weights.sum(axis=1, keepdims=True)
    taps = np.clip(taps, 0, plan.before[i] - 1).astype("int64")
    if plan.mode == "linear" and not antialias:  # at an edge both are one place: no product of 0 and infinity there
        weights = np.where(taps[:, :1] == taps[:, 1:], 0.5, weights)
    return taps, weights


def _cubic(distance: Array, a: float) -> Array:
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0))


def _summed(op: Any, x: Any, axis: int, taps: Array, weights: Array) -> Any:
    """Many taps: gathered along an axis of their own, and summed over it. A weight of 0 reads nothing: not 0 * inf."""
    dtype, after = dtype_of(x), (1,) * (int(x.ty.ndim) - axis - 1)
    taps, weights = _merged(taps, weights)
    shape = (*weights.shape, *after)
    used = relax.const((weights != 0).reshape(shape), "bool")
    terms = op.multiply(
        op.take(x, relax.const(taps, "int64"), axis),
        relax.const(weights.reshape(shape).astype(numpy_dtype(dtype)), dtype),
    )
    return op.sum(op.where(used, terms, scalar(0, dtype)), [axis + 1])


def _merged(taps: Array, weights: Array) -> tuple[Array, Array]:
    """Taps of one place with their weights added up, as the edge is read where taps lie beyond it."""
    matrix = np.zeros((len(taps), int(taps.max()) + 1))
    np.add.at(matrix, (np.arange(len(taps))[:, None], taps), weights)
    width = int(min(taps.shape[1], matrix.shape[1]))
    places = np.minimum(taps.min(axis=1), matrix.shape[1] - width)[:, None] + np.arange(width)
    return places, np.take_along_axis(matrix, places, axis=1)


def _relax_is_exact(node: Node, plan: Plan) -> bool:
    """TVM takes scales from the sizes; whole factors leave its float32 coordinates far from any tie.

    Its align_corners cannot be compiled for symbolic sizes.
    """
    if node.rank() != 4 or node.dtype() not in ("float32", "float16") or node.integer("antialias", 0):
        return False
    resized = {axis for i, axis in enumerate(plan.axes) if not plan.is_unchanged(i)}
    whole = all(plan.factor(i) is not None for i in range(len(plan.axes)))
    if not resized or not resized <= {2, 3} or not whole:
        return False
    if plan.coordinates == "align_corners" and any(map(plan.is_symbolic, range(len(plan.axes)))):
        return False
    if plan.mode == "nearest":
        return (plan.coordinates, plan.nearest) in (
            ("asymmetric", "floor"),
            ("asymmetric", "simple"),
            ("half_pixel", "round_prefer_floor"),
        )
    return plan.mode == "linear" and plan.coordinates in ("half_pixel", "asymmetric", "align_corners")


def _relax_resize(node: Node, plan: Plan) -> Any:
    after = dict(zip(plan.axes, plan.after, strict=True))
    size = [after.get(axis, node.dims()[axis]) for axis in (2, 3)]
    rounding = "round_prefer_floor" if plan.nearest == "round_prefer_floor" else "floor"
    return node.op.image.resize2d(
        node.x,
        size=relax.ShapeExpr(size),
        layout="NCHW",
        rounding_method=rounding if plan.mode == "nearest" else "",
        method="nearest_neighbor" if plan.mode == "nearest" else "linear",
        coordinate_transformation_mode=plan.coordinates,
    )


CONVERTERS: Converters = {"Resize": {10: _upsample, 11: _resize}, "Upsample": {1: _upsample}}
