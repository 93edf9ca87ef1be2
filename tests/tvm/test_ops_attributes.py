"""Drawn combinations of attributes against ONNX Runtime: pooling, convolutions, resizing, norms, recurrences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper
from ops_runs import assert_as_reference, assert_same, compiled, imported, one_node, reference

from tvmflow.errors import UnsupportedError
from tvmflow.frontend.onnx import ops


class Draw:
    """Deterministic draws for one test."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape).astype("f4")

    def ints(self, low: int, high: int, count: int) -> list[int]:
        return [int(value) for value in self.rng.integers(low, high, count)]

    def pick(self, *options: Any) -> Any:
        return options[int(self.rng.integers(len(options)))]


def _padding(draw: Draw, axes: int, limits: list[int]) -> dict[str, Any]:
    auto = draw.pick("NOTSET", "NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")
    if auto != "NOTSET":
        return {"auto_pad": auto}
    return {"pads": [int(draw.rng.integers(0, limits[i % axes])) for i in range(2 * axes)]}


@pytest.mark.parametrize("op_type", ["AveragePool", "MaxPool", "LpPool"])
@pytest.mark.parametrize("seed", range(5))
def test_pooling(op_type: str, seed: int, tmp_path: Path) -> None:
    draw = Draw(seed)
    axes = draw.pick(1, 2, 2, 3)
    kernel = draw.ints(1, 4, axes)
    strides = [int(draw.rng.integers(1, k + 1)) for k in kernel]
    attributes = {"kernel_shape": kernel, "strides": strides, **_padding(draw, axes, [(k + 1) // 2 for k in kernel])}
    if "pads" in attributes:
        attributes |= {"ceil_mode": draw.pick(0, 1), "dilations": draw.ints(1, 3, axes)}
    attributes |= {"count_include_pad": draw.pick(0, 1)} if op_type == "AveragePool" else {}
    attributes |= {"p": draw.pick(1, 2, 3)} if op_type == "LpPool" else {}
    attributes |= {"storage_order": draw.pick(0, 1)} if op_type == "MaxPool" else {}
    x = draw.normal(2, 3, *draw.ints(5, 9, axes))
    outputs = 2 if op_type == "MaxPool" and seed % 2 else 1
    model = one_node(op_type, {"x": x}, outputs=outputs, opset=19, **attributes)
    assert_as_reference(model, {"x": x}, tmp_path)


@pytest.mark.parametrize("seed", range(6))
def test_convolution(seed: int, tmp_path: Path) -> None:
    draw = Draw(seed)
    axes, group = draw.pick(1, 2, 2, 3), draw.pick(1, 2, 4)
    kernel = draw.ints(1, 4, axes)
    attributes = {"group": group, "strides": draw.ints(1, 3, axes), **_padding(draw, axes, [3] * axes)}
    attributes |= {"dilations": draw.ints(1, 3, axes)} if "pads" in attributes else {}
    x = draw.normal(2, 4, *draw.ints(5, 8, axes))
    weights = {"w": draw.normal(8, 4 // group, *kernel), "b": draw.normal(8)}
    assert_as_reference(one_node("Conv", {"x": x}, weights, **attributes), {"x": x}, tmp_path)


@pytest.mark.parametrize("seed", range(8))
def test_transposed_convolution(seed: int, tmp_path: Path) -> None:
    draw = Draw(seed)
    axes, group = draw.pick(1, 2, 2, 3), draw.pick(1, 2, 4)
    kernel, strides, sizes = draw.ints(1, 4, axes), draw.ints(1, 4, axes), draw.ints(3, 6, axes)
    attributes = {"group": group, "strides": strides, "dilations": draw.ints(1, 3, axes)}
    if seed % 2:
        reach = [(k - 1) * d + 1 for k, d in zip(kernel, attributes["dilations"], strict=True)]
        whole = [(n - 1) * s + r for n, s, r in zip(sizes, strides, reach, strict=True)]
        attributes["output_shape"] = [size - draw.pick(0, 1) for size in whole]
    else:
        attributes |= {
            "pads": [0] * axes + draw.ints(0, 2, axes),
            "output_padding": [int(draw.rng.integers(0, s)) for s in strides],
        }
    x, weights = draw.normal(2, 4, *sizes), {"w": draw.normal(4, 8 // group, *kernel), "b": draw.normal(8)}
    assert_as_reference(one_node("ConvTranspose", {"x": x}, weights, **attributes), {"x": x}, tmp_path, atol=1e-4)


@pytest.mark.parametrize(("kernel", "filters"), [((2, 2), 1), ((3, 2), 3), ((4,), 2), ((2, 1, 2), 3)])
def test_transposed_convolution_without_overlap(kernel: tuple[int, ...], filters: int, tmp_path: Path) -> None:
    draw = Draw(0)
    x = draw.normal(2, 5, *draw.ints(3, 6, len(kernel)))
    weights = {"w": draw.normal(5, filters, *kernel), "b": draw.normal(filters)}
    model = one_node("ConvTranspose", {"x": x}, weights, strides=list(kernel))
    assert_as_reference(model, {"x": x}, tmp_path, atol=1e-4)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("coordinates", ["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"])
@pytest.mark.parametrize("seed", range(2))
def test_resize(mode: str, coordinates: str, seed: int, tmp_path: Path) -> None:
    draw = Draw(seed)
    x = draw.normal(1, 2, *draw.ints(3, 8, 2))
    attributes: dict[str, Any] = {"mode": mode, "coordinate_transformation_mode": coordinates}
    if mode == "nearest":
        attributes["nearest_mode"] = draw.pick("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
    elif mode == "cubic":
        attributes |= {"cubic_coeff_a": draw.pick(-0.5, -0.75), "exclude_outside": draw.pick(0, 1)}
    if seed or coordinates == "align_corners":
        weights, order = {"n": np.array([1, 2, *draw.ints(2, 12, 2)])}, ["x", "", "", "n"]
    else:
        weights, order = {"s": np.array([1, 1, draw.pick(0.6, 1.5, 2.5), draw.pick(0.5, 2, 3)], "f4")}, ["x", "", "s"]
    model = one_node("Resize", {"x": x}, weights, order=order, opset=13, **attributes)
    assert_as_reference(model, {"x": x}, tmp_path, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_resize_with_antialias(mode: str, tmp_path: Path) -> None:
    x = Draw(0).normal(1, 2, 9, 8)
    sizes = {"n": np.array([1, 2, 4, 5])}
    model = one_node("Resize", {"x": x}, sizes, order=["x", "", "", "n"], mode=mode, antialias=1)
    assert_as_reference(model, {"x": x}, tmp_path, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("op_type", "opset"), [("Resize", 10), ("Upsample", 9)])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_resize_of_old_versions(op_type: str, opset: int, mode: str, tmp_path: Path) -> None:
    x = Draw(0).normal(1, 2, 3, 4)
    model = one_node(op_type, {"x": x}, {"s": np.array([1, 1, 2, 1.5], "f4")}, opset=opset, mode=mode)
    assert_as_reference(model, {"x": x}, tmp_path)


def test_resize_on_which_the_references_disagree_is_refused(tmp_path: Path) -> None:
    x = Draw(0).normal(1, 1, 4, 4)
    model = one_node(
        "Resize",
        {"x": x},
        {"s": np.array([1, 1, 0.6, 0.6], "f4")},
        order=["x", "", "s"],
        opset=13,
        mode="linear",
        coordinate_transformation_mode="align_corners",
    )
    with pytest.raises(UnsupportedError, match="disagree"):
        imported(model, tmp_path)


NORMS: list[tuple[str, int, list[tuple[int, ...]], dict[str, Any]]] = [
    ("LayerNormalization", 17, [(4, 5), (4, 5)], {"axis": 2}),
    ("LayerNormalization", 17, [(5,), (5,)], {"axis": 2}),
    ("LayerNormalization", 17, [(5,)], {}),
    ("GroupNormalization", 21, [(6,), (6,)], {"num_groups": 3}),
    ("InstanceNormalization", 17, [(6,), (6,)], {}),
    ("RMSNormalization", 23, [(5,)], {}),
    ("LRN", 13, [], {"size": 3, "alpha": 0.01, "bias": 1.5}),
    ("LpNormalization", 13, [], {"p": 1}),
    ("MeanVarianceNormalization", 13, [], {"axes": [0, 2]}),
    ("GlobalLpPool", 13, [], {"p": 3}),
]


@pytest.mark.parametrize(("op_type", "opset", "shapes", "attributes"), NORMS)
def test_normalisation(
    op_type: str, opset: int, shapes: list[tuple[int, ...]], attributes: dict[str, Any], tmp_path: Path
) -> None:
    draw = Draw(0)
    x, weights = draw.normal(2, 6, 4, 5), {f"w{i}": draw.normal(*shape) for i, shape in enumerate(shapes)}
    assert_as_reference(one_node(op_type, {"x": x}, weights, opset=opset, **attributes), {"x": x}, tmp_path)


@pytest.mark.parametrize(("op_type", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_recurrence(op_type: str, gates: int, direction: str, tmp_path: Path) -> None:
    draw, count, hidden = Draw(gates), 2 if direction == "bidirectional" else 1, 4
    x = draw.normal(5, 2, 3)
    width = gates * hidden
    weights: dict[str, Any] = {
        "w": draw.normal(count, width, 3),
        "r": draw.normal(count, width, hidden),
        "b": draw.normal(count, 2 * width),
        "lengths": np.array([5, 3], "i4"),
    }
    more = {"linear_before_reset": 1} if op_type == "GRU" else {"clip": 2.0}
    model = one_node(
        op_type,
        {"x": x},
        weights,
        outputs=3 if op_type == "LSTM" else 2,
        opset=14,
        hidden_size=hidden,
        direction=direction,
        **more,
    )
    assert_as_reference(model, {"x": x}, tmp_path)


@pytest.mark.parametrize(
    ("direction", "dtype", "zero", "per_column", "lengths"),
    [
        ("forward", "i1", 3, False, [5, 5, 5]),
        ("reverse", "u1", 120, False, [4, 2, 3]),
        ("bidirectional", "i1", 0, True, [5, 1, 4]),
        ("forward", "i1", 0, True, [3, 4, 2]),
        ("bidirectional", "u1", 130, False, [5, 5, 5]),
    ],
)
def test_recurrence_quantised_on_the_way(
    direction: str, dtype: str, zero: int, per_column: bool, lengths: list[int], tmp_path: Path
) -> None:
    """The same integers as ONNX Runtime's on one thread: on several it quantises groups of rows apart."""
    draw, count, hidden = Draw(zero), 2 if direction == "bidirectional" else 1, 24
    rng, limits = np.random.default_rng(zero), np.iinfo(dtype)
    feeds = {"x": draw.normal(5, 3, 20), "h": draw.normal(count, 3, hidden), "c": draw.normal(count, 3, hidden)}
    weights: dict[str, Any] = {
        "b": draw.normal(count, 8 * hidden),
        "p": draw.normal(count, 3 * hidden),
        "lengths": np.array(lengths, "i4"),
    }
    for name, length in (("w", 20), ("r", hidden)):
        shape = (count, 4 * hidden) if per_column else (count,)
        weights[name] = rng.integers(limits.min, limits.max, (count, length, 4 * hidden), endpoint=True).astype(dtype)
        weights[f"{name}_scale"] = rng.uniform(0.001, 0.004, shape).astype("f4")
        weights[f"{name}_zero"] = np.full(shape, zero, dtype)
    order = ["x", "w", "r", "b", "lengths", "h", "c", "p", "w_scale", "w_zero", "r_scale", "r_zero"]
    model = one_node(
        "DynamicQuantizeLSTM",
        feeds,
        weights,
        outputs=3,
        order=order,
        domain="com.microsoft",
        hidden_size=hidden,
        direction=direction,
    )
    # A state that rounds the other way would be off by at least 1e-4.
    assert_same(compiled(model, feeds, tmp_path), reference(model, feeds, threads=1), rtol=0, atol=3e-6)


@pytest.mark.parametrize("more", [{"clip": 1.5, "input_forget": 1}, {"activations": ["HardSigmoid", "Relu", "Tanh"]}])
def test_attributes_of_a_recurrence_quantised_on_the_way(more: dict[str, Any], tmp_path: Path) -> None:
    draw, rng = Draw(1), np.random.default_rng(1)
    weights: dict[str, Any] = {name: rng.integers(-128, 128, (1, 8, 32)).astype("i1") for name in "wr"}
    weights |= {f"{name}_scale": np.full(1, 0.004, "f4") for name in "wr"}
    weights |= {f"{name}_zero": np.zeros(1, "i1") for name in "wr"}
    order = ["x", "w", "r", *[""] * 5, "w_scale", "w_zero", "r_scale", "r_zero"]
    feeds = {"x": draw.normal(6, 1, 8)}
    model = one_node(
        "DynamicQuantizeLSTM", feeds, weights, outputs=3, order=order, domain="com.microsoft", hidden_size=8, **more
    )
    assert_as_reference(model, feeds, tmp_path, rtol=0, atol=3e-6)


@pytest.mark.parametrize("activation", ["Gelu", "FastGelu", "QuickGelu"])
def test_activations_of_com_microsoft(activation: str, tmp_path: Path) -> None:
    x = Draw(0).normal(2, 3, 8)
    assert_as_reference(one_node(activation, {"x": x}, domain="com.microsoft"), {"x": x}, tmp_path)


@pytest.mark.parametrize("bias", [{}, {"c": np.ones(8, "f4")}])
def test_skip_layer_normalisation_of_com_microsoft(bias: dict[str, np.ndarray], tmp_path: Path) -> None:
    draw = Draw(0)
    feeds = {"x": draw.normal(2, 3, 8), "s": draw.normal(2, 3, 8)}
    weights = {"g": draw.normal(8), "b": draw.normal(8), **bias}
    assert_as_reference(one_node("SkipLayerNormalization", feeds, weights, domain="com.microsoft"), feeds, tmp_path)


@pytest.mark.parametrize("op_type", ["QLinearAdd", "QLinearMul"])
def test_quantised_arithmetic_of_com_microsoft(op_type: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    feeds = {name: rng.integers(0, 255, (2, 5)).astype("u1") for name in "ab"}
    weights: dict[str, Any] = {"as": np.float32(0.02), "bs": np.float32(0.03), "ys": np.float32(0.05)}
    weights |= {"az": np.uint8(100), "bz": np.uint8(120), "yz": np.uint8(110)}
    order = ["a", "as", "az", "b", "bs", "bz", "ys", "yz"]
    model = one_node(op_type, feeds, weights, order=order, domain="com.microsoft")
    got, want = compiled(model, feeds, tmp_path)[0], reference(model, feeds)[0]
    assert np.abs(got.astype(int) - want.astype(int)).max() <= 1  # ONNX Runtime multiplies by rounded reciprocals


def test_operators_of_other_domains_are_not_taken_for_standard_ones(tmp_path: Path) -> None:
    x = Draw(0).normal(4)
    model = one_node("Relu", {"x": x}, domain="my.company")
    model.opset_import.add(domain="my.company", version=1)
    with pytest.raises(UnsupportedError, match=r"my\.company"):
        imported(model, tmp_path)


def test_attributes_that_cannot_be_compiled_are_told_before_the_import() -> None:
    fixed = helper.make_node("RoiAlign", ["x", "r", "b"], ["y"], sampling_ratio=2)
    by_data = helper.make_node("RoiAlign", ["x", "r", "b"], ["y"])
    assert ops.refusals(fixed, 16) is None
    assert "sampling_ratio" in (ops.refusals(by_data, 16) or "")
    unknown = helper.make_node("LSTM", ["x", "w", "r"], ["y"], activations=["Sigmoid", "Tanh", "Cosine"])
    assert ops.refusals(unknown, 14) == "activation Cosine is not supported"
    unknown.op_type, unknown.domain = "DynamicQuantizeLSTM", "com.microsoft"
    assert ops.refusals(unknown, 14) == "activation Cosine is not supported"


def test_every_converter_of_another_domain_is_listed() -> None:
    assert {f"{domain}::{name}" for domain, name in ops.FOREIGN} == {key for key in ops.convert_map() if "::" in key}
