"""Broken ONNX files: each kind with its message, and none of them read beyond what was checked."""

from __future__ import annotations

import os

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.numpy_helper import from_array
from onnx_files import added, external, message_of, model, node, write

from tvmflow import config
from tvmflow.errors import ConfigError
from tvmflow.frontend.onnx import memory
from tvmflow.frontend.onnx.file import read
from tvmflow.frontend.onnx.graph import sort_nodes
from tvmflow.frontend.onnx.shapes import check_memory, fix_shapes, input_shapes


def newer_opset():
    return model([helper.make_node("Relu", ["x"], ["y"])], opset=999)


def without_opset():
    proto = model([helper.make_node("Relu", ["x"], ["y"])])
    del proto.opset_import[:]
    return proto


def short_weight():
    tensor = from_array(np.ones(4, "float32"), "w")
    tensor.raw_data = tensor.raw_data[:-1]
    return added(tensor)


FILES = {
    "empty": (b"", "the file is empty"),
    "text": (b"this is no model\n" * 9, "not an ONNX file, or a truncated one (153 bytes)"),
    "truncated": (
        added(from_array(np.ones(4, "float32"), "w")).SerializeToString()[:60],
        "not an ONNX file, or a truncated one (60 bytes)",
    ),
    "Git LFS": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        "is a Git LFS pointer, not the model",
    ),
    "zip": (b"PK\x03\x04" + bytes(99), "is a zip archive, not an ONNX file"),
    "TensorFlow Lite": (b"\x1c\0\0\0TFL3" + bytes(99), "is a TensorFlow Lite model"),
    "ORT format": (b"\x1c\0\0\0ORTM" + bytes(99), "is a model in ONNX Runtime's own format (.ort)"),
    "web page": (b"\n<!DOCTYPE html><html>", "is a web page or XML, not an ONNX file"),
    "pickle": (b"\x80\x02}q\0", "is a Python pickle, as old versions of PyTorch write them"),
    "safetensors": (b"\x08" + bytes(7) + b'{"w": 0}', "is a safetensors file, which holds weights and no graph"),
    "gzip": (b"\x1f\x8b\x08", "is compressed with gzip"),
    "JSON": (b'{"ir_version": 8}', "is JSON, not an ONNX file"),
    "no UTF-8": (
        model([helper.make_node("Relu", ["x"], ["y"])]).SerializeToString().replace(b"Relu", b"R\xfflu"),
        "the op type b'R\\xfflu' is not UTF-8",
    ),
    "few values": (
        added(TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], float_data=[1, 2])).SerializeToString(),
        "tensor 'w' of shape [4] needs 4 values and has 2",
    ),
    "no values": (
        added(TensorProto(name="w", data_type=TensorProto.INT4, dims=[3])).SerializeToString(),
        "tensor 'w' of shape [3] needs 2 values and has 0",
    ),
    "no graph": (onnx.ModelProto(ir_version=10).SerializeToString(), "holds no graph"),
    "no opset": (without_opset().SerializeToString(), "names no opset version"),
    "newer opset": (
        newer_opset().SerializeToString(),
        f"opset 999 is newer than onnx {onnx.__version__} knows ({onnx.defs.onnx_opset_version()})",
    ),
    "newer IR": (
        model([helper.make_node("Relu", ["x"], ["y"])], ir=99).SerializeToString(),
        f"IR version 99 is newer than onnx {onnx.__version__} knows ({onnx.IR_VERSION})",
    ),
    "no outputs": (
        model([helper.make_node("Relu", ["x"], ["y"])], outputs=()).SerializeToString(),
        "the graph has no outputs",
    ),
    "short weight": (short_weight().SerializeToString(), "tensor 'w' of shape [4] needs 16 bytes of data and has 15"),
}


@pytest.mark.parametrize(("data", "message"), FILES.values(), ids=FILES.keys())
def test_a_broken_file(tmp_path, data, message):
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    assert message_of(read, path) == message


def test_no_file_a_directory_no_permission(tmp_path):
    assert message_of(read, tmp_path / "none.onnx") == "no such file"
    assert message_of(read, tmp_path) == "is a directory, not a file"
    if os.getuid():
        path = write(tmp_path / "m.onnx", newer_opset())
        path.chmod(0)
        assert message_of(read, path) == "no permission to read it"


def field(tag, data):
    """A field of protobuf's wire format that holds a message."""
    return tag + bytes([len(data) & 127 | 128, len(data) >> 7]) + data


def test_nesting_beyond_what_protobuf_reads(tmp_path):
    graph = b""
    for _ in range(40):  # the graph of an attribute of a node
        graph = field(b"\x0a", field(b"\x2a", field(b"\x32", graph)))
    (tmp_path / "m.onnx").write_bytes(field(b"\x3a", graph))
    assert message_of(read, tmp_path / "m.onnx") == "its branches or loops are nested more than 31 deep"


def test_a_weight_beyond_memory_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: type("M", (), {"available": 2**33}))
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[10**6, 10**6])
    path = write(tmp_path / "m.onnx", added(external(weight, "w.bin")))
    assert message_of(read, path) == (
        "tensor 'w' of shape [1000000, 1000000] takes 4,000,000,000,000 bytes, and "
        "8,589,934,592 bytes of memory are free"
    )


def test_a_computed_value_beyond_memory_is_refused(monkeypatch):
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: type("M", (), {"available": 2**33}))
    shape = from_array(np.array([10**6, 10**6]), "s")
    proto = model(
        [
            helper.make_node("ConstantOfShape", ["s"], ["huge"]),
            helper.make_node("ReduceMax", ["huge"], ["m"], keepdims=0),
            node(["x", "m"], ["y"]),
        ],
        weights=[shape],
    )
    assert message_of(check_memory, proto) == (
        "value 'huge' of shape [1000000, 1000000] takes 4,000,000,000,000 bytes, and 8,589,934,592 bytes of memory "
        "are free"
    )


GRAPHS = {
    "defined twice": (
        [node(["x", "x"], ["y"], "a"), node(["x", "x"], ["y"], "b")],
        "value 'y' is defined twice, by Add 'a' and by Add 'b'",
    ),
    "over an input": (
        [node(["x", "x"], ["x"], "a"), node(["x", "x"], ["y"])],
        "value 'x' is defined twice, by an input or initialiser and by Add 'a'",
    ),
    "never defined": (
        [node(["x", "gone"], ["y"])],
        "node Add (output 'y'), number 0, reads 'gone', which nothing defines",
    ),
    "no such output": ([node(["x", "x"], ["z"])], "output 'y' is defined by nothing"),
    "cycle": (
        [node(["x", "b"], ["a"], "A"), node(["x", "a"], ["b"], "B"), node(["a", "b"], ["y"], "C")],
        "the graph has a cycle: Add 'A' -> Add 'B' -> Add 'A'",
    ),
}


@pytest.mark.parametrize(("nodes", "message"), GRAPHS.values(), ids=GRAPHS.keys())
def test_a_broken_graph(nodes, message):
    assert message_of(sort_nodes, model(nodes)) == message


def test_unsorted_nodes_are_sorted():
    proto = model([node(["a", "b"], ["y"]), node(["a", "x"], ["b"]), node(["x", "x"], ["a"])])
    sort_nodes(proto)
    assert [n.output[0] for n in proto.graph.node] == ["a", "b", "y"]
    onnx.checker.check_model(model(proto.graph.node, outputs=()))


def named():
    return model([node(["x", "z"], ["y"])], [("x", ["batch.size", 3, "?", None]), ("z", ["batch.size", 3, 1, -1])])


def test_open_dimensions_get_names_that_are_identifiers():
    proto = named()
    fix_shapes(proto, {}, {})
    assert input_shapes(proto.graph) == {
        "x": ("batch_size", 3, "x_dim2", "x_dim3"),
        "z": ("batch_size", 3, 1, "z_dim3"),
    }


def test_sizes_by_either_name_and_by_input():
    proto = named()
    fix_shapes(proto, {"z": config.ModelInput(shape=("n", 3, 1, 5))}, {"batch.size": 2, "x_dim3": 7, "n": 4})
    assert input_shapes(proto.graph) == {"x": (2, 3, "x_dim2", 7), "z": (4, 3, 1, 5)}


HAVE = "does not fit the model, which has ['batch.size', 3, 'x_dim2', 'x_dim3']"
CHOOSE = "only sizes that the model leaves open can be chosen"
SHAPES = {
    "input": ({"w": config.ModelInput()}, {}, "model.inputs: the model has no input 'w'", "its inputs are 'x', 'z'"),
    "dimension": (
        {},
        {"time": 3},
        "shapes.dims: the model has no dimension 'time'",
        "its dimensions are 'batch.size', 'batch_size', 'x_dim2', 'x_dim3', 'z_dim3'",
    ),
    "rank": ({"x": config.ModelInput(shape=(1, 3))}, {}, f"model.inputs.x.shape [1, 3] {HAVE}", CHOOSE),
    "size": ({"x": config.ModelInput(shape=(1, 4, 5, 5))}, {}, f"model.inputs.x.shape [1, 4, 5, 5] {HAVE}", CHOOSE),
    "dtype": (
        {"x": config.ModelInput(dtype="int32")},
        {},
        "model.inputs.x.dtype is int32, and the model's is float32",
        'take dtype = "float32", or export the model with that type',
    ),
}


@pytest.mark.parametrize(("inputs", "dims", "message", "hint"), SHAPES.values(), ids=SHAPES.keys())
def test_shapes_that_do_not_fit(inputs, dims, message, hint):
    with pytest.raises(ConfigError) as caught:
        fix_shapes(named(), inputs, dims)
    assert (caught.value.message, caught.value.hint) == (message, hint)


def test_inputs_without_rank_or_of_other_kinds():
    ranked = model([helper.make_node("Relu", ["x"], ["y"])], [("x", None)])
    assert message_of(fix_shapes, ranked, {}, {}) == "input 'x' has no shape, not even a rank"
    fix_shapes(ranked, {"x": config.ModelInput(shape=(2, "t"))}, {})
    assert input_shapes(ranked.graph) == {"x": (2, "t")}
    ranked.graph.input.append(helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, None))
    assert message_of(fix_shapes, ranked, {}, {}) == "input 's' is a sequence, not a tensor"
    del ranked.graph.input[1:]
    ranked.graph.input.append(helper.make_tensor_value_info("t", TensorProto.STRING, [1]))
    assert message_of(fix_shapes, ranked, {}, {}) == "input 't' has the type string"
