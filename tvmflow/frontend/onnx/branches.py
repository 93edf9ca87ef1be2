"""The two branches of an If: both must give tensors of the same kind, and one that cannot run stops the run."""

from __future__ import annotations

from collections.abc import Sequence

from onnx import NodeProto
from tvm import relax, tirx

from tvmflow.errors import UnsupportedError
from tvmflow.frontend.onnx.graph import describe
from tvmflow.graph import run_time_check


def types_of(call: relax.Call, count: int) -> list[relax.Type]:
    """The types of a branch's `count` outputs, given its call."""
    return [call.ty] if count == 1 else list(call.ty.fields)


def has_shape(ty: relax.Type) -> bool:
    """Whether it is the type of a tensor whose sizes are known, if only as expressions."""
    return isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr)


def check_alike(node: NodeProto, then: Sequence[relax.Type], other: Sequence[relax.Type]) -> None:
    """Raises UnsupportedError where an output of an If has another rank or dtype in one branch than in the other."""
    for name, a, b in zip(node.output, then, other, strict=True):
        if not isinstance(a, relax.TensorType) or not isinstance(b, relax.TensorType) or min(a.ndim, b.ndim) < 0:
            continue  # what becomes of those, their readers say
        if (a.ndim, str(a.dtype)) != (b.ndim, str(b.dtype)):
            raise UnsupportedError(
                f"{describe(node)}: output '{name}' has rank {a.ndim} and dtype {a.dtype} where the condition holds, "
                f"rank {b.ndim} and dtype {b.dtype} where not, and only a run tells which",
                "if sizes decide it, fix those of the inputs ([model.inputs], [shapes.dims], --shape); else export the "
                "model so that both branches give the same rank and dtype",
            )


def stopping(what: str, types: Sequence[relax.TensorType], symbols: Sequence[tirx.Var]) -> relax.Function:
    """In place of a branch: it stops the run with an error that shows `what`.

    It says that it gives tensors of `types`, whose shapes are known as expressions of `symbols`. Where there are
    symbols, its only parameter is a shape that holds them.
    """
    builder = relax.BlockBuilder()
    with builder.function("main", [relax.Var("sizes", relax.ShapeType(symbols))] if symbols else []):
        run_time_check.require(builder, relax.const(False, "bool"), what)
        zeros = [builder.emit(relax.op.zeros(ty.shape, str(ty.dtype))) for ty in types]
        builder.emit_func_output(zeros[0] if len(zeros) == 1 else relax.Tuple(zeros))
    return builder.get()["main"].without_attr("global_symbol")
