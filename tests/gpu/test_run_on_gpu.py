"""On a machine with a GPU: a library built for it gives the reference's values."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm_ffi
from onnx import TensorProto, helper, numpy_helper

import tvmflow
from tvmflow.codegen import cuda

ARCH = cuda.detect_arch()
pytestmark = pytest.mark.skipif(ARCH is None, reason="no GPU is here")


@pytest.mark.parametrize("fast_math", [False, True])
def test_compile_runs_on_the_gpu(fast_math: bool, tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((16, 3, 3, 3)).astype("f4")
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w"], ["c"]),
            helper.make_node("Relu", ["c"], ["r"]),
            helper.make_node("GlobalAveragePool", ["r"], ["p"]),
            helper.make_node("Softmax", ["p"], ["y"], axis=1),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 32, 32])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 16, 1, 1])],
        [numpy_helper.from_array(weight, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tvmflow.cli",
            "compile",
            "m.onnx",
            "--target",
            "cuda",
            "--json",
            "--set",
            f"numerics.fast_math={str(fast_math).lower()}",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    manifest = json.loads(done.stdout)
    assert manifest["target"]["arch"] == ARCH
    assert manifest["verdict"]["ok"]
    assert not manifest["verdict"]["notes"]


def test_device_tensors_in_and_out(tmp_path: Path) -> None:
    """PyTorch's tensors on the GPU, on its default stream and on one of their own; and the copy on the CPU."""
    torch = pytest.importorskip("torch", reason="the extra `torch` is not installed")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype("f4")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [64, 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [64, 64])],
        [numpy_helper.from_array(weight, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    session = tvmflow.load(tvmflow.compile(tmp_path / "m.onnx", target="cuda", out=tmp_path / "a"))
    x = torch.randn(64, 64, device="cuda")
    want = x.double().cpu().numpy() @ weight
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream), tvm_ffi.use_torch_stream():
            y = session.run({"x": x}, into=torch.from_dlpack)["y"]
            assert y.device == x.device
            np.testing.assert_allclose(y.cpu().numpy(), want, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(session.run({"x": x.cpu().numpy()})["y"], y.cpu().numpy())
