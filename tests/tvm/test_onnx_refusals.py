"""What an import says of models that are valid protobuf and cannot be compiled, or ask for too much."""

from __future__ import annotations

import contextlib
import itertools
import resource

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.helper import make_node, make_tensor_value_info, make_value_info
from onnx.numpy_helper import from_array

from tvmflow.errors import TvmflowError
from tvmflow.frontend.onnx import memory
from tvmflow.frontend.onnx.loading import load

FLOAT, STRING = TensorProto.FLOAT, TensorProto.STRING
TENSOR = helper.make_tensor_type_proto(FLOAT, [4])
X = make_tensor_value_info("x", FLOAT, [4])
Y = onnx.ValueInfoProto(name="y")
RELU = [make_node("Relu", ["x"], ["y"])]
SPARSE = helper.make_sparse_tensor(from_array(np.ones(1, "float32"), "thin"), from_array(np.array([2])), [4])


def model(nodes, inputs=(X,), outputs=(Y,), sparse=(), **weights):
    tensors = [from_array(np.asarray(value), name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, tensors)
    graph.sparse_initializer.extend(sparse)
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])


def typed(kind):
    return model(RELU, [make_value_info("x", kind)])


def huge(*nodes, **weights):
    """A model in which `nodes` make `k` of 2 ** 30 elements, of which its output takes the sum."""
    return model(
        [
            *nodes,
            make_node("ReduceMax", ["k"], ["m"], keepdims=0),
            make_node("Cast", ["m"], ["f"], to=FLOAT),
            make_node("Add", ["x", "f"], ["y"]),
        ],
        **weights,
    )


REFUSED = {
    "no rank": (model(RELU, [make_tensor_value_info("x", FLOAT, None)]), "input 'x' has no shape, not even a rank"),
    "no type": (model(RELU, [make_tensor_value_info("x", 0, [4])]), "input 'x' states no element type"),
    "sequence": (typed(helper.make_sequence_type_proto(TENSOR)), "input 'x' is a sequence, not a tensor"),
    "optional": (typed(helper.make_optional_type_proto(TENSOR)), "input 'x' is an optional value, not a tensor"),
    "map": (typed(helper.make_map_type_proto(TensorProto.INT64, TENSOR)), "input 'x' is a map, not a tensor"),
    "sparse input": (
        typed(helper.make_sparse_tensor_type_proto(FLOAT, [4])),
        "input 'x' is a sparse tensor, not a tensor",
    ),
    "strings": (typed(helper.make_tensor_type_proto(STRING, [4])), "input 'x' has the type string"),
    "sequence out": (
        model(
            [make_node("SequenceConstruct", ["x"], ["y"])],
            outputs=[helper.make_tensor_sequence_value_info("y", FLOAT, None)],
        ),
        "output 'y': is a sequence, not a tensor",
    ),
    "sparse weight": (
        model([make_node("Add", ["x", "thin"], ["y"])], sparse=[SPARSE]),
        "initialiser 'thin': is a sparse tensor",
    ),
    "sparse attribute": (
        model([make_node("Constant", [], ["k"], sparse_value=SPARSE), make_node("Add", ["x", "k"], ["y"])]),
        "Constant (output 'k'): holds a sparse tensor",
    ),
    "no operator": (
        model([make_node("Foo", ["x"], ["y"], name="first")]),
        "not a valid model: No Op registered for Foo with domain_version of 18 (Bad node spec for node. "
        "Name: first OpType: Foo)",
    ),
    # TVM would take the lower 32 bits, which are a valid axis.
    "wide attribute": (
        model([make_node("Concat", ["x", "x"], ["y"], axis=1 << 62)]),
        "Concat 'y': its attribute 'axis' holds a number that needs more than 32 bits",
    ),
    "one-hot": (
        huge(make_node("OneHot", ["i", "d", "v"], ["k"]), i=[1], d=1 << 30, v=np.array([0, 1], "float32")),
        "OneHot 'k': it makes a constant that is too large: Unable to allocate 8.00 GiB for an array with "
        "shape (1073741824,) and data type int64",
    ),
}


@pytest.mark.parametrize(("proto", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refusals(tmp_path, monkeypatch, proto, message):
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: type("M", (), {"available": 2**40}))
    path = tmp_path / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(TvmflowError) as caught:
        load(path, {}, {})
    assert caught.value.message == f"{path}: {message}"
    assert caught.value.hint


HUGE = {
    "Tile": huge(make_node("Tile", ["w", "n"], ["k"]), w=np.ones(1, "float32"), n=[1 << 30]),
    "Expand": huge(make_node("Expand", ["w", "n"], ["k"]), w=np.ones(1, "float32"), n=[1 << 30]),
    "ConstantOfShape": huge(make_node("ConstantOfShape", ["n"], ["k"]), n=[1 << 15, 1 << 15]),
    "Pad": huge(make_node("Pad", ["w", "n"], ["k"]), w=np.ones(1, "float32"), n=[0, 1 << 30]),
    "Range": huge(make_node("Range", ["a", "n", "s"], ["k"]), a=0, n=1 << 30, s=1),
    "Resize": huge(
        make_node("Resize", ["w", "", "n"], ["k"], mode="nearest"),
        w=np.ones((1, 1, 1, 1), "float32"),
        n=np.array([1, 1, 1 << 15, 1 << 15], "float32"),
    ),
    "EyeLike": huge(
        make_node("Expand", ["w", "n"], ["z"]),
        make_node("EyeLike", ["z"], ["k"]),
        w=np.ones((1, 1), "float32"),
        n=[1 << 15, 1 << 15],
    ),
}


@pytest.mark.parametrize("proto", HUGE.values(), ids=HUGE.keys())
def test_sizes_that_stand_in_constants_take_no_memory(tmp_path, monkeypatch, proto):
    """They are left for the run, or refused."""
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: type("M", (), {"available": 2**40}))
    path = tmp_path / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.suppress(TvmflowError):
        load(path, {}, {})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20


def test_the_bound_of_memory_ends_with_the_import():
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with memory.bounded(model(RELU)), pytest.raises(MemoryError):
        np.ones(1 << 32)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_names_of_any_length_and_many_that_look_alike(tmp_path):
    values = ["x", *("层" * (i % 3 + 1) + "!" * (i // 3) for i in range(300)), "y" * 100_000]
    nodes = [make_node("Relu", [a], [b]) for a, b in itertools.pairwise(values)]
    path = tmp_path / "m.onnx"
    path.write_bytes(model(nodes, outputs=[onnx.ValueInfoProto(name=values[-1])]).SerializeToString())
    assert load(path, {}, {}).signature.outputs[0].name == values[-1]
