"""ONNX file -> Model: read, fix the shapes, simplify, refuse what cannot be compiled, import."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import onnx
import tvm
from onnx import ModelProto
from tvm import relax, tirx

from tvmflow import config
from tvmflow.artifact import Signature, TensorSpec
from tvmflow.errors import ConfigError, ModelError, UnsupportedError
from tvmflow.frontend.checks import check
from tvmflow.frontend.importer import import_model
from tvmflow.frontend.model import Model
from tvmflow.frontend.normalise import STEPS
from tvmflow.frontend.onnx_file import read
from tvmflow.frontend.onnx_graph import in_order
from tvmflow.frontend.onnx_shapes import check_memory, dtype_name, fix_shapes, input_shapes, real_inputs, without_weights
from tvmflow.frontend.ranges import input_ranges


def load(path: Path, model_inputs: Mapping[str, config.ModelInput], dims: Mapping[str, int]) -> Model:
    """The model in the ONNX file `path`, its weights as constants.

    `model_inputs` gives shapes and dtypes where the file leaves them open, `dims` sizes of named dimensions; all other
    named dimensions stay symbolic. Raises ModelError for a file that cannot be used, UnsupportedError for what cannot
    be compiled, ConfigError where `model_inputs` or `dims` do not fit the model; each message starts with `path`.
    """
    with _located(path):
        original = fix_shapes(in_order(read(path)), model_inputs, dims)
        check_memory(original)
        simple, notes = _simplified(original)
        check(simple)
        _check_valid(simple)
        shapes = input_shapes(simple.graph)
        dtypes = {value.name: dtype_name(value.type.tensor_type.elem_type) for value in simple.graph.input}
        mod = import_model(simple, shapes, dtypes)
        return Model(mod, _signature(original, simple, mod), notes)


@contextmanager
def _located(path: Path) -> Iterator[None]:
    """Puts `path` in front of the messages of what is raised inside."""
    try:
        yield
    except (ModelError, ConfigError) as exc:
        raise type(exc)(f"{path}: {exc.message}", exc.hint, exc.details) from exc


def _simplified(model: ModelProto) -> tuple[ModelProto, tuple[str, ...]]:
    """The normalised model, and one note for each step that changed the number of nodes."""
    notes = []
    for step in STEPS:
        before = len(model.graph.node)
        model = step.apply(model)
        if len(model.graph.node) != before:
            notes.append(f"{step.name}: {before} nodes became {len(model.graph.node)}")
    return model, tuple(notes)


def _check_valid(model: ModelProto) -> None:
    """onnx's own checker; TVM's importer would only warn of what it finds."""
    light = without_weights(model)
    for value in light.graph.output:
        value.type.tensor_type.shape.SetInParent()  # it asks for a shape, which the standard does not
    try:
        onnx.checker.check_model(light)
    except onnx.checker.ValidationError as exc:
        lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
        raise ModelError(f"not a valid model: {lines[0] if lines else 'onnx.checker refuses it'}",
                         "export the model again, with a newer exporter if you can", str(exc)) from None


def _signature(original: ModelProto, simple: ModelProto, mod: tvm.IRModule) -> Signature:
    """Names of the file, shapes and dtypes of what was imported."""
    shapes = input_shapes(original.graph)
    inputs = [
        TensorSpec(name=value.name, dtype=dtype_name(value.type.tensor_type.elem_type), shape=shapes[value.name],
                   range=limits)
        for value, limits in zip(real_inputs(original.graph), input_ranges(simple), strict=True)
    ]
    result = mod["main"].ret_ty
    types = list(result.fields) if isinstance(result, relax.TupleType) else [result]
    known = {dim for shape in shapes.values() for dim in shape if isinstance(dim, str)}
    outputs = [_output_spec(value, ty, known) for value, ty in zip(original.graph.output, types, strict=True)]
    return Signature(inputs=tuple(inputs), outputs=tuple(outputs))


def _output_spec(value: onnx.ValueInfoProto, ty: relax.Type, known: set[str]) -> TensorSpec:
    """One output; refuses what the importer gave another type than the file declares."""
    if not isinstance(ty, relax.TensorType) or ty.ndim < 0:
        raise UnsupportedError(f"output '{value.name}' has no rank that is known before the model runs",
                               "export the model so that both branches of each If give the same rank")
    dtype, declared = str(ty.dtype), value.type.tensor_type.elem_type
    if declared and dtype != dtype_name(declared):
        raise UnsupportedError(f"output '{value.name}' is declared as {dtype_name(declared)}, and the nodes before it "
                               f"give {dtype}", "export the model again")
    if not isinstance(ty.shape, relax.ShapeExpr):
        return TensorSpec(name=value.name, dtype=dtype, shape=("?",) * ty.ndim)
    return TensorSpec(name=value.name, dtype=dtype, shape=tuple(_size(dim, known) for dim in ty.shape.values))


def _size(dim: tirx.PrimExpr, known: set[str]) -> int | str:
    """A size, a dimension's name, an expression of names in brackets, or "?" where only run time knows."""
    if isinstance(dim, tirx.IntImm):
        return int(dim.value)
    names = {var.name for var in tirx.analysis.undefined_vars(dim)}
    if not names <= known:
        return "?"
    return str(dim) if isinstance(dim, tirx.Var) else f"({dim})"
