"""PyTorch's symbolic sizes as TVM expressions."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import tvm

from tvmflow.errors import UnsupportedError

# By the names of the sympy classes that PyTorch's sizes are made of.
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "FloorDiv": tvm.tirx.floordiv,
    "CeilDiv": tvm.tirx.ceildiv,
    "Mod": tvm.tirx.floormod,
    "PythonMod": tvm.tirx.floormod,
    "Max": tvm.tirx.max,
    "Min": tvm.tirx.min,
}


def variables(placeholders: Mapping[torch.fx.Node, Any]) -> dict[str, tvm.tirx.Var]:
    """Name of PyTorch's symbol -> TVM's variable, from graph inputs and the Relax parameters made of them."""
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
    return size if isinstance(size, int) else _translated(size.node.expr, symbols)


def _translated(expr: Any, symbols: Mapping[str, tvm.tirx.Var]) -> Any:
    if expr.is_Integer:
        return tvm.tirx.IntImm("int64", int(expr))
    if expr.is_Symbol and str(expr) in symbols:
        return symbols[str(expr)]
    if expr.is_Pow and expr.exp.is_Integer and expr.exp > 0:
        return functools.reduce(operator.mul, [_translated(expr.base, symbols)] * int(expr.exp))
    operation = OPERATIONS.get(type(expr).__name__)
    if operation is None:
        raise UnsupportedError(
            f"the size {expr} cannot be expressed", "fix the dimensions it depends on in [shapes.dims]"
        )
    return functools.reduce(operation, [_translated(arg, symbols) for arg in expr.args])
