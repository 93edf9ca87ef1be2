"""The reference runs the file as it is."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.helper import make_node

from tvmflow import config, flow
from tvmflow.errors import ReferenceRunError
from tvmflow.frontend.onnx.reference import run_onnx


def save(tmp_path, nodes, outputs, opset=18, functions=()):
    """A model of one float input `x` of length 2."""
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])
    results = [helper.make_tensor_value_info(name, dtype, None) for name, dtype in outputs]
    domains = [helper.make_opsetid(node.domain, 1) for node in nodes if node.domain]
    proto = helper.make_model(
        helper.make_graph(nodes, "g", [value], results),
        ir_version=10,
        functions=functions,
        opset_imports=[helper.make_opsetid("", opset), *domains],
    )
    onnx.save(proto, tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


X = np.array([1.5, np.nan], "float32")


@pytest.mark.parametrize("reference", ["onnxruntime", "onnx"])
def test_bfloat16_outputs_listed_twice(tmp_path, reference):
    path = save(
        tmp_path,
        [make_node("Cast", ["x"], ["y"], to=TensorProto.BFLOAT16)],
        [("y", TensorProto.BFLOAT16), ("x", TensorProto.FLOAT), ("y", TensorProto.BFLOAT16)],
    )
    who, [outputs, again] = run_onnx(path, [{"x": X}, {"x": X[::-1]}], reference)
    assert who.startswith("ONNX Runtime" if reference == "onnxruntime" else "onnx ")
    assert [array.dtype for array in outputs] == [ml_dtypes.bfloat16, np.float32, ml_dtypes.bfloat16]
    np.testing.assert_array_equal(outputs[0].astype("float32"), X)
    np.testing.assert_array_equal(again[1], X[::-1])


def test_onnx_stands_in_where_onnxruntime_cannot_load(tmp_path):
    """ONNX Runtime has no float64 kernel of Asinh on CPUs."""
    nodes = [make_node("Cast", ["x"], ["a"], to=TensorProto.DOUBLE), make_node("Asinh", ["a"], ["y"])]
    path = save(tmp_path, nodes, [("y", TensorProto.DOUBLE)])
    who, [[got]] = run_onnx(path, [{"x": np.ones(2, "float32")}], "auto")
    assert who.startswith(f"onnx {onnx.__version__}'s reference implementation, because ONNX Runtime cannot load it: ")
    np.testing.assert_allclose(got, np.arcsinh(np.ones(2)), rtol=1e-15)


def test_what_the_reference_says_about_bad_inputs(tmp_path):
    path = save(tmp_path, [make_node("Relu", ["x"], ["y"])], [("y", TensorProto.FLOAT)])
    with pytest.raises(ReferenceRunError, match=r"m\.onnx: the reference fails on these inputs: .*") as caught:
        run_onnx(path, [{"x": np.zeros((3, 3), "float32")}], "onnxruntime")
    assert caught.value.hint


def test_a_model_that_no_reference_can_load(tmp_path):
    path = save(tmp_path, [make_node("Secret", ["x"], ["y"], domain="my.company")], [("y", TensorProto.FLOAT)])
    with pytest.raises(ReferenceRunError, match="ONNX Runtime cannot load the model: "):
        run_onnx(path, [{"x": X}], "onnxruntime")
    with pytest.raises(ReferenceRunError, match=r"onnx's reference implementation cannot load"):
        run_onnx(path, [{"x": X}], "auto")


def lrn(folder: Path, shape: tuple[int, ...], size: int) -> Path:
    node = helper.make_node("LRN", ["x"], ["y"], size=size, alpha=0.3, beta=0.6, bias=1.5)
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    graph = helper.make_graph([node], "g", [value], [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)])
    path = folder / "lrn.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def lrn_by_its_text(x: np.ndarray, size: int) -> np.ndarray:
    y = np.empty_like(x)
    for c in range(x.shape[1]):
        first, last = max(0, c - (size - 1) // 2), min(x.shape[1] - 1, c + -(-(size - 1) // 2))
        y[:, c] = x[:, c] / (1.5 + 0.3 / size * (x[:, first : last + 1] ** 2).sum(1)) ** 0.6
    return y


def test_a_fault_of_the_reference_that_is_known_is_not_the_librarys(tmp_path: Path) -> None:
    """ONNX Runtime takes no even sizes, and onnx's LRN sums squares in the first channels only."""
    x = np.random.default_rng(0).standard_normal((1, 7, 2, 2)).astype("f4")
    who, [[got]] = run_onnx(lrn(tmp_path, x.shape, 4), [{"x": x}], "auto")
    assert "LRN by tvmflow's own rewriting of its text" in who
    np.testing.assert_allclose(got, lrn_by_its_text(x, 4), rtol=1e-6)
    path = lrn(tmp_path, x.shape, 3)
    _, [[wanted]] = run_onnx(path, [{"x": x}], "onnxruntime")
    np.testing.assert_allclose(run_onnx(path, [{"x": x}], "onnx")[1][0][0], wanted, rtol=1e-5)


def test_a_library_is_verified_against_the_stand_in(tmp_path: Path) -> None:
    manifest = flow.compile_model(config.of_model(str(lrn(tmp_path, (1, 7, 2, 2), 4)), []), tmp_path / "a")
    assert manifest.verdict is not None
    assert manifest.verdict.ok
    assert "ONNX Runtime cannot load it" in manifest.verdict.reference
    assert "because it sums squares" in manifest.verdict.reference
