"""Layouts of weights that a schedule asks for: those that would lose elements are seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import te, topi
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms

import tvmflow
from tvmflow import tasks
from tvmflow.database.grammar import Where
from tvmflow.kernels.schedules import default_schedule, repacking
from tvmflow.replay import ReplayError, replay

TARGET = tvm.target.Target({"kind": "llvm", "num-cores": 2, "mcpu": "x86-64-v3"})


def transposed_convolution() -> tvm.tirx.PrimFunc:
    x, w = te.placeholder((1, 24, 8, 8), name="X"), te.placeholder((24, 1, 2, 2), name="W")
    made = topi.nn.conv2d_transpose_nchw(x, w, (2, 2), (0, 0), "float32", (0, 0))
    return te.create_prim_func([x, w, made]).with_attr("layout_free_buffers", [1])


def suggested(function: tvm.tirx.PrimFunc) -> Schedule:
    """The function with its weights in the layout that TVM suggests."""
    schedule = Schedule(tvm.IRModule({"main": function.with_attr("global_symbol", "main")}), debug_mask="none")
    schedule.enter_postproc()
    assert ms.postproc.RewriteLayout().apply(schedule)
    return schedule


def test_a_layout_that_loses_weights_is_seen() -> None:
    function = transposed_convolution()
    schedule = suggested(function)
    assert not repacking.is_whole(schedule.mod["main"])
    mod = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    with pytest.raises(ReplayError):
        replay(mod, tasks.trace_json(schedule), Where("llvm", "x86_64", False))


def test_a_layout_that_keeps_them_is_taken() -> None:
    x, w = te.placeholder((4, 32), name="X"), te.placeholder((32, 64), name="W")
    k = te.reduce_axis((0, 32), name="k")
    product = te.compute((4, 64), lambda i, j: te.sum(x[i, k] * w[k, j], axis=k), name="C")
    schedule = suggested(te.create_prim_func([x, w, product]).with_attr("layout_free_buffers", [1]))
    assert repacking.is_whole(schedule.mod["main"])
    assert len(repacking.blocks(schedule.mod["main"])) <= 1


@pytest.mark.parametrize("prepack", [True, False])
def test_a_transposed_convolution_keeps_its_values(prepack: bool) -> None:
    function = transposed_convolution()
    if not prepack:
        function = function.without_attr("layout_free_buffers")
    with TARGET:
        made = default_schedule.scheduled(function)
    assert repacking.is_whole(made)
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype("f4") for shape in ((1, 24, 8, 8), (24, 1, 2, 2)))
    results = []
    for version in (function, made):
        out = tvm.runtime.tensor(np.full((1, 1, 16, 16), np.nan, "f4"))
        main = tvm.IRModule({"main": version.with_attr("global_symbol", "main")})
        tvm.tirx.build(main, target="llvm")["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(w), out)
        results.append(out.numpy())
    want = np.einsum("bchw,cokl->bohkwl", x.astype("f8"), w.astype("f8")).reshape(1, 1, 16, 16)
    for got in results:
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_kernels_that_are_no_block_nest_do_not_stand_in_the_way(tmp_path: Path) -> None:
    """A running sum beside a convolution, whose weights are repacked."""
    w = np.random.default_rng(0).standard_normal((3, 2, 5)).astype("f4")
    nodes = [helper.make_node("CumSum", ["x", "axis"], ["sums"]), helper.make_node("Conv", ["sums", "w"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 2, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3, 4])],
        [numpy_helper.from_array(w, "w"), numpy_helper.from_array(np.int64(2), "axis")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    x = np.random.default_rng(1).standard_normal((2, 2, 8)).astype("f4")
    got = tvmflow.load(tvmflow.compile(tmp_path / "m.onnx", out=tmp_path / "m.tvmflow")).run({"x": x})["y"]
    windows = np.lib.stride_tricks.sliding_window_view(x.cumsum(axis=2), 5, axis=2)
    np.testing.assert_allclose(got, np.einsum("bipk,oik->bop", windows, w), rtol=1e-4, atol=1e-4)
