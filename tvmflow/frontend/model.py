"""What every frontend produces."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax

from tvmflow.manifest import Signature

# Float dtypes from the narrowest significand to the widest.
FLOATS = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True)
class Model:
    """An imported model.

    `mod` holds the Relax function `main`, beside private ones for the branches of an If. The parameters of `main` are
    exactly `signature.inputs`, its result is `signature.outputs` (a tuple when there are several), both in that order;
    weights are constants.
    `notes` says in plain words what was rewritten on the way in.
    """

    mod: tvm.IRModule
    signature: Signature
    notes: tuple[str, ...] = ()


def narrowest_float(mod: tvm.IRModule) -> str:
    """The narrowest float dtype of any tensor in the module, "float64" where there is none: what limits precision."""
    found = {"float64"}

    def visit(node: object) -> None:
        ty = getattr(node, "ty", None)
        if isinstance(ty, relax.TensorType):
            found.add(str(ty.dtype))

    for function in mod.functions.values():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, visit)
    return next(dtype for dtype in FLOATS if dtype in found)
