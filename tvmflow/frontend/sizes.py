"""Arithmetic on sizes: integers and TVM expressions of the model's open dimensions, which are 0 or more.

All expressions are int64. What TVM's analyzer can prove is simplified away, so that a size that is the same for all
inputs becomes an integer, and equal sizes become equal expressions.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence, Set
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.sym import Analyzer, ConstIntBound

Size = Any  # an int or a tirx expression of int64

AT_LEAST_ZERO = ConstIntBound(0, ConstIntBound.POS_INF)


class SizeArithmetic:
    """Operations on sizes, each simplified. It remembers which expressions are axes of tensors, thus 0 or more."""

    def __init__(self) -> None:
        self._analyzer = Analyzer()
        self._bound: set[tirx.Var] = set()
        self._axes: dict[int, Size] = {}

    def axis(self, size: Size) -> Size:
        """A size that is known to be an axis of a tensor, simplified."""
        size = self.simple(size)
        if not isinstance(size, int):
            self._axes[_hash(size)] = size
        return size

    def simple(self, size: Size) -> Size:
        """An int where the value is the same for all sizes of the open dimensions, else the simplest expression."""
        if isinstance(size, int | tirx.IntImm):
            return int(size)
        for var in tirx.analysis.undefined_vars(size):
            if var not in self._bound:
                self._bound.add(var)
                self._analyzer.update(var, AT_LEAST_ZERO)
        size = self._analyzer.simplify(size)
        return int(size) if isinstance(size, tirx.IntImm) else size

    def is_true(self, condition: Any) -> bool | None:
        """Whether a condition always (True) or never (False) holds; None where that depends on the sizes."""
        if isinstance(condition, bool | tirx.IntImm):
            return bool(condition)
        self.simple(condition)  # states the bounds of the variables
        if self._analyzer.can_prove(condition):
            return True
        return False if self._analyzer.can_prove(tirx.Not(condition)) else None

    def not_negative(self, size: Size) -> bool:
        """Whether a size is 0 or more as far as can be proven."""
        if isinstance(size, int | tirx.IntImm):
            return int(size) >= 0
        if _same(self._axes.get(_hash(size)), size):
            return True
        if isinstance(size, tirx.Add | tirx.Mul | tirx.FloorDiv | tirx.Min) and (
            self.not_negative(size.a) and self.not_negative(size.b)
        ):
            return True
        if isinstance(size, tirx.Max) and (self.not_negative(size.a) or self.not_negative(size.b)):
            return True
        return self.is_true(size >= 0) is True

    def equal(self, a: Size, b: Size) -> bool:
        """Whether two sizes are the same whatever the open dimensions are, as far as can be proven."""
        return is_size(self.simple(a - b), 0)

    def maximum(self, a: Size, b: Size) -> Size:
        if isinstance(a, int) and isinstance(b, int):
            return max(a, b)
        if (is_size(b, 0) and self.not_negative(a)) or (is_size(a, 0) and self.not_negative(b)):
            return a if is_size(b, 0) else b
        if self.not_negative(self.simple(a - b)):
            return a
        return self.simple(tirx.max(_expr(a), _expr(b)))

    def minimum(self, a: Size, b: Size) -> Size:
        if isinstance(a, int) and isinstance(b, int):
            return min(a, b)
        return self.simple(tirx.min(_expr(a), _expr(b)))

    def product(self, sizes: Iterable[Size]) -> Size:
        return self.simple(functools.reduce(lambda a, b: a * b, sizes, 1))

    def quotient(self, a: Size, b: Size) -> Size | None:
        """a / b towards zero, as ONNX divides integers; None where the sign of b is not known, or b is 0.

        A symbolic b that is 0 in some run has no right result; it counts as 1, lest the division end the process.
        """
        a, b = self._without_common_factors(a, b)
        if isinstance(b, int):
            if b < 0:
                a, b = self.product((a, -1)), -b
        elif self.not_negative(b):
            b = self.maximum(b, 1)
        else:
            return None
        if is_size(b, 0) or is_size(b, 1):
            return a if is_size(b, 1) else None
        if self.not_negative(a):
            return self.simple(tirx.floordiv(_expr(a), _expr(b)))
        up, down = self.maximum(a, 0), self.maximum(self.product((a, -1)), 0)
        return self.simple(tirx.floordiv(_expr(up), _expr(b)) - tirx.floordiv(_expr(down), _expr(b)))

    def remainder(self, a: Size, b: Size, towards_zero: bool) -> Size | None:
        """What is left of a after a division by b towards zero, or towards minus infinity; None as for quotient."""
        if towards_zero and not (self.not_negative(a) and self.not_negative(b)):
            times = self.quotient(a, b)
            return None if times is None else self.simple(a - times * b)
        if is_size(b, 0) or not (isinstance(b, int) or self.not_negative(b)):
            return None
        b = b if isinstance(b, int) else self.maximum(b, 1)
        return self.simple(tirx.floormod(_expr(a), _expr(b)))

    def rest(self, sizes: Sequence[Size], taken: Sequence[Size]) -> Size | None:
        """The size that a reshape from `sizes` has left for its -1 beside the axes `taken`."""
        rest = self.quotient(self.product(sizes), self.product(taken))
        return None if rest is None else self.axis(rest)

    def _without_common_factors(self, a: Size, b: Size) -> tuple[Size, Size]:
        """Both without the factors that they share; those are not 0 wherever a / b has a value."""
        above, below = _factors(a), _factors(b)
        for factor in list(below):
            same = next((f for f in above if _same(f, factor)), None)
            if same is not None:
                above = [f for f in above if f is not same]
                below = [f for f in below if f is not factor]
        return self.product(above), self.product(below)


def shape_text(typed: relax.TensorType, names: Set[str]) -> tuple[int | str, ...]:
    """The axes of a tensor as signatures state them: an int, a dimension's name, an expression of `names` in brackets,
    whose operations are Python's, or "?" where only run time knows."""
    if not isinstance(typed.shape, relax.ShapeExpr):
        return ("?",) * int(typed.ndim)
    return tuple(_text(size, names) for size in typed.shape.values)


def _text(size: Size, names: Set[str]) -> int | str:
    if isinstance(size, int | tirx.IntImm):
        return int(size)
    if not {var.name for var in tirx.analysis.undefined_vars(size)} <= names:
        return "?"
    plain = re.sub(r"T\.(min|max)\(", r"\1(", re.sub(r"T\.int64\((-?\d+)\)", r"\1", str(size)))
    return plain if isinstance(size, tirx.Var) else f"({plain})"


def _factors(size: Size) -> list[Size]:
    return _factors(size.a) + _factors(size.b) if isinstance(size, tirx.Mul) else [size]


def _expr(size: Size) -> Any:
    return tirx.IntImm("int64", size) if isinstance(size, int) else size


def is_size(size: Size, value: int) -> bool:
    """Whether a size is this integer."""
    return isinstance(size, int | tirx.IntImm) and int(size) == value


def _hash(size: Size) -> int:
    return int(tvm_ffi.structural_hash(size, map_free_vars=False))


def _same(a: Size | None, b: Size) -> bool:
    """Whether both are one and the same expression."""
    return (
        isinstance(a, tvm.ir.Expr)
        and isinstance(b, tvm.ir.Expr)
        and bool(tvm_ffi.structural_equal(a, b, map_free_vars=False))
    )
