"""Tensors without elements go through the whole build, as they go through ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from ops_runs import assert_same, one_node, reference

from tvmflow import config, flow, runtime

WIDE, NONE = np.arange(12, dtype="f4").reshape(3, 4), np.zeros((2, 0, 3), "f4")
NO_ROWS = np.zeros((0, 4), "f4")
CASES: dict[str, tuple[str, Mapping[str, Any], Mapping[str, Any], dict[str, Any]]] = {
    "softmax": ("Softmax", {"x": NONE}, {}, {"axis": 1}),
    "reshape": ("Reshape", {"x": NONE}, {"s": np.array([0, -1, 1])}, {"opset": 14}),
    "gather of nothing": ("Gather", {"x": WIDE, "i": np.zeros(0, "i8")}, {}, {"axis": 1}),
    "scatter of nothing": ("ScatterND", {"x": WIDE, "i": np.zeros((0, 1), "i8"), "u": NO_ROWS}, {}, {}),
    "no largest": ("TopK", {"x": WIDE}, {"k": np.array([0])}, {"outputs": 2}),
    "no repetition": ("Tile", {"x": WIDE}, {"r": np.array([1, 0])}, {}),
    "concatenation": ("Concat", {"a": NO_ROWS, "b": WIDE}, {}, {"axis": 0}),
    "weight": ("Concat", {"b": WIDE}, {"a": NO_ROWS}, {"axis": 0}),
    "padding": ("Pad", {"x": NO_ROWS}, {"p": np.array([2, 0, 0, 0])}, {}),
    "sum": ("ReduceSum", {"x": NONE}, {"a": np.array([1])}, {}),
    "half precision": ("Add", {"a": np.zeros((0, 2), "f2"), "b": np.ones(2, "f2")}, {}, {}),
    "booleans": ("Not", {"a": np.zeros((0, 2), "?")}, {}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_it_compiles_and_gives_what_onnxruntime_gives(name: str, tmp_path: Path) -> None:
    op_type, feeds, weights, attributes = CASES[name]
    model = one_node(op_type, feeds, weights, **attributes)
    onnx.save(model, tmp_path / "m.onnx")
    cfg = config.from_dict({"model": {"path": str(tmp_path / "m.onnx")}, "verify": {"seeds": [0]}})
    flow.compile_model(cfg, tmp_path / "m.tvmflow")
    assert_same(list(runtime.load(tmp_path / "m.tvmflow").run_list(feeds)), reference(model, feeds))
