"""`verify --attribute`: builds against ONNX Runtime and against the build before; a stage gets what it causes."""

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
from planted_faults import plant

from tvmflow import config, flow, runtime
from tvmflow.verification import compare


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 3 x 3 convolution that Winograd takes, and a division; compiled with fast math."""
    folder = tmp_path_factory.mktemp("attribution")
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.standard_normal((64, 64, 3, 3)).astype("float32") / 24,
        "s": rng.uniform(1, 3, (1, 64, 1, 1)).astype("float32"),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Div", ["c", "s"], ["d"]),
        helper.make_node("Tanh", ["d"], ["t"]),
        helper.make_node("ReduceSum", ["d"], ["total"], keepdims=0),
    ]
    values = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 64, 32, 32]),
        helper.make_tensor_value_info("t", TensorProto.FLOAT, [1, 64, 32, 32]),
        helper.make_tensor_value_info("total", TensorProto.FLOAT, []),
    ]
    graph = helper.make_graph(
        nodes, "net", values[:1], values[1:], [numpy_helper.from_array(value, name) for name, value in weights.items()]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    onnx.save(model, folder / "net.onnx")
    cfg = config.of_model(
        str(folder / "net.onnx"),
        [
            {
                "numerics": {"fast_math": True},
                "graph": {"layout": "nhwc"},
                "target": {"mcpu": "x86-64-v3", "threads": 1},
                "verify": {"seeds": [0, 1], "enabled": False, "rtol": 1e-3, "atol": 1e-3},
            }
        ],
    )
    flow.compile_model(cfg, folder / "net.tvmflow")
    return folder / "net.tvmflow"


def attributed(artifact: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tvmflow.cli", "verify", str(artifact), "--attribute", "--json"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_stage_of_every_output(artifact: Path) -> None:
    done = attributed(artifact)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    stages = ["import", "schedule", "winograd", "fast_math"]
    assert list(found["stages"]) == stages
    assert [row["stage"] for row in found["rows"] if row["output"] == "t"] == stages
    rows = {row["stage"]: row for row in found["rows"] if row["output"] == "t"}
    assert rows["import"]["change"] is None
    assert all(0 < rows[stage]["change"] < 1e-4 for stage in stages[1:])
    assert all(row["mismatched"] == 0 for row in found["rows"])
    session, reference = runtime.load(artifact), onnxruntime.InferenceSession(artifact.parent / "net.onnx")
    worst = 0.0
    for seed in (0, 1):
        feeds = next(compare.candidates(session.signature, config.VerifySection(), seed)).inputs
        difference = session.run(feeds)["t"].astype("float64") - reference.run(["t"], feeds)[0]
        worst = max(worst, float(np.abs(difference).max()))
    assert rows["fast_math"]["max_error"] == pytest.approx(worst, rel=1e-6)


def test_a_wrong_schedule_is_the_schedules(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(
        tmp_path / "site",
        monkeypatch,
        "tvmflow.kernels.schedules.default_schedule",
        """
        real = module.scheduled

        def scheduled(function):
            import tvm
            text = real(function).script(show_meta=False)
            return tvm.script.from_source(text.replace("T.tanh(", "T.float32(0.5) + T.tanh("))

        module.scheduled = scheduled
    """,
    )
    done = attributed(artifact)
    rows = {row["stage"]: row for row in json.loads(done.stdout)["rows"] if row["output"] == "t"}
    assert rows["import"]["ok"]
    assert not rows["schedule"]["ok"]
    assert rows["schedule"]["change"] == pytest.approx(0.5, rel=1e-3)
    assert rows["fast_math"]["ok"]  # the artifact itself was built before
    assert done.returncode == 0
