"""The blocking of products: right values from sizes taken by rule and from sizes drawn, and what is no product."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import tvm
from tvm import te, topi
from tvm.s_tir import Schedule

from tvmflow.kernels.schedules import blocking
from tvmflow.kernels.schedules.axes import Registers

AVX512, AVX2, NEON = Registers(16, 32), Registers(8, 16), Registers(4, 32)
TARGET = tvm.target.Target({"kind": "llvm", "num-cores": 2})


def product(m: int, n: int, k: int, relu: bool) -> list[te.Tensor]:
    a, b, bias = (te.placeholder(shape, name=name) for name, shape in (("A", (m, k)), ("B", (k, n)), ("C", (n,))))
    r = te.reduce_axis((0, k), name="r")
    c = te.compute((m, n), lambda i, j: te.sum(a[i, r] * b[r, j], axis=r))
    return [a, b, bias, topi.nn.relu(topi.add(c, bias)) if relu else c]


def convolution(size: int, channels: int, filters: int, stride: int) -> list[te.Tensor]:
    x, w = te.placeholder((1, size, size, channels), name="X"), te.placeholder((3, 3, channels, filters), name="W")
    return [x, w, topi.nn.conv2d_nhwc(x, w, stride, 1, 1)]


def scheduled(tensors: list[te.Tensor], informed: bool, registers: Registers = AVX512) -> Schedule | None:
    mod = tvm.IRModule({"main": te.create_prim_func(tensors).with_attr("global_symbol", "main")})
    schedule = Schedule(mod, seed=1, debug_mask="all")
    return schedule if blocking.block(schedule, registers, informed) else None


def run(schedule: Schedule, tensors: list[te.Tensor]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = [tuple(int(size) for size in tensor.shape) for tensor in tensors]
    arrays = [rng.standard_normal(shape).astype("float32") for shape in shapes]
    arguments = [tvm.runtime.tensor(array) for array in arrays]
    tvm.tirx.build(schedule.mod, target=TARGET)["main"](*arguments)
    return [*arrays[:-1], arguments[-1].numpy()]


@pytest.mark.parametrize(("m", "n", "k"), [(64, 64, 64), (49, 96, 33), (1, 64, 128), (13, 17, 19), (128, 384, 8)])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(("informed", "registers"), [(True, AVX512), (True, AVX2), (True, NEON), (False, AVX512)])
def test_products_have_numpys_values(m: int, n: int, k: int, relu: bool, informed: bool, registers: Registers) -> None:
    tensors = product(m, n, k, relu)
    schedule = scheduled(tensors, informed, registers)
    if schedule is None:
        assert min(n, 4) == 4
        assert n % 4, "only an axis without vectors may be refused"
        return
    a, b, bias, got = run(schedule, tensors)
    want = a.astype("float64") @ b.astype("float64")
    want = np.maximum(want + bias, 0) if relu else want
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("size", "channels", "filters", "stride"), [(14, 32, 32, 1), (15, 16, 48, 2)])
@pytest.mark.parametrize("informed", [True, False])
def test_convolutions_have_pytorchs_values(size: int, channels: int, filters: int, stride: int, informed: bool) -> None:
    tensors = convolution(size, channels, filters, stride)
    schedule = scheduled(tensors, informed)
    assert schedule is not None
    x, w, got = run(schedule, tensors)
    want = torch.nn.functional.conv2d(
        torch.from_numpy(x).permute(0, 3, 1, 2), torch.from_numpy(w).permute(3, 2, 0, 1), stride=stride, padding=1
    )
    np.testing.assert_allclose(got, want.permute(0, 2, 3, 1).numpy(), rtol=1e-4, atol=1e-4)


def test_a_tile_fills_the_registers_and_no_more() -> None:
    for registers in (AVX512, AVX2, NEON):
        schedule = scheduled(product(128, 384, 64, relu=False), True, registers)
        assert schedule is not None
        factors = [[int(f) for f in decision] for _, decision in schedule.trace.decisions.items()]
        rows, vectors = factors[0][-1], factors[1][-1]
        assert 8 <= rows * vectors <= registers.count - 4


def test_the_registers_are_those_of_the_target() -> None:
    cpus = {"x86-64-v4": AVX512, "x86-64-v3": AVX2, "x86-64-v2": Registers(4, 16)}
    for mcpu, registers in cpus.items():
        target = tvm.target.Target({"kind": "llvm", "mcpu": mcpu, "mtriple": "x86_64-linux-gnu"})
        assert Registers.of(target) == registers
    arm = tvm.target.Target({"kind": "llvm", "mcpu": "generic", "mtriple": "aarch64-linux-gnu"})
    assert Registers.of(arm) == NEON
    without = {"kind": "llvm", "mcpu": "sapphirerapids", "mattr": ["-avx512f"], "mtriple": "x86_64-linux-gnu"}
    assert Registers.of(tvm.target.Target(without)) == AVX2


def test_other_kernels_are_left_alone() -> None:
    x = te.placeholder((64, 64), name="X")
    assert scheduled([x, topi.nn.softmax(x)], informed=True) is None
    assert scheduled([x, topi.nn.relu(x)], informed=True) is None
    assert scheduled([x, topi.sum(x, axis=1)], informed=True) is None
