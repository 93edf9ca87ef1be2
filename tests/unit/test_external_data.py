"""Weights outside of an ONNX file: read from beside it, wherever a tensor stands, and from nowhere else."""

from __future__ import annotations

import os

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.numpy_helper import from_array
from onnx_files import added, external, message_of, model, write

from tvmflow.frontend.onnx import memory
from tvmflow.frontend.onnx.file import data_locations, read, tensors


def test_external_data_is_read(tmp_path):
    want = np.arange(4, dtype="float32")
    (tmp_path / "w.bin").write_bytes(b"head" + want.tobytes())
    proto = added(external(from_array(want, "w"), "w.bin", offset=4, length=16))
    got = read(write(tmp_path / "m.onnx", proto))
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(got.graph.initializer[0]), want)


EXTERNAL = {
    "missing": ({"location": "none.bin"}, "tensor 'w': its external data file {folder}/none.bin does not exist"),
    "too short": (
        {"location": "w.bin", "offset": 8},
        "tensor 'w': its external data file {folder}/w.bin is too short: 24 bytes are needed, it has 16",
    ),
    "wrong length": (
        {"location": "w.bin", "length": 12},
        "tensor 'w' of shape [4] needs 16 bytes of external data, and the model gives it 12 at offset 0",
    ),
    "no number": ({"location": "w.bin", "offset": "x"}, "tensor 'w': its external data has no valid offset and length"),
    "parent": ({"location": "../secret"}, "tensor 'w': its external data '../secret' lies outside the model's folder"),
    "absolute": (
        {"location": "/etc/passwd"},
        "tensor 'w': its external data '/etc/passwd' lies outside the model's folder",
    ),
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
    function = helper.make_function(
        "own",
        "F",
        ["c"],
        ["y"],
        [constant("z"), branches, helper.make_node("Constant", [], ["u"], sparse_value=sparse)],
        [helper.make_opsetid("", 18)],
        attribute_protos=[default],
    )
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
            "tensor 'w': its external data 'model.onnx_data' lies outside the model's folder"
        )


def test_external_data_that_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("zero")
    for location, message in (
        ("pipe", f"its external data file {tmp_path}/pipe: is a named pipe, not a file"),
        (".", f"its external data file {tmp_path}: is a directory, not a file"),
        ("zero", "its external data 'zero' is no usable path"),
        ("a\0b", "its external data 'a\0b' lies outside the model's folder"),
        ("n" * 300, f"its external data file {tmp_path}/{'n' * 300} does not exist"),
    ):
        path = write(tmp_path / "m.onnx", added(external(from_array(np.zeros(4, "float32"), "w"), location)))
        assert message_of(read, path) == f"tensor 'w': {message}"


def test_many_tensors_of_one_file_are_added_up(tmp_path, monkeypatch):
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: type("M", (), {"available": 2**22}))
    with (tmp_path / "w.bin").open("wb") as stream:
        stream.truncate(2**21)
    weights = [
        external(TensorProto(name=f"w{i}", data_type=TensorProto.FLOAT, dims=[2**19]), "w.bin") for i in range(3)
    ]
    path = write(tmp_path / "m.onnx", model([helper.make_node("Relu", ["x"], ["y"])], weights=weights))
    assert message_of(read, path) == "the external data takes 6,291,456 bytes, and 4,194,304 bytes of memory are free"
