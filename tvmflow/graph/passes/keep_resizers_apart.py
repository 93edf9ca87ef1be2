"""Says which kernels may be computed where the one before them leaves its result, element by element."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
import tvm_ffi
from tvm import tirx
from tvm.tirx import IntImm, PrimFunc

PATTERN = "op_pattern"
BROADCAST, INJECTIVE = 1, 2  # OpPatternKind of include/tvm/relax/op_attr_types.h; below BROADCAST is ELEMWISE


@tvm.transform.module_pass(opt_level=0, name="KeepResizersApart")
class KeepResizersApart:
    """Paddings at the end of an axis and slices from its start are no epilogues of a reduction.

    They read what stands where they write, so that TVM takes them for elementwise; fused and computed at a reduction's
    tiles, a padding would be left out, for no tile is there.
    """

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        functions = {var: f.with_attr(PATTERN, INJECTIVE) if _resizes(f) else f for var, f in mod.functions.items()}
        return tvm.IRModule(functions, attrs=mod.attrs)


def _resizes(function: tvm.ir.BaseFunc) -> bool:
    """Whether an elementwise or broadcasting kernel reads a tensor of other sizes than it writes."""
    pattern = (function.attrs or {}).get(PATTERN) if isinstance(function, PrimFunc) else None
    if pattern is None or int(pattern) > BROADCAST:
        return False
    *read, written = [list(p.ty.shape) for p in function.params if hasattr(p.ty, "shape")]
    return any(len(shape) == len(written) and not _fits(shape, written) for shape in read)


def _fits(read: Sequence[tirx.PrimExpr], written: Sequence[tirx.PrimExpr]) -> bool:
    return all(
        tvm_ffi.structural_equal(a, b) or (isinstance(a, IntImm) and int(a) == 1)
        for a, b in zip(read, written, strict=True)
    )
