"""On a machine with a GPU: products on TF32 tensor cores have the values that TF32 allows, and no worse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from tvmflow import config
from tvmflow.codegen import cuda

ARCH = cuda.detect_arch()
pytestmark = [
    pytest.mark.skipif(ARCH is None, reason="no GPU is here"),
    pytest.mark.skipif(ARCH is not None and not config.has_tf32(ARCH), reason="the GPU here has no TF32"),
]


def save(path: Path, nodes: list[onnx.NodeProto], x: list[int], weights: dict[str, tuple[int, ...]]) -> None:
    rng = np.random.default_rng(0)
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(rng.standard_normal(shape).astype("f4"), name) for name, shape in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)


MODELS = {
    "matmul": ([helper.make_node("MatMul", ["x", "w"], ["y"])], [512, 384], {"w": (384, 1024)}),
    "odd": ([helper.make_node("MatMul", ["x", "w"], ["y"])], [77, 99], {"w": (99, 131)}),
    "fused": (
        [
            helper.make_node("MatMul", ["x", "w"], ["m"]),
            helper.make_node("Add", ["m", "b"], ["s"]),
            helper.make_node("Gelu", ["s"], ["y"]),
        ],
        [128, 384],
        {"w": (384, 1536), "b": (1536,)},
    ),
    "batch": ([helper.make_node("MatMul", ["x", "w"], ["y"])], [12, 128, 32], {"w": (12, 32, 128)}),
    "conv": (
        [helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]), helper.make_node("Relu", ["c"], ["y"])],
        [1, 64, 28, 28],
        {"w": (128, 64, 3, 3)},
    ),
    "stem": (
        [helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1], strides=[2, 2])],
        [1, 3, 65, 65],
        {"w": (32, 3, 3, 3)},
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tf32", [False, True])
def test_error_is_that_of_the_number_format(name: str, tf32: bool, tmp_path: Path) -> None:
    model = tmp_path / "m.onnx"
    save(model, *MODELS[name])
    x = np.random.default_rng(1).standard_normal(MODELS[name][1]).astype("f4")
    np.savez(tmp_path / "x.npz", x=x)

    def command(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "tvmflow.cli", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    numerics = f"numerics.tf32={str(tf32).lower()}"
    manifest = json.loads(command("compile", "m.onnx", "--target", "cuda", "--set", numerics, "--json", "-o", "a"))
    assert any("tf32 " in kernel["rule"] for kernel in manifest["kernels"]) == tf32
    command("run", "a", "--inputs", "x.npz", "--outputs", "y.npz")
    got = np.load(tmp_path / "y.npz")["y"].astype("f8")
    (want,) = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, {"x": x})
    error = np.abs(got - want).max() / np.abs(want).max()
    # Operands are off by up to 2^-11 each, at random, so sums are off by less of their own range.
    assert error < (2**-10 if tf32 else 2**-18)
    if tf32:
        assert error > 2**-20  # tensor cores were used
