"""Functions of a model that call themselves or would become too large are refused before anything is inlined."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir
import pytest
from onnx import TensorProto, helper
from onnx.helper import make_node
from onnx.numpy_helper import from_array
from onnx_ir.passes.common import InlinePass

from tvmflow.errors import ModelError, UnsupportedError
from tvmflow.frontend.onnx.function_bounds import check_functions
from tvmflow.frontend.onnx.functions import inline_local_functions

OPSETS = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]


def function(name, *nodes):
    return helper.make_function("own", name, ["a"], ["b"], list(nodes), OPSETS)


def calls(*names, first="a", last="b"):
    """Calls of functions, each of what the one before gives."""
    values = [first, *(f"t{i}" for i in range(len(names) - 1)), last]
    return [make_node(name, [values[i]], [values[i + 1]], domain="own") for i, name in enumerate(names)]


def model(functions, nodes):
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        [value("x", TensorProto.FLOAT, [4]), value("c", TensorProto.BOOL, [])],
        [value("y", TensorProto.FLOAT, [4])],
    )
    return helper.make_model(graph, opset_imports=OPSETS, functions=functions, ir_version=10)


RELU = make_node("Relu", ["a"], ["b"])


def doubling(levels):
    """2 ** levels nodes in some hundred bytes per level."""
    doubled = (function(f"F{i}", *calls(f"F{i - 1}", f"F{i - 1}")) for i in range(1, levels + 1))
    return model([function("F0", RELU), *doubled], calls(f"F{levels}", first="x", last="y"))


def nested(levels):
    """Functions in a branch of which the next one is called."""

    def branch(node):
        return helper.make_graph([node], "branch", [], [helper.make_tensor_value_info("r", TensorProto.FLOAT, [4])])

    def taking_c(name, node):
        return helper.make_function("own", name, ["a", "c"], ["b"], [node], OPSETS)

    functions = [taking_c("F0", RELU)]
    for i in range(1, levels + 1):
        then = branch(make_node(f"F{i - 1}", ["a", "c"], ["r"], domain="own"))
        other = branch(make_node("Neg", ["a"], ["r"]))
        functions.append(taking_c(f"F{i}", make_node("If", ["c"], ["b"], then_branch=then, else_branch=other)))
    return model(functions, [make_node(f"F{levels}", ["x", "c"], ["y"], domain="own")])


def weighted():
    """A weight of a MiB in a function that is called 1,025 times."""
    weight = from_array(np.zeros(1 << 18, "float32"), "w")
    add = [make_node("Constant", [], ["w"], value=weight), make_node("Add", ["a", "w"], ["b"])]
    return model([function("W", *add)], calls(*["W"] * 1025, first="x", last="y"))


def copied():
    """The same weight as an attribute of one call, to which the function refers 1,025 times."""
    nodes = []
    for number in range(1025):
        constant = make_node("Constant", [], [f"w{number}"])
        constant.attribute.add(name="value", type=onnx.AttributeProto.TENSOR, ref_attr_name="weight")
        nodes.append(constant)
    call = make_node("W", ["x"], ["y"], domain="own", weight=from_array(np.zeros(1 << 18, "float32"), "w"))
    return model([function("W", *nodes, RELU)], [call])


REFUSED = {
    "itself": (lambda: model([function("A", *calls("A"))], []), ModelError, "the function 'own::A' calls itself"),
    "circle": (
        lambda: model([function("A", *calls("B")), function("B", *calls("C")), function("C", *calls("A"))], []),
        ModelError,
        "functions call each other in a circle: 'own::A' -> 'own::B' -> 'own::C' -> 'own::A'",
    ),
    "twice": (
        lambda: model([function("A", RELU), function("A", RELU)], []),
        ModelError,
        "two functions are called 'own::A'",
    ),
    "nodes": (
        lambda: doubling(60),
        UnsupportedError,
        "the function 'own::F17' would become 131,072 nodes when functions are inlined; 100,000 are the most",
    ),
    "calls": (
        lambda: model([function("A", *[RELU] * 60)], calls(*["A"] * 2000, first="x", last="y")),
        UnsupportedError,
        "the model, mostly by 2,000 calls of the function 'own::A', would become 120,000 nodes "
        "when functions are inlined; 100,000 are the most",
    ),
    "nesting": (
        lambda: nested(32),
        UnsupportedError,
        "the function 'own::F32' would nest branches 32 deep when functions are inlined; 31 levels are the most",
    ),
    "weights": (
        weighted,
        UnsupportedError,
        "the model, mostly by 1,025 calls of the function 'own::W', would have 1,074,818,075 bytes of "
        "attributes when functions are inlined; 1,073,741,824 are the most",
    ),
    "copies": (
        copied,
        UnsupportedError,
        "the model, mostly by 1 calls of the function 'own::W', would have 1,074,838,575 bytes of attributes "
        "when functions are inlined; 1,073,741,824 are the most",
    ),
}


@pytest.mark.parametrize(("make", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_functions(make, error, message):
    with pytest.raises(error) as caught:
        check_functions(make())
    assert caught.value.message == message
    assert caught.value.hint


def test_what_is_within_bounds_is_inlined():
    for proto, nodes in ((doubling(6), 64), (nested(5), 1)):
        check_functions(proto)
        assert len(inline_local_functions(proto).graph.node) == nodes


def test_names_are_those_of_onnx_ir():
    """Ours only looks for them faster."""
    two = function("Two", make_node("Relu", ["a"], ["h"]), make_node("Neg", ["h"], ["b"]))
    proto = model([two], [*calls(*["Two"] * 5, first="x", last="h_3"), make_node("Neg", ["h_3"], ["y"])])
    plain = onnx.load_from_string(proto.SerializeToString())
    want = InlinePass()(onnx_ir.serde.deserialize_model(plain)).model
    assert inline_local_functions(proto) == onnx_ir.serde.serialize_model(want)


def test_the_number_of_name_searches_is_linear(monkeypatch):
    """Each name is tried about once, however many calls there are."""
    tried = []

    class Counting(set):
        def __contains__(self, name):
            tried.append(name)
            return super().__contains__(name)

    init = InlinePass._reset

    def reset(self, *args):
        init(self, *args)
        self._used_value_names = Counting()

    monkeypatch.setattr(InlinePass, "_reset", reset)
    inline_local_functions(model([function("A", RELU)], calls(*["A"] * 500, first="x", last="y")))
    assert 500 <= len(tried) < 1500
