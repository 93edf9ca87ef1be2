"""What the rewrites of scheduled kernels share: visiting each kernel, and functions that TVM's TensorIR lacks."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm.ir import Op, _ffi_api
from tvm.tirx import PrimFunc

PURE, READS = 1, 2  # CallEffectKind's kPure and kReadState of include/tvm/tirx/op_attr_types.h
PRIORITY = 100  # above TVM's own rules, which have 10


def each_kernel(mod: tvm.IRModule, change: Callable[[PrimFunc], PrimFunc]) -> tvm.IRModule:
    """The module with its kernels changed, and all else as it is."""
    functions = {var: change(f) if isinstance(f, PrimFunc) else f for var, f in mod.functions.items()}
    return tvm.IRModule(functions, attrs=mod.attrs)


def define(name: str, description: str, effect: int = PURE) -> None:
    """Makes `name` a function without side effects that kernels may call, also from loops that become vectors."""
    _ffi_api.RegisterOp(name, description)
    Op.get(name).set_attr("TCallEffectKind", effect, PRIORITY)
    Op.get(name).set_attr("TVectorizable", True, PRIORITY)
    Op.get(name).set_attr("TScriptPrinterName", name.partition(".")[2], PRIORITY)
