"""What an ONNX model may not hold, and that all of it is said at once."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx.numpy_helper import from_array

from tvmflow.errors import UnsupportedError
from tvmflow.frontend.onnx.checks import check

CONVERTERS = frozenset({"Relu", "Add", "Cast", "Dropout", "BatchNormalization", "If", "com.microsoft::Gelu"})


def graph(nodes, name="g", outputs=("y",), initialisers=()):
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [3])
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in outputs]
    return helper.make_graph(nodes, name, [value] if name == "g" else [], results, initialisers)


def model(nodes, initialisers=(), domains=(), functions=()):
    return helper.make_model(
        graph(nodes, initialisers=initialisers),
        ir_version=10,
        functions=functions,
        opset_imports=[helper.make_opsetid("", 18), *(helper.make_opsetid(domain, 1) for domain in domains)],
    )


def relu(**attributes):
    return helper.make_node("Relu", ["x"], ["y"], **attributes)


def test_a_supported_model_passes():
    check(model([relu()]), CONVERTERS)
    gelu = helper.make_node("Gelu", ["x"], ["y"], domain="com.microsoft")
    check(model([gelu], domains=["com.microsoft"]), CONVERTERS)


NODES = {
    "foreign domain": (
        relu(name="r", domain="my.company"),
        "my.company::Relu 'r': operators of the domain 'my.company' have no converter",
    ),
    "foreign name in ai.onnx": (
        helper.make_node("Gelu_", ["x"], ["y"]),
        "Gelu_ (output 'y'): ai.onnx has no such operator in opset 18",
    ),
    "operator of a later opset": (
        helper.make_node("Gelu", ["x"], ["y"]),
        "Gelu (output 'y'): ai.onnx has no such operator in opset 18",
    ),
    "no converter": (helper.make_node("Det", ["x"], ["y"]), "Det (output 'y'): there is no converter for it"),
    "loop": (
        helper.make_node(
            "Scan", ["x"], ["y"], num_scan_inputs=1, body=graph([helper.make_node("Relu", ["a"], ["b"])], "body", ["b"])
        ),
        "Scan (output 'y'): loops are not compiled",
    ),
    "random": (
        helper.make_node("RandomNormalLike", ["x"], ["y"]),
        "RandomNormalLike (output 'y'): its result is random, so that no run can be verified",
    ),
    "training BatchNormalization": (
        helper.make_node("BatchNormalization", ["x"] * 5, ["y"], training_mode=1),
        "BatchNormalization (output 'y'): it is in training mode",
    ),
    "training Dropout": (
        helper.make_node("Dropout", ["x", "", "yes"], ["y"]),
        "Dropout (output 'y'): it is in training mode",
    ),
    "Dropout that may train": (
        helper.make_node("Dropout", ["x", "", "x"], ["y"]),
        "Dropout (output 'y'): its training mode is only known at run time",
    ),
    "cast to a type without arithmetic": (
        helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT8E4M3FN),
        "Cast (output 'y'): its result has the element type float8_e4m3fn, which is not supported",
    ),
    "strings": (
        helper.make_node("Constant", [], ["y"], value_string="a"),
        "Constant (output 'y'): its value is no plain tensor",
    ),
}


@pytest.mark.parametrize(("node", "message"), NODES.values(), ids=NODES.keys())
def test_one_node(node, message):
    initialiser = from_array(np.array(True), "yes")
    with pytest.raises(UnsupportedError) as caught:
        check(model([node], [initialiser], domains=["my.company"]), CONVERTERS)
    assert caught.value.message == message
    assert caught.value.hint


def test_all_faults_at_once_also_in_branches_and_functions():
    branches = {
        f"{side}_branch": graph([helper.make_node("Det", ["x"], [side], name=side)], side, [side])
        for side in ("then", "else")
    }
    function = helper.make_function(
        "own", "F", ["a"], ["b"], [helper.make_node("Multinomial", ["a"], ["b"])], [helper.make_opsetid("", 18)]
    )
    nodes = [helper.make_node("If", ["c"], ["z"], **branches), helper.make_node("F", ["z"], ["y"], domain="own")]
    with pytest.raises(UnsupportedError) as caught:
        check(model(nodes, [from_array(np.array(True), "c")], ["own"], [function]), CONVERTERS)
    first, *rest = caught.value.message.splitlines()
    assert first == "3 things cannot be compiled"
    assert sorted(line.strip().split(":")[0] for line in rest) == [
        "Det 'else'",
        "Det 'then'",
        "Multinomial (output 'b')",
    ]


def test_strings_sequences_and_sparse_tensors_at_the_edges():
    broken = model([relu()])
    broken.graph.input.append(helper.make_tensor_value_info("text", TensorProto.STRING, [1]))
    broken.graph.input.append(helper.make_tensor_sequence_value_info("many", TensorProto.FLOAT, None))
    dense = from_array(np.ones(1, "float32"), "thin")
    broken.graph.sparse_initializer.append(helper.make_sparse_tensor(dense, from_array(np.zeros(1, "int64")), [9]))
    with pytest.raises(UnsupportedError) as caught:
        check(broken, CONVERTERS)
    assert caught.value.message.splitlines()[1:] == [
        "  input 'text': has the element type string, which is not supported",
        "  input 'many': is a sequence, not a tensor",
        "  initialiser 'thin': is a sparse tensor",
    ]
