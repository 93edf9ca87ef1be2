"""Broken ONNX files: each kind with its message, and none of them read beyond what was checked."""

from __future__ import annotations

import os

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.numpy_helper import from_array

from tvmflow import config
from tvmflow.errors import ConfigError, TvmflowError
from tvmflow.frontend import memory
from tvmflow.frontend.onnx_file import data_locations, read, tensors
from tvmflow.frontend.onnx_graph import sort_nodes
from tvmflow.frontend.onnx_shapes import check_memory, fix_shapes, input_shapes


def model(nodes, inputs=(("x", [4]),), outputs=("y",), weights=(), opset=18, ir=10):
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    return helper.make_model(helper.make_graph(nodes, "g", values, results, weights), ir_version=ir,
                             opset_imports=[helper.make_opsetid("", opset)])


def added(weight):
    return model([helper.make_node("Add", ["x", "w"], ["y"])], weights=[weight])


def node(inputs, outputs, name=""):
    return helper.make_node("Add", inputs, outputs, name)


def external(tensor, location, **entries):
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def message_of(function, *args):
    with pytest.raises(TvmflowError) as caught:
        function(*args)
    assert caught.value.hint
    return caught.value.message


def write(path, proto):
    path.write_bytes(proto.SerializeToString())
    return path


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
    "truncated": (added(from_array(np.ones(4, "float32"), "w")).SerializeToString()[:60],
                  "not an ONNX file, or a truncated one (60 bytes)"),
    "Git LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
                "is a Git LFS pointer, not the model"),
    "zip": (b"PK\x03\x04" + bytes(99), "is a zip archive, not an ONNX file"),
    "TensorFlow Lite": (b"\x1c\0\0\0TFL3" + bytes(99), "is a TensorFlow Lite model"),
    "ORT format": (b"\x1c\0\0\0ORTM" + bytes(99), "is a model in ONNX Runtime's own format (.ort)"),
    "web page": (b"\n<!DOCTYPE html><html>", "is a web page or XML, not an ONNX file"),
    "pickle": (b"\x80\x02}q\0", "is a Python pickle, as old versions of PyTorch write them"),
    "safetensors": (b"\x08" + bytes(7) + b'{"w": 0}', "is a safetensors file, which holds weights and no graph"),
    "gzip": (b"\x1f\x8b\x08", "is compressed with gzip"),
    "JSON": (b'{"ir_version": 8}', "is JSON, not an ONNX file"),
    "no UTF-8": (model([helper.make_node("Relu", ["x"], ["y"])]).SerializeToString().replace(b"Relu", b"R\xfflu"),
                 "the op type b'R\\xfflu' is not UTF-8"),
    "few values": (added(TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], float_data=[1, 2])
                         ).SerializeToString(), "tensor 'w' of shape [4] needs 4 values and has 2"),
    "no values": (added(TensorProto(name="w", data_type=TensorProto.INT4, dims=[3])).SerializeToString(),
                  "tensor 'w' of shape [3] needs 2 values and has 0"),
    "no graph": (onnx.ModelProto(ir_version=10).SerializeToString(), "holds no graph"),
    "no opset": (without_opset().SerializeToString(), "names no opset version"),
    "newer opset": (newer_opset().SerializeToString(), f"opset 999 is newer than onnx {onnx.__version__} knows "
                    f"({onnx.defs.onnx_opset_version()})"),
    "newer IR": (model([helper.make_node("Relu", ["x"], ["y"])], ir=99).SerializeToString(),
                 f"IR version 99 is newer than onnx {onnx.__version__} knows ({onnx.IR_VERSION})"),
    "no outputs": (model([helper.make_node("Relu", ["x"], ["y"])], outputs=()).SerializeToString(),
                   "the graph has no outputs"),
    "short weight": (short_weight().SerializeToString(),
                     "tensor 'w' of shape [4] needs 16 bytes of data and has 15"),
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


def test_external_data_is_read(tmp_path):
    want = np.arange(4, dtype="float32")
    (tmp_path / "w.bin").write_bytes(b"head" + want.tobytes())
    proto = added(external(from_array(want, "w"), "w.bin", offset=4, length=16))
    got = read(write(tmp_path / "m.onnx", proto))
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(got.graph.initializer[0]), want)


EXTERNAL = {
    "missing": ({"location": "none.bin"}, "tensor 'w': its external data file {folder}/none.bin does not exist"),
    "too short": ({"location": "w.bin", "offset": 8},
                  "tensor 'w': its external data file {folder}/w.bin is too short: 24 bytes are needed, it has 16"),
    "wrong length": ({"location": "w.bin", "length": 12}, "tensor 'w' of shape [4] needs 16 bytes of external data, "
                     "and the model gives it 12 at offset 0"),
    "no number": ({"location": "w.bin", "offset": "x"}, "tensor 'w': its external data has no valid offset and length"),
    "parent": ({"location": "../secret"}, "tensor 'w': its external data '../secret' lies outside the model's folder"),
    "absolute": ({"location": "/etc/passwd"},
                 "tensor 'w': its external data '/etc/passwd' lies outside the model's folder"),
    "link": ({"location": "link"}, "tensor 'w': its external data 'link' lies outside the model's folder"),
    "no location": ({"location": ""}, "tensor 'w': its external data '' lies outside the model's folder"),
}


@pytest.mark.parametrize(("entries", "message"), EXTERNAL.values(), ids=EXTERNAL.keys())
def test_broken_external_data(tmp_path, entries, message):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(bytes(16))
    (folder / "w.bin").write_bytes(bytes(16))
    (folder / "link").symlink_to(tmp_path / "secret")
    path = write(folder / "m.onnx", added(external(from_array(np.zeros(4, "float32"), "w"), **entries)))
    assert message_of(read, path) == message.format(folder=folder)


def test_external_data_is_read_wherever_a_tensor_stands(tmp_path, monkeypatch):
    """In a branch, a function, a function's default and a sparse tensor; from the model's folder, wherever we are."""
    want = np.arange(4, dtype="float32")
    (tmp_path / "w.bin").write_bytes(want.tobytes())

    def constant(name):
        return helper.make_node("Constant", [], [name], value=external(from_array(want, name), "w.bin"))

    inner = helper.make_graph([constant("k")], "then", [], [helper.make_tensor_value_info("k", TensorProto.FLOAT, [4])])
    branches = helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)
    default = helper.make_attribute("value", external(from_array(want, "d"), "w.bin"))
    sparse = helper.make_sparse_tensor(external(from_array(want, "s"), "w.bin"), from_array(np.arange(4), "i"), [9])
    function = helper.make_function("own", "F", ["c"], ["y"], [
        constant("z"), branches, helper.make_node("Constant", [], ["u"], sparse_value=sparse)],
        [helper.make_opsetid("", 18)], attribute_protos=[default])  # fmt: skip
    proto = model([branches, constant("m")])
    proto.functions.append(function)
    path = write(tmp_path / "m.onnx", proto)
    assert data_locations(path) == ("w.bin",)
    monkeypatch.chdir("/")
    found = list(tensors(read(path)))
    assert sorted(tensor.name for tensor in found) == ["d", "i", "k", "k", "k", "k", "m", "s", "z"]
    assert all(not tensor.external_data for tensor in found)
    for tensor in found:
        if tensor.name != "i":
            np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor), want)


def linked(folder, target, data):
    """A folder in which the model is a link into `target`, and its external data one to `data`."""
    target.mkdir(parents=True, exist_ok=True)
    write(target / "1234", added(external(from_array(np.ones(4, "float32"), "w"), "model.onnx_data")))
    folder.mkdir(parents=True)
    (folder / "model.onnx").symlink_to(target / "1234")
    (folder / "model.onnx_data").symlink_to(data)
    return folder / "model.onnx"


def test_links_of_a_download_cache_are_followed_and_no_others(tmp_path):
    blobs = tmp_path / "blobs"
    path = linked(tmp_path / "snapshots/a/onnx", blobs, blobs / "5678")
    (blobs / "5678").write_bytes(np.ones(4, "float32").tobytes())
    assert read(path).graph.initializer[0].raw_data == np.ones(4, "float32").tobytes()
    (tmp_path / "secret").write_bytes(bytes(16))
    (blobs / "more").mkdir()
    (blobs / "more/deep").write_bytes(bytes(16))
    for number, place in enumerate((tmp_path / "secret", blobs / "more/deep")):
        elsewhere = linked(tmp_path / f"snapshots/{number}", blobs, place)
        assert message_of(read, elsewhere) == (
            "tensor 'w': its external data 'model.onnx_data' lies outside the model's folder")


def test_external_data_that_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("zero")
    for location, message in (("pipe", f"its external data file {tmp_path}/pipe: is a named pipe, not a file"),
                              (".", f"its external data file {tmp_path}: is a directory, not a file"),
                              ("zero", "its external data 'zero' is no usable path"),
                              ("a\0b", "its external data 'a\0b' lies outside the model's folder"),
                              ("n" * 300, f"its external data file {tmp_path}/{'n' * 300} does not exist")):
        path = write(tmp_path / "m.onnx", added(external(from_array(np.zeros(4, "float32"), "w"), location)))
        assert message_of(read, path) == f"tensor 'w': {message}"


def test_many_tensors_of_one_file_are_added_up(tmp_path, monkeypatch):
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: type("M", (), {"available": 2**22}))
    with (tmp_path / "w.bin").open("wb") as stream:
        stream.truncate(2**21)
    weights = [external(TensorProto(name=f"w{i}", data_type=TensorProto.FLOAT, dims=[2**19]), "w.bin")
               for i in range(3)]
    path = write(tmp_path / "m.onnx", model([helper.make_node("Relu", ["x"], ["y"])], weights=weights))
    assert message_of(read, path) == "the external data takes 6,291,456 bytes, and 4,194,304 bytes of memory are free"


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
    assert message_of(read, path) == ("tensor 'w' of shape [1000000, 1000000] takes 4,000,000,000,000 bytes, and "
                                      "8,589,934,592 bytes of memory are free")


def test_a_computed_value_beyond_memory_is_refused(monkeypatch):
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: type("M", (), {"available": 2**33}))
    shape = from_array(np.array([10**6, 10**6]), "s")
    proto = model([helper.make_node("ConstantOfShape", ["s"], ["huge"]),
                   helper.make_node("ReduceMax", ["huge"], ["m"], keepdims=0), node(["x", "m"], ["y"])],
                  weights=[shape])
    assert message_of(check_memory, proto) == (
        "value 'huge' of shape [1000000, 1000000] takes 4,000,000,000,000 bytes, and 8,589,934,592 bytes of memory "
        "are free")


GRAPHS = {
    "defined twice": ([node(["x", "x"], ["y"], "a"), node(["x", "x"], ["y"], "b")],
                      "value 'y' is defined twice, by Add 'a' and by Add 'b'"),
    "over an input": ([node(["x", "x"], ["x"], "a"), node(["x", "x"], ["y"])],
                      "value 'x' is defined twice, by an input or initialiser and by Add 'a'"),
    "never defined": ([node(["x", "gone"], ["y"])],
                      "node Add (output 'y'), number 0, reads 'gone', which nothing defines"),
    "no such output": ([node(["x", "x"], ["z"])], "output 'y' is defined by nothing"),
    "cycle": ([node(["x", "b"], ["a"], "A"), node(["x", "a"], ["b"], "B"), node(["a", "b"], ["y"], "C")],
              "the graph has a cycle: Add 'A' -> Add 'B' -> Add 'A'"),
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
    assert input_shapes(proto.graph) == {"x": ("batch_size", 3, "x_dim2", "x_dim3"),
                                         "z": ("batch_size", 3, 1, "z_dim3")}


def test_sizes_by_either_name_and_by_input():
    proto = named()
    fix_shapes(proto, {"z": config.ModelInput(shape=("n", 3, 1, 5))}, {"batch.size": 2, "x_dim3": 7, "n": 4})
    assert input_shapes(proto.graph) == {"x": (2, 3, "x_dim2", 7), "z": (4, 3, 1, 5)}


HAVE = "does not fit the model, which has ['batch.size', 3, 'x_dim2', 'x_dim3']"
CHOOSE = "only sizes that the model leaves open can be chosen"
SHAPES = {
    "input": ({"w": config.ModelInput()}, {}, "model.inputs: the model has no input 'w'", "its inputs are 'x', 'z'"),
    "dimension": ({}, {"time": 3}, "shapes.dims: the model has no dimension 'time'",
                  "its dimensions are 'batch.size', 'batch_size', 'x_dim2', 'x_dim3', 'z_dim3'"),
    "rank": ({"x": config.ModelInput(shape=(1, 3))}, {}, f"model.inputs.x.shape [1, 3] {HAVE}", CHOOSE),
    "size": ({"x": config.ModelInput(shape=(1, 4, 5, 5))}, {}, f"model.inputs.x.shape [1, 4, 5, 5] {HAVE}", CHOOSE),
    "dtype": ({"x": config.ModelInput(dtype="int32")}, {}, "model.inputs.x.dtype is int32, and the model's is float32",
              'take dtype = "float32", or export the model with that type'),
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
