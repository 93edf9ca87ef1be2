"""Operators of detectors and image transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from tvm import relax

from tvmflow.frontend.onnx.ops.activation import at_least, at_most
from tvmflow.frontend.onnx.ops.guard import in_range
from tvmflow.frontend.onnx.ops.node import Converters, Node, Refusal, dtype_of, scalar


def _roi_align(node: Node) -> Any:
    """half_pixel shifts the scaled regions by half a pixel; output_half_pixel makes them at least one pixel large."""
    op, dtype = node.op, node.dtype(1)
    mode, ratio = node.text("mode", "avg"), node.integer("sampling_ratio", 0)
    coordinates = node.text("coordinate_transformation_mode", "half_pixel" if node.opset >= 16 else "output_half_pixel")
    rois = op.multiply(node.tensor(1), scalar(node.number("spatial_scale", 1.0), dtype))
    aligned = coordinates == "half_pixel"
    rois = op.subtract(rois, scalar(0.5, dtype)) if aligned else rois
    batches = in_range(node, 2, node.shape(0, [0])[0])
    size = (node.integer("output_height", 1), node.integer("output_width", 1))
    if mode == "max":
        return _roi_max(node, rois, batches, size, aligned)
    boxes = op.concat([op.expand_dims(op.astype(batches, dtype), 1), rois], axis=1)
    return op.vision.roi_align(node.x, boxes, size, 1.0, ratio, aligned, "NCHW", "avg")


def _roi_align_refusal(attributes: Mapping[str, Any]) -> str | None:
    if int(attributes.get("sampling_ratio", 0)) <= 0:
        return "sampling_ratio = 0 makes the number of samples depend on data; export with a fixed one, e.g. 2"
    return None


def _roi_max(node: Node, rois: Any, batches: Any, size: tuple[int, int], aligned: bool) -> Any:
    """The largest of all samples' four weighted neighbours, as ONNX Runtime and the standard's examples have it."""
    op, ratio, (height, width) = node.op, node.integer("sampling_ratio", 0), node.shape(0, [2, 3])
    rows = _axis_samples(op, rois, (1, 3), size[0], ratio, height, aligned)
    columns = _axis_samples(op, rois, (0, 2), size[1], ratio, width, aligned)
    count, channels = rois.ty.shape[0], node.shape(0, [1])[0]
    image = op.reshape(op.take(node.x, batches, 0), (count, channels, height * width))
    best = None
    for y, y_weight in rows:
        for x, x_weight in columns:
            place = op.add(op.multiply(op.expand_dims(y, 2), scalar(width, "int64")), op.expand_dims(x, 1))
            samples = place.ty.shape[1] * place.ty.shape[2]
            place = op.broadcast_to(op.reshape(place, (count, 1, samples)), (count, channels, samples))
            weight = op.multiply(op.expand_dims(y_weight, 2), op.expand_dims(x_weight, 1))
            value = op.multiply(op.gather_elements(image, place, 2), op.reshape(weight, (count, 1, samples)))
            best = value if best is None else op.maximum(best, value)
    grid = op.reshape(best, (count, channels, size[0], ratio, size[1], ratio))
    return op.max(grid, [3, 5])


def _axis_samples(
    op: Any, rois: Any, columns: tuple[int, int], bins: int, ratio: int, size: int, aligned: bool
) -> list[tuple[Any, Any]]:
    """Along one axis: (places, weights) of the lower and of the upper neighbours of all samples, [R, samples]."""
    dtype = dtype_of(rois)
    start, end = (op.strided_slice(rois, [1], [c], [c + 1]) for c in columns)
    extent = op.subtract(end, start)
    extent = extent if aligned else at_least(op, extent, 1)
    steps = relax.const(((np.arange(bins * ratio) + 0.5) / (bins * ratio))[None].astype(dtype), dtype)
    place = op.add(start, op.multiply(extent, steps))
    outside = op.logical_or(op.less(place, scalar(-1, dtype)), op.greater(place, scalar(size, dtype)))
    place = at_most(op, at_least(op, place, 0), size - 1)
    low = op.floor(place)
    fraction = op.subtract(place, low)
    inside = op.astype(op.logical_not(outside), dtype)
    lower = op.astype(low, "int64")
    upper = at_most(op, op.add(lower, scalar(1, "int64")), size - 1)
    one = scalar(1, dtype)
    return [(lower, op.multiply(op.subtract(one, fraction), inside)), (upper, op.multiply(fraction, inside))]


def _non_max_suppression(node: Node) -> Any:
    """TVM drops boxes whose overlap is AT LEAST its threshold, the standard those above it: the next float is given.

    Without a score threshold every box counts, without a maximum none is kept.
    """
    limits = [
        node.optional(index, name)
        for index, name in ((2, "max_output_boxes_per_class"), (3, "iou_threshold"), (4, "score_threshold"))
    ]
    boxes, iou, score = (None if value is None or not value.size else value.item() for value in limits)
    threshold = np.nextafter(np.float32(iou or 0.0), np.float32(np.inf))
    inputs = [
        node.tensor(0),
        node.tensor(1),
        relax.const(int(boxes or 0), "int64"),
        relax.const(threshold, "float32"),
        relax.const(np.float32(-3e38 if score is None else score), "float32"),
    ]
    return node.upstream(inputs)


def _grid_sample(node: Node) -> Any:
    if node.rank() == 5 and node.text("mode", "linear") in ("cubic", "bicubic"):
        raise node.refuse("mode = 'cubic' in three dimensions")
    return node.upstream()


def _affine_grid(node: Node) -> Any:
    """theta @ (x, y[, z], 1) over a grid of coordinates that is known at import."""
    op, size, dtype = node.op, [int(s) for s in node.known(1, "size")], node.dtype()
    axes = []
    for extent in size[2:]:
        places = np.arange(extent, dtype="float64")
        if node.integer("align_corners", 0):
            axes.append(places * 2 / (extent - 1) - 1 if extent > 1 else np.zeros(1))
        else:
            axes.append((places * 2 + 1) / extent - 1)
    grids = np.meshgrid(*axes, indexing="ij")[::-1]
    homogeneous = np.stack([*grids, np.ones_like(grids[0])], axis=-1).reshape(math.prod(size[2:]), len(size) - 1)
    product = op.matmul(relax.const(homogeneous.astype(dtype), dtype), op.permute_dims(node.x, [0, 2, 1]))
    return op.reshape(product, (size[0], *size[2:], len(size) - 2))


REFUSALS: dict[str, Refusal] = {"RoiAlign": _roi_align_refusal}
CONVERTERS: Converters = {
    "RoiAlign": {10: _roi_align},
    "NonMaxSuppression": {10: _non_max_suppression},
    "GridSample": {16: _grid_sample},
    "AffineGrid": {20: _affine_grid},
}
