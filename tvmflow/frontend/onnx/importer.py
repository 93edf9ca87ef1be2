"""Runs TVM's ONNX importer over a normalised model, with our table of converters.

TVM's importer looks operators up by name alone, prints when a converter fails, cannot put a branch's bindings inside
the branch, and hands symbolic shapes to converters that take tensors. This subclass replaces its loop over nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import onnx
import tvm
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto
from tvm import relax, tirx
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter, onnx_input

from tvmflow.errors import UnsupportedError, last_line
from tvmflow.frontend.onnx import ops, shape_values
from tvmflow.frontend.onnx.agreement import agreed
from tvmflow.frontend.onnx.branches import check_alike, has_shape, stopping, types_of
from tvmflow.frontend.onnx.functions import opset_of
from tvmflow.frontend.onnx.graph import describe, operator_key, outer_uses
from tvmflow.frontend.onnx.ops.node import numpy_dtype
from tvmflow.frontend.onnx.shape_values import Operands, ShapeValue
from tvmflow.frontend.onnx.shapes import Shape, contradiction
from tvmflow.frontend.sizes import SizeArithmetic

# Operator -> the inputs that its converter takes as a relax.ShapeExpr where their values are known as expressions.
SHAPE_INPUTS: Mapping[str, Set[int]] = {
    "Reshape": {1},
    "Expand": {1},
    "ConstantOfShape": {0},
    "Resize": {3},
    "Slice": {1, 2},
    "Tile": {1},
}
BRANCHES = ("then_branch", "else_branch")
SEQUENCE_OPERATORS = frozenset(
    {
        "Optional",
        "OptionalGetElement",
        "SequenceConstruct",
        "SequenceEmpty",
        "SequenceErase",
        "SequenceInsert",
        "ConcatFromSequence",
        "SplitToSequence",
    }
)


def import_model(
    model: ModelProto, shapes: Mapping[str, Shape], dtypes: Mapping[str, str]
) -> tuple[tvm.IRModule, tuple[str, ...]]:
    """A Relax function `main` whose parameters are the graph's inputs and whose result is its outputs, both in order,
    and a note on each branch that stops the run because it cannot be run at these shapes.

    `shapes` and `dtypes` are those of the inputs; a name in a shape is one symbolic variable wherever it stands.
    The branches of an If are private functions: TVM's memory planning lets the branches of one function share storage
    that only one of them allocates. Raises UnsupportedError naming the node that TVM cannot convert.
    """
    symbols = {dim: tirx.Var(dim, "int64") for shape in shapes.values() for dim in shape if isinstance(dim, str)}
    sizes = {name: [symbols[dim] if isinstance(dim, str) else dim for dim in shape] for name, shape in shapes.items()}
    params = {name: relax.Var(name, relax.TensorType(sizes[name], dtypes[name])) for name in shapes}
    branches = relax.BlockBuilder()
    importer = Importer(params, list(symbols.values()), opset_of(model), branches, SizeArithmetic(), [])
    main = importer.function(model.graph)
    mod = branches.get()
    mod["main"] = main.with_attr("global_symbol", "main")
    return relax.transform.ConvertToDataflow(min_size=1)(mod), tuple(importer.notes)


class Importer(ONNXGraphImporter):  # type: ignore[misc] # TVM carries no types
    """TVM's importer with a loop of our own over the nodes of a graph.

    `given` are the values that the graph reads from outside, `symbols` the sizes it may mention; the functions of
    branches are added to `branches`, what a user should know to `notes`. Values that are known as expressions of sizes
    are kept as ShapeValue.
    """

    def __init__(
        self,
        given: Mapping[str, relax.Expr | ShapeValue],
        symbols: Sequence[tirx.Var],
        opset: int,
        branches: relax.BlockBuilder,
        sizes: SizeArithmetic,
        notes: list[str],
    ) -> None:
        super().__init__({}, {}, keep_params_in_input=False, sanitize=False)
        self.opset = opset
        self._given = dict(given)
        self._symbols = symbols
        self._branches = branches
        self._sizes = sizes
        self.notes = notes
        self._converters = ops.convert_map()

    def function(self, graph: GraphProto) -> relax.Function:
        """The graph as a Relax function of those of the given values that are variables."""
        return self.from_onnx(graph, self.opset)["main"].without_attr("num_input").without_attr("global_symbol")

    def _check_for_unsupported_ops(self, graph: GraphProto) -> None:
        """Nothing: `checks.check` has refused them already, all at once."""

    def _parse_graph_input(self, graph: GraphProto) -> None:
        self._nodes.update(self._given)
        self._inputs = self._given

    def _parse_attr(self, attributes: Sequence[AttributeProto]) -> dict[str, Any]:
        """As TVM's, but an empty list is an empty tuple instead of an error."""
        lists = (AttributeProto.INTS, AttributeProto.FLOATS, AttributeProto.STRINGS)
        empty = {a.name: () for a in attributes if a.type in lists and not (a.ints or a.floats or a.strings)}
        parsed: dict[str, Any] = super()._parse_attr([a for a in attributes if a.name not in empty])
        return parsed | empty

    def _construct_nodes(self, graph: GraphProto) -> None:
        for node in graph.node:
            results = self._converted(node)
            for name, result in zip(node.output, results, strict=False):
                self._nodes[name] = result
        for value in graph.output:
            self._nodes[value.name] = self._tensor(self._nodes[value.name])

    def _converted(self, node: NodeProto) -> list[Any]:
        """The values of a node's outputs. Faults are UnsupportedError, whose cause is ONNX's InferenceError where it
        is not TVM but the standard that has no such operation on operands of these shapes."""
        try:
            return self._branches_of(node) if node.op_type == "If" else self._convert(node)
        except Exception as exc:
            inputs = [self._declared(name) for name in dict.fromkeys(node.input) if name]
            if node.op_type != "If" and (wrong := contradiction(node, inputs, self.opset)):
                reason = last_line(wrong)[:300].rpartition("Error] ")[2]
                raise UnsupportedError(
                    f"{describe(node)}: it cannot run at these sizes: {reason}",
                    "correct the sizes of the inputs, or the model",
                ) from wrong
            if isinstance(exc, UnsupportedError):
                raise
            if isinstance(exc, MemoryError):
                raise UnsupportedError(
                    f"{describe(node)}: it makes a constant that is too large: {last_line(exc)}",
                    "make its sizes smaller, or compute it outside of the model",
                ) from exc
            raise UnsupportedError(
                f"{describe(node)}: TVM cannot convert it: {last_line(exc)[:300]}",
                "change the model so that it does without this node",
            ) from exc

    def _declared(self, name: str) -> onnx.ValueInfoProto | None:
        """A value's type as ONNX states it, None where it has none that ONNX can state; unknown sizes are left open."""
        value = self._nodes.get(name)
        shape: list[Any]
        if isinstance(value, ShapeValue):
            dtype, shape = value.dtype, [*value.elements.shape]
        elif isinstance(value, relax.Expr) and isinstance(value.ty, relax.TensorType) and value.ty.ndim >= 0:
            dtype, shape = str(value.ty.dtype), list(_shape_of(value) or [None] * int(value.ty.ndim))
        else:
            return None
        sizes = [int(size) if isinstance(size, int | tirx.IntImm) else None for size in shape]
        return onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(numpy_dtype(dtype)), sizes)

    def _convert(self, node: NodeProto) -> list[Any]:
        """The values of a node's outputs: by its converter, unless they are known as expressions of sizes."""
        values = [self._nodes[name] if name else None for name in node.input]
        attributes = self._parse_attr(node.attribute)
        known = None if node.domain else self._known(node.op_type, values, attributes)
        if known is not None:
            return [known]
        if node.op_type == "Range" and not node.domain and (positions := self._range(values)) is not None:
            return [positions]
        as_shape = SHAPE_INPUTS.get(node.op_type, set()) if not node.domain else set()
        operands = [
            value.as_shape() if i in as_shape and isinstance(value, ShapeValue) else self._tensor(value)
            for i, value in enumerate(values)
        ]
        inputs = onnx_input(agreed(node, operands, self.bb, self._sizes))
        attributes["tvm_custom"] = {"name": node.name, "num_outputs": len(node.output)}
        converter = self._converters[operator_key(node)]
        result = converter.get_converter(self.opset)(self.bb, inputs, attributes, [self._nodes, self._params])
        if node.op_type in SEQUENCE_OPERATORS:
            return [self._bound(result)]
        results = self._fields(result)
        if len(results) < len(node.output):
            raise ValueError(f"it has {len(node.output)} outputs, and the converter gives {len(results)}")
        return results

    def _known(self, op_type: str, values: Sequence[Any], attributes: Mapping[str, Any]) -> Any | None:
        """The output as a ShapeValue, or a constant, where it follows from sizes, else None."""
        if op_type in ("Shape", "Size"):
            shape = _shape_of(values[0])
            if shape is None:
                return None
            of = shape_values.of_shape if op_type == "Shape" else shape_values.of_number
            return _value(of(shape, attributes, self._sizes), "int64")
        # Constants alone were folded before the import, but for the truth of what is compared here.
        if not any(isinstance(value, ShapeValue) for value in values) and op_type not in shape_values.TRUTH:
            return None
        elements = [None if value is None else shape_values.known(value) for value in values]
        if any(known is None and value is not None for known, value in zip(elements, values, strict=True)):
            return None
        result = shape_values.evaluate(op_type, Operands(elements, attributes, self._sizes))
        return None if result is None else _value(result, shape_values.result_dtype(op_type, values, attributes))

    def _range(self, limits: Sequence[Any]) -> relax.Var | None:
        """A Range of sizes is as long as they say; TVM's converter would give it a length that equals nothing else."""
        elements = [shape_values.known(limit) for limit in limits]
        sizes = [known.item() for known in elements if known is not None and known.ndim == 0]
        if len(sizes) < len(limits):
            return None
        start, limit, step = sizes
        if isinstance(step, int) and step > 0:
            limit = self._sizes.maximum(start, limit)
        return self.bb.emit(relax.op.arange(start, limit, step, dtype=shape_values.dtype_of(limits[0])))

    def _fields(self, result: Any) -> list[Any]:
        if isinstance(result, relax.Tuple):
            return [self._bound(field) for field in result]
        result = self._bound(result)
        if isinstance(result, relax.Expr) and isinstance(result.ty, relax.TupleType):
            return [self.bb.emit(relax.TupleGetItem(result, i)) for i in range(len(result.ty.fields))]
        return [result]

    def _bound(self, result: Any) -> Any:
        """A computation bound to a variable, so that all of its readers share it; anything else as it is."""
        if isinstance(result, relax.ShapeExpr):
            return _value(shape_values.objects([self._sizes.simple(size) for size in result.values]), "int64")
        return self.bb.emit(result) if isinstance(result, relax.Call) else result

    def _tensor(self, value: Any) -> Any:
        """`value`, where it is a shape, as the tensor that it stands for."""
        if isinstance(value, ShapeValue):
            return value.as_tensor(self.bb)
        if isinstance(value, relax.Expr) and isinstance(value.ty, relax.ShapeType):
            return self.bb.emit(relax.op.shape_to_tensor(value))
        return value

    def _branches_of(self, node: NodeProto) -> list[Any]:
        """An If: only the branch that is taken runs; where that is known now, it is all that is imported."""
        condition = self._tensor(self._nodes[node.input[0]])
        bodies = {attribute.name: attribute.g for attribute in node.attribute}
        if isinstance(condition, tvm.ir.GenericConst):
            taken = bodies["then_branch" if condition.value.numpy().any() else "else_branch"]
            self._construct_nodes(taken)  # names are unique in the whole model
            return [self._nodes[value.name] for value in taken.output]
        if condition.ty.ndim != 0:
            condition = self.bb.emit(relax.op.reshape(condition, ()))
        return self._fields(self.bb.emit(relax.If(condition, *self._calls(node, bodies))))

    def _calls(self, node: NodeProto, bodies: Mapping[str, GraphProto]) -> list[relax.Call]:
        """The calls of both branches; one that cannot run at these sizes stops the run instead."""
        calls: dict[str, relax.Call] = {}
        wrong: dict[str, UnsupportedError] = {}
        for name in BRANCHES:
            try:
                calls[name] = self._branch(bodies[name], f"{node.output[0]}_{name}")
            except UnsupportedError as exc:
                if not isinstance(exc.__cause__, onnx.shape_inference.InferenceError):
                    raise
                wrong[name] = exc
        for name, fault in wrong.items():
            types = [ty for call in calls.values() for ty in types_of(call, len(node.output))]
            if not calls or not all(has_shape(ty) for ty in types):
                raise fault
            self.notes.append(f"{describe(node)}: a run that takes its {name} stops with an error: {fault.message}")
            function = stopping(f"{node.op_type}_{node.name}_{name}_fits_the_sizes", types, self._symbols)
            sizes = [relax.ShapeExpr(self._symbols)] if self._symbols else []
            calls[name] = self._call(function, f"{node.output[0]}_{name}", sizes)
        check_alike(node, *(types_of(calls[name], len(node.output)) for name in BRANCHES))
        return [calls[name] for name in BRANCHES]

    def _call(self, function: relax.Function, name: str, arguments: list[relax.Expr]) -> relax.Call:
        """The call of a new private function."""
        var = self._branches.add_func(relax.utils.copy_with_new_vars(function), name)
        return self.bb.normalize(relax.Call(var, arguments))

    def _branch(self, graph: GraphProto, name: str) -> relax.Call:
        """The call of a private function that is the branch `graph`."""
        inside = {used: self._nodes[used] for used in sorted(outer_uses(graph))}
        arguments = []
        for used, value in inside.items():
            if isinstance(value, ShapeValue) and not value.mentions_only(self._symbols):
                value = self._tensor(value)
            if isinstance(value, relax.Var):
                inside[used] = relax.Var(used, value.ty)
                arguments.append(value)
        if self._symbols:
            inside["sizes"] = relax.Var("sizes", relax.ShapeType(self._symbols))
            arguments.append(relax.ShapeExpr(self._symbols))
        function = Importer(inside, self._symbols, self.opset, self._branches, self._sizes, self.notes).function(graph)
        return self._call(function, name, arguments)


def _value(elements: Any, dtype: str) -> Any:
    value = ShapeValue(elements, dtype)
    constant = value.as_constant()
    return value if constant is None else constant


def _shape_of(value: Any) -> Sequence[Any] | None:
    """The axes of a value, None where they depend on data."""
    if isinstance(value, ShapeValue):
        return list(value.elements.shape)
    if not isinstance(value.ty, relax.TensorType) or not isinstance(value.ty.shape, relax.ShapeExpr):
        return None
    return [*value.ty.shape.values]
