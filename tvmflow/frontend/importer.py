"""Runs TVM's ONNX importer over a normalised model, with our table of converters.

TVM's importer looks operators up by name alone, prints when a converter fails, cannot put a branch's bindings inside
the branch, and hands symbolic shapes to converters that take tensors. This subclass replaces its loop over nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto
from tvm import relax, tirx
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter, onnx_input

from tvmflow.errors import UnsupportedError
from tvmflow.frontend import ops
from tvmflow.frontend.functions import opset_of
from tvmflow.frontend.onnx_graph import describe, operator_key, outer_uses
from tvmflow.frontend.onnx_shapes import Shape

# Their converters can compute on shapes (relax.ShapeExpr) and sizes (integer expressions) as on tensors.
SHAPE_OPERATORS = frozenset({
    "Reshape", "Resize", "ConstantOfShape", "Gather", "Slice", "Shape", "Expand", "Concat", "Equal", "Where",
    "Squeeze", "Unsqueeze", "Range", "Identity",
})
SIZE_OPERATORS = frozenset({"Add", "Sub", "Mul", "Div"})
SEQUENCE_OPERATORS = frozenset({
    "Optional", "OptionalGetElement", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert",
    "ConcatFromSequence", "SplitToSequence",
})


def import_model(model: ModelProto, shapes: Mapping[str, Shape], dtypes: Mapping[str, str]) -> tvm.IRModule:
    """A Relax function `main` whose parameters are the graph's inputs and whose result is its outputs, both in order.

    `shapes` and `dtypes` are those of the inputs; a name in a shape is one symbolic variable wherever it stands.
    The branches of an If are private functions: TVM's memory planning lets the branches of one function share storage
    that only one of them allocates. Raises UnsupportedError naming the node that TVM cannot convert.
    """
    symbols = {dim: tirx.Var(dim, "int64") for shape in shapes.values() for dim in shape if isinstance(dim, str)}
    sizes = {name: [symbols[dim] if isinstance(dim, str) else dim for dim in shape] for name, shape in shapes.items()}
    params = {name: relax.Var(name, relax.TensorType(sizes[name], dtypes[name])) for name in shapes}
    branches = relax.BlockBuilder()
    main = Importer(params, list(symbols.values()), opset_of(model), branches).function(model.graph)
    mod = branches.get()
    mod["main"] = main.with_attr("global_symbol", "main")
    return relax.transform.ConvertToDataflow(min_size=1)(mod)


class Importer(ONNXGraphImporter):  # type: ignore[misc] # TVM carries no types
    """TVM's importer with a loop of our own over the nodes of a graph.

    `given` are the values that the graph reads from outside, `symbols` the sizes it may mention; the functions of
    branches are added to `branches`.
    """

    def __init__(self, given: Mapping[str, relax.Expr], symbols: Sequence[tirx.Var], opset: int,
                 branches: relax.BlockBuilder) -> None:
        super().__init__({}, {}, keep_params_in_input=False, sanitize=False)
        self.opset = opset
        self._given = dict(given)
        self._symbols = symbols
        self._branches = branches
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
            try:
                results = self._branches_of(node) if node.op_type == "If" else self._convert(node)
            except Exception as exc:
                if isinstance(exc, UnsupportedError):
                    raise
                raise UnsupportedError(f"{describe(node)}: TVM cannot convert it: {_first_line(exc)}",
                                       "change the model so that it does without this node") from exc
            for name, result in zip(node.output, results, strict=False):
                self._nodes[name] = result
        for value in graph.output:
            self._nodes[value.name] = self._tensor(self._nodes[value.name])

    def _convert(self, node: NodeProto) -> list[Any]:
        """The values of a node's outputs, by its converter."""
        inputs = onnx_input(self._nodes[name] if name else None for name in node.input)
        if node.op_type == "Range" and not node.domain and all(_is_integer(value) for value in inputs):
            return [self._range(*inputs)]
        if not _stays_symbolic(node, inputs):
            inputs = onnx_input(self._tensor(value) for value in inputs)
        attributes = self._parse_attr(node.attribute)
        attributes["tvm_custom"] = {"name": node.name, "num_outputs": len(node.output)}
        converter = self._converters[operator_key(node)]
        result = converter.get_converter(self.opset)(self.bb, inputs, attributes, [self._nodes, self._params])
        if node.op_type in SEQUENCE_OPERATORS:
            return [self._bound(result)]
        results = self._fields(result)
        if len(results) < len(node.output):
            raise ValueError(f"it has {len(node.output)} outputs, and the converter gives {len(results)}")
        return results

    def _range(self, *limits: Any) -> relax.Var:
        """A Range of sizes is as long as they say; TVM's converter would give it a length that equals nothing else."""
        sizes = [value if _is_size(value) else int(value.value.numpy()) for value in limits]
        return self.bb.emit(relax.op.arange(*sizes, dtype="int64"))

    def _fields(self, result: Any) -> list[Any]:
        if isinstance(result, relax.Tuple):
            return [self._bound(field) for field in result]
        result = self._bound(result)
        if isinstance(result, relax.Expr) and isinstance(result.ty, relax.TupleType):
            return [self.bb.emit(relax.TupleGetItem(result, i)) for i in range(len(result.ty.fields))]
        return [result]

    def _bound(self, result: Any) -> Any:
        """A computation bound to a variable, so that all of its readers share it; anything else as it is."""
        return self.bb.emit(result) if isinstance(result, relax.Call) and not _is_size(result) else result

    def _tensor(self, value: Any) -> Any:
        """`value`, where it is a shape or a size, as the int64 tensor that it stands for."""
        if _is_size(value):
            size = self.bb.emit(relax.op.shape_to_tensor(relax.ShapeExpr([tirx.Cast("int64", value)])))
            return self.bb.emit(relax.op.reshape(size, ()))
        if isinstance(value, relax.Expr) and isinstance(value.ty, relax.ShapeType):
            return self.bb.emit(relax.op.shape_to_tensor(value))
        return value

    def _branches_of(self, node: NodeProto) -> list[Any]:
        """An If: only the branch that is taken runs."""
        condition = self._tensor(self._nodes[node.input[0]])
        if condition.ty.ndim != 0:
            condition = self.bb.emit(relax.op.reshape(condition, ()))
        bodies = {attribute.name: attribute.g for attribute in node.attribute}
        calls = [self._branch(bodies[name], f"{node.output[0]}_{name}") for name in ("then_branch", "else_branch")]
        return self._fields(self.bb.emit(relax.If(condition, *calls)))

    def _branch(self, graph: GraphProto, name: str) -> relax.Call:
        """The call of a private function that is the branch `graph`."""
        inside = {used: self._nodes[used] for used in sorted(outer_uses(graph))}
        arguments = []
        for used, value in inside.items():
            value = self._tensor(value) if _is_size(value) else value
            if isinstance(value, relax.Var):
                inside[used] = relax.Var(used, value.ty)
                arguments.append(value)
        if self._symbols:
            inside["sizes"] = relax.Var("sizes", relax.ShapeType(self._symbols))
            arguments.append(relax.ShapeExpr(self._symbols))
        function = Importer(inside, self._symbols, self.opset, self._branches).function(graph)
        return relax.Call(self._branches.add_func(relax.utils.copy_with_new_vars(function), name), arguments)


def _stays_symbolic(node: NodeProto, inputs: Sequence[Any]) -> bool:
    """Whether the converter may see shapes and sizes: those of SIZE_OPERATORS only together with constants."""
    if node.op_type in SIZE_OPERATORS:
        return all(_is_size(value) or isinstance(value, tvm.ir.GenericConst) for value in inputs)
    if node.op_type == "Cast":
        return any(attribute.name == "to" and attribute.i == TensorProto.INT64 for attribute in node.attribute)
    return node.op_type in SHAPE_OPERATORS


def _is_integer(value: Any) -> bool:
    """A size, or an int64 constant of one element."""
    if isinstance(value, tvm.ir.GenericConst):
        return str(value.ty.dtype) == "int64" and value.value.numpy().ndim == 0
    return _is_size(value)


def _is_size(value: Any) -> bool:
    return isinstance(value, tvm.ir.Expr) and bool(tvm.ir.is_prim_expr(value))


def _first_line(exc: BaseException) -> str:
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return (lines[-1] if lines else type(exc).__name__)[:300]
