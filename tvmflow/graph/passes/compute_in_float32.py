"""Half precision on a CPU: float16 and bfloat16 models computed in float32.

CPUs convert these formats quickly but hardly compute in them: an operator in float16 costs conversions of every
operand and result, and rounds. ONNX Runtime does the same on CPUs. Inputs, outputs and what is not understood here keep
their dtypes. What a model rounds by name, in a conversion from or to a narrow format, is rounded here too, where an
importer has marked it (graph/rounding.py).
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmflow.graph.mutation import mutated
from tvmflow.graph.rounding import NARROW, is_mark

LACKING = frozenset({"relax.isfinite", "relax.isnan", "relax.power"})  # what TVM's TensorIR has for other formats only
# Operators whose results are numbers that they were given.
MOVES = frozenset(
    {
        "relax.broadcast_to",
        "relax.concat",
        "relax.expand_dims",
        "relax.flatten",
        "relax.flip",
        "relax.maximum",
        "relax.minimum",
        "relax.nn.relu",
        "relax.permute_dims",
        "relax.repeat",
        "relax.reshape",
        "relax.split",
        "relax.squeeze",
        "relax.strided_slice",
        "relax.take",
        "relax.tile",
    }
)


@tvm.transform.module_pass(opt_level=0, name="ComputeInFloat32")
class ComputeInFloat32:
    """Every operator whose dtype follows its operands' gets them in float32, constants among them.

    What is marked as rounded is rounded to the narrow format and back, where it is not known to be.
    """

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return mutated(mod, _Widener)


@mutator
class _Widener(PyExprMutator):  # type: ignore[misc] # TVM has no types
    def visit_seq_expr_(self, seq: relax.SeqExpr) -> relax.Expr:
        """What a function or branch returns has the dtypes it had."""
        new = super().visit_seq_expr_(seq)
        if not _holds_narrow(seq.body.ty):
            return new
        self.builder_._begin_binding_block()
        body = self._cast(new.body, _dtypes(seq.body.ty))
        return relax.SeqExpr([*new.blocks, self.builder_._end_block()], body)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        if not _holds_narrow(call.ty) and not any(_holds_narrow(arg.ty) for arg in call.args):
            return self.visit_expr_post_order(call)
        args = [self.visit_expr(arg) for arg in call.args]
        if is_mark(call):
            narrow = _dtypes(call.ty)
            return args[0] if self._is_rounded(args[0], narrow) else self._cast(self._cast(args[0], narrow), "float32")
        if getattr(call.op, "name", "") == "relax.astype":
            return self._cast(args[0], _widened(_dtypes(call.ty)))
        wide = self._in_float32(call, args)
        return wide if wide is not None else self._as_it_was(call, args)

    def _is_rounded(self, value: relax.Expr, narrow: str) -> bool:
        """Whether float32 in place of a narrow format holds what that format can hold."""
        if _dtypes(value.ty) == narrow:
            return True
        if isinstance(value, relax.Var):
            known = self.lookup_binding(value)
            return known is not None and self._is_rounded(known, narrow)
        if isinstance(value, relax.TupleGetItem):
            return self._is_rounded(value.tuple_value, narrow)
        if isinstance(value, relax.Tuple):
            return all(self._is_rounded(field, narrow) for field in value.fields)
        if not isinstance(value, relax.Call):
            return False
        name = getattr(value.op, "name", "")
        if name == "relax.astype":
            return bool(_dtypes(value.args[0].ty) == narrow)
        return name in MOVES and all(self._is_rounded(arg, narrow) for arg in value.args if _is_of_floats(arg.ty))

    def _in_float32(self, call: relax.Call, args: list[relax.Expr]) -> relax.Expr | None:
        """The call on widened operands; None where its result would not simply be the wider one."""
        if not isinstance(call.op, tvm.ir.Op) or call.ty_args:
            return None
        args = [self._cast(arg, _widened(_dtypes(arg.ty))) for arg in args]
        try:
            wide = self.builder_.normalize(relax.Call(call.op, args, call.attrs))
        except (RuntimeError, ValueError, TypeError):  # an operator that wants this very dtype
            return None
        return wide if _dtypes(wide.ty) == _widened(_dtypes(call.ty)) else None

    def _as_it_was(self, call: relax.Call, args: list[relax.Expr]) -> relax.Expr:
        args = [self._cast(arg, _dtypes(old.ty)) for arg, old in zip(args, call.args, strict=True)]
        return self.builder_.normalize(relax.Call(call.op, args, call.attrs, call.ty_args))

    def _cast(self, expr: relax.Expr, dtypes: Any) -> relax.Expr:
        """`expr` in the given dtypes: of a tensor one, of a tuple one for each field."""
        if _dtypes(expr.ty) == dtypes:
            return expr
        if isinstance(dtypes, tuple):
            fields = (
                expr
                if isinstance(expr, relax.Tuple)
                else [self.builder_.emit(relax.TupleGetItem(expr, i)) for i in range(len(dtypes))]
            )
            return relax.Tuple([self._cast(field, dtype) for field, dtype in zip(fields, dtypes, strict=True)])
        if isinstance(expr, tvm.ir.GenericConst):
            return relax.const(expr.value.numpy().astype(dtypes), dtypes)
        return self.builder_.emit(relax.op.astype(expr, dtypes))


def _dtypes(ty: Any) -> Any:
    """The dtype of a tensor type, for a tuple type those of its fields, for any other None."""
    if isinstance(ty, relax.TupleType):
        return tuple(_dtypes(field) for field in ty.fields)
    return str(ty.dtype) if isinstance(ty, relax.TensorType) else None


def _is_of_floats(ty: Any) -> bool:
    """Whether a type is that of a tensor or a tuple, and not of integers: indices only say which numbers are taken."""
    return isinstance(ty, relax.TupleType) or "float" in str(_dtypes(ty))


def _widened(dtypes: Any) -> Any:
    if isinstance(dtypes, tuple):
        return tuple(_widened(dtype) for dtype in dtypes)
    return "float32" if dtypes in NARROW else dtypes


def _holds_narrow(ty: Any) -> bool:
    dtypes = _dtypes(ty)
    return bool(_widened(dtypes) != dtypes)


@tvm.transform.module_pass(opt_level=0, name="CompleteBfloat16")
class CompleteBfloat16:
    """Operators that TVM has not for bfloat16 are computed in float32, and rounded where they return bfloat16.

    Marks of rounding go: what is not widened rounds everywhere.
    """

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return mutated(mod, _Completer)


@mutator
class _Completer(PyExprMutator):  # type: ignore[misc] # TVM has no types
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if is_mark(call):
            return call.args[0]
        if getattr(call.op, "name", "") not in LACKING or _dtypes(call.args[0].ty) != "bfloat16":
            return call
        args = [self.builder_.emit(relax.op.astype(arg, "float32")) for arg in call.args]
        wide = self.builder_.normalize(relax.Call(call.op, args, call.attrs))
        if _dtypes(wide.ty) == _dtypes(call.ty):
            return wide
        return relax.op.astype(self.builder_.emit(wide), _dtypes(call.ty))
