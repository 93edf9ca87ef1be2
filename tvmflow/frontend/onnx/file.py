"""Reads an ONNX file with its external data, or says what is wrong with it and where.

The file may come from anywhere: nothing is allocated, opened or trusted before it was checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx.external_data_helper
from google.protobuf.message import DecodeError  # type: ignore[import-untyped] # has no types
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

from tvmflow.errors import ModelError
from tvmflow.frontend.onnx import memory

MAX_PROTOBUF_BYTES = 2**31 - 1
EXPORT_AGAIN = "export the model again, or fetch the whole file"


def read(path: Path) -> ModelProto:
    """The model in `path`, all of its weights in memory. Messages do not name `path`: the caller does.

    Raises ModelError when the file, one of its external data files, or what it declares cannot be used.
    """
    model = _parse(_bytes_of(path))
    _check_header(model)
    for tensor in tensors(model):
        memory.check_fits(f"tensor '{tensor.name}'", tensor.dims, tensor.data_type)
        if tensor.data_location == TensorProto.EXTERNAL:
            _load_external(path, tensor)
        else:
            _check_inline(tensor)
    return model


def data_locations(path: Path) -> tuple[str, ...]:
    """Where the model in `path` keeps its weights outside of that file, from its folder, in alphabetical order."""
    model = _parse(_bytes_of(path))
    outside = [tensor for tensor in tensors(model) if tensor.data_location == TensorProto.EXTERNAL]
    return tuple(sorted({_entries(tensor).get("location", "") for tensor in outside}))


def graphs(model: ModelProto) -> Iterator[GraphProto]:
    """The main graph and the graphs inside its nodes, outermost first."""
    stack = [model.graph]
    while stack:
        graph = stack.pop()
        yield graph
        for node in graph.node:
            stack += subgraphs(node)


def subgraphs(node: NodeProto) -> list[GraphProto]:
    """The graphs that are attributes of `node` (branches, loop bodies), in the order of its attributes."""
    found: list[GraphProto] = []
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            found.append(attribute.g)
        found += attribute.graphs
    return found


def tensors(model: ModelProto) -> Iterator[TensorProto]:
    """Every tensor of the model: initialisers and attributes, in all graphs and functions."""
    for graph in graphs(model):
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield sparse.values
            yield sparse.indices
        yield from _attribute_tensors(graph.node)
    for function in model.functions:
        yield from _attribute_tensors(function.node)


def _attribute_tensors(nodes: object) -> Iterator[TensorProto]:
    for node in nodes:  # type: ignore[attr-defined] # a protobuf container has no type of its own
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                yield attribute.t
            yield from attribute.tensors


def _bytes_of(path: Path) -> bytes:
    try:
        size_bytes = path.stat().st_size
        if path.is_file() and size_bytes > MAX_PROTOBUF_BYTES:
            raise ModelError(
                f"{size_bytes:,} bytes are more than one protobuf file can hold",
                "store the weights as external data: onnx.save(..., save_as_external_data=True)",
            )
        return path.read_bytes()
    except FileNotFoundError:
        raise ModelError("no such file", "check model.path") from None
    except IsADirectoryError:
        raise ModelError("is a directory", "give the .onnx file inside it") from None
    except PermissionError:
        raise ModelError("no permission to read it", f"chmod u+r {path}") from None
    except OSError as exc:
        raise ModelError(f"cannot be read: {exc.strerror}", "check the file and its disk") from None


def _parse(data: bytes) -> ModelProto:
    if not data:
        raise ModelError("the file is empty", EXPORT_AGAIN)
    if data.startswith(b"version https://git-lfs"):
        raise ModelError("is a Git LFS pointer, not the model", "run `git lfs pull`")
    try:
        model: ModelProto = ModelProto.FromString(data)
    except DecodeError:
        raise ModelError(f"not an ONNX file, or a truncated one ({len(data):,} bytes)", EXPORT_AGAIN) from None
    return model


def _check_header(model: ModelProto) -> None:
    if not model.HasField("graph") or not (model.graph.node or model.graph.output):
        raise ModelError("holds no graph", EXPORT_AGAIN)
    if model.ir_version < 1:
        raise ModelError("has no IR version", EXPORT_AGAIN)
    if model.ir_version > onnx.IR_VERSION:
        raise ModelError(
            f"IR version {model.ir_version} is newer than onnx {onnx.__version__} knows ({onnx.IR_VERSION})",
            "install a newer onnx, or export with an older IR version",
        )
    versions = [entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")]
    if not versions and model.ir_version >= 3 and not any(node.domain for node in model.graph.node):
        raise ModelError("names no opset version", "export it again with an opset, e.g. opset_version=18")
    newest = onnx.defs.onnx_opset_version()
    if versions and versions[0] > newest:
        raise ModelError(
            f"opset {versions[0]} is newer than onnx {onnx.__version__} knows ({newest})",
            f"export with opset_version <= {newest}, or install a newer onnx",
        )
    if not model.graph.output:
        raise ModelError("the graph has no outputs", EXPORT_AGAIN)


def _expected_bytes(tensor: TensorProto) -> int:
    elements: int = math.prod(tensor.dims)
    return -(-elements * memory.bits_of(tensor.data_type) // 8)


def _check_inline(tensor: TensorProto) -> None:
    """Raw data must have the declared size; typed fields are checked by onnx itself."""
    if tensor.HasField("raw_data") and len(tensor.raw_data) != _expected_bytes(tensor):
        raise ModelError(
            f"tensor '{tensor.name}' of shape {list(tensor.dims)} needs {_expected_bytes(tensor):,} bytes of "
            f"data and has {len(tensor.raw_data):,}",
            EXPORT_AGAIN,
        )


def _entries(tensor: TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def _load_external(path: Path, tensor: TensorProto) -> None:
    """Reads one tensor's external data, once its file is known to lie beside the model and to be long enough."""
    entries = _entries(tensor)
    where = f"tensor '{tensor.name}'"
    location = entries.get("location", "")
    file = path.parent / location
    folder = path.parent.resolve()
    if not location or Path(location).is_absolute() or not file.resolve().is_relative_to(folder):
        raise ModelError(
            f"{where}: its external data '{location}' lies outside the model's folder",
            "external data must lie beside the model; save the model again with relative locations",
        )
    if not file.is_file():
        raise ModelError(
            f"{where}: its external data file {file} does not exist",
            f"put {location} beside the model, where the export wrote it",
        )
    try:
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", _expected_bytes(tensor)))
    except ValueError:
        raise ModelError(f"{where}: its external data has no valid offset and length", EXPORT_AGAIN) from None
    size_bytes = file.stat().st_size
    if offset < 0 or length != _expected_bytes(tensor):
        raise ModelError(
            f"{where} of shape {list(tensor.dims)} needs {_expected_bytes(tensor):,} bytes of external "
            f"data, and the model gives it {length:,} at offset {offset:,}",
            EXPORT_AGAIN,
        )
    if offset + length > size_bytes:
        raise ModelError(
            f"{where}: its external data file {file} is too short: {offset + length:,} bytes are needed, "
            f"it has {size_bytes:,}",
            EXPORT_AGAIN,
        )
    try:
        onnx.external_data_helper.load_external_data_for_tensor(tensor, str(folder))
    except (OSError, ValueError, onnx.checker.ValidationError) as exc:
        raise ModelError(
            f"{where}: its external data file {file} cannot be read: {exc}", "check the file's permissions"
        ) from None
    tensor.data_location = TensorProto.DEFAULT
    del tensor.external_data[:]
