"""Gives every input of an ONNX model a full shape: sizes and named dimensions."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import get_args

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from tvmflow import config
from tvmflow.errors import ConfigError, ModelError, UnsupportedError
from tvmflow.frontend.onnx import memory
from tvmflow.frontend.onnx.file import graphs

Shape = tuple[int | str, ...]
# Weights above this many elements are hidden from shape inference, which copies the whole model.
MAX_INFERRED_ELEMENTS = 4096
MAX_NAME = 200  # of a value's name, which may have any length, inside
FEW = 100


def fix_shapes(model: ModelProto, inputs: Mapping[str, config.ModelInput], dims: Mapping[str, int]) -> None:
    """Gives the inputs of `model`, in place, the shapes of `inputs`, and named dimensions the sizes of `dims`.

    What stays open has a name that is a valid identifier, the same name for the same size in all inputs. Shapes that
    the file declares for other values are dropped, because they may contradict the new ones.
    Raises ConfigError where `inputs` or `dims` do not fit the model, ModelError for an input without a shape.
    """
    real = real_inputs(model.graph)
    _known("input", inputs, [value.name for value in real], "model.inputs")
    shapes = {value.name: _shape_of(value, inputs.get(value.name)) for value in real}
    names = _dim_names(shapes)
    _known("dimension", dims, sorted({*names, *names.values()}), "shapes.dims")
    for value in real:
        sizes = [
            dims.get(dim, dims.get(names[dim], names[dim])) if isinstance(dim, str) else dim
            for dim in shapes[value.name]
        ]
        _check_dtype(value, inputs.get(value.name))
        elem_type = value.type.tensor_type.elem_type
        value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, elem_type, sizes))
        memory.check_fits(f"input '{value.name}'", [s for s in sizes if isinstance(s, int)], elem_type)
    for value in model.graph.output:
        for dim in value.type.tensor_type.shape.dim:
            dim.Clear()
    for graph in graphs(model):
        del graph.value_info[:]


def real_inputs(graph: GraphProto) -> list[ValueInfoProto]:
    """The inputs that a caller gives: not those that are the names of weights."""
    weights = {tensor.name for tensor in graph.initializer}
    return [value for value in graph.input if value.name not in weights]


def input_shapes(graph: GraphProto) -> dict[str, Shape]:
    """The shapes of the inputs that a caller gives, once they are fixed."""
    return {value.name: _dims(value.type.tensor_type) or () for value in real_inputs(graph)}


def check_memory(model: ModelProto) -> None:
    """Raises ModelError for the first value of a known shape that alone exceeds this machine's free memory."""
    for name, (elem_type, shape) in value_types(model).items():
        if shape is not None and all(isinstance(size, int) for size in shape):
            memory.check_fits(f"value '{name}'", [int(size) for size in shape], elem_type)


def value_types(model: ModelProto) -> dict[str, tuple[int, Shape | None]]:
    """Element type and shape (None where even the rank is unknown; "" for an unknown size) of each value of the
    main graph that shape inference finds. Raises ModelError when the model contradicts itself."""
    try:
        inferred = onnx.shape_inference.infer_shapes(without_weights(model), strict_mode=False, data_prop=True)
    except (onnx.shape_inference.InferenceError, ValueError) as exc:
        raise ModelError(
            f"the shapes of the model contradict each other: {exc}", "check model.inputs and shapes.dims"
        ) from None
    graph = inferred.graph
    found = {value.name: value.type.tensor_type for value in (*graph.input, *graph.value_info, *graph.output)}
    types = {name: (tensor.elem_type, _dims(tensor)) for name, tensor in found.items()}
    types.update({tensor.name: (tensor.data_type, tuple(tensor.dims)) for tensor in graph.initializer})
    return types


def contradiction(node: NodeProto, inputs: Sequence[ValueInfoProto | None], opset: int) -> Exception | None:
    """What ONNX's own shape inference says against `node` with inputs of these shapes, None where it says nothing."""
    known = [value for value in inputs if value is not None]
    if len(known) < len(inputs):
        return None
    outputs = [onnx.helper.make_empty_tensor_value_info(name) for name in node.output if name]
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "node", known, outputs),
        opset_imports=[
            onnx.helper.make_opsetid(domain, version) for domain, version in {node.domain: 1, "": opset}.items()
        ],
    )
    try:
        onnx.shape_inference.infer_shapes(model, strict_mode=True)
    except onnx.shape_inference.InferenceError as exc:
        wrong: Exception = exc
        return None if "[TypeInferenceError]" in str(exc) else wrong
    return None


def without_weights(model: ModelProto) -> ModelProto:
    """A copy in which large weights are inputs: small enough for what copies the whole model."""
    light = ModelProto(ir_version=max(model.ir_version, 4), opset_import=model.opset_import, functions=model.functions)
    light.graph.name = model.graph.name
    light.graph.node.extend(model.graph.node)
    light.graph.output.extend(model.graph.output)
    light.graph.input.extend(real_inputs(model.graph))
    for sparse in model.graph.sparse_initializer:
        tensor = sparse.values
        light.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, sparse.dims))
    for tensor in model.graph.initializer:
        if math.prod(tensor.dims) > MAX_INFERRED_ELEMENTS:
            light.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        else:
            light.graph.initializer.append(tensor)
    return light


def _dims(tensor: onnx.TypeProto.Tensor) -> Shape | None:
    if not tensor.HasField("shape"):
        return None
    return tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in tensor.shape.dim)


def _known(kind: str, given: Mapping[str, object], known: Sequence[str], place: str) -> None:
    for name in given:
        if name not in known:
            have = ", ".join(f"'{known_name}'" for known_name in known) or "none"
            raise ConfigError(f"{place}: the model has no {kind} '{name}'", f"its {kind}s are {have}")


def _shape_of(value: ValueInfoProto, given: config.ModelInput | None) -> Shape:
    """The shape of an input: from the config where it says so, else from the file; unnamed sizes get names."""
    if kind := kind_of(value):
        raise UnsupportedError(
            f"input '{value.name}' is {kind}, not a tensor", "export the model with tensors as inputs"
        )
    declared = _dims(value.type.tensor_type)
    named = (
        None
        if declared is None
        else tuple(
            dim if isinstance(dim, int) and dim >= 0 else _symbol(dim, value.name, axis)
            for axis, dim in enumerate(declared)
        )
    )
    if given is None or given.shape is None:
        if named is None:
            raise ModelError(
                f"input '{value.name}' has no shape, not even a rank",
                f'give one: [model.inputs."{value.name}"] shape = [1, 3, 224, 224]',
            )
        return named
    fits = named is None or (
        len(named) == len(given.shape)
        and all(
            isinstance(have, str) or isinstance(want, str) or have == want
            for have, want in zip(named, given.shape, strict=True)
        )
    )
    if not fits:
        raise ConfigError(
            f"model.inputs.{value.name}.shape {list(given.shape)} does not fit the model, "
            f"which has {list(named or ())}",
            "only sizes that the model leaves open can be chosen",
        )
    fixed = named or given.shape
    return tuple(have if isinstance(have, int) else want for have, want in zip(fixed, given.shape, strict=True))


def _symbol(dim: int | str, value: str, axis: int) -> str:
    """The file's own name of a dimension, or `<input>_dim<axis>` where it has none ("", "?", -1)."""
    return dim if isinstance(dim, str) and re.search(r"\w", dim) else f"{value}_dim{axis}"


def _dim_names(shapes: Mapping[str, Shape]) -> dict[str, str]:
    """A valid and unique identifier for each dimension's name, in the order of their first use."""
    symbols = dict.fromkeys(dim for shape in shapes.values() for dim in shape if isinstance(dim, str))
    taken = {symbol for symbol in symbols if symbol.isidentifier() and symbol.isascii()}
    return {symbol: symbol if symbol in taken else unique_name(symbol, taken) for symbol in symbols}


def unique_name(name: str, taken: set[str]) -> str:
    """An ASCII identifier made of `name` that is not in `taken`; it is added to it."""
    base = re.sub(r"\W", "_", name[:MAX_NAME], flags=re.ASCII)
    base = base if base and not base[0].isdigit() else f"v_{base}"
    candidate, number = base, 1
    while candidate in taken:
        number = number + 1 if number < FEW else max(number + 1, len(taken))  # any number of names may look alike
        candidate = f"{base}_{number}"
    taken.add(candidate)
    return candidate


def _check_dtype(value: ValueInfoProto, given: config.ModelInput | None) -> None:
    elem_type = value.type.tensor_type.elem_type
    if elem_type == TensorProto.UNDEFINED and given is not None and given.dtype is not None:
        elem_type = onnx.helper.np_dtype_to_tensor_dtype(given.dtype)
        value.type.tensor_type.elem_type = elem_type
    have = dtype_name(elem_type)
    if elem_type == TensorProto.UNDEFINED:
        raise ModelError(
            f"input '{value.name}' states no element type", f'give one: [model.inputs."{value.name}"] dtype = "float32"'
        )
    if have not in get_args(config.DType):
        raise UnsupportedError(
            f"input '{value.name}' has the type {have}", "inputs can be " + ", ".join(get_args(config.DType))
        )
    if given is not None and given.dtype is not None and given.dtype != have:
        raise ConfigError(
            f"model.inputs.{value.name}.dtype is {given.dtype}, and the model's is {have}",
            f'take dtype = "{have}", or export the model with that type',
        )


def kind_of(value: ValueInfoProto) -> str:
    """What a value that is not a tensor is, with an article; "" for tensors, whatever is stated of their type."""
    which = value.type.WhichOneof("value")
    return {
        None: "",
        "tensor_type": "",
        "sequence_type": "a sequence",
        "map_type": "a map",
        "optional_type": "an optional value",
        "sparse_tensor_type": "a sparse tensor",
    }.get(which, "an opaque value")


def dtype_name(elem_type: int) -> str:
    """numpy's name of an ONNX element type, or ONNX's own where numpy has none."""
    if elem_type in (TensorProto.UNDEFINED, TensorProto.STRING):
        return "string" if elem_type else "undefined"
    if elem_type not in TensorProto.DataType.values():
        return f"number {elem_type}"
    return str(onnx.helper.tensor_dtype_to_np_dtype(elem_type))
