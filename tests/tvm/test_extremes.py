"""Maxima and minima of NaN and of nothing but infinities, scheduled by every rule that a reduction may meet."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from tvmflow.kernels.mathematics import vector_math
from tvmflow.kernels.rewrites.compare_exactly import CompareExactly
from tvmflow.kernels.rewrites.start_from_infinity import StartFromInfinity
from tvmflow.kernels.schedules.default_schedule import DefaultSchedule

SHAPE = (2, 6, 6, 16)
ROWS = {"rows": [3], "columns": [1, 2], "all": None, "batch": [0]}


def values(dtype: str) -> np.ndarray[Any, Any]:
    """-inf in the first image but for one NaN and one number; the same with inf in the second."""
    array = np.full(SHAPE, -np.inf, dtype)
    array[1] = np.inf
    array[:, 2, 3, ::2] = np.nan
    array[:, 1, 1, 3] = 5
    return array


def built(make: Any, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What `make` of a variable gives for `x`, with default schedules and exact extremes."""
    builder, var = relax.BlockBuilder(), relax.Var("x", relax.TensorType(x.shape, str(x.dtype)))
    with builder.function("main", [var]):
        with builder.dataflow():
            result = builder.emit_output(make(var))
        builder.emit_func_output(result)
    target = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3"})
    vector_math.register()
    with target:
        mod = StartFromInfinity()(DefaultSchedule()(relax.transform.LegalizeOps()(builder.get())))
        mod = CompareExactly("llvm")(mod)
    machine = relax.VirtualMachine(tvm.compile(mod, target), tvm.cpu())
    return machine["main"](tvm.runtime.tensor(x)).numpy()  # type: ignore[no-any-return]


@pytest.mark.parametrize("axes", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(("function", "expected"), [(op.max, np.max), (op.min, np.min)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_reductions(axes: list[int] | None, function: Any, expected: Any, dtype: str) -> None:
    for x in (values(dtype), -values(dtype)):
        want = expected(x, axis=None if axes is None else tuple(axes))
        np.testing.assert_array_equal(built(lambda v: function(v, axes), x), want)


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_pools(layout: str) -> None:
    x, axes = values("float32"), (layout.index("H"), layout.index("W"))
    padded = np.pad(x, [(int(axis in axes),) * 2 for axis in range(4)], constant_values=-np.inf)
    want = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axes).max((-2, -1))
    got = built(lambda v: op.nn.max_pool2d(v, (3, 3), (1, 1), (1, 1), layout=layout), x)
    np.testing.assert_array_equal(got, want)


def test_a_mask_of_the_lowest_number_stays_one() -> None:
    lowest = np.finfo("float32").min
    x = np.full((4, 16), lowest, "float32")
    got = built(lambda v: op.max(op.maximum(v, relax.const(lowest, "float32")), [1]), x)
    np.testing.assert_array_equal(got, x.max(1))
