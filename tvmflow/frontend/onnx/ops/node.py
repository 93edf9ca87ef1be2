"""One ONNX node on its way into Relax, as the converters of this package see it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import tvm
from tvm import relax, tirx
from tvm.relax.frontend.onnx import onnx_frontend

from tvmflow.errors import UnsupportedError
from tvmflow.frontend.emitter import Emitter
from tvmflow.graph import rounding

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
SIGNED = frozenset({"int8", "int16", "int32", "int64"})


@dataclass(frozen=True)
class Node:
    """A node's operands (Relax expressions, None where omitted) and attributes.

    Methods that need something to be known at compile time raise UnsupportedError where it is not.
    """

    op_type: str
    name: str
    opset: int
    builder: relax.BlockBuilder
    inputs: Sequence[Any]
    attributes: Mapping[str, Any]
    graph: Sequence[Any]

    @property
    def op(self) -> Any:
        return Emitter(self.builder)

    @property
    def x(self) -> Any:
        """The first operand as a tensor."""
        return self.tensor(0)

    @property
    def output_count(self) -> int:
        return int(self.attributes["tvm_custom"]["num_outputs"])

    @property
    def where(self) -> str:
        """The node's place, as messages name it."""
        return f"{self.op_type} `{self.name}`" if self.name else self.op_type

    def has(self, index: int) -> bool:
        return index < len(self.inputs) and self.inputs[index] is not None

    def tensor(self, index: int) -> Any:
        """An operand as a tensor; shapes and symbolic integers, which the importer keeps apart, become int64."""
        value = self.inputs[index]
        if isinstance(value, relax.ShapeExpr) or isinstance(value.ty, relax.ShapeType):
            return self.op.shape_to_tensor(value)
        if tvm.ir.is_prim_expr(value):
            shape = relax.ShapeExpr([value if str(value.ty) == "int64" else tirx.Cast("int64", value)])
            return self.op.reshape(self.op.shape_to_tensor(shape), ())
        return value

    def constant(self, index: int) -> np.ndarray[Any, Any] | None:
        """An operand's value where it is known now, else None."""
        return constant_of(self.inputs[index], self.graph) if self.has(index) else None

    def known(self, index: int, name: str) -> np.ndarray[Any, Any]:
        """The value of an operand that must be known now; `name` is the operator's word for it."""
        value = self.constant(index)
        if value is None:
            raise self.refuse(f"input `{name}` must be a constant", f"freeze `{name}` to a constant in the model")
        return value

    def optional(self, index: int, name: str) -> np.ndarray[Any, Any] | None:
        """The value of an operand that may be omitted but not be a run-time value."""
        return self.known(index, name) if self.has(index) else None

    def dtype(self, index: int = 0) -> str:
        return dtype_of(self.tensor(index))

    def rank(self, index: int = 0) -> int:
        rank = int(self.tensor(index).ty.ndim)
        if rank < 0:
            raise self.refuse(f"the rank of input {index} is not known", "give the model's inputs fixed ranks")
        return rank

    def dims(self, index: int = 0) -> list[Any]:
        """An operand's axes: integers, and expressions where an axis is symbolic."""
        shape = self.tensor(index).ty.shape
        if shape is None:
            raise self.refuse(f"the shape of input {index} depends on data", "fix the shapes of the model's inputs")
        return [int(dim) if isinstance(dim, int | tirx.IntImm) else dim for dim in shape]

    def shape(self, index: int = 0, axes: Sequence[int] | None = None) -> list[int]:
        """An operand's axes (or those named), all of which must be known integers."""
        dims = self.dims(index)
        picked = dims if axes is None else [dims[axis] for axis in axes]
        if not all(isinstance(dim, int) for dim in picked):
            raise self.refuse(f"the shape of input {index} is symbolic", "fix it with [shapes.dims] in the config")
        return picked

    def axis(self, axis: int, rank: int | None = None) -> int:
        """A possibly negative axis of the first operand, counted from the front."""
        rank = self.rank() if rank is None else rank
        if not -rank <= axis < rank:
            raise self.refuse(f"axis {axis} is out of range for rank {rank}", "correct the model")
        return axis % rank

    def text(self, name: str, default: str) -> str:
        return text_of(self.attributes.get(name, default))

    def ints(self, name: str, default: Sequence[int]) -> list[int]:
        return [int(value) for value in self.attributes.get(name, default)]

    def integer(self, name: str, default: int) -> int:
        return int(self.attributes.get(name, default))

    def number(self, name: str, default: float) -> float:
        return float(self.attributes.get(name, default))

    def emit(self, expr: Any) -> Any:
        """Binds an expression to a variable, whose type is then known."""
        return self.builder.emit(expr)

    def upstream(self, inputs: Sequence[Any] | None = None, **attributes: Any) -> Any:
        """What TVM's own converter makes of this node, with other operands or attributes."""
        converter = UPSTREAM[self.op_type.removeprefix("com.microsoft::")].get_converter(self.opset)
        operands = onnx_frontend.onnx_input(self.inputs if inputs is None else inputs)
        return converter(self.builder, operands, {**self.attributes, **attributes}, list(self.graph))

    def refuse(self, reason: str, hint: str = "export the model without this form of the operator") -> UnsupportedError:
        return UnsupportedError(f"{self.where}: {reason}", hint)


Converter = Callable[[Node], Any]
# For every operator: the first opset version a converter holds for -> that converter.
Converters = Mapping[str, Mapping[int, Converter]]
# Why a node with these attributes cannot be converted, or None.
Refusal = Callable[[Mapping[str, Any]], str | None]
UPSTREAM: dict[str, Any] = dict(onnx_frontend._get_convert_map())


def converter_class(op_type: str, versions: Mapping[int, Converter], refusal: Refusal | None) -> type:
    """The class that TVM's importer wants, made of converter functions."""

    def get_converter(_cls: type, opset: int) -> Callable[..., Any]:
        version = max((v for v in versions if v <= opset), default=min(versions))

        def convert(builder: Any, inputs: Any, attributes: Any, graph: Any) -> Any:
            node = Node(op_type, attributes["tvm_custom"]["name"], opset, builder, inputs, attributes, graph)
            reason = refusal(attributes) if refusal else None
            if reason:
                raise node.refuse(reason)
            return versions[version](node)

        return convert

    namespace: dict[str, Any] = {"get_converter": classmethod(get_converter)}
    return type(re.sub(r"\W", "_", op_type), (onnx_frontend.OnnxOpConverter,), namespace)


def rounding_class(upstream: Any) -> type:
    """TVM's class for a conversion of the model's, with marks where narrow formats are rounded."""

    def get_converter(_cls: type, opset: int) -> Callable[..., Any]:
        def convert(builder: Any, inputs: Any, attributes: Any, graph: Any) -> Any:
            operands = onnx_frontend.onnx_input([rounding.marked(builder, inputs[0]), *list(inputs)[1:]])
            value = upstream.get_converter(opset)(builder, operands, attributes, graph)
            is_call = isinstance(value, relax.Call)
            return rounding.marked(builder, builder.normalize(value) if is_call else value)

        return convert

    return type(f"Rounding{upstream.__name__}", (upstream,), {"get_converter": classmethod(get_converter)})


def constant_of(value: Any, graph: Sequence[Any]) -> np.ndarray[Any, Any] | None:
    """The value of an expression that is known at import, else None. `graph` is the importer's (nodes, parameters)."""
    if isinstance(value, tvm.ir.GenericConst):
        return np.asarray(value.value.numpy())
    if isinstance(value, relax.ShapeExpr):
        known = all(isinstance(dim, tirx.IntImm) for dim in value.values)
        return np.array([int(dim) for dim in value.values], "int64") if known else None
    if isinstance(value, tirx.IntImm | tirx.FloatImm):
        return np.array(value.value)
    if isinstance(value, relax.Var) and value.name in graph[1]:
        return np.asarray(graph[1][value.name][1].numpy())
    return None


def dtype_of(tensor: Any) -> str:
    return str(tensor.ty.dtype.dtype)


def text_of(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def scalar(value: float, dtype: str) -> Any:
    """A 0-d constant, the only constant that layout conversion lets through as a FIRST operand."""
    return relax.const(value, dtype)


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name)) if name == "bfloat16" or name.startswith("float8") else np.dtype(name)


def in_float32(node: Node, tensor: Any) -> Any:
    """The tensor in the precision that half-precision operators accumulate in."""
    return node.op.astype(tensor, "float32") if dtype_of(tensor) in ("float16", "bfloat16") else tensor
