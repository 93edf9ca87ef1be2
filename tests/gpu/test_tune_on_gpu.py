"""On a machine with a GPU: candidates are measured on it, and a library built from the records is right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tvmflow.codegen import cuda
from tvmflow.database import Store

ARCH = cuda.detect_arch()
pytestmark = pytest.mark.skipif(ARCH is None, reason="no GPU is here")


def test_tune_then_compile_from_the_records(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((256, 256)).astype("f4")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [128, 256])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [128, 256])],
        [numpy_helper.from_array(weight, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")

    def command(*arguments: str) -> dict[str, object]:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "tvmflow.cli",
                *arguments,
                "--target",
                "cuda",
                "--set",
                "tuning.database=db",
                "--json",
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    summary = command("tune", "m.onnx", "--minutes", "3", "--trials-per-task", "64")
    assert (summary["tasks"], summary["trials"]) == (1, 64)
    (record,) = Store(tmp_path / "db").read().records
    assert "device events" in record.provenance.protocol
    manifest = command("compile", "m.onnx", "-o", "a")
    assert [kernel["origin"] for kernel in manifest["kernels"]] == ["tuned"]
    assert manifest["verdict"]["ok"]
