"""Softmax, normalisation and reductions under their default schedule: float64's values for drawn sizes."""

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

from tvmflow.kernels.schedules import default_schedule, rows

TARGET = tvm.target.Target({"kind": "llvm", "mcpu": tvm.target.codegen.llvm_get_system_cpu()})


def moments(x: te.Tensor) -> te.Tensor:
    """Normalised without a converter of its own, as models that were not simplified have it."""
    mean = topi.divide(topi.sum(x, -1, True), float(int(x.shape[-1])))
    centred = topi.subtract(x, mean)
    variance = topi.divide(topi.sum(topi.multiply(centred, centred), -1, True), float(int(x.shape[-1])))
    return topi.multiply(topi.tanh(centred), topi.rsqrt(topi.add(variance, 1e-5)))


def numpys_moments(x: np.ndarray) -> np.ndarray:
    return np.tanh(x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


KERNELS: dict[str, tuple[Callable[[te.Tensor], te.Tensor], Callable[[np.ndarray], np.ndarray]]] = {
    "softmax": (topi.nn.softmax, lambda x: torch.softmax(torch.from_numpy(x), -1).numpy()),
    "log_softmax": (topi.nn.log_softmax, lambda x: torch.log_softmax(torch.from_numpy(x), -1).numpy()),
    "moments": (moments, numpys_moments),
    "sum": (lambda x: topi.sum(x, -1), lambda x: x.sum(-1)),
    "mean": (lambda x: topi.divide(topi.sum(x, -1, True), 3.0), lambda x: x.sum(-1, keepdims=True) / 3),
    "max": (lambda x: topi.exp(topi.max(x, -1)), lambda x: np.exp(x.max(-1))),
    "min": (lambda x: topi.min(x, -1, True), lambda x: x.min(-1, keepdims=True)),
    "two axes": (
        lambda x: topi.sum(topi.reshape(x, (*x.shape[:-1], x.shape[-1] // 4, 4)), [-1, -2]),
        lambda x: x.sum(-1),
    ),
}
SIZES = st.tuples(
    st.integers(1, 3), st.integers(1, 70), st.one_of(st.integers(1, 150).map(lambda n: 4 * n), st.integers(1, 700))
)


def scheduled(tensors: list[te.Tensor]) -> tuple[str, PrimFunc]:
    with TARGET:
        function = default_schedule.scheduled(te.create_prim_func(tensors))
    return str(function.attrs[default_schedule.RULE_ATTR]), function


def run(function: PrimFunc, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    out = tvm.runtime.tensor(np.full(shape, 7, "float32"))
    module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    tvm.tirx.build(module, target=TARGET)["main"](tvm.runtime.tensor(array), out)
    return out.numpy()


@settings(max_examples=80, deadline=None, database=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@example(name="softmax", size=(1, 3, 6625))
@example(name="moments", size=(1, 67, 1000))
@example(name="two axes", size=(2, 3, 25600))
@given(name=st.sampled_from(sorted(KERNELS)), size=SIZES)
def test_kernels(name: str, size: tuple[int, int, int]) -> None:
    if name == "two axes":
        size = (*size[:2], size[2] // 4 * 4 + 4)
    build, reference = KERNELS[name]
    x = te.placeholder(size, name="X")
    y = build(x)
    rule, function = scheduled([x, y])
    if size[2] % 4 == 0 and size[2] > 4 and name != "two axes":
        assert rule == rows.NAME
    array = np.random.default_rng(0).standard_normal(size).astype("float32")
    want = reference(array.astype("float64"))
    got = run(function, array, want.shape)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * max(1.0, float(np.abs(want).max())))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_softmax_with_special_values_is_pytorchs(value: float) -> None:
    x = te.placeholder((5, 64), name="X")
    rule, function = scheduled([x, topi.nn.softmax(x)])
    assert rule == rows.NAME
    array = np.random.default_rng(0).standard_normal((5, 64)).astype("float32")
    array[1, 7], array[2, 60], array[4] = value, value, value
    want = torch.softmax(torch.from_numpy(array), -1).numpy()
    np.testing.assert_allclose(run(function, array, (5, 64)), want, rtol=1e-5, atol=1e-7)


def test_rows_may_be_symbolic() -> None:
    x = te.placeholder((te.var("n"), 64), name="X")
    rule, function = scheduled([x, topi.nn.softmax(x)])
    assert rule == rows.NAME
    array = np.random.default_rng(0).standard_normal((37, 64)).astype("float32")
    want = torch.softmax(torch.from_numpy(array), -1).numpy()
    np.testing.assert_allclose(run(function, array, (37, 64)), want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("length", "taps", "stride"), [(1000, 256, 2), (300, 64, 1), (4096, 96, 3)])
def test_filters(length: int, taps: int, stride: int) -> None:
    count = (length - taps) // stride + 1
    x, w = te.placeholder((2, length), name="X"), te.placeholder((taps,), name="W")
    k = te.reduce_axis((0, taps), name="k")
    y = te.compute((2, count), lambda b, i: te.sum(x[b, i * stride + k] * w[k], axis=k))
    rule, function = scheduled([x, w, y])
    assert rule == rows.NAME
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype("float32") for shape in ((2, length), (taps,), (2, count))]
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    tvm.tirx.build(module, target=TARGET)["main"](*tensors)
    windows = np.lib.stride_tricks.sliding_window_view(arrays[0].astype("float64"), taps, 1)[:, ::stride]
    np.testing.assert_allclose(tensors[2].numpy(), windows @ arrays[1].astype("float64"), rtol=1e-4, atol=1e-4)


def product(transposed: bool) -> list[te.Tensor]:
    a, b = te.placeholder((16, 32), name="A"), te.placeholder((32, 32), name="B")
    r = te.reduce_axis((0, 32), name="r")
    return [a, b, te.compute((16, 32), lambda i, j: te.sum(a[i, r] * (b[j, r] if transposed else b[r, j]), axis=r))]


def test_what_does_not_reduce_along_rows_is_left_alone() -> None:
    x = te.placeholder((8, 16, 32), name="X")
    image = te.placeholder((1, 8, 16, 32), name="X")
    window = topi.nn.pool2d(image, (2, 2), (2, 2), (1, 1), (0,) * 4, "max", layout="NCHW")
    for tensors in (
        [x, topi.nn.relu(x)],
        [x, topi.sum(x, 1)],
        [x, topi.nn.softmax(x, 1)],
        product(False),
        [image, window],
    ):
        schedule = Schedule(tvm.IRModule({"main": te.create_prim_func(tensors)}))
        assert rows.apply(schedule) == ""
