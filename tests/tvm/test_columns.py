"""Reductions of columns under their default schedule, with what is around them: NumPy's values for drawn sizes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tvm import te, topi
from tvm.s_tir import Schedule

from tvmflow.kernels.schedules import columns, default_schedule

TARGET = tvm.target.Target({"kind": "llvm", "mcpu": tvm.target.codegen.llvm_get_system_cpu()})
KERNELS: dict[str, tuple[Callable[[te.Tensor], te.Tensor], Callable[[np.ndarray], np.ndarray]]] = {
    "max": (lambda x: topi.max(topi.tanh(x), 1), lambda x: np.tanh(x).max(1)),
    "square sum": (lambda x: topi.sqrt(topi.sum(topi.multiply(x, x), [1, 2])), lambda x: np.sqrt((x * x).sum((1, 2)))),
    "mean": (
        lambda x: topi.multiply(topi.sum(topi.nn.relu(x), [1, 2], True), 0.5),
        lambda x: np.maximum(x, 0).sum((1, 2), keepdims=True) * 0.5,
    ),
    "used twice": (
        lambda x: (lambda y: topi.sum(topi.multiply(y, topi.negative(y)), 1))(topi.tanh(x)),
        lambda x: -(np.tanh(x) ** 2).sum(1),
    ),
}
SIZES = st.tuples(st.integers(1, 2), st.integers(2, 40), st.integers(2, 9), st.sampled_from([4, 8, 12, 48, 80, 256]))


@settings(max_examples=20, deadline=None, database=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@example(name="max", size=(1, 508, 1, 512))
@given(name=st.sampled_from(sorted(KERNELS)), size=SIZES)
def test_kernels(name: str, size: tuple[int, int, int, int]) -> None:
    x = te.placeholder(size, name="X")
    build, reference = KERNELS[name]
    with TARGET:
        function = default_schedule.scheduled(te.create_prim_func([x, build(x)]))
        assert str(function.attrs[default_schedule.RULE_ATTR]) == columns.NAME or name == "used twice"
        array = np.random.default_rng(0).standard_normal(size).astype("float32")
        want = reference(array.astype("float64"))
        out = tvm.runtime.tensor(np.full(want.shape, 7, "float32"))
        module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
        tvm.tirx.build(module, target=TARGET)["main"](tvm.runtime.tensor(array), out)
    np.testing.assert_allclose(out.numpy(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["rows", "product", "without what comes before"])
def test_other_kernels_are_left_alone(kind: str) -> None:
    x, w = te.placeholder((16, 32), name="X"), te.placeholder((32, 64), name="W")
    r = te.reduce_axis((0, 32), name="r")
    relu = topi.nn.relu(x)
    tensors = {
        "rows": [x, topi.sum(relu, 1)],
        "product": [x, w, te.compute((16, 64), lambda i, j: te.sum(relu[i, r] * w[r, j], axis=r))],
        "without what comes before": [x, topi.sum(x, 0)],
    }[kind]
    with TARGET:
        assert columns.apply(Schedule(tvm.IRModule({"main": te.create_prim_func(tensors)}))) == ""
