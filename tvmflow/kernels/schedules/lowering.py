"""Whether TVM can compile the schedule of a kernel whose sizes are symbolic.

Its passes prove where a block's regions lie, and some raise where sizes such as (w - 1) // 4 + 5 leave that open: after
the schedule, when no other one can be chosen any more. So it is tried out first.
"""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.tirx import IntImm, PrimFunc


def is_symbolic(function: PrimFunc) -> bool:
    """Whether a function has a size that is known when it runs only."""
    shapes = [getattr(parameter.ty, "shape", None) for parameter in function.params]
    return not all(shape is not None and all(isinstance(size, IntImm) for size in shape) for shape in shapes)


def can_lower(function: PrimFunc) -> bool:
    """Whether TVM's passes take a function, for the current target."""
    target = tvm.target.Target.current()
    mod = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    pipeline, _, _ = tirx.get_default_tir_pipeline(target)
    try:
        pipeline(tirx.transform.BindTarget(target.with_host(target))(mod))
    except (RuntimeError, TypeError, ValueError):  # tvm.error.InternalError is a RuntimeError
        return False
    return True
