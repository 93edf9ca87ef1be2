"""A custom operator: matmul, bias and GELU as one kernel, left to the tuner or the default rules."""

from __future__ import annotations

import math

from tvm import te, tirx
from tvm.tirx import PrimFunc

from tvmflow.kernels.user import Call


def matmul_bias_gelu(call: Call) -> PrimFunc | None:
    """x[..., k] @ w[k, n] + a bias of n values, then GELU; None for other shapes and dtypes."""
    x, w, bias = call.args
    if len(w.shape) != 2 or math.prod(bias.shape) != w.shape[1] or call.output.dtype != "float32":
        return None
    tx, tw, tb = (te.placeholder(t.shape, t.dtype, name) for t, name in ((x, "x"), (w, "w"), (bias, "bias")))
    r = te.reduce_axis((0, w.shape[0]), "r")
    first = (0,) * (len(bias.shape) - 1)
    shape = call.output.shape
    product = te.compute(shape, lambda *i: te.sum(tx[(*i[:-1], r)] * tw[r, i[-1]], axis=r), "product")
    biased = te.compute(shape, lambda *i: product[i] + tb[(*first, i[-1])], "biased")
    gelu = te.compute(shape, lambda *i: biased[i] * 0.5 * (1.0 + tirx.erf(biased[i] * 0.5**0.5)), "gelu")
    return te.create_prim_func([tx, tw, tb, gelu])
