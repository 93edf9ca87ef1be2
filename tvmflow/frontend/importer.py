"""Runs TVM's ONNX importer over a normalised model, with our table of converters.

TVM's importer looks operators up by name alone, prints when a converter fails, cannot put a branch's bindings inside
the branch, and hands symbolic shapes to converters that take tensors. This subclass replaces its loop over nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto
from tvm import relax, tirx
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter, onnx_input

from tvmflow.errors import UnsupportedError
from tvmflow.frontend import ops
from tvmflow.frontend.functions import opset_of
from tvmflow.frontend.onnx_graph import describe
from tvmflow.frontend.onnx_shapes import Shape

# Their converters can compute on shapes (relax.ShapeExpr) and sizes (integer expressions) as on tensors.
SHAPE_OPERATORS = frozenset({
    "Reshape", "Resize", "ConstantOfShape", "Gather", "Slice", "Shape", "Expand", "Concat", "Equal", "Where", "Cast",
    "CastLike", "Squeeze", "Unsqueeze", "Range", "Identity",
})
SIZE_OPERATORS = frozenset({"Add", "Sub", "Mul", "Div"})
SEQUENCE_OPERATORS = frozenset({
    "Optional", "OptionalGetElement", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert",
    "ConcatFromSequence", "SplitToSequence",
})


def import_model(model: ModelProto, shapes: Mapping[str, Shape], dtypes: Mapping[str, str]) -> tvm.IRModule:
    """One Relax function `main` whose parameters are the graph's inputs and whose result is its outputs, both in order.

    `shapes` and `dtypes` are those of the inputs; a name in a shape is one symbolic variable wherever it stands.
    Raises UnsupportedError naming the node that TVM cannot convert.
    """
    symbols = {dim: tirx.Var(dim, "int64") for shape in shapes.values() for dim in shape if isinstance(dim, str)}
    symbolic = {name: [symbols[dim] if isinstance(dim, str) else dim for dim in shape]
                for name, shape in shapes.items()}
    importer = Importer(symbolic, dict(dtypes))
    mod = importer.from_onnx(model.graph, opset_of(model))
    mod["main"] = mod["main"].without_attr("num_input")
    return relax.transform.ConvertToDataflow(min_size=1)(mod)


class Importer(ONNXGraphImporter):  # type: ignore[misc] # TVM carries no types
    """TVM's importer with a loop of our own over the nodes of a graph."""

    def __init__(self, shapes: dict[str, list[Any]], dtypes: dict[str, str]) -> None:
        super().__init__(shapes, dtypes, keep_params_in_input=False, sanitize=False)
        self._converters = ops.convert_map()

    def _check_for_unsupported_ops(self, graph: GraphProto) -> None:
        """Nothing: `checks.check` has refused them already, all at once."""

    def _parse_graph_input(self, graph: GraphProto) -> None:
        for value in graph.input:
            var = self._new_var(value.name, shape=self._shape[value.name], dtype=self._dtype[value.name])
            self._nodes[value.name] = self._inputs[value.name] = var
        self._num_input = len(graph.input)

    def _parse_attr(self, attributes: Sequence[AttributeProto]) -> dict[str, Any]:
        """As TVM's, but an empty list is an empty tuple instead of an error."""
        lists = (AttributeProto.INTS, AttributeProto.FLOATS, AttributeProto.STRINGS)
        empty = {a.name: () for a in attributes if a.type in lists and not (a.ints or a.floats or a.strings)}
        parsed: dict[str, Any] = super()._parse_attr([a for a in attributes if a.name not in empty])
        return parsed | empty

    def _construct_nodes(self, graph: GraphProto) -> None:
        for node in graph.node:
            try:
                results = self._branches(node) if node.op_type == "If" else self._convert(node)
            except (Exception, tvm.error.TVMError) as exc:
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
        if not _stays_symbolic(node, inputs):
            inputs = onnx_input(self._tensor(value) for value in inputs)
        attributes = self._parse_attr(node.attribute)
        attributes["tvm_custom"] = {"name": node.name, "num_outputs": len(node.output)}
        converter = ops.DOMAINS[node.domain, node.op_type] if node.domain else self._converters[node.op_type]
        result = converter.get_converter(self.opset)(self.bb, inputs, attributes, [self._nodes, self._params])
        if isinstance(result, relax.Expr):
            result = self.bb.normalize(result)
        if node.op_type in SEQUENCE_OPERATORS:
            return [result]
        results = self._fields(result)
        if len(results) < len(node.output):
            raise ValueError(f"it has {len(node.output)} outputs, and the converter gives {len(results)}")
        return results

    def _fields(self, result: Any) -> list[Any]:
        if isinstance(result, relax.Tuple):
            return list(result)
        if isinstance(result, relax.Expr) and isinstance(result.ty, relax.TupleType):
            return [self.bb.emit(relax.TupleGetItem(result, i)) for i in range(len(result.ty.fields))]
        return [result]

    def _tensor(self, value: Any) -> Any:
        """`value`, where it is a shape or a size, as the int64 tensor that it stands for."""
        if isinstance(value, tvm.ir.Expr) and tvm.ir.is_prim_expr(value):
            size = self.bb.emit(relax.op.shape_to_tensor(relax.ShapeExpr([tirx.Cast("int64", value)])))
            return self.bb.emit(relax.op.reshape(size, ()))
        if isinstance(value, relax.Expr) and isinstance(value.ty, relax.ShapeType):
            return self.bb.emit(relax.op.shape_to_tensor(value))
        return value

    def _branches(self, node: NodeProto) -> list[Any]:
        """An If: only the branch that is taken runs."""
        condition = self._nodes[node.input[0]]
        if list(condition.ty.shape or []):
            condition = self.bb.emit(relax.op.reshape(condition, ()))
        bodies = {attribute.name: attribute.g for attribute in node.attribute}
        chosen = relax.If(condition, self._branch(bodies["then_branch"]), self._branch(bodies["else_branch"]))
        result = self.bb.emit(chosen)
        return self._fields(result)

    def _branch(self, graph: GraphProto) -> relax.SeqExpr:
        outer = dict(self._nodes)
        self.bb._begin_binding_block()
        for tensor in graph.initializer:
            self._nodes[tensor.name] = relax.const(self._parse_array(tensor))
        self._construct_nodes(graph)
        results = [self._nodes[value.name] for value in graph.output]
        result = self.bb.emit(results[0] if len(results) == 1 else relax.Tuple(results))
        block = self.bb._end_block()
        self._nodes = outer
        return relax.SeqExpr([block], result)


def _stays_symbolic(node: NodeProto, inputs: Sequence[Any]) -> bool:
    """Whether the converter may see shapes and sizes: those of SIZE_OPERATORS only together with constants."""
    if node.op_type in SIZE_OPERATORS:
        return all(_is_size(value) or isinstance(value, tvm.ir.GenericConst) for value in inputs)
    return node.op_type in SHAPE_OPERATORS


def _is_size(value: Any) -> bool:
    return isinstance(value, tvm.ir.Expr) and bool(tvm.ir.is_prim_expr(value))


def _first_line(exc: BaseException) -> str:
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return (lines[-1] if lines else type(exc).__name__)[:300]
