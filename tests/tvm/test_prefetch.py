"""Requests for a product's next weights: no value changes; they stand where panels of weights follow."""

from __future__ import annotations

import math
import platform

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import te, topi
from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock

from tvmflow import target as targets
from tvmflow.config import TargetSection
from tvmflow.kernels.rewrites import prefetch
from tvmflow.kernels.schedules import default_schedule

LEVEL = {"x86_64": "x86-64-v3", "aarch64": "generic"}[platform.machine()]
TARGET = targets.to_tvm(targets.resolve(TargetSection(mcpu=LEVEL, threads=2)), {})


def matmul(m: int, k: int, n: int) -> list[te.Tensor]:
    a, b = te.placeholder((m, k), name="A"), te.placeholder((k, n), name="B")
    r = te.reduce_axis((0, k), name="r")
    return [a, b, topi.nn.relu(te.compute((m, n), lambda i, j: te.sum(a[i, r] * b[r, j], axis=r), name="C"))]


def convolution(size: int, channels: int, filters: int) -> list[te.Tensor]:
    x = te.placeholder((1, size, size, channels), name="A")
    w = te.placeholder((3, 3, channels, filters), name="B")
    return [x, w, topi.nn.conv2d_nhwc(x, w, 1, 1, 1)]


def scheduled(tensors: list[te.Tensor], target: tvm.target.Target = TARGET) -> tvm.IRModule:
    function = te.create_prim_func(tensors).with_attrs({"layout_free_buffers": [1], "global_symbol": "main"})
    with target:
        return default_schedule.schedule_of(tvm.IRModule({"main": function}))[0].mod


def packed(mod: tvm.IRModule) -> tvm.IRModule:
    """The module that takes its weights packed already, as tuning's workers build it."""
    return RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(mod)


def requests(mod: tvm.IRModule) -> int:
    return str(mod.script()).count("prefetch")


@pytest.mark.parametrize("tensors", [matmul(64, 576, 1536), matmul(128, 1536, 384), convolution(7, 256, 256)])
def test_values_are_the_same(tensors: list[te.Tensor]) -> None:
    mod = packed(scheduled(tensors))
    changed = prefetch.inserted(mod, TARGET)
    assert requests(changed) > requests(mod) == 0
    rng = np.random.default_rng(0)
    shapes = [tuple(int(d) for d in param.ty.shape) for param in mod["main"].params]
    a, b = (tvm.runtime.tensor(rng.standard_normal(shape).astype("float32")) for shape in shapes[:2])
    outputs = []
    for each in (mod, changed):
        out = tvm.runtime.tensor(np.full(shapes[2], np.nan, "float32"))
        tvm.tirx.build(each, target=TARGET)["main"](a, b, out)
        outputs.append(out.numpy())
    np.testing.assert_array_equal(*outputs)


def test_a_whole_panel_is_asked_for() -> None:
    """By the tiles of rows that use the one before it, together: eight of 64 rows with AVX-512."""
    wide = targets.to_tvm(targets.resolve(TargetSection(mcpu="x86-64-v4", threads=2)), {})
    function = packed(scheduled(matmul(64, 576, 1536), wide))["main"]
    panel = math.prod(int(d) for d in function.params[1].ty.shape[1:])
    asked: list[int] = []

    def visit(loop: tvm.tirx.For) -> None:
        if str(loop.loop_var.name).endswith("_portion"):
            asked.append(int(loop.extent) * loop.script().count("prefetch") * 16)

    tvm_ffi.structural_walk(prefetch.insert(function).body, (tvm.tirx.For, visit))
    (elements,) = asked
    assert panel <= 8 * elements < 1.1 * panel


@pytest.mark.parametrize(
    "tensors",
    [matmul(64, 64, 64), matmul(1, 2048, 1024)],
    ids=["small weights", "one row: nothing to multiply meanwhile"],
)
def test_what_gains_nothing_stays(tensors: list[te.Tensor]) -> None:
    mod = packed(scheduled(tensors))
    assert requests(prefetch.inserted(mod, TARGET)) == 0


def test_weights_that_are_not_packed_stay() -> None:
    plain = te.create_prim_func(matmul(64, 576, 1536)).with_attr("global_symbol", "main")
    repacking_itself = scheduled(matmul(64, 576, 1536))["main"]
    for function in (plain, repacking_itself):
        assert "prefetch" not in prefetch.insert(function).script()


def test_zen_is_left_to_itself() -> None:
    zen = targets.to_tvm(targets.resolve(TargetSection(mcpu="znver4", threads=2)), {})
    mod = packed(scheduled(matmul(64, 576, 1536), zen))
    assert prefetch.inserted(mod, zen).same_as(mod)
