"""Indices: negative, out of range at import and at run time; sizes that are only known at run time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from ops_runs import assert_as_reference, assert_same, compiled, imported, one_node

from tvmflow.errors import UnsupportedError

DATA = np.arange(24, dtype="f4").reshape(4, 6)


def indexed(op_type: str, indices: Any) -> dict[str, Any]:
    updates = np.zeros((*np.shape(indices)[:-1], 6) if op_type == "ScatterND" else np.shape(indices), "f4")
    operands = {"x": DATA, "i": np.array(indices)}
    return operands | ({"u": updates} if op_type.startswith("Scatter") else {})


GOOD = [
    ("Gather", [0, -1, 3]),
    ("GatherElements", [[0, -1, 3, -4, 1, 2]]),
    ("GatherND", [[0, -1], [-4, 5]]),
    ("ScatterND", [[-1], [0]]),
    ("ScatterElements", [[0, -1, 3, -4, 1, 2]]),
]
BAD = [
    ("Gather", [0, 4]),
    ("Gather", [-5]),
    ("GatherElements", [[0, 0, 0, 0, 0, 9]]),
    ("GatherND", [[0, 6]]),
    ("ScatterND", [[7000000]]),
    ("ScatterElements", [[0, 1, 2, 3, 4, 0]]),
]


@pytest.mark.parametrize(("op_type", "indices"), GOOD)
@pytest.mark.parametrize("as_constant", [True, False])
def test_negative_indices_count_from_the_end(op_type: str, indices: Any, as_constant: bool, tmp_path: Path) -> None:
    operands = indexed(op_type, indices)
    weights = {"i": operands.pop("i")} if as_constant else {}
    order = [name for name in ("x", "i", "u") if name in operands | weights]
    assert_as_reference(one_node(op_type, operands, weights, order=order), operands, tmp_path)


@pytest.mark.parametrize(("op_type", "indices"), BAD)
def test_constant_indices_out_of_range_are_refused(op_type: str, indices: Any, tmp_path: Path) -> None:
    operands = indexed(op_type, indices)
    weights = {"i": operands.pop("i")}
    order = [name for name in ("x", "i", "u") if name in operands | weights]
    with pytest.raises(UnsupportedError, match=r"node1.*out of range"):
        imported(one_node(op_type, operands, weights, order=order), tmp_path)


@pytest.mark.parametrize(("op_type", "indices"), BAD)
def test_run_time_indices_out_of_range_stop_the_run_and_name_the_node(
    op_type: str, indices: Any, tmp_path: Path
) -> None:
    operands = indexed(op_type, indices)
    with pytest.raises(RuntimeError, match=f"{op_type}_node1_index_in_range"):
        compiled(one_node(op_type, operands), operands, tmp_path)


def test_a_run_time_zero_divisor_stops_the_run(tmp_path: Path) -> None:
    operands = {"a": np.array([4, 3], "i4"), "b": np.array([2, 0], "i4")}
    with pytest.raises(RuntimeError, match="Div_node1_divisor_not_zero"):
        compiled(one_node("Div", operands, opset=14), operands, tmp_path)


def test_one_hot_leaves_rows_of_indices_out_of_range_empty(tmp_path: Path) -> None:
    indices = np.array([[0, -1, 4], [5, -5, -6]])
    weights = {"depth": np.array(5), "values": np.array([1, 3], "f4")}
    for axis in (-1, 0, 1):
        model = one_node("OneHot", {"i": indices}, weights, axis=axis)
        assert_as_reference(model, {"i": indices}, tmp_path)


@pytest.mark.parametrize("sizes", [[2, 4], [0, 6], [6, 0]])
def test_split_at_run_time(sizes: list[int], tmp_path: Path) -> None:
    operands = {"x": DATA[0], "s": np.array(sizes)}
    assert_as_reference(one_node("Split", operands, outputs=2, axis=0), operands, tmp_path)


def test_split_sizes_that_do_not_fill_the_axis_stop_the_run(tmp_path: Path) -> None:
    operands = {"x": DATA[0], "s": np.array([2, 5])}
    with pytest.raises(RuntimeError, match="sizes_fill_the_axis"):
        compiled(one_node("Split", operands, outputs=2, axis=0), operands, tmp_path)


@pytest.mark.parametrize(
    ("opset", "attributes", "outputs"), [(2, {"split": [1, 5]}, 2), (11, {}, 3), (18, {"num_outputs": 4}, 4)]
)
def test_split_by_attributes(opset: int, attributes: dict[str, Any], outputs: int, tmp_path: Path) -> None:
    model = one_node("Split", {"x": DATA}, outputs=outputs, opset=opset, axis=1, **attributes)
    assert_as_reference(model, {"x": DATA}, tmp_path)


SLICES = [
    ([5], [-3], [0], [1]),
    ([-9], [9], [1], [2]),
    ([0], [3], [1], [-2]),
    ([9], [-9], [1], [-2]),
    ([-1], [2**63 - 1], [0], [-1]),
    ([7], [-(2**63) + 1], [1], [-1]),
    ([1, -2], [3, 2**31 - 1], [0, 1], [1, 1]),
    ([-20], [2], [0], [-1]),
]


@pytest.mark.parametrize(("starts", "ends", "axes", "steps"), SLICES)
def test_slices_beyond_the_ends(
    starts: list[int], ends: list[int], axes: list[int], steps: list[int], tmp_path: Path
) -> None:
    weights = {"s": np.array(starts), "e": np.array(ends), "a": np.array(axes), "t": np.array(steps)}
    assert_as_reference(one_node("Slice", {"x": DATA}, weights, opset=13), {"x": DATA}, tmp_path)


def test_slice_of_old_versions(tmp_path: Path) -> None:
    model = one_node("Slice", {"x": DATA}, opset=9, starts=[1, -4], ends=[3, -1])
    assert_as_reference(model, {"x": DATA}, tmp_path)


@pytest.mark.parametrize("target", [[2, 1, 6], [6], [1], [4, 6], [3, 1, 1]])
@pytest.mark.parametrize("as_constant", [True, False])
def test_expand_broadcasts_both_ways(target: list[int], as_constant: bool, tmp_path: Path) -> None:
    shape = {"s": np.array(target)}
    operands = {"x": DATA} if as_constant else {"x": DATA, **shape}
    assert_as_reference(one_node("Expand", operands, shape if as_constant else {}), operands, tmp_path)


@pytest.mark.parametrize("target", [[-1], [0, 3, -1], [2, 12], [8, 0, 3]])
def test_reshape_by_a_run_time_shape(target: list[int], tmp_path: Path) -> None:
    x = np.arange(24, dtype="f4").reshape(2, 1, 12) if target == [8, 0, 3] else DATA
    operands = {"x": x, "s": np.array(target)}
    assert_as_reference(one_node("Reshape", operands, opset=14), operands, tmp_path)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
def test_scatter_elements_into_a_part(axis: int, reduction: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(axis)
    indices = np.stack([rng.permutation(3)[:2] for _ in range(4)]).reshape(2, 2, 2)
    operands = {
        "x": rng.standard_normal((3, 4, 5)).astype("f4"),
        "i": np.sort(indices, axis=axis),
        "u": rng.standard_normal((2, 2, 2)).astype("f4"),
    }
    if reduction == "none":
        places = np.arange(2).reshape([2 if a == axis else 1 for a in range(3)])
        operands["i"] = np.broadcast_to(places, (2, 2, 2)).copy()
    assert_as_reference(one_node("ScatterElements", operands, axis=axis, reduction=reduction), operands, tmp_path)


def test_padding_crops_with_negative_numbers_and_takes_run_time_values(tmp_path: Path) -> None:
    pads = {"p": np.array([0, -1, 2, -2])}
    assert_as_reference(one_node("Pad", {"x": DATA}, pads, opset=13), {"x": DATA}, tmp_path)
    operands = {"x": DATA, "v": np.float32(7)}
    assert_as_reference(one_node("Pad", operands, pads, order=["x", "p", "v"], opset=13), operands, tmp_path)
    old = one_node("Pad", {"x": DATA}, opset=2, pads=[0, 1, 0, 2], mode="constant", value=1.5)
    assert_as_reference(old, {"x": DATA}, tmp_path)


@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
def test_padding_modes(mode: str, tmp_path: Path) -> None:
    model = one_node("Pad", {"x": DATA}, {"p": np.array([1, 2, 3, 0])}, opset=19, mode=mode)
    assert_as_reference(model, {"x": DATA}, tmp_path)


def test_reductions_of_empty_sets(tmp_path: Path) -> None:
    x = np.zeros((2, 0, 3), "f4")
    for op_type, value in (("ReduceSum", 0), ("ReduceProd", 1), ("ReduceMax", -np.inf), ("ReduceMin", np.inf)):
        model = one_node(op_type, {"x": x}, {"a": np.array([1])}, opset=20)
        assert_same(compiled(model, {"x": x}, tmp_path), [np.full((2, 1, 3), value, "f4")])


def test_a_reduction_of_a_scalar_is_the_scalar(tmp_path: Path) -> None:
    x = np.float32(-3)
    for op_type in ("ReduceSum", "ReduceMax", "ReduceL1", "ReduceSumSquare"):
        model = one_node(op_type, {"x": x}, keepdims=0)
        assert_as_reference(model, {"x": x}, tmp_path)


@pytest.mark.parametrize(("axis", "condition"), [(0, [True, False, True]), (-1, [False] * 5 + [True]), (None, [True])])
def test_compress_by_a_constant(axis: int | None, condition: list[bool], tmp_path: Path) -> None:
    attributes = {} if axis is None else {"axis": axis}
    model = one_node("Compress", {"x": DATA}, {"c": np.array(condition)}, **attributes)
    assert_as_reference(model, {"x": DATA}, tmp_path)


@pytest.mark.parametrize(
    ("op_type", "operands", "reason"),
    [
        ("Slice", {"x": DATA, "s": np.array([0]), "e": np.array([2])}, "input `starts` must be a constant"),
        ("Squeeze", {"x": DATA[None], "a": np.array([0])}, "input `axes` must be a constant"),
    ],
)
def test_what_must_be_constant_is_refused_by_name(
    op_type: str, operands: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=f"{op_type} `node1`: {reason}"):
        imported(one_node(op_type, operands), tmp_path)


def test_reshape_of_the_first_version_has_its_shape_as_an_attribute(tmp_path: Path) -> None:
    assert_as_reference(one_node("Reshape", {"x": DATA}, opset=1, shape=[2, 0, -1]), {"x": DATA}, tmp_path)


def unpooled(indices: list[list[int]]) -> dict[str, Any]:
    return {"x": np.array([[[[5, 6], [7, 8]]]], "f4"), "i": np.array([[indices]])}


@pytest.mark.parametrize("shape", [None, [1, 1, 5, 5]])
def test_unpooling_counts_indices_in_the_output(shape: list[int] | None, tmp_path: Path) -> None:
    operands, weights = unpooled([[0, 3], [9, 15 if shape is None else 24]]), {"s": np.array(shape)} if shape else {}
    model = one_node("MaxUnpool", operands, weights, opset=11, kernel_shape=[2, 2], strides=[2, 2])
    assert_as_reference(model, operands, tmp_path)


ROWS = {"x": np.ones((3, 2, 2), "f4"), "w": np.ones((1, 2, 2), "f4"), "r": np.ones((1, 2, 2), "f4")}
RUN_TIME: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("MaxUnpool", unpooled([[0, 3], [9, 50_000_000]]), {"kernel_shape": [2, 2], "strides": [2, 2]}, "index_in_range"),
    ("MaxUnpool", unpooled([[0, 3], [9, -1]]), {"kernel_shape": [2, 2], "strides": [2, 2]}, "index_in_range"),
    (
        "RoiAlign",
        {"x": np.ones((1, 1, 8, 8), "f4"), "r": np.array([[0, 0, 7, 7]], "f4"), "b": np.array([90_000_000])},
        {"output_height": 2, "output_width": 2, "sampling_ratio": 2},
        "index_in_range",
    ),
    (
        "RNN",
        {**ROWS, "l": np.array([4, 1], "i4")},
        {"hidden_size": 2, "order": ["x", "w", "r", "", "l"]},
        "length_in_range",
    ),
    ("ReverseSequence", {"x": DATA, "l": np.array([1, 2, 3, 4, 5, -1])}, {}, "length_in_range"),
    ("ConstantOfShape", {"s": np.array([2, -3])}, {}, "size_not_negative"),
    ("ConstantOfShape", {"s": np.array([2**32, 2**32])}, {}, "size_fits_into_memory"),
    ("Reshape", {"x": DATA, "s": np.array([-4, -6])}, {}, "size_not_negative"),
    ("Expand", {"x": DATA[:1], "s": np.array([-2, 6])}, {}, "size_not_negative"),
    ("Tile", {"x": DATA, "s": np.array([2**62, 1])}, {}, "size_fits_into_memory"),
    ("Range", {"a": np.array(0), "b": np.array(5), "c": np.array(0)}, {}, "step_is_not_0"),
    ("Range", {"a": np.array(0), "b": np.array(2**62), "c": np.array(1)}, {}, "length_fits_into_memory"),
]


@pytest.mark.parametrize(("op_type", "operands", "attributes", "what"), RUN_TIME)
def test_run_time_values_that_reach_beyond_memory_stop_the_run_and_name_the_node(
    op_type: str, operands: dict[str, Any], attributes: dict[str, Any], what: str, tmp_path: Path
) -> None:
    opset = 11 if op_type == "MaxUnpool" else 16
    outputs = 2 if op_type == "RNN" else 1
    with pytest.raises(RuntimeError, match=f"{op_type}_node1_.*{what}"):
        compiled(one_node(op_type, operands, opset=opset, outputs=outputs, **attributes), operands, tmp_path)


def test_labels_of_a_loss_are_checked(tmp_path: Path) -> None:
    operands = {"x": np.random.default_rng(0).standard_normal((3, 5)).astype("f4"), "l": np.array([1, 4, 2])}
    model = one_node("SoftmaxCrossEntropyLoss", operands, opset=13)
    assert_as_reference(model, operands, tmp_path)
    with pytest.raises(RuntimeError, match="index_in_range"):
        compiled(model, operands | {"l": np.array([1, 80_000_000, 2])}, tmp_path)


def test_all_that_gives_as_much_as_values_say_is_refused_at_once(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("NonZero", ["x"], ["a"], name="first"),
        helper.make_node("Unique", ["x"], ["b"], name="second"),
        helper.make_node("Compress", ["x", "c"], ["d"], name="third", axis=0),
    ]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 6]),
        helper.make_tensor_value_info("c", TensorProto.BOOL, [4]),
    ]
    outputs = [helper.make_empty_tensor_value_info(name) for name in "abd"]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    with pytest.raises(UnsupportedError, match=r"(?s)3 things .*first.*depends on values.*second.*third") as caught:
        imported(model, tmp_path)
    assert "NonZero" in caught.value.message


def test_one_hot_of_no_column_is_refused(tmp_path: Path) -> None:
    weights = {"depth": np.array(-4), "values": np.array([0, 1], "f4")}
    with pytest.raises(UnsupportedError, match=r"node1.*depth = -4"):
        imported(one_node("OneHot", {"i": np.array([0, 1])}, weights), tmp_path)
