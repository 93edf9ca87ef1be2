"""ONNX file -> Model: read, fix the shapes, simplify, refuse what cannot be compiled, import."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import onnx
import onnx_ir
import tvm
from onnx import ModelProto, TensorProto
from tvm import relax

from tvmflow import config
from tvmflow.errors import ConfigError, ModelError, UnsupportedError, first_line, innermost, last_line
from tvmflow.frontend.model import Model
from tvmflow.frontend.onnx import memory, ops
from tvmflow.frontend.onnx.checks import check, check_dense
from tvmflow.frontend.onnx.file import read
from tvmflow.frontend.onnx.function_bounds import check_functions
from tvmflow.frontend.onnx.graph import EXPORT_AGAIN, sort_nodes
from tvmflow.frontend.onnx.importer import import_model
from tvmflow.frontend.onnx.normalise import STEPS
from tvmflow.frontend.onnx.ranges import input_ranges
from tvmflow.frontend.onnx.shapes import (
    check_memory,
    dtype_name,
    fix_shapes,
    input_shapes,
    real_inputs,
    without_weights,
)
from tvmflow.frontend.sizes import shape_text
from tvmflow.frozen import evolve
from tvmflow.manifest import Signature, TensorSpec


def load(path: Path, model_inputs: Mapping[str, config.ModelInput], dims: Mapping[str, int]) -> Model:
    """The model in the ONNX file `path`, its weights as constants.

    `model_inputs` gives shapes and dtypes where the file leaves them open, `dims` sizes of named dimensions; all other
    named dimensions stay symbolic. Raises ModelError for a file that cannot be used, UnsupportedError for what cannot
    be compiled, ConfigError where `model_inputs` or `dims` do not fit the model; each message starts with `path`.
    """
    with _located(path):
        model = _checked(path)
        fix_shapes(model, model_inputs, dims)
        check_memory(model)
        inputs, outputs = _input_specs(model), [_declared(value) for value in model.graph.output]
        with memory.bounded(model):
            model, notes = _normalised(model)
            check(model, ops.convert_map(), ops.refusals)
            dtypes = {value.name: dtype_name(value.type.tensor_type.elem_type) for value in model.graph.input}
            mod, more = import_model(model, input_shapes(model.graph), dtypes)
        ranged = [evolve(spec, range=limits) for spec, limits in zip(inputs, input_ranges(model), strict=True)]
        return Model(mod, Signature(inputs=tuple(ranged), outputs=_output_specs(outputs, inputs, mod)), notes + more)


def inputs(
    path: Path, model_inputs: Mapping[str, config.ModelInput], dims: Mapping[str, int]
) -> tuple[TensorSpec, ...]:
    """What goes into the model in the ONNX file `path`, not imported; raises ModelError and ConfigError likewise."""
    with _located(path):
        model = _checked(path)
        fix_shapes(model, model_inputs, dims)
        return tuple(_input_specs(model))


def _checked(path: Path) -> ModelProto:
    """The model in `path`, whose structure is right, and which is not far larger than its file once it is unfolded."""
    model = read(path)
    check_functions(model)
    sort_nodes(model)
    _check_valid(model)
    check_dense(model)
    return model


@contextmanager
def _located(path: Path) -> Iterator[None]:
    """Puts `path` in front of the messages of what is raised inside."""
    try:
        yield
    except (ModelError, ConfigError) as exc:
        raise exc.within(f"{path}: ") from exc
    except UnicodeDecodeError as exc:
        raise ModelError(f"{path}: holds names that are not UTF-8", EXPORT_AGAIN) from exc
    except onnx_ir.serde.SerdeError as exc:
        raise ModelError(f"{path}: not a valid model: {last_line(innermost(exc))[:300]}", EXPORT_AGAIN) from exc
    except MemoryError as exc:
        raise ModelError(
            f"{path}: its import takes far more memory than what the file holds: {first_line(exc)}",
            "make the sizes that the model's constants and attributes state smaller",
        ) from exc


def _normalised(model: ModelProto) -> tuple[ModelProto, tuple[str, ...]]:
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
    for value in (*light.graph.input, *light.graph.output):
        is_tensor = value.type.WhichOneof("value") in (None, "tensor_type")
        if is_tensor and not value.type.tensor_type.HasField("shape"):
            # The checker wants a full type, which neither the standard nor any runtime does. Inputs get theirs later.
            value.type.CopyFrom(onnx.helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    try:
        onnx.checker.check_model(light)
    except onnx.checker.ValidationError as exc:
        lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
        where = next((f" ({line})" for line in lines if "Context:" in line), "").replace("==> Context: ", "")
        raise ModelError(
            f"not a valid model: {lines[0] if lines else 'onnx.checker refuses it'}{where[:300]}",
            EXPORT_AGAIN,
            str(exc),
        ) from None


def _input_specs(model: ModelProto) -> list[TensorSpec]:
    shapes = input_shapes(model.graph)
    return [
        TensorSpec(name=value.name, dtype=dtype_name(value.type.tensor_type.elem_type), shape=shapes[value.name])
        for value in real_inputs(model.graph)
    ]


def _declared(value: onnx.ValueInfoProto) -> tuple[str, str]:
    """Name and dtype of an output as the file has them; the dtype is "undefined" where it says nothing."""
    return value.name, dtype_name(value.type.tensor_type.elem_type)


def _output_specs(
    outputs: Sequence[tuple[str, str]], inputs: Sequence[TensorSpec], mod: tvm.IRModule
) -> tuple[TensorSpec, ...]:
    """The outputs with the names of the file, and the dtypes and shapes of what was imported."""
    result = mod["main"].ret_ty
    types = list(result.fields) if isinstance(result, relax.TupleType) else [result]
    known = {dim for spec in inputs for dim in spec.shape if isinstance(dim, str)}
    return tuple(_output_spec(name, dtype, ty, known) for (name, dtype), ty in zip(outputs, types, strict=True))


def _output_spec(name: str, declared: str, ty: relax.Type, known: set[str]) -> TensorSpec:
    """One output; refuses what the importer gave another type than the file declares."""
    if not isinstance(ty, relax.TensorType) or ty.ndim < 0:
        raise UnsupportedError(
            f"output '{name}' has no rank that is known before the model runs",
            "export the model so that both branches of each If give the same rank",
        )
    dtype = str(ty.dtype)
    if declared not in ("undefined", dtype):
        raise UnsupportedError(
            f"output '{name}' is declared as {declared}, and the nodes before it give {dtype}", "export the model again"
        )
    return TensorSpec(name=name, dtype=dtype, shape=shape_text(ty, known))
