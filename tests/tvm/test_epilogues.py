"""A padding behind a convolution is a kernel of its own where it only adds elements at the ends of axes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tvm.tirx import PrimFunc

from tvmflow import config, frontend
from tvmflow.pipeline.prepare import prepare, setting


def test_paddings_and_slices_are_not_computed_at_a_convolutions_tiles(tmp_path: Path) -> None:
    weights = np.random.default_rng(0).standard_normal((16, 16, 1, 1)).astype("float32")
    constants = {
        "w": weights,
        "ends": np.array([0, 0, 0, 0, 0, 0, 1, 1]),
        "stop": np.array([9]),
        "from": np.array([0]),
        "axis": np.array([3]),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Pad", ["r", "ends"], ["p"]),
        helper.make_node("Conv", ["p", "w"], ["d"]),
        helper.make_node("Slice", ["d", "from", "stop", "axis"], ["y"]),
    ]
    values = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 16, 12, 12]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 16, 13, 9]),
    ]
    graph = helper.make_graph(
        nodes,
        "padded",
        values[:1],
        values[1:],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    onnx.save(model, tmp_path / "padded.onnx")
    cfg = config.of_model(str(tmp_path / "padded.onnx"), [{"graph": {"layout": "keep"}}])
    chosen = setting(cfg)
    with chosen.entered():
        prepared, _ = prepare(cfg, frontend.load(cfg))
    names = [var.name_hint for var, function in prepared.functions.items() if isinstance(function, PrimFunc)]
    assert any("conv2d" in name and "maximum" in name for name in names)
    assert not any("conv2d" in name and ("pad" in name or "slice" in name) for name in names), names
