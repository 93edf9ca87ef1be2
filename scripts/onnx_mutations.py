"""Small ONNX models and random changes to them, each decided by a seed: what `fuzz_onnx.py` feeds to the importer.

A change keeps most of a model as it is, so that it gets past the first checks.
"""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    -2,
    7,
    16,
    255,
    4096,
    65536,
    2**24,
    2**31 - 1,
    -(2**31),
    2**32,
    2**40,
    2**62,
    2**63 - 1,
    -(2**63),
)
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e38, -1e38, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    b"",
    b"NOTSET",
    b"SAME_UPPER",
    b"VALID",
    b"linear",
    b"nearest",
    b"constant",
    b"reflect",
    b"\xff\xfe",
    b"ij,jk->ik",
)
EXTERNAL = ("w.bin", "none.bin", "../w.bin", "/etc/passwd", "", ".", "w.bin/x", "a\0b", "x" * 5000)
LARGEST_BYTES = 1 << 20  # a model of the corpus; larger ones only take time


@functools.cache
def corpus() -> tuple[bytes, ...]:
    """onnx's own node tests, with their inputs and with constants in place of them, and models of ours."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's, while onnx computes expected values with infinities
        cases = collect_testcases(None)
    models = [case.model for case in cases] + [_with_constants(case.model, case.data_sets[0][0]) for case in cases]
    found = [model.SerializeToString() for model in (*models, *_own_models())]
    return tuple(data for data in found if len(data) <= LARGEST_BYTES)


def mutated(seed: int, index: int) -> bytes:
    """The file number `index` of a seed: one to a few changes of fields, of bytes, or of both."""
    rng = random.Random(f"{seed}:{index}")
    data = rng.choice(corpus())
    if rng.random() < 0.9:
        model = ModelProto.FromString(data)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            rng.choice(CHANGES)(rng, model)
        data = model.SerializeToString()
    if rng.random() < 0.2:
        for _ in range(rng.randint(1, 4)):
            data = rng.choice(BYTE_CHANGES)(rng, data)
    return data


def _with_constants(model: ModelProto, inputs: Sequence[Any]) -> ModelProto:
    """The model with every input but the first as a constant, so that what depends on them is computed at import."""
    model = ModelProto.FromString(model.SerializeToString())
    for value, array in list(zip(model.graph.input, inputs, strict=False))[1:]:
        if isinstance(array, np.ndarray | np.generic) and np.asarray(array).dtype.kind not in "OUS":
            model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), value.name))
            model.graph.input.remove(value)
    return model


def _own_models() -> list[ModelProto]:
    """Functions, branches, and weights in another file (`w.bin`, of 64 bytes), in nodes of each."""
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    make = helper.make_node
    weight = numpy_helper.from_array(np.arange(16, dtype="float32"), "w")
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="w.bin")
    scale = helper.make_function(
        "own",
        "Scale",
        ["a"],
        ["b"],
        [make("Constant", [], ["k"], value=weight), make("Mul", ["a", "k"], ["m"]), make("Elu", ["m"], ["b"])],
        opsets,
        attribute_protos=[helper.make_attribute("alpha", 0.5)],
    )
    scale.node[2].attribute.add(name="alpha", type=AttributeProto.FLOAT, ref_attr_name="alpha")
    twice = helper.make_function(
        "own",
        "Twice",
        ["a"],
        ["c"],
        [make("Scale", ["a"], ["b"], domain="own"), make("Scale", ["b"], ["c"], domain="own", alpha=2.0)],
        opsets,
    )

    def value(name: str, elem_type: int, *shape: Any) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, elem_type, shape)

    def branch(name: str, *nodes: NodeProto) -> GraphProto:
        return helper.make_graph(list(nodes), name, [], [value(nodes[-1].output[0], TensorProto.FLOAT, "n", 16)])

    then = branch("then", make("Constant", [], ["k1"], value=weight), make("Add", ["x", "k1"], ["t"]))
    other = branch("else", make("Twice", ["x"], ["e"], domain="own"))
    nodes = [
        make("If", ["c"], ["i"], then_branch=then, else_branch=other),
        make("Shape", ["i"], ["s"]),
        make("ConstantOfShape", ["s"], ["z"]),
        make("Add", ["i", "z"], ["p"]),
        make("Twice", ["p"], ["q"], domain="own"),
        make("Reshape", ["q", "flat"], ["r"]),
        make("Tile", ["r", "two"], ["y"]),
    ]
    weights = [
        numpy_helper.from_array(np.array([-1, 4]), "flat"),
        numpy_helper.from_array(np.array([2, 1]), "two"),
        weight,
    ]
    graph = helper.make_graph(
        nodes,
        "own",
        [value("c", TensorProto.BOOL), value("x", TensorProto.FLOAT, "n", 16)],
        [value("y", TensorProto.FLOAT, "m", 4)],
        weights,
    )
    model = helper.make_model(graph, opset_imports=opsets, functions=[scale, twice], ir_version=10)
    return [model] * 100  # as often as one node test in twenty


def _any_nodes(model: ModelProto) -> list[Any]:
    """The list of nodes of the main graph, a function or a branch."""
    found: list[Any] = [model.graph.node, *(function.node for function in model.functions)]
    found += [a.g.node for nodes in list(found) for node in nodes for a in node.attribute if a.HasField("g")]
    return [nodes for nodes in found if len(nodes)]


def _node(rng: random.Random, model: ModelProto) -> NodeProto | None:
    lists = _any_nodes(model)
    return rng.choice(rng.choice(lists)) if lists else None


def _tensor(rng: random.Random, model: ModelProto) -> TensorProto | None:
    found = list(model.graph.initializer)
    found += [a.t for nodes in _any_nodes(model) for node in nodes for a in node.attribute if a.HasField("t")]
    return rng.choice(found) if found else None


def _change_dims(rng: random.Random, model: ModelProto) -> None:
    tensor = _tensor(rng, model)
    if tensor is not None and rng.random() < 0.5:
        dims = [*tensor.dims]
        dims.insert(rng.randint(0, len(dims)), rng.choice(NUMBERS)) if rng.random() < 0.3 or not dims else None
        dims[rng.randrange(len(dims))] = rng.choice(NUMBERS)
        del tensor.dims[:]
        tensor.dims.extend(dims)
    elif model.graph.input:
        shape = rng.choice(model.graph.input).type.tensor_type.shape
        dim = rng.choice(shape.dim) if shape.dim and rng.random() < 0.8 else shape.dim.add()
        if rng.random() < 0.3:
            dim.dim_param = rng.choice(["n", "", "m.1", "7", "é", "x" * 300])
        else:
            dim.dim_value = rng.choice(NUMBERS)


def _change_values(rng: random.Random, model: ModelProto) -> None:
    """Other numbers, of the right length, or data of another."""
    tensor = _tensor(rng, model)
    if tensor is None:
        return
    if tensor.data_type == TensorProto.INT64 and tensor.raw_data:
        values = [int(value) for value in np.frombuffer(tensor.raw_data[: len(tensor.raw_data) // 8 * 8], "<i8")]
        changed = [rng.choice(NUMBERS) if rng.random() < 0.5 else value for value in values]
        tensor.raw_data = np.array(changed, "<i8").tobytes()
    elif rng.random() < 0.3:
        tensor.ClearField("raw_data")
    elif rng.random() < 0.5:
        tensor.raw_data = rng.randbytes(len(tensor.raw_data))
    else:
        tensor.raw_data = tensor.raw_data[: rng.randint(0, len(tensor.raw_data))]


def _change_type(rng: random.Random, model: ModelProto) -> None:
    tensor, number = _tensor(rng, model), rng.randint(0, 26)
    if tensor is not None and rng.random() < 0.5:
        tensor.data_type = number
    elif model.graph.input:
        rng.choice(model.graph.input).type.tensor_type.elem_type = number


def _move_outside(rng: random.Random, model: ModelProto) -> None:
    tensor = _tensor(rng, model)
    if tensor is not None:
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=rng.choice(EXTERNAL))
        if rng.random() < 0.5:
            tensor.external_data.add(key=rng.choice(["offset", "length", "other"]), value=str(rng.choice(NUMBERS)))


def _change_attribute(rng: random.Random, model: ModelProto) -> None:
    node = _node(rng, model)
    if node is None:
        return
    if not node.attribute or rng.random() < 0.3:
        names = ["axis", "axes", "to", "perm", "pads", "kernel_shape", "group", "mode", "strides", "value", "alpha"]
        node.attribute.append(helper.make_attribute(rng.choice(names), rng.choice([rng.choice(NUMBERS), [1, 0], 1.5])))
        return
    attribute = rng.choice(node.attribute)
    attribute.i = rng.choice(NUMBERS) if rng.random() < 0.7 else attribute.i
    attribute.f = rng.choice(FLOATS)
    attribute.s = rng.choice(TEXTS)
    if attribute.ints:
        attribute.ints[rng.randrange(len(attribute.ints))] = rng.choice(NUMBERS)
    choice = rng.random()
    if choice < 0.1:
        attribute.type = rng.randint(0, 14)
    elif choice < 0.2:
        node.attribute.remove(attribute)
    elif choice < 0.3:
        attribute.ints.append(rng.choice(NUMBERS))
    elif choice < 0.4:
        attribute.ref_attr_name = rng.choice(["alpha", "axis", ""])


def _rewire(rng: random.Random, model: ModelProto) -> None:
    """Another value, none, or one more at a node's inputs or outputs."""
    node = _node(rng, model)
    if node is None:
        return
    names = [*node.input, *node.output, *(value.name for value in model.graph.input), "", "new"]
    ends = node.input if rng.random() < 0.7 else node.output
    if ends and rng.random() < 0.7:
        ends[rng.randrange(len(ends))] = rng.choice(names)
    elif ends and rng.random() < 0.5:
        del ends[rng.randrange(len(ends))]
    else:
        ends.append(rng.choice(names))


def _change_operator(rng: random.Random, model: ModelProto) -> None:
    node, other = _node(rng, model), _node(rng, ModelProto.FromString(rng.choice(corpus())))
    if node is None or other is None:
        return
    if rng.random() < 0.5:
        node.op_type, node.domain = other.op_type, other.domain
    elif rng.random() < 0.5:
        del node.attribute[:]
        node.attribute.extend(other.attribute)
    else:
        rng.choice(_any_nodes(model)).append(node)


def _change_frame(rng: random.Random, model: ModelProto) -> None:
    """Opsets, outputs, functions, nesting."""
    choice = rng.randrange(7)
    if choice == 0 and model.opset_import:
        rng.choice(model.opset_import).version = rng.choice([0, 1, 6, 7, 9, 11, 13, 17, 21, 23, 99, -1, 2**40])
    elif choice == 1:
        model.ir_version = rng.choice([0, 1, 3, 4, 8, 10, 99])
    elif choice == 2 and model.graph.output:
        model.graph.output[0].name = rng.choice(["", "x", "new", "y" * 3000])
    elif choice == 3 and model.functions:
        model.functions.append(rng.choice(model.functions))
    elif choice == 4 and model.functions:
        function: FunctionProto = rng.choice(model.functions)
        name = rng.choice(model.functions).name
        function.node.append(NodeProto(op_type=name, domain="own", input=["a"], output=["z"]))
    elif choice == 5 and model.graph.initializer:
        del model.graph.initializer[rng.randrange(len(model.graph.initializer))]
    elif choice == 6 and (node := _node(rng, model)) is not None:
        inner = GraphProto.FromString(model.graph.SerializeToString())
        node.attribute.append(helper.make_attribute("then_branch", inner))


Change = Callable[[random.Random, ModelProto], None]
CHANGES: Sequence[Change] = (
    _change_dims,
    _change_values,
    _change_type,
    _move_outside,
    _change_attribute,
    _change_attribute,
    _rewire,
    _change_operator,
    _change_frame,
)


def _flip(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def _cut(rng: random.Random, data: bytes) -> bytes:
    start = rng.randrange(len(data))
    return data[:start] + data[start + rng.randint(1, 40) :] or data


def _insert(rng: random.Random, data: bytes) -> bytes:
    start, other = rng.randrange(len(data)), rng.choice(corpus())
    piece = rng.randbytes(rng.randint(1, 9)) if rng.random() < 0.5 else other[: rng.randint(1, len(other))]
    return data[:start] + piece + data[start:]


BYTE_CHANGES: Sequence[Callable[[random.Random, bytes], bytes]] = (_flip, _flip, _cut, _insert)
