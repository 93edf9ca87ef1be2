"""Candidates for the tests of measuring: one that runs, one that ends its process, one that hangs."""

from __future__ import annotations

import tvm
from tvm.script import tirx as T  # noqa: N812 # TVMScript's own name

from tvmflow.tuning.worker import Job


@T.prim_func(s_tir=True)
def copying(a: T.Buffer((64,), "float32"), b: T.Buffer((64,), "float32")) -> None:
    for i in range(64):
        with T.sblock("copy"):
            v = T.axis.spatial(64, i)
            b[v] = a[v] + T.float32(1)


@T.prim_func(s_tir=True)
def aborting(a: T.Buffer((64,), "float32"), b: T.Buffer((64,), "float32")) -> None:
    T.evaluate(T.call_extern("int32", "abort"))


@T.prim_func(s_tir=True)
def sleeping(a: T.Buffer((64,), "float32"), b: T.Buffer((64,), "float32")) -> None:
    T.evaluate(T.call_extern("int32", "sleep", 1000))


def job(function: tvm.tirx.PrimFunc, size: int = 64, weights: tuple[int, ...] = ()) -> Job:
    mod = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    return Job(tvm.ir.save_json(mod), (("float32", (size,)), ("float32", (size,))), weights)
