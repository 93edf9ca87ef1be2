"""A check of values at run time, as part of the graph.

It counts the good values and casts the pair (all, good) to the shape (n, n): where the two differ, the virtual machine
stops with an error that shows n's name, and runtime/session.py says that name. This uses nothing but the virtual
machine's own built-ins, so it works on every target and in every runtime.
"""

from __future__ import annotations

import re
from typing import Any

from tvm import relax, tirx
from tvm.relax import op


def require(builder: relax.BlockBuilder, good: Any, what: str) -> None:
    """Emits what stops a run where the boolean tensor `good` does not hold throughout; `what` is what then does not."""
    emit = builder.emit
    flat = emit(op.reshape(emit(op.astype(good, "int64")), (-1,)))
    every = emit(op.sum(emit(op.ones_like(flat)), keepdims=True))
    counts = emit(op.concat([every, emit(op.sum(flat, keepdims=True))], axis=0))
    _require_pair(builder, counts, what)


def require_equal(builder: relax.BlockBuilder, a: Any, b: Any, what: str) -> None:
    """Emits what stops a run where two sizes differ; `what` is what then does not hold."""
    _require_pair(builder, builder.emit(op.shape_to_tensor(relax.ShapeExpr([a, b]))), what)


def _require_pair(builder: relax.BlockBuilder, pair: relax.Expr, what: str) -> None:
    n = tirx.Var(re.sub(r"\W+", "_", what), "int64")
    # Not op.tensor_to_shape: its decomposition brings variables of its own, whose names would be shown instead.
    shape = relax.call_pure_packed("vm.builtin.tensor_to_shape", pair, ty_args=relax.ShapeType(ndim=2))
    builder.match_cast(builder.emit(shape), relax.ShapeType([n, n]))
