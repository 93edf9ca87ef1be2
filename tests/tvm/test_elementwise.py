"""Fused elementwise kernels: one pass over memory, with numpy's values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import te, topi
from tvm.s_tir import Schedule

from tvmflow.kernels.schedules import default_schedule, elementwise
from tvmflow.kernels.schedules.axes import blocks_of

TARGET = tvm.target.Target({"kind": "llvm", "num-cores": 2})
Build = Callable[[te.Tensor], te.Tensor]


def chain(x: te.Tensor) -> te.Tensor:
    """Each value is read once: transposes, a reshape, arithmetic."""
    a, b, c = (int(size) for size in x.shape)
    moved = topi.reshape(topi.transpose(x, (0, 2, 1)), (a, c * b))
    return topi.add(topi.multiply(moved, 2.0), 1.0)


def powers(x: te.Tensor) -> te.Tensor:
    """Each value is read twice; inlined, the expression would double at every step."""
    for _ in range(24):
        x = topi.multiply(topi.add(x, x), half(x))
    return x


def half(x: te.Tensor) -> te.Tensor:
    return te.compute(x.shape, lambda i, j, k: 0.5 / (1.0 + x[i, j, k] * x[i, j, k]), name="half")


def scaled(x: te.Tensor) -> te.Tensor:
    """exp of a small value that every row reads."""
    row = topi.exp(te.compute((x.shape[2],), lambda k: x[0, 0, k], name="row"))
    return topi.multiply(x, row)


def gathered(x: te.Tensor) -> te.Tensor:
    """Reads where another value says, which is computed too."""
    place = te.compute(x.shape, lambda i, j, k: (k * 7 + j) % x.shape[2], name="place")
    double = te.compute(x.shape, lambda i, j, k: x[i, j, k] * 2.0 + x[i, j, k], name="double")
    return te.compute(x.shape, lambda i, j, k: double[i, j, place[i, j, k]] + double[i, j, k], name="picked")


def expected(name: str, x: np.ndarray) -> np.ndarray:
    if name == "chain":
        return x.transpose(0, 2, 1).reshape(x.shape[0], -1) * 2 + 1
    if name == "powers":
        for _ in range(24):
            x = (x + x) * (0.5 / (1 + x * x))
        return x
    if name == "scaled":
        return x * np.exp(x[0, 0])
    _, j, k = np.ogrid[: x.shape[0], : x.shape[1], : x.shape[2]]
    triple = x * 3
    places = np.broadcast_to((k * 7 + j) % x.shape[2], x.shape)
    return np.take_along_axis(triple, places, 2) + triple


@pytest.mark.parametrize("shape", [(2, 5, 32), (1, 40, 24), (3, 7, 13), (1, 1, 6)])
@pytest.mark.parametrize("build", [chain, powers, scaled, gathered])
def test_fused_kernels_have_numpys_values(build: Build, shape: tuple[int, ...]) -> None:
    x = te.placeholder(shape, name="X")
    function = te.create_prim_func([x, build(x)])
    with TARGET:
        made = default_schedule.scheduled(function)
    assert made.attrs[default_schedule.RULE_ATTR] == elementwise.RULE
    values = np.random.default_rng(0).standard_normal(shape).astype("f4")
    want = expected(build.__name__, values.astype("f8"))
    out = tvm.runtime.tensor(np.full(want.shape, np.nan, "f4"))
    built = tvm.tirx.build(tvm.IRModule({"main": made.with_attr("global_symbol", "main")}), target=TARGET)
    built["main"](tvm.runtime.tensor(values), out)
    np.testing.assert_allclose(out.numpy(), want, rtol=1e-5, atol=1e-6)


def test_what_is_read_once_goes_into_its_reader() -> None:
    x = te.placeholder((4, 16, 32), name="X")
    schedule = Schedule(tvm.IRModule({"main": te.create_prim_func([x, chain(x)])}), debug_mask="none")
    assert len(blocks_of(schedule)) == 4
    assert elementwise.apply(schedule) == elementwise.RULE
    assert len(blocks_of(schedule)) == 1
