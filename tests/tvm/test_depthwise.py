"""Depthwise convolutions and pooling under their default schedule: PyTorch's values for drawn sizes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import tvm
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tvm import te, topi
from tvm.s_tir import Schedule
from tvm.tirx import PrimFunc

from tvmflow.kernels.schedules import default_schedule, depthwise

TARGET = tvm.target.Target({"kind": "llvm", "mcpu": tvm.target.codegen.llvm_get_system_cpu()})
SIZES = st.tuples(st.integers(1, 2), st.integers(5, 20), st.integers(5, 20), st.sampled_from([4, 8, 16, 24, 36, 48]))
WINDOWS = st.tuples(st.sampled_from([(3, 3), (5, 5), (1, 3), (4, 2)]), st.sampled_from([1, 2, 3]), st.integers(0, 2))
few = settings(
    max_examples=20, deadline=None, database=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


def scheduled(tensors: list[te.Tensor]) -> tuple[str, PrimFunc]:
    with TARGET:
        function = default_schedule.scheduled(te.create_prim_func(tensors))
    return str(function.attrs[default_schedule.RULE_ATTR]), function


def run(function: PrimFunc, arrays: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    out = tvm.runtime.tensor(np.full(shape, 7, "float32"))
    module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    tvm.tirx.build(module, target=TARGET)["main"](*(tvm.runtime.tensor(array) for array in arrays), out)
    return out.numpy()


def epilogue(y: te.Tensor, bias: te.Tensor, kind: str) -> te.Tensor:
    y = topi.add(y, bias)
    if kind == "relu6":
        return topi.minimum(topi.maximum(y, 0.0), 6.0)
    gate = topi.minimum(topi.maximum(topi.add(y, 3.0), 0.0), 6.0)
    return topi.divide(topi.multiply(y, gate), 6.0)


def torchs(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x).permute(0, 3, 1, 2)


@few
@example((1, 14, 14, 48), ((5, 5), 1, 2), "hard-swish")
@example((1, 17, 19, 16), ((3, 3), 2, 1), "relu6")
@given(size=SIZES, window=WINDOWS, after=st.sampled_from(["relu6", "hard-swish"]))
def test_convolutions(size: tuple[int, int, int, int], window: tuple[tuple[int, int], int, int], after: str) -> None:
    (kernel, stride, padding), channels = window, size[3]
    x, w, b = (te.placeholder(s, name=n) for s, n in ((size, "X"), ((*kernel, 1, channels), "W"), ((channels,), "B")))
    y = topi.nn.conv(x, w, stride, padding, 1, channels, "NHWC", "HWIO")
    tensors = [x, w, b, epilogue(y, b, after)]
    rule, function = scheduled(tensors)
    assert rule == depthwise.NAME
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal([int(n) for n in t.shape]).astype("float32") for t in tensors[:3]]
    want = torch.nn.functional.conv2d(
        torchs(arrays[0]),
        torch.from_numpy(arrays[1]).permute(3, 2, 0, 1),
        torch.from_numpy(arrays[2]),
        stride,
        padding,
        groups=channels,
    )
    want = torch.nn.functional.relu6(want) if after == "relu6" else torch.nn.functional.hardswish(want)
    got = run(function, arrays, tuple(int(n) for n in tensors[3].shape))
    np.testing.assert_allclose(got, want.permute(0, 2, 3, 1).numpy(), rtol=1e-5, atol=1e-5)


@few
@given(size=SIZES, window=WINDOWS, kind=st.sampled_from(["max", "avg"]))
def test_pooling(size: tuple[int, int, int, int], window: tuple[tuple[int, int], int, int], kind: str) -> None:
    kernel, stride, padding = window
    padding = min(padding, kernel[0] // 2, kernel[1] // 2)
    x = te.placeholder(size, name="X")
    y = topi.nn.pool2d(x, kernel, (stride, stride), (1, 1), (padding,) * 4, kind, False, "NHWC", False)
    rule, function = scheduled([x, y])
    assert rule == depthwise.NAME
    array = np.random.default_rng(0).standard_normal(size).astype("float32")
    pool: dict[str, Callable[[], torch.Tensor]] = {
        "max": lambda: torch.nn.functional.max_pool2d(torchs(array), kernel, stride, padding),
        "avg": lambda: torch.nn.functional.avg_pool2d(torchs(array), kernel, stride, padding, count_include_pad=False),
    }
    got = run(function, [array], tuple(int(n) for n in y.shape))
    np.testing.assert_allclose(got, pool[kind]().permute(0, 2, 3, 1).numpy(), rtol=1e-5, atol=1e-6)


def convolution(size: tuple[int, ...], groups: int, filters: int, layout: str) -> list[te.Tensor]:
    channels = size[3] if layout == "NHWC" else size[1]
    kernel = (3, 3, channels // groups, filters) if layout == "NHWC" else (filters, channels // groups, 3, 3)
    x, w = te.placeholder(size, name="X"), te.placeholder(kernel, name="W")
    return [x, w, topi.nn.conv(x, w, 1, 1, 1, groups, layout, "HWIO" if layout == "NHWC" else "OIHW")]


@pytest.mark.parametrize(
    "tensors",
    [
        convolution((1, 8, 8, 16), 1, 16, "NHWC"),
        convolution((1, 8, 8, 16), 4, 16, "NHWC"),
        convolution((1, 8, 8, 6), 6, 6, "NHWC"),
        convolution((1, 16, 8, 8), 16, 16, "NCHW"),
    ],
    ids=["dense", "grouped", "odd channels", "channels first"],
)
def test_what_is_none_gets_another_rule_and_the_right_values(tensors: list[te.Tensor]) -> None:
    function = te.create_prim_func(tensors)
    with TARGET:
        assert depthwise.apply(Schedule(tvm.IRModule({"main": function}))) == ""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal([int(n) for n in t.shape]).astype("float32") for t in tensors[:2])
    got = run(scheduled(tensors)[1], [x, w], tuple(int(n) for n in tensors[2].shape))
    np.testing.assert_allclose(got, run(function, [x, w], got.shape), rtol=1e-4, atol=1e-4)
