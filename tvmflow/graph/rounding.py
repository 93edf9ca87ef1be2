"""Where a model rounds by name: its conversions from and to narrow formats, as importers write them.

Importers convert for reasons of their own too, e.g. to add up float16 in float32. What is computed in float32
throughout (compute_in_float32.py) rounds only where a model does. The mark is an operator that passes its argument on.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

NARROW = ("float16", "bfloat16")


def converted(builder: relax.BlockBuilder, value: Any, dtype: str) -> Any:
    """A tensor in another dtype, with marks where either dtype is narrow."""
    result = relax.op.astype(marked(builder, value), dtype)
    return marked(builder, builder.emit(result)) if dtype in NARROW else result


def marked(builder: relax.BlockBuilder, value: Any) -> Any:
    """`value`, marked where it is a tensor of a narrow format that is not constant."""
    narrow = str(getattr(getattr(value, "ty", None), "dtype", "")) in NARROW
    if not narrow or isinstance(value, tvm.ir.GenericConst) or not isinstance(value.ty, relax.TensorType):
        return value
    return builder.emit(relax.op.builtin.stop_lift_params(value))


def is_mark(call: relax.Call) -> bool:
    return getattr(call.op, "name", "") == "relax.builtin.stop_lift_params"
