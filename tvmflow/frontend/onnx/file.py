"""Reads an ONNX file with its external data, or says what is wrong with it and where.

The file may come from anywhere: nothing is allocated, opened or trusted before it was checked.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped] # has no types
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

from tvmflow.errors import ModelError
from tvmflow.files import open_regular, read_regular
from tvmflow.frontend.onnx import external_data, memory

MAX_PROTOBUF_BYTES = 2**31 - 1
TENSOR_NAME = TensorProto.DESCRIPTOR.fields_by_name["name"]
MAX_NESTING = 31  # graphs in attributes of nodes; protobuf reads no more
EXPORT_AGAIN = "export the model again, or fetch the whole file"
EXPORT_AS_ONNX = "export the model as ONNX, e.g. by torch.onnx.export"
# First bytes, and how far from the start they stand, of what is often taken for an ONNX file.
OTHER_FILES = (
    (b"version https://git-lfs", 0, "is a Git LFS pointer, not the model", "run `git lfs pull`"),
    (
        b"PK\x03\x04",
        0,
        "is a zip archive, not an ONNX file",
        "PyTorch's own files are such archives: export the model with torch.onnx.export or torch.export.save (.pt2); "
        "unpack any other",
    ),
    (b"TFL3", 4, "is a TensorFlow Lite model", "convert it, e.g. by tf2onnx --tflite"),
    (b"ORTM", 4, "is a model in ONNX Runtime's own format (.ort)", "give the ONNX file that it was made from"),
    (b"GGUF", 0, "is a GGUF file", EXPORT_AS_ONNX),
    (b"\x89HDF", 0, "is an HDF5 file, as Keras writes them", "convert it, e.g. by tf2onnx"),
    (b"{", 8, "is a safetensors file, which holds weights and no graph", EXPORT_AS_ONNX),
    (b"\x80\x02", 0, "is a Python pickle, as old versions of PyTorch write them", EXPORT_AS_ONNX),
    (b"\x80\x04", 0, "is a Python pickle", EXPORT_AS_ONNX),
    (b"\x1f\x8b", 0, "is compressed with gzip", "unpack it: gunzip"),
    (b"\x7fELF", 0, "is a program or library, not a model", "give the ONNX file"),
    (b"<", 0, "is a web page or XML, not an ONNX file", "the download went wrong: fetch the file itself"),
    (b"{", 0, "is JSON, not an ONNX file", "give the ONNX file itself"),
)


def read(path: Path) -> ModelProto:
    """The model in `path`, all of its weights in memory. Messages do not name `path`: the caller does.

    Raises ModelError when the file, one of its external data files, or what it declares cannot be used.
    """
    model = _parse(_bytes_of(path))
    del model.training_info[:]  # graphs that only training runs
    _check_text(model)
    _check_header(model)
    total = 0
    for tensor in tensors(model):
        memory.check_fits(f"tensor '{tensor.name}'", tensor.dims, tensor.data_type)
        if tensor.data_location == TensorProto.EXTERNAL:
            total += external_data.expected_bytes(tensor)
            memory.check_total("the external data", total)
            external_data.load(path, tensor)
        else:
            _check_inline(tensor)
    return model


def data_locations(path: Path) -> tuple[str, ...]:
    """Where the model in `path` keeps its weights outside of that file, from its folder, in alphabetical order."""
    model = _parse(_bytes_of(path))
    outside = [tensor for tensor in tensors(model) if tensor.data_location == TensorProto.EXTERNAL]
    return tuple(sorted({external_data.location(tensor) for tensor in outside}))


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
    """Every tensor of the model: weights and attributes, dense and sparse, in all graphs, functions and defaults."""
    pending = [model.graph]
    for function in model.functions:
        yield from _attribute_tensors(function.attribute_proto, pending)
        for node in function.node:
            yield from _attribute_tensors(node.attribute, pending)
    while pending:
        graph = pending.pop()
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
        for node in graph.node:
            yield from _attribute_tensors(node.attribute, pending)


def _attribute_tensors(attributes: Iterable[AttributeProto], pending: list[GraphProto]) -> Iterator[TensorProto]:
    """The tensors of attributes, whatever type they claim to have; graphs are added to `pending`."""
    for attribute in attributes:
        pending += [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]
        yield from [attribute.t] if attribute.HasField("t") else []
        yield from attribute.tensors
        for sparse in (
            *([attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []),
            *attribute.sparse_tensors,
        ):
            yield from (sparse.values, sparse.indices)


def _bytes_of(path: Path) -> bytes:
    with open_regular(path, ModelError, place="") as stream:
        size_bytes = os.fstat(stream.fileno()).st_size
    if size_bytes > MAX_PROTOBUF_BYTES:
        raise ModelError(
            f"{size_bytes:,} bytes are more than one protobuf file can hold",
            "store the weights as external data: onnx.save(..., save_as_external_data=True)",
        )
    memory.check_total("the file", size_bytes)
    return read_regular(path, ModelError, MAX_PROTOBUF_BYTES, place="")


def _parse(data: bytes) -> ModelProto:
    if not data:
        raise ModelError("the file is empty", EXPORT_AGAIN)
    for start, offset, what, hint in OTHER_FILES:
        if data[:64].lstrip().startswith(start) if start == b"<" else data[offset : offset + len(start)] == start:
            raise ModelError(what, hint)
    try:
        model: ModelProto = ModelProto.FromString(data)
    except DecodeError as exc:
        if "MaxDepth" in str(exc):
            raise ModelError(
                f"its branches or loops are nested more than {MAX_NESTING} deep", "export it with fewer levels"
            ) from None
        raise ModelError(f"not an ONNX file, or a truncated one ({len(data):,} bytes)", EXPORT_AGAIN) from None
    return model


def _check_text(model: ModelProto) -> None:
    """Raises ModelError where a text is not UTF-8: protobuf then gives bytes, which nothing later expects."""
    pending: list[Any] = [model]
    while pending:
        message = pending.pop()
        # Of tensors only what is text: to list their fields would copy their data.
        fields = [(TENSOR_NAME, message.name)] if isinstance(message, TensorProto) else message.ListFields()
        pending += message.external_data if isinstance(message, TensorProto) else []
        for field, value in fields:
            values = value if field.is_repeated else [value]
            if field.type == field.TYPE_MESSAGE:
                pending += values
            elif field.type == field.TYPE_STRING and (wrong := next((v for v in values if isinstance(v, bytes)), None)):
                raise ModelError(f"the {field.name.replace('_', ' ')} {wrong[:100]!r} is not UTF-8", EXPORT_AGAIN)


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
    if versions and versions[0] < 1:
        raise ModelError(f"opset {versions[0]} does not exist", EXPORT_AGAIN)
    if not model.graph.output:
        raise ModelError("the graph has no outputs", "name at least one output when the model is exported")


def _check_inline(tensor: TensorProto) -> None:
    """Data must have the declared size, raw or in the field of its type."""
    needed = external_data.expected_bytes(tensor)
    if tensor.HasField("raw_data"):
        if len(tensor.raw_data) != needed:
            raise ModelError(
                f"tensor '{tensor.name}' of shape {list(tensor.dims)} needs {needed:,} bytes of data and "
                f"has {len(tensor.raw_data):,}",
                EXPORT_AGAIN,
            )
        return
    known = memory.values_of(tensor)
    if known is not None and len(getattr(tensor, known[0])) != known[1]:
        raise ModelError(
            f"tensor '{tensor.name}' of shape {list(tensor.dims)} needs {known[1]:,} values and has "
            f"{len(getattr(tensor, known[0])):,}",
            EXPORT_AGAIN,
        )
