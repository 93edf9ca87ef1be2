"""Values that operators must get right where TVM's own importer does not: NaN, extremes, integers, old versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ops_runs import assert_as_reference, assert_same, compiled, imported, one_node, reference

from tvmflow.errors import UnsupportedError

NAN, INF = np.nan, np.inf
X = np.array([NAN, 1, -2, 0, INF, -INF, 7, NAN, -0.5, 3, 2, 1, 0, -1, -2, -3, NAN], "f4")
Y = np.array([1, NAN, 3, 0, -INF, INF, 7, NAN, 0.5, 3, NAN, 1, 0, -1, -2, -3, 4], "f4")


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("f4")


@pytest.mark.parametrize(
    ("op_type", "attributes"),
    [
        ("Relu", {}),
        ("LeakyRelu", {"alpha": 0.1}),
        ("Elu", {}),
        ("Selu", {}),
        ("Sign", {}),
        ("HardSigmoid", {}),
        ("ThresholdedRelu", {}),
        ("Softplus", {}),
        ("Abs", {}),
        ("Round", {}),
        ("Tanh", {}),
        ("Sigmoid", {}),
    ],
)
def test_nan_and_infinities_come_through_functions(op_type: str, attributes: dict[str, Any], tmp_path: Path) -> None:
    finite_alike = np.where(np.isneginf(X), -50, X) if op_type in ("Elu", "Selu") else X
    assert_as_reference(one_node(op_type, {"x": finite_alike}, **attributes), {"x": finite_alike}, tmp_path)


@pytest.mark.parametrize(("op_type", "expected"), [("Max", np.maximum), ("Min", np.minimum)])
def test_nan_of_either_operand_comes_through_maxima(op_type: str, expected: np.ufunc, tmp_path: Path) -> None:
    feeds = {"a": X, "b": Y}
    assert_same(compiled(one_node(op_type, feeds), feeds, tmp_path), [expected(X, Y)])
    constant = one_node(op_type, {"a": X}, {"b": np.float32(1)})
    assert_same(compiled(constant, {"a": X}, tmp_path), [expected(X, np.float32(1))])


@pytest.mark.parametrize("low", [0.0, NAN])
@pytest.mark.parametrize("high", [2.0, NAN])
@pytest.mark.parametrize("as_constants", [True, False])
def test_clip_keeps_nan_and_takes_a_nan_bound_for_none(
    low: float, high: float, as_constants: bool, tmp_path: Path
) -> None:
    bounds = {"lo": np.array(low, "f4"), "hi": np.array(high, "f4")}
    feeds = {"x": X} if as_constants else {"x": X, **bounds}
    assert_as_reference(one_node("Clip", feeds, bounds if as_constants else None), feeds, tmp_path)


@pytest.mark.parametrize("slope", [normal(1), np.array(NAN, "f4"), np.array(INF, "f4")])
def test_prelu_multiplies_the_negative_side_only(slope: np.ndarray, tmp_path: Path) -> None:
    finite = np.where(np.isinf(X), 5, X)
    assert_as_reference(one_node("PRelu", {"x": finite}, {"slope": slope}), {"x": finite}, tmp_path)


@pytest.mark.parametrize(("op_type", "expected"), [("ReduceMax", np.max), ("ReduceMin", np.min)])
@pytest.mark.parametrize("row", [[1, NAN, 3], [-INF] * 3, [INF] * 3, [NAN, INF, 1], [-3e38, -INF, -3.4e38]])
def test_extremes_of_nan_and_infinities(op_type: str, expected: Any, row: list[float], tmp_path: Path) -> None:
    x = np.array([row, [1, 2, 3]], "f4")
    model = one_node(op_type, {"x": x}, {"axes": np.array([1])}, keepdims=0)
    assert_same(compiled(model, {"x": x}, tmp_path), [expected(x, axis=1)])


@pytest.mark.parametrize("op_type", ["ArgMax", "ArgMin"])
@pytest.mark.parametrize("last", [0, 1])
def test_places_of_extremes(op_type: str, last: int, tmp_path: Path) -> None:
    rows = [[2, NAN, 7, 4, 7], [1, 1, 1, 1, NAN], [-INF] * 5, [INF] * 5, [0] * 5]
    x = np.array(rows, "f4")
    model = one_node(op_type, {"x": x}, opset=13, axis=1, select_last_index=last)
    assert_as_reference(model, {"x": x}, tmp_path)


def test_place_of_the_extreme_of_the_lowest_integers(tmp_path: Path) -> None:
    x = np.zeros((2, 3), "u1")
    assert_as_reference(one_node("ArgMax", {"x": x}, opset=13, axis=1), {"x": x}, tmp_path)


@pytest.mark.parametrize("largest", [1, 0])
def test_top_k_orders_ties_by_place_and_nan_as_the_largest(largest: int, tmp_path: Path) -> None:
    x = np.array([[1, 3, NAN, 3, 2], [0, 0, 0, 0, 1]], "f4") if largest else np.array([[1, 3, 1, 3, 2]], "f4")
    model = one_node("TopK", {"x": x}, {"k": np.array([3])}, outputs=2, opset=11, largest=largest)
    assert_as_reference(model, {"x": x}, tmp_path)


@pytest.mark.parametrize("op_type", ["Asinh", "Acosh", "Atanh", "Sinh", "Cosh", "Tan", "Erf", "Log"])
def test_functions_over_their_whole_range(op_type: str, tmp_path: Path) -> None:
    points = {
        "Acosh": np.r_[1, 1.0001, np.logspace(0.01, 37, 60)],
        "Atanh": np.linspace(-0.999, 0.999, 60),
        "Sinh": np.linspace(-80, 80, 60),
        "Cosh": np.linspace(-80, 80, 60),
        "Log": np.logspace(-37, 37, 60),
    }
    x = points.get(op_type, np.r_[-np.logspace(-6, 37, 60), 0, np.logspace(-6, 37, 60)]).astype("f4")
    x = np.clip(x, -50, 50) if op_type == "Tan" else x
    expected = (
        reference(one_node("Erf", {"x": x}), {"x": x})[0]
        if op_type == "Erf"
        else getattr(np, {"Asinh": "arcsinh", "Acosh": "arccosh", "Atanh": "arctanh"}.get(op_type, op_type.lower()))(
            x.astype("f8")
        )
    )
    got = compiled(one_node(op_type, {"x": x}), {"x": x}, tmp_path)[0]
    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8"])
@pytest.mark.parametrize(("op_type", "attributes"), [("Div", {}), ("Mod", {}), ("Mod", {"fmod": 1})])
def test_integer_division_rounds_and_signs_as_the_standard_says(
    dtype: str, op_type: str, attributes: dict[str, int], tmp_path: Path
) -> None:
    signs = 0 if dtype.startswith("u") else 1
    a = (np.array([7, -7, 7, -7, 0, 100, 6]) if signs else np.array([7, 9, 0, 100, 255, 3, 6])).astype(dtype)
    b = (np.array([2, 2, -2, -2, 5, -1, 3]) if signs else np.array([2, 4, 5, 7, 16, 3, 6])).astype(dtype)
    feeds = {"a": a, "b": b}
    model = one_node(op_type, feeds, opset=14, **attributes)
    if op_type == "Div":
        assert_same(compiled(model, feeds, tmp_path), [np.trunc(a.astype("f8") / b).astype(dtype)])
    else:
        assert_same(compiled(model, feeds, tmp_path), [np.fmod(a, b) if attributes else np.mod(a, b)])


def test_the_lowest_integer_divided_by_minus_one_does_not_end_the_process(tmp_path: Path) -> None:
    feeds = {"a": np.array([-(2**31), 5], "i4"), "b": np.array([-1, -1], "i4")}
    assert compiled(one_node("Div", feeds, opset=14), feeds, tmp_path)[0][1] == -5


def test_integers_above_two_to_the_53_stay_exact(tmp_path: Path) -> None:
    big = 9007199254740993
    feeds = {"a": np.array([big, -big, 3], "i8"), "b": np.array([1, 2, 39], "i8")}
    assert_same(compiled(one_node("Div", feeds, opset=14), feeds, tmp_path), [np.array([big, -big // 2 + 1, 0])])
    assert_same(compiled(one_node("Pow", feeds, opset=15), feeds, tmp_path), [feeds["a"] ** feeds["b"]])


@pytest.mark.parametrize(("base", "exponent"), [("f4", "i8"), ("i4", "f4"), ("f4", "f4"), ("i8", "i8")])
def test_powers_have_the_type_of_the_base(base: str, exponent: str, tmp_path: Path) -> None:
    feeds = {"a": np.array([1, 2, 3, 4], base), "b": np.array([3, 2, 1, 0], exponent)}
    assert_as_reference(one_node("Pow", feeds, opset=15), feeds, tmp_path)


def test_half_precision_is_summed_in_float32(tmp_path: Path) -> None:
    x = np.full((1, 8192), 9.0, "f2")
    got = compiled(one_node("ReduceMean", {"x": x}, {"a": np.array([1])}), {"x": x}, tmp_path)
    assert_same(got, [np.full((1, 1), 9.0, "f2")])
    feeds = {"a": np.ones((1, 4096), "f2"), "b": np.ones((4096, 1), "f2")}
    assert_same(compiled(one_node("MatMul", feeds), feeds, tmp_path), [np.full((1, 1), 4096, "f2")])


@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax", "Hardmax"])
@pytest.mark.parametrize(("opset", "axis"), [(11, None), (11, 0), (11, 2), (13, None), (13, 1)])
def test_softmax_of_old_and_new_versions(op_type: str, opset: int, axis: int | None, tmp_path: Path) -> None:
    attributes = {} if axis is None else {"axis": axis}
    x = normal(2, 3, 4)
    assert_as_reference(one_node(op_type, {"x": x}, opset=opset, **attributes), {"x": x}, tmp_path)


def test_a_product_over_nothing_is_zero(tmp_path: Path) -> None:
    feeds = {"a": np.zeros((2, 0), "f4"), "b": np.zeros((0, 3), "f4")}
    assert_same(compiled(one_node("MatMul", feeds), feeds, tmp_path), [np.zeros((2, 3), "f4")])


def test_training_mode_is_refused(tmp_path: Path) -> None:
    x = normal(4, 4)
    model = one_node("Dropout", {"x": x}, {"r": np.float32(0.5), "t": np.array(True)}, opset=13)
    with pytest.raises(UnsupportedError, match="node1"):
        imported(model, tmp_path)


@pytest.mark.parametrize("dtype", ["u1", "u4", "i1", "i8"])
def test_signs_of_integers(dtype: str, tmp_path: Path) -> None:
    x = np.array([0, 5, np.iinfo(dtype).max, np.iinfo(dtype).min], dtype)
    assert_as_reference(one_node("Sign", {"x": x}), {"x": x}, tmp_path)


def test_operands_aligned_as_before_opset_7_are_refused(tmp_path: Path) -> None:
    operands = {"a": normal(3, 3), "b": normal(3)}
    with pytest.raises(UnsupportedError, match=r"node1.*`axis` aligns"):
        imported(one_node("Add", operands, opset=6, axis=0, broadcast=1), tmp_path)


@pytest.mark.parametrize("row", [[NAN, 1, 2, 3, NAN, 5], [-INF, -INF, NAN, NAN, -INF, -INF], [NAN] * 6])
@pytest.mark.parametrize("dilation", [1, 2])
def test_maximum_pools_with_places(row: list[float], dilation: int, tmp_path: Path) -> None:
    x = np.array([[row, row[::-1]]], "f4")
    model = one_node("MaxPool", {"x": x}, outputs=2, opset=12, kernel_shape=[3], pads=[2, 2], dilations=[dilation])
    assert_as_reference(model, {"x": x}, tmp_path)


@pytest.mark.parametrize(
    ("size", "mode", "attributes"),
    [
        (3, "linear", {"antialias": 1}),
        (3, "cubic", {"antialias": 1}),
        (4, "cubic", {"antialias": 1}),
        (9, "linear", {"coordinate_transformation_mode": "align_corners"}),
    ],
)
def test_resizing_reads_infinities_and_nan_where_the_reference_does(
    size: int, mode: str, attributes: dict[str, Any], tmp_path: Path
) -> None:
    x = normal(1, 2, 5 if size == 9 else 8, 8)
    x[0, 1, 2, 3], x[0, 0, -1, 0], x[0, 0, 0, -1] = INF, NAN, -INF
    sizes = {"sizes": np.array([1, 2, size, size])}
    model = one_node("Resize", {"x": x}, sizes, order=["x", "", "", "sizes"], mode=mode, **attributes)
    assert_as_reference(model, {"x": x}, tmp_path)


@pytest.mark.parametrize("alpha", [0.0, INF])
def test_leaky_relu_of_slopes_that_make_nan(alpha: float, tmp_path: Path) -> None:
    assert_as_reference(one_node("LeakyRelu", {"x": X}, alpha=alpha), {"x": X}, tmp_path)
