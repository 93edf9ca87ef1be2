"""Small integer tensors whose values are known as expressions of the model's open dimensions.

Exporters compute shapes by nodes: Shape, Cast, Slice, Mul, Concat, ... to Reshape. As long as such a tensor's values
are known, no tensor is made of it: `evaluate` computes the values of a node's output from those of its inputs.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from onnx import TensorProto
from tvm import relax, tirx

from tvmflow.frontend.sizes import Size, SizeArithmetic

Array = np.ndarray[Any, Any]
# What is larger is data, not a shape.
MAX_ELEMENTS = 256
TRUTH = frozenset({"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Not"})
DTYPES = {"int32": TensorProto.INT32, "int64": TensorProto.INT64}


@dataclass(frozen=True)
class ShapeValue:
    """A tensor of `dtype` (int32, int64) whose elements are ints and expressions of int64: an array of objects."""

    elements: Array
    dtype: str

    def as_constant(self) -> Any | None:
        """The Relax constant that it is, None where an element is symbolic."""
        if not all(isinstance(element, int) for element in self.elements.flat):
            return None
        return relax.const(self.elements.astype(self.dtype), self.dtype)

    def mentions_only(self, symbols: Sequence[tirx.Var]) -> bool:
        """Whether no size in it is known at run time only."""
        used = [var for x in self.elements.flat if not isinstance(x, int) for var in tirx.analysis.undefined_vars(x)]
        return all(any(var.same_as(symbol) for symbol in symbols) for var in used)

    def as_shape(self) -> relax.ShapeExpr:
        return relax.ShapeExpr(list(self.elements.flat))

    def as_tensor(self, builder: relax.BlockBuilder) -> relax.Expr:
        """The tensor that it stands for, made at run time."""
        tensor = builder.emit(relax.op.shape_to_tensor(self.as_shape()))
        if self.elements.ndim != 1:
            tensor = builder.emit(relax.op.reshape(tensor, self.elements.shape))
        return tensor if self.dtype == "int64" else builder.emit(relax.op.astype(tensor, self.dtype))


@dataclass(frozen=True)
class Operands:
    """What a rule sees of a node: the elements of its inputs (None where omitted or unknown) and its attributes."""

    inputs: Sequence[Array | None]
    attributes: Mapping[str, Any]
    sizes: SizeArithmetic

    def array(self, index: int) -> Array:
        """The elements of an input that may not be omitted."""
        array = self.inputs[index]
        assert array is not None
        return array

    def ints(self, index: int, name: str) -> list[int] | None:
        """Integers that are an attribute in old operator versions and an input in new ones; None where omitted.

        Raises UnknownValueError where they are symbolic."""
        if name in self.attributes:
            return [int(value) for value in self.attributes[name]]
        if index >= len(self.inputs) or self.inputs[index] is None:
            return None
        values = list(self.array(index).flat)
        if not all(isinstance(value, int) for value in values):
            raise UnknownValueError
        return values


Rule = Callable[[Operands], Array]


class UnknownValueError(Exception):
    """The values of an output cannot be told from those of the inputs."""


def known(value: Any) -> Array | None:
    """The elements of a value where they are known and small integers or truth values, else None."""
    if isinstance(value, ShapeValue):
        return value.elements
    if isinstance(value, tvm.ir.GenericConst):
        array = value.value.numpy()
        if array.dtype.name in (*DTYPES, "bool") and array.size <= MAX_ELEMENTS:
            return objects(array.reshape(-1).tolist(), array.shape)
    return None


def objects(elements: Sequence[Any], shape: Sequence[int] | None = None) -> Array:
    """An array of objects with the given flat elements, of one axis where no shape is given."""
    array = np.empty(len(elements), object)
    for index, element in enumerate(elements):
        array[index] = element
    return array if shape is None else array.reshape(shape)


def _mapped(function: Callable[..., Any], *arrays: Any) -> Array:
    """`function` of the elements of arrays that are broadcast against each other; None means that nothing is known."""
    pairs = np.broadcast(*arrays)
    if pairs.size > MAX_ELEMENTS:
        raise UnknownValueError
    results = [function(*elements) for elements in pairs]
    if any(result is None for result in results):
        raise UnknownValueError
    return objects(results, pairs.shape)


def evaluate(op_type: str, operands: Operands) -> Array | None:
    """The elements of the output of a node in ai.onnx, all of whose inputs are known; None where they are not."""
    rule = RULES.get(op_type)
    if rule is None:
        return None
    try:
        result = rule(operands)
    except UnknownValueError:
        return None
    return result if result.size <= MAX_ELEMENTS else None


def dtype_of(value: Any) -> str:
    return value.dtype if isinstance(value, ShapeValue) else str(value.ty.dtype.dtype)


def result_dtype(op_type: str, values: Sequence[Any], attributes: Mapping[str, Any]) -> str:
    """The dtype of a node's output."""
    if op_type in TRUTH:
        return "bool"
    if op_type == "Cast":
        return next(name for name, number in DTYPES.items() if number == attributes["to"])
    return dtype_of(values[1 if op_type == "Where" else 0])


def of_shape(shape: Sequence[Size], attributes: Mapping[str, Any], sizes: SizeArithmetic) -> Array:
    """What Shape gives for a tensor with these axes."""
    axes = [sizes.axis(size) for size in shape]
    return objects(axes[attributes.get("start", 0) : attributes.get("end")])


def of_number(shape: Sequence[Size], _attributes: Mapping[str, Any], sizes: SizeArithmetic) -> Array:
    """What Size gives for a tensor with these axes."""
    return objects([sizes.product([sizes.axis(size) for size in shape])], ())


def _elementwise(function: Callable[[SizeArithmetic, Any, Any], Any]) -> Rule:
    """Two or more operands that are broadcast against each other."""
    return lambda operands: functools.reduce(
        lambda a, b: _mapped(functools.partial(function, operands.sizes), a, b),
        [operands.array(i) for i in range(len(operands.inputs))],
    )


def _single(function: Callable[[SizeArithmetic, Any], Any]) -> Rule:
    return lambda operands: _mapped(functools.partial(function, operands.sizes), operands.inputs[0])


def _compare(relation: Callable[[Any, Any], Any]) -> Rule:
    """Only where the relation holds for all sizes or for none."""
    return _elementwise(lambda sizes, a, b: sizes.is_true(relation(a, b)))


def _equal(a: Any, b: Any) -> Any:
    return a == b if isinstance(a, int) and isinstance(b, int) else tirx.EQ(*map(_expr, (a, b)))


def _expr(value: Any) -> Any:
    return tirx.IntImm("int64", value) if isinstance(value, int) else value


def _mod(operands: Operands) -> Array:
    towards_zero = bool(operands.attributes.get("fmod", 0))
    return _elementwise(lambda sizes, a, b: sizes.remainder(a, b, towards_zero))(operands)


def _cast(operands: Operands) -> Array:
    """Sizes fit into int32 by the same right as in the model itself."""
    if operands.attributes["to"] not in DTYPES.values():
        raise UnknownValueError
    return _mapped(lambda x: int(x) if isinstance(x, bool) else x, operands.inputs[0])


def _gather(operands: Operands) -> Array:
    data, axis = operands.array(0), operands.attributes.get("axis", 0)
    indices = np.array(operands.ints(1, ""), "int64").reshape(operands.array(1).shape)
    if not ((-data.shape[axis] <= indices) & (indices < data.shape[axis])).all():
        raise UnknownValueError
    picked: Array = data[(*(slice(None),) * (axis % data.ndim), indices, ...)]
    return picked


def _slice(operands: Operands) -> Array:
    """Ends are clamped as Python's are; with a negative step only those that are the same in both."""
    data, starts, ends = operands.array(0), operands.ints(1, "starts") or [], operands.ints(2, "ends") or []
    axes = operands.ints(3, "axes") or list(range(len(starts)))
    steps = operands.ints(4, "steps") or [1] * len(starts)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        size = data.shape[axis]
        if step == 0 or (step < 0 and (start < -size or end in (2**31 - 1, 2**63 - 1))):
            raise UnknownValueError
        data = np.moveaxis(np.moveaxis(data, axis, 0)[start:end:step], 0, axis)
    return data


def _squeeze(operands: Operands) -> Array:
    axes = operands.ints(1, "axes")
    return np.squeeze(operands.array(0), None if axes is None else tuple(axes))


def _unsqueeze(operands: Operands) -> Array:
    axes = operands.ints(1, "axes")
    return np.expand_dims(operands.array(0), tuple(axes or ()))


def _concat(operands: Operands) -> Array:
    return np.concatenate([operands.array(i) for i in range(len(operands.inputs))], axis=operands.attributes["axis"])


def _reshape(operands: Operands) -> Array:
    data, shape = operands.array(0), operands.ints(1, "shape") or []
    if not operands.attributes.get("allowzero", 0):
        shape = [data.shape[axis] if size == 0 else size for axis, size in enumerate(shape)]
    return data.reshape(shape)


def _expand(operands: Operands) -> Array:
    data, shape = operands.array(0), operands.ints(1, "shape") or []
    return np.broadcast_to(data, np.broadcast_shapes(data.shape, tuple(shape)))


def _where(operands: Operands) -> Array:
    return _mapped(lambda condition, a, b: a if condition else b, *operands.inputs)


def _range(operands: Operands) -> Array:
    limits = [value for i in range(3) for value in operands.ints(i, "") or []]
    counted = range(*limits)
    if counted and len(counted[: MAX_ELEMENTS + 1]) > MAX_ELEMENTS:
        raise UnknownValueError
    return objects(counted)


def _reduce(function: Callable[[SizeArithmetic, Any, Any], Any]) -> Rule:
    """A reduction of the only axis."""

    def rule(operands: Operands) -> Array:
        data, axes = operands.array(0), operands.ints(1, "axes")
        keeps_all = not axes and operands.attributes.get("noop_with_empty_axes", 0)
        if data.ndim != 1 or data.size == 0 or keeps_all or axes not in (None, [], [0], [-1]):
            raise UnknownValueError
        total = functools.reduce(lambda a, b: function(operands.sizes, a, b), data)
        return objects([total], (1,) if operands.attributes.get("keepdims", 1) else ())

    return rule


def _add(sizes: SizeArithmetic, a: Any, b: Any) -> Any:
    return sizes.simple(a + b)


def _mul(sizes: SizeArithmetic, a: Any, b: Any) -> Any:
    return sizes.product((a, b))


RULES: Mapping[str, Rule] = {
    "Identity": lambda operands: operands.array(0),
    "Cast": _cast,
    "Gather": _gather,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Concat": _concat,
    "Reshape": _reshape,
    "Expand": _expand,
    "Where": _where,
    "Range": _range,
    "Add": _elementwise(_add),
    "Sub": _elementwise(lambda sizes, a, b: sizes.simple(a - b)),
    "Mul": _elementwise(_mul),
    "Div": _elementwise(SizeArithmetic.quotient),
    "Mod": _mod,
    "Min": _elementwise(SizeArithmetic.minimum),
    "Max": _elementwise(SizeArithmetic.maximum),
    "Sum": _elementwise(_add),
    "Neg": _single(lambda sizes, x: sizes.product((x, -1))),
    "Abs": _single(lambda sizes, x: sizes.maximum(x, sizes.product((x, -1)))),
    "Equal": _compare(_equal),
    "Less": _compare(operator.lt),
    "LessOrEqual": _compare(operator.le),
    "Greater": _compare(operator.gt),
    "GreaterOrEqual": _compare(operator.ge),
    "And": _elementwise(lambda sizes, a, b: a and b),
    "Or": _elementwise(lambda sizes, a, b: a or b),
    "Not": _single(lambda sizes, x: not x),
    "ReduceProd": _reduce(_mul),
    "ReduceSum": _reduce(_add),
    "ReduceMax": _reduce(SizeArithmetic.maximum),
    "ReduceMin": _reduce(SizeArithmetic.minimum),
}
