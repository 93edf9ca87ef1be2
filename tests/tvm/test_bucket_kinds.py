"""What compile says of padding where rows do not rest on each other alone: order, pairs, windows, sums; odd names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import tvmflow
from tvmflow import config, flow
from tvmflow.errors import ConfigError, InputError
from tvmflow.manifest import Bundle

KERNEL = np.random.default_rng(0).standard_normal((3, 2, 5)).astype("f4")
FIXED = {"time": 4, "max": 3, "in": 8, "parts": 4}
SETTINGS = {"verify": {"ranges": {"counted": [0, 1]}}}


def model(file: Path) -> Path:
    """sums[time] so far, likeness[max, max] of all pairs, windows[2, 3, in - 4], total[] of what `counted` marks."""
    nodes = [
        helper.make_node("CumSum", ["steps", "first"], ["sums"]),
        helper.make_node("Transpose", ["things"], ["turned"], perm=[1, 0]),
        helper.make_node("MatMul", ["things", "turned"], ["likeness"]),
        helper.make_node("Conv", ["signal", "kernel"], ["windows"]),
        helper.make_node("Mul", ["parts", "counted"], ["products"]),
        helper.make_node("ReduceSum", ["products"], ["total"], keepdims=0),
    ]
    shapes: dict[str, list[int | str]] = {
        "steps": ["time"],
        "things": ["max", 6],
        "signal": [2, 2, "in"],
        "parts": ["parts"],
        "counted": ["parts"],
        "sums": ["time"],
        "likeness": ["max", "max"],
        "windows": [2, 3, "positions"],
        "total": [],
    }
    values = {
        name: helper.make_tensor_value_info(
            name, TensorProto.INT32 if name in ("parts", "counted", "total") else TensorProto.FLOAT, shape
        )
        for name, shape in shapes.items()
    }
    graph = helper.make_graph(
        nodes,
        "kinds",
        list(values.values())[:5],
        list(values.values())[5:],
        [numpy_helper.from_array(np.int64(0), "first"), numpy_helper.from_array(KERNEL, "kernel")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), file)
    return file


def configured(file: Path, **shapes: Any) -> config.Config:
    given = {"buckets": [FIXED], "pad": {"counted": 0}} | shapes
    return config.of_model(str(file), [{"shapes": given, **SETTINGS}])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kinds")
    flow.compile_model(configured(model(folder / "model.onnx")), folder / "kinds.tvmflow")
    return folder


def drawn(**sizes: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    held = FIXED | sizes
    floats = {"steps": (held["time"],), "things": (held["max"], 6), "signal": (2, 2, held["in"])}
    return {
        **{name: rng.standard_normal(shape).astype("f4") for name, shape in floats.items()},
        "parts": rng.integers(-9, 9, held["parts"]).astype("i4"),
        "counted": rng.integers(0, 2, held["parts"]).astype("i4"),
    }


def test_what_rests_on_order_or_pairs_is_padded_but_not_split(folder: Path) -> None:
    manifest = tvmflow.load(folder / "kinds.tvmflow").manifest
    assert isinstance(manifest, Bundle)
    assert {dim: (one.kind, one.reason.partition("; ")[2]) for dim, one in manifest.padding.items()} == {
        "time": ("masked", "output `sums` changes with the place of a position"),
        "max": ("masked", "`likeness` has it along two axes"),
        "in": ("masked", "`windows` is not cut where inputs are"),
        "parts": ("masked", ""),
    }
    assert manifest.padding["parts"].reason == "nothing in the padding changes values while it holds `counted` = 0"


@pytest.mark.parametrize(
    "sizes", [{}, {"time": 1}, {"max": 2}, {"in": 5}, {"parts": 3}, dict(FIXED, time=3, parts=1)], ids=str
)
def test_padded_values_are_the_references(sizes: dict[str, int], folder: Path) -> None:
    feeds = drawn(**sizes)
    got = tvmflow.load(folder / "kinds.tvmflow").run(feeds)
    want = onnxruntime.InferenceSession(folder / "model.onnx").run(None, feeds)
    for (name, array), expected in zip(got.items(), want, strict=True):
        assert array.shape == np.shape(expected), name
        np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"time": 5}, "`time` = 5 is above the largest bucket, 4, and cannot be split"),
        ({"max": 4}, "`max` = 4 is above the largest bucket, 3, and cannot be split"),
        ({"in": 9}, "`in` = 9 is above the largest bucket"),
        ({"in": 3}, r"output `windows` would have the size \(in - 4\) = -1"),
    ],
)
def test_what_is_refused(sizes: dict[str, int], message: str, folder: Path) -> None:
    with pytest.raises(InputError, match=message):
        tvmflow.load(folder / "kinds.tvmflow").run(drawn(**sizes))


@pytest.mark.parametrize(
    ("pad", "message"),
    [
        ({"counted": 0.5}, "shapes.pad: `counted` = 0.5, but it is int32 from"),
        ({"parts": 3e9}, r"shapes.pad: `parts` = 3e\+09, but it is int32 from -2.14748e\+09 to 2.14748e\+09"),
        ({"steps": 1e39}, r"shapes.pad: `steps` = 1e\+39, but it is float32 from"),
    ],
)
def test_padding_is_a_value_that_the_input_may_hold(
    pad: dict[str, float], message: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        flow.compile_model(configured(folder / "model.onnx", pad=pad), tmp_path / "a.tvmflow")


def test_a_model_that_only_takes_multiples_is_verified_on_those(tmp_path: Path) -> None:
    nodes = [helper.make_node("Reshape", ["x", "rows"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "rows",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["m", 4])],
        [numpy_helper.from_array(np.array([-1, 4]), "rows")],
    )
    file = tmp_path / "rows.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), file)
    bundle = flow.compile_model(config.of_model(str(file), [{"shapes": {"buckets": {"n": [16, 32]}}}]), tmp_path / "r")
    assert isinstance(bundle, Bundle)
    assert (bundle.padding["n"].kind, bundle.verdict.ok) == ("masked", True)
    tried = {run.dims["n"] for run in bundle.verdict.runs}
    assert tried > {16, 32}
    assert all(size % 4 == 0 for size in tried)
    (note,) = bundle.verdict.notes
    assert "refuses n = " in note
    x = np.arange(20, dtype="f4")
    np.testing.assert_array_equal(tvmflow.load(tmp_path / "r").run({"x": x})["y"], x.reshape(-1, 4))
