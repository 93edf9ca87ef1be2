"""A custom operator: matmul, bias and GELU as one kernel, left to the tuner or the default rules."""

from __future__ import annotations

from tvm import te, tirx
from tvm.tirx import PrimFunc

from tvmflow.kernels.user import Call


def matmul_bias_gelu(call: Call) -> PrimFunc | None:
    """x[m, k] @ w[k, n] + a bias of n values, then GELU; None for other shapes and dtypes."""
    x, w, bias = call.args
    if (len(x.shape), len(w.shape)) != (2, 2) or call.output.dtype != "float32":
        return None
    (m, k), (_, n) = x.shape, w.shape
    if bias.shape not in ((n,), (1, n)):
        return None
    tx, tw, tb = (te.placeholder(t.shape, t.dtype, name) for t, name in ((x, "x"), (w, "w"), (bias, "bias")))
    first = (0,) * (len(bias.shape) - 1)
    r = te.reduce_axis((0, k), "r")
    product = te.compute((m, n), lambda i, j: te.sum(tx[i, r] * tw[r, j], axis=r), "product")
    biased = te.compute((m, n), lambda i, j: product[i, j] + tb[(*first, j)], "biased")
    gelu = te.compute(
        (m, n), lambda i, j: biased[i, j] * 0.5 * (1.0 + tirx.erf(biased[i, j] * 0.5**0.5)), "gelu"
    )
    return te.create_prim_func([tx, tw, tb, gelu])
