"""Small ONNX models as files, and what is said of broken ones."""

from __future__ import annotations

import pytest
from onnx import TensorProto, helper

from tvmflow.errors import TvmflowError


def model(nodes, inputs=(("x", [4]),), outputs=("y",), weights=(), opset=18, ir=10):
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    return helper.make_model(
        helper.make_graph(nodes, "g", values, results, weights),
        ir_version=ir,
        opset_imports=[helper.make_opsetid("", opset)],
    )


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
