"""PyTorch's symbolic sizes as TVM expressions."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
import tvm
from torch.utils._sympy.functions import CeilDiv, FloorDiv, Mod, PythonMod

from tvmflow.errors import UnsupportedError

OPERATIONS: dict[Any, Callable[..., Any]] = {
    sympy.Add: lambda *terms: functools.reduce(operator.add, terms),
    sympy.Mul: lambda *factors: functools.reduce(operator.mul, factors),
    FloorDiv: tvm.tirx.floordiv,
    CeilDiv: tvm.tirx.ceildiv,
    Mod: tvm.tirx.floormod,
    PythonMod: tvm.tirx.floormod,
    sympy.Max: lambda *terms: functools.reduce(tvm.tirx.max, terms),
    sympy.Min: lambda *terms: functools.reduce(tvm.tirx.min, terms),
}


def variables(placeholders: Mapping[torch.fx.Node, Any]) -> dict[str, tvm.tirx.Var]:
    """Name of torch's symbol -> TVM's variable, from graph inputs and the Relax parameters made of them."""
    found = {}
    for node, parameter in placeholders.items():
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            for size, variable in zip(value.shape, parameter.ty.shape, strict=True):
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                    found[str(size)] = variable
    return found


def expression(size: Any, symbols: Mapping[str, tvm.tirx.Var]) -> Any:
    """A size as an integer or a TVM expression of int64; UnsupportedError where it has none."""
    if isinstance(size, int):
        return size
    return _translated(size.node.expr, symbols)


def _translated(expr: Any, symbols: Mapping[str, tvm.tirx.Var]) -> Any:
    if expr.is_Integer:
        return tvm.tirx.IntImm("int64", int(expr))
    if expr.is_Symbol and str(expr) in symbols:
        return symbols[str(expr)]
    for kind, operation in OPERATIONS.items():
        if isinstance(expr, kind):
            return operation(*(_translated(arg, symbols) for arg in expr.args))
    if expr.is_Pow and expr.exp.is_Integer and expr.exp > 0:
        return functools.reduce(operator.mul, [_translated(expr.base, symbols)] * int(expr.exp))
    raise UnsupportedError(f"the size {expr} cannot be expressed", "fix the dimensions it depends on in [shapes.dims]")
