"""The comparison agrees with numpy's own, and sees what numpy's does not look at."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tvmflow.config import VerifySection
from tvmflow.manifest import Signature, TensorSpec
from tvmflow.verification import compare

FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)


@given(
    hnp.arrays(np.float32, 6, elements=FLOATS),
    hnp.arrays(np.float32, 6, elements=FLOATS),
    st.sampled_from([0.0, 1e-3, 0.5]),
    st.sampled_from([0.0, 1e-6, 1.0]),
)
def test_agrees_with_numpy(got: np.ndarray, want: np.ndarray, rtol: float, atol: float) -> None:
    with np.errstate(all="ignore"):
        expected = np.allclose(got.astype(np.float64), want.astype(np.float64), rtol, atol, equal_nan=True)
    assert compare.compare_output("y", got, want, (rtol, atol)).ok == expected


@pytest.mark.parametrize("dtype", ["int64", "uint64", "int8", "bool"])
def test_integers_are_exact(dtype: str) -> None:
    info = None if dtype == "bool" else np.iinfo(dtype)
    want = np.array([0, 1] if info is None else [info.max, info.min], dtype)
    assert compare.compare_output("y", want, want, (0, 0)).ok
    off = want.copy()
    off[0] = not off[0] if info is None else off[0] - 1
    verdict = compare.compare_output("y", off, want, (0, 0))
    assert (verdict.ok, verdict.mismatched, verdict.max_error) == (False, 1, 1.0)


def test_names_the_worst_place() -> None:
    want = np.zeros((2, 3), np.float32)
    got = want.copy()
    got[0, 1], got[1, 2] = 1, 5
    verdict = compare.compare_output("y", got, want, (0, 0.5))
    assert verdict.reason == "2 of 6 values differ, at [1, 2] got 5.0, want 0.0"


@pytest.mark.parametrize(
    ("got", "want"), [([np.nan, 1], [1, 1]), ([1, 1], [np.nan, 1]), ([np.inf, 1], [-np.inf, 1]), ([np.inf, 1], [9, 1])]
)
def test_nan_and_infinity_stand_where_they_should(got: list[float], want: list[float]) -> None:
    verdict = compare.compare_output("y", np.array(got, "f4"), np.array(want, "f4"), (1.0, 1e9))
    assert (verdict.ok, verdict.nan_or_inf_differs) == (False, 1)


@pytest.mark.parametrize("got", [np.zeros(3, "f8"), np.zeros(4, "f4"), np.zeros((1, 3), "f4")])
def test_dtype_and_shape(got: np.ndarray) -> None:
    verdict = compare.compare_output("y", got, np.zeros(3, "f4"), (1, 1))
    assert not verdict.ok
    assert "the reference gives float32[3]" in verdict.reason


def test_empty_outputs_are_equal() -> None:
    assert compare.compare_output("y", np.zeros((0, 3), "f4"), np.zeros((0, 3), "f4"), (0, 0)).ok


def test_top_k_agreement() -> None:
    want = np.arange(20, dtype="f4").reshape(2, 10)
    got = want.copy()
    got[0, 0] = 100
    verdict = compare.compare_output("y", got, want, (0, 0))
    assert (verdict.top1_agreement, verdict.top5_agreement) == (0.5, 0.5)


def test_default_tolerance_follows_dtype_and_magnitude() -> None:
    section = VerifySection()
    large, ones = np.array([0, -200], "f4"), np.ones(1, "f4")
    assert compare.tolerance("y", large, section, "float32") == (1e-3, pytest.approx(2e-3))
    assert compare.tolerance("y", np.array([5, 9]), section, "float16") == (0, 0)
    assert compare.tolerance("y", np.array([4e-3], "f4"), section, "float32")[1] == pytest.approx(4 * 2**-23)
    assert compare.tolerance("y", np.array([1e-8], "f4"), section, "float32")[1] == pytest.approx(1e-11)
    assert compare.tolerance("y", np.array([np.nan, np.inf], "f4"), section, "float64") == (1e-3, 0)
    assert compare.tolerance("y", ones, section, "bfloat16") == (4e-2, pytest.approx(1e-2))
    stated = VerifySection.model_validate({"rtol": 0.1, "outputs": {"z": {"rtol": 0.2, "atol": 0.3}}})
    assert compare.tolerance("y", ones, stated, "float32") == (0.1, pytest.approx(1e-5))
    assert compare.tolerance("z", ones, stated, "float32") == (0.2, 0.3)


def spec(name: str, dtype: str, shape: tuple[int | str, ...], limits: tuple[float, float] | None = None) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape, range=limits)


def test_inputs_keep_to_ranges_and_shared_sizes() -> None:
    signature = Signature(
        inputs=(
            spec("ids", "int64", ("b", "t"), (0, 9)),
            spec("mask", "bool", ("b", "t")),
            spec("x", "float32", (4, "t")),
        ),
        outputs=(),
    )
    section = VerifySection.model_validate({"ranges": {"x": (2, 3)}})
    first = next(compare.candidates(signature, section, 0))
    assert first.inputs["ids"].shape == first.inputs["mask"].shape == (first.dims["b"], first.dims["t"])
    assert first.inputs["ids"].min() >= 0
    assert first.inputs["ids"].max() <= 9
    assert ((first.inputs["x"] >= 2) & (first.inputs["x"] <= 3)).all()


def test_inputs_follow_the_seed() -> None:
    signature = Signature(inputs=(spec("x", "float32", (100,)),), outputs=())
    draw = [next(compare.candidates(signature, VerifySection(), seed)).inputs["x"] for seed in (0, 0, 1)]
    assert (draw[0] == draw[1]).all()
    assert (draw[0] != draw[2]).any()


def test_open_integers_are_first_drawn_without_zero_then_as_indices() -> None:
    signature = Signature(inputs=(spec("i", "int32", (1000,)),), outputs=())
    drawn = [feeds.inputs["i"] for feeds in compare.candidates(signature, VerifySection(), 0)]
    assert [(int(i.min()), int(i.max())) for i in drawn] == list(compare.TRIED_RANGES)
    assert (drawn[0] != 0).all()


def test_sizes_end_with_all_ones() -> None:
    signature = Signature(inputs=(spec("x", "float32", ("a", "b")),), outputs=())
    sizes = [feeds.dims for feeds in compare.candidates(signature, VerifySection(), 0)]
    assert {"a": 1, "b": 1} in sizes
    assert sizes[0]["a"] != sizes[0]["b"]
    stated = VerifySection.model_validate({"dims": {"a": (4, 6)}})
    assert [next(compare.candidates(signature, stated, seed)).dims["a"] for seed in (0, 1, 2)] == [4, 6, 4]


@pytest.mark.parametrize(("size", "tried"), [("((w - 5) // 8 + 1)", [32, 16]), ("(w * 0)", [3, 32, 2, 1, 16])])
def test_sizes_that_leave_nothing_of_an_output_are_left_out_if_others_are_left(size: str, tried: list[int]) -> None:
    inputs = (TensorSpec(name="x", dtype="float32", shape=("w",)),)
    signature = Signature(inputs=inputs, outputs=(TensorSpec(name="y", dtype="float32", shape=(size, 2)),))
    assert [feeds.dims["w"] for feeds in compare.candidates(signature, VerifySection(), 0)] == tried
