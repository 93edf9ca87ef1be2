"""ONNX models through `load`, compiled as they come out, held against ONNX Runtime on the untouched file."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper
from onnx.helper import make_node
from onnx.numpy_helper import from_array
from tvm import relax

from tvmflow.errors import UnsupportedError
from tvmflow.frontend.onnx import normalise
from tvmflow.frontend.onnx.file import read
from tvmflow.frontend.onnx.loading import load
from tvmflow.frontend.onnx.normalise import STEPS
from tvmflow.frontend.onnx.reference import run_onnx
from tvmflow.frontend.onnx.shapes import fix_shapes

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
OPSETS = [helper.make_opsetid("", 18)]


def graph(nodes, inputs, outputs, weights=(), name="g"):
    """`inputs` and `outputs`: (name, element type, shape)."""
    weights = [from_array(np.asarray(array), key) for key, array in dict(weights).items()]
    return helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info(*value) for value in inputs],
        [helper.make_tensor_value_info(*value) for value in outputs],
        weights,
    )


def model(nodes, inputs, outputs, weights=(), opset=18, ir=10, **more):
    domains = {node.domain for node in nodes if node.domain}
    return helper.make_model(
        graph(nodes, inputs, outputs, weights),
        ir_version=ir,
        **more,
        opset_imports=[helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)],
    )


def save(tmp_path, proto):
    path = tmp_path / "m.onnx"
    onnx.save(proto, path)
    return path


def run(imported, feed):
    machine = relax.VirtualMachine(tvm.compile(imported.mod, "llvm"), tvm.cpu())
    result = machine["main"](*(tvm.runtime.tensor(np.asarray(feed[spec.name])) for spec in imported.signature.inputs))
    results = [result] if isinstance(result, tvm.runtime.Tensor) else list(result)
    return [array.numpy() for array in results]


def agrees(tmp_path, proto, *feeds, dims=None):
    """Loads, compiles and compares; the imported model."""
    path = save(tmp_path, proto)
    imported = load(path, {}, dims or {})
    _, wanted = run_onnx(path, feeds, "onnxruntime")
    for feed, want in zip(feeds, wanted, strict=True):
        got = run(imported, feed)
        assert [array.dtype for array in got] == [array.dtype for array in want]
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    return imported


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def test_names_that_are_no_identifiers_and_clash_once_cleaned(tmp_path):
    proto = model(
        [make_node("Add", ["0.a", "0_a"], ["/t/x:0"]), make_node("Sub", ["/t/x:0", "0/a"], ["out.put"])],
        [("0.a", FLOAT, [3]), ("0_a", FLOAT, [3])],
        [("out.put", FLOAT, [3])],
        {"0/a": random(3, seed=2)},
    )
    imported = agrees(tmp_path, proto, {"0.a": random(3), "0_a": random(3, seed=1)})
    assert [spec.name for spec in imported.signature.inputs] == ["0.a", "0_a"]
    assert [spec.name for spec in imported.signature.outputs] == ["out.put"]
    names = [param.name for param in imported.mod["main"].params]
    assert len(set(names)) == 2
    assert all(name.isidentifier() for name in names)


def test_every_input_and_output_stays_in_order(tmp_path):
    proto = model(
        [make_node("Relu", ["x"], ["y"])],
        [("unused", FLOAT, [2]), ("x", FLOAT, [3]), ("through", INT64, [1])],
        [("y", FLOAT, [3]), ("through", INT64, [1]), ("w", FLOAT, [2]), ("y", FLOAT, [3])],
        {"w": random(2)},
    )
    imported = agrees(tmp_path, proto, {"unused": random(2), "x": random(3), "through": np.array([7])})
    assert [spec.name for spec in imported.signature.inputs] == ["unused", "x", "through"]
    assert [spec.name for spec in imported.signature.outputs] == ["y", "through", "w", "y"]


def test_weights_listed_as_inputs(tmp_path):
    proto = model(
        [make_node("Gemm", ["x", "w", "b"], ["y"])],
        [("x", FLOAT, [2, 3]), ("w", FLOAT, [3, 4]), ("b", FLOAT, [4])],
        [("y", FLOAT, [2, 4])],
        {"w": random(3, 4, seed=1), "b": random(4)},
        opset=11,
        ir=3,
    )
    imported = agrees(tmp_path, proto, {"x": random(2, 3)})
    assert [spec.name for spec in imported.signature.inputs] == ["x"]


def test_external_data(tmp_path):
    weight = random(64, 32, seed=1)
    proto = model(
        [make_node("MatMul", ["x", "w"], ["y"])], [("x", FLOAT, [2, 64])], [("y", FLOAT, [2, 32])], {"w": weight}
    )
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    got = run(load(tmp_path / "m.onnx", {}, {}), {"x": random(2, 64)})
    np.testing.assert_allclose(got[0], random(2, 64) @ weight, rtol=1e-4, atol=1e-5)


def test_functions_with_default_attributes_and_omitted_inputs(tmp_path):
    inner = helper.make_function(
        "own",
        "Scale",
        ["a"],
        ["b"],
        [make_node("Elu", ["a"], ["b"])],
        OPSETS,
        attribute_protos=[helper.make_attribute("alpha", 0.25)],
    )
    reference = inner.node[0].attribute.add(name="alpha", type=onnx.AttributeProto.FLOAT)
    reference.ref_attr_name = "alpha"
    outer = helper.make_function(
        "own",
        "Twice",
        ["a", "low", "high"],
        ["c"],
        [make_node("Scale", ["a"], ["b"], domain="own"), make_node("Clip", ["b", "low", "high"], ["c"])],
        [*OPSETS, helper.make_opsetid("own", 1)],
    )
    proto = model(
        [
            make_node("Twice", ["x", "", "top"], ["t"], domain="own"),
            make_node("Scale", ["t"], ["y"], domain="own", alpha=2.0),
        ],
        [("x", FLOAT, [8])],
        [("y", FLOAT, [8])],
        {"top": np.float32(0.5)},
        functions=[inner, outer],
    )
    agrees(tmp_path, proto, {"x": random(8)})


@pytest.fixture
def inlined(monkeypatch):
    """Two operators, one of whose bodies depends on its inputs' types, are inlined, converter or not."""
    monkeypatch.setattr(normalise.ops, "INLINE", frozenset({"CenterCropPad", "Celu"}))


def test_operators_that_onnx_defines_by_others_are_inlined(tmp_path, inlined):
    proto = model(
        [
            make_node("CenterCropPad", ["x", "s"], ["c"], axes=[1]),
            make_node("Celu", ["c"], ["y"], alpha=0.5),
            make_node("Celu", ["y"], ["z"]),
        ],
        [("x", FLOAT, [2, 6])],
        [("z", FLOAT, [2, 4])],
        {"s": np.array([4])},
    )
    imported = agrees(tmp_path, proto, {"x": random(2, 6)})
    assert any(note.startswith("inline operators without converter") for note in imported.notes)


@pytest.mark.parametrize("opset", [8, 18])
def test_variadic_operators(tmp_path, opset):
    terms = ["a", "b", "c"]
    nodes = [make_node(op, terms, [op]) for op in ("Sum", "Mean", "Max", "Min")] + [make_node("Max", ["a"], ["one"])]
    proto = model(
        nodes,
        [(name, FLOAT, shape) for name, shape in zip(terms, ([2, 3], [3], [1]), strict=True)],
        [(node.output[0], FLOAT, None) for node in nodes],
        opset=opset,
    )
    agrees(tmp_path, proto, {"a": random(2, 3), "b": random(3, seed=1), "c": random(1, seed=2)})


def branch(side, nodes, shape=(4, 8)):
    return graph(nodes, [], [(f"{side}_y", FLOAT, list(shape))], name=side)


def conditional(condition):
    then = branch("then", [make_node("Mul", ["x", "h"], ["then_y"])])
    other = branch("else", [make_node("Sub", ["x", "h"], ["d"]), make_node("Neg", ["d"], ["else_y"])])
    return [
        make_node("Exp", ["x"], ["h"]),
        *condition,
        make_node("If", ["c"], ["r"], then_branch=then, else_branch=other),
        make_node("Relu", ["r"], ["y"]),
    ]


@pytest.mark.parametrize("shape", [[], [1]])
def test_an_if_runs_the_branch_that_is_taken(tmp_path, shape):
    proto = model(conditional([]), [("c", BOOL, shape), ("x", FLOAT, [4, 8])], [("y", FLOAT, [4, 8])])
    feeds = [{"c": np.full(shape, taken), "x": random(4, 8)} for taken in (True, False)]
    agrees(tmp_path, proto, *feeds)


def test_an_if_within_an_if_with_symbolic_sizes(tmp_path):
    inner = [
        make_node(
            "If",
            ["d"],
            ["then_y"],
            then_branch=branch("a", [make_node("Neg", ["x"], ["a_y"])], ["t", 8]),
            else_branch=branch(
                "b", [make_node("Shape", ["x"], ["s"]), make_node("Expand", ["w", "s"], ["b_y"])], ["t", 8]
            ),
        )
    ]
    proto = model(
        [
            make_node(
                "If",
                ["c"],
                ["y"],
                then_branch=branch("then", inner, ["t", 8]),
                else_branch=branch("else", [make_node("Add", ["x", "w"], ["else_y"])], ["t", 8]),
            )
        ],
        [("c", BOOL, []), ("d", BOOL, []), ("x", FLOAT, ["t", 8])],
        [("y", FLOAT, ["t", 8])],
        {"w": random(1, 8, seed=1)},
    )
    feeds = [{"c": np.array(c), "d": np.array(d), "x": random(3, 8)} for c in (True, False) for d in (True, False)]
    assert agrees(tmp_path, proto, *feeds).signature.outputs[0].shape == ("t", 8)


def test_an_if_with_a_constant_condition_is_its_branch(tmp_path):
    shape = [
        make_node("Shape", ["x"], ["s"], start=0, end=1),
        make_node("Squeeze", ["s"], ["n"]),
        make_node("Equal", ["n", "four"], ["c"]),
    ]
    proto = model(conditional(shape), [("x", FLOAT, [4, 8])], [("y", FLOAT, [4, 8])], {"four": np.array(4)})
    imported = agrees(tmp_path, proto, {"x": random(4, 8)})
    assert len(imported.mod.functions) == 1


def test_symbolic_sizes_stay_symbolic_and_are_named_in_the_outputs(tmp_path):
    proto = model(
        [
            make_node("Concat", ["x", "x"], ["twice"], axis=1),
            make_node("Concat", ["x", "one"], ["more"], axis=1),
            make_node("Shape", ["x"], ["shape"]),
        ],
        [("x", FLOAT, [1, "time"]), ("one", FLOAT, [1, 1])],
        [("twice", FLOAT, None), ("more", FLOAT, None), ("shape", INT64, None)],
    )
    feeds = [{"x": random(1, n), "one": random(1, 1)} for n in (2, 5)]
    signature = agrees(tmp_path, proto, *feeds).signature
    assert signature.inputs[0].shape == (1, "time")
    twice, more, shape = (spec.shape for spec in signature.outputs)
    assert (twice, more, shape) == ((1, "(time * 2)"), (1, "(time + 1)"), (2,))


def test_one_name_is_one_size_in_all_inputs(tmp_path):
    proto = model(
        [make_node("Add", ["a", "b"], ["y"])],
        [("a", FLOAT, ["n", 3]), ("b", FLOAT, ["n", 3])],
        [("y", FLOAT, ["other", 3])],
    )
    assert agrees(tmp_path, proto, {"a": random(2, 3), "b": random(2, 3)}).signature.outputs[0].shape == ("n", 3)
    assert load(tmp_path / "m.onnx", {}, {"n": 5}).signature.outputs[0].shape == (5, 3)


def test_sizes_computed_from_shapes(tmp_path):
    """Batch and length read from the input, multiplied and put together again, as exporters write it."""
    nodes = [
        make_node("Shape", ["x"], ["s"]),
        make_node("Gather", ["s", "zero"], ["b"]),
        make_node("Gather", ["s", "one"], ["t"]),
        make_node("Mul", ["b", "t"], ["bt"]),
        make_node("Unsqueeze", ["bt", "axis"], ["bt1"]),
        make_node("Concat", ["bt1", "six"], ["target"], axis=0),
        make_node("Reshape", ["x", "target"], ["flat"]),
        make_node("MatMul", ["flat", "w"], ["z"]),
        make_node("Unsqueeze", ["b", "axis"], ["b1"]),
        make_node("Unsqueeze", ["t", "axis"], ["t1"]),
        make_node("Concat", ["b1", "t1", "five"], ["back"], axis=0),
        make_node("Reshape", ["z", "back"], ["y"]),
        make_node("Cast", ["t"], ["tf"], to=FLOAT),
        make_node("Mul", ["y", "tf"], ["scaled"]),
    ]
    weights = {
        "zero": np.array(0),
        "one": np.array(1),
        "axis": np.array([0]),
        "six": np.array([6]),
        "five": np.array([5]),
        "w": random(6, 5, seed=1),
    }
    proto = model(nodes, [("x", FLOAT, ["b", "t", 6])], [("scaled", FLOAT, None)], weights)
    imported = agrees(tmp_path, proto, {"x": random(2, 3, 6)}, {"x": random(1, 7, 6)})
    assert imported.signature.outputs[0].shape == ("b", "t", 5)


def test_positions_counted_up_to_a_symbolic_length(tmp_path):
    """As long as the input itself, so that both can be added."""
    nodes = [
        make_node("Shape", ["x"], ["s"], start=0, end=1),
        make_node("Squeeze", ["s"], ["t"]),
        make_node("Range", ["zero", "t", "one"], ["places"]),
        make_node("Gather", ["table", "places"], ["e"]),
        make_node("Add", ["x", "e"], ["y"]),
    ]
    proto = model(
        nodes,
        [("x", FLOAT, ["t", 4])],
        [("y", FLOAT, None)],
        {"zero": np.array(0), "one": np.array(1), "table": random(9, 4, seed=1)},
    )
    assert agrees(tmp_path, proto, {"x": random(3, 4)}, {"x": random(9, 4)}).signature.outputs[0].shape == ("t", 4)


def test_paddings_put_together_from_filled_tensors(tmp_path):
    nodes = [
        make_node("ConstantOfShape", ["two"], ["zeros"], value=from_array(np.array([0]))),
        make_node("Concat", ["ends", "zeros"], ["pads"], axis=0),
        make_node("Pad", ["x", "pads"], ["y"]),
    ]
    proto = model(
        nodes, [("x", FLOAT, ["n", 3])], [("y", FLOAT, None)], {"two": np.array([2]), "ends": np.array([0, 1])}
    )
    assert agrees(tmp_path, proto, {"x": random(2, 3)}).signature.outputs[0].shape == ("n", 4)


def test_integer_inputs_get_the_range_of_what_they_index(tmp_path):
    nodes = [
        make_node("Cast", ["ids"], ["i"], to=INT64),
        make_node("Gather", ["table", "i"], ["e"]),
        make_node("Gather", ["small", "kind"], ["k"]),
        make_node("Add", ["e", "k"], ["ek"]),
        make_node("Cast", ["mask"], ["mf"], to=FLOAT),
        make_node("Sub", ["one", "mf"], ["keep"]),
        make_node("Unsqueeze", ["keep", "last"], ["k3"]),
        make_node("Mul", ["ek", "k3"], ["a"]),
        make_node("OneHot", ["label", "depth", "onoff"], ["hot"]),
        make_node("Add", ["count", "count"], ["c2"]),
    ]
    weights = {
        "table": random(11, 4),
        "small": random(3, 4),
        "one": np.float32(1),
        "last": np.array([2]),
        "depth": np.array(5),
        "onoff": np.array([0, 1], "float32"),
    }
    proto = model(
        nodes,
        [
            ("ids", TensorProto.INT32, [1, 2]),
            ("kind", INT64, [1, 2]),
            ("mask", INT64, [1, 2]),
            ("label", INT64, [2]),
            ("count", INT64, [2]),
        ],
        [("a", FLOAT, None), ("hot", FLOAT, None), ("c2", INT64, None)],
        weights,
    )
    specs = load(save(tmp_path, proto), {}, {}).signature.inputs
    assert [spec.range for spec in specs] == [(0, 10), (0, 2), (0, 1), (0, 4), None]


def test_each_step_gives_a_valid_model(tmp_path, inlined):
    condition = [make_node("Cast", ["yes"], ["c"], to=BOOL)]
    proto = model(
        [
            *conditional(condition),
            make_node("Sum", ["y", "x", "h"], ["s"]),
            make_node("CenterCropPad", ["s", "crop"], ["z"]),
        ],
        [("x", FLOAT, [4, 8]), ("yes", FLOAT, [])],
        [("z", FLOAT, [2, 2]), ("yes", FLOAT, [])],
        {"yes": np.float32(1), "crop": np.array([2, 2])},
        ir=3,
    )
    current = read(save(tmp_path, proto))
    fix_shapes(current, {}, {})
    for step in STEPS:
        current = step.apply(current)
        onnx.checker.check_model(current)
        assert [value.name for value in current.graph.input] == ["x"], step.name
    assert {node.op_type for node in current.graph.node} >= {"Exp", "Mul", "Relu", "Add"}
    assert not {node.op_type for node in current.graph.node} & {"If", "Sum", "CenterCropPad", "Constant"}


def test_folding_does_not_blow_up(tmp_path):
    proto = model(
        [
            make_node("Expand", ["one", "s"], ["big"]),
            make_node("ReduceMax", ["big"], ["m"], keepdims=0),
            make_node("Add", ["x", "m"], ["y"]),
        ],
        [("x", FLOAT, [1])],
        [("y", FLOAT, None)],
        {"one": np.ones(1, "float32"), "s": np.array([4096, 4096])},
    )
    current = read(save(tmp_path, proto))
    for step in STEPS:
        current = step.apply(current)
    assert current.ByteSize() < 10_000


def test_what_tvm_cannot_convert_is_named(tmp_path):
    proto = model(
        [make_node("Reshape", ["x", "s"], ["y"], name="layer/reshape")],
        [("x", FLOAT, [4])],
        [("y", FLOAT, None)],
        {"s": np.array([3, 3])},
    )
    path = save(tmp_path, proto)
    with pytest.raises(UnsupportedError) as caught:
        load(path, {}, {})
    assert caught.value.message.startswith(f"{path}: Reshape")
    assert "layer/reshape" in caught.value.message
    assert caught.value.hint


def test_a_private_operator_with_a_standard_name_is_refused(tmp_path):
    proto = model([make_node("Relu", ["x"], ["y"], domain="my.company")], [("x", FLOAT, [4])], [("y", FLOAT, [4])])
    with pytest.raises(UnsupportedError, match=r"my\.company::Relu 'y': operators of the domain 'my\.company'"):
        load(save(tmp_path, proto), {}, {})
