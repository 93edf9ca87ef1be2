"""Every family of operators over random shapes, untuned: odd sizes, 1, tails; values are ONNX Runtime's."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import tvm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

from tvmflow import config, frontend
from tvmflow.pipeline import plan
from tvmflow.pipeline.context import context_of
from tvmflow.pipeline.prepare import prepare, setting

Nodes = list[tuple[str, list[str], list[str], dict[str, Any]]]
Arrays = dict[str, np.ndarray]
Draw = Callable[[st.SearchStrategy[Any]], Any]

EXAMPLES = settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
SIZE = st.one_of(st.integers(1, 5), st.sampled_from([7, 8, 13, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 100, 129]))
ACTIVATIONS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "none": [],
    "Relu": [("Relu", {})],
    "Gelu": [("Gelu", {})],
    "SiLU": [("HardSwish", {})],
    "Sigmoid": [("Sigmoid", {})],
    "LeakyRelu": [("LeakyRelu", {"alpha": 0.1})],
    "Tanh": [("Tanh", {}), ("Abs", {})],
    "Elu": [("Elu", {"alpha": 1.5})],
    "Softplus": [("Softplus", {})],
}


def model(nodes: Nodes, inputs: Arrays, weights: Arrays) -> onnx.ModelProto:
    made = [helper.make_node(kind, takes, gives, **attrs) for kind, takes, gives, attrs in nodes]
    values = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in inputs.items()
    ]
    last = helper.make_tensor_value_info(nodes[-1][2][0], TensorProto.FLOAT, None)
    graph = helper.make_graph(
        made, "family", values, [last], [numpy_helper.from_array(array, name) for name, array in weights.items()]
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    return onnx.shape_inference.infer_shapes(proto)


def check(nodes: Nodes, inputs: Arrays, weights: Arrays, layout: str = "auto") -> None:
    """Builds the model as `compile` does, runs it, and compares with ONNX Runtime."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "family.onnx"
        onnx.save(model(nodes, inputs, weights), path)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        (want,) = session.run(None, inputs)
        cfg = config.of_model(str(path), [{"target": {"threads": 2}, "graph": {"layout": layout}}])
        loaded, chosen = frontend.load(cfg), setting(cfg)
        with chosen.entered():
            mod, _ = prepare(cfg, loaded)
            held: list[tvm.runtime.Tensor] = []
            context = context_of(cfg, on_weights=held.extend)
            later = plan.steps_of(context, "schedule", "rewrite", "pack", "prefetch", "weights", "lower")
            lowered = plan.run(mod, later)
            built = relax.vm_build.build(lowered, chosen.tvm_target, relax_pipeline=None)
    machine = relax.VirtualMachine(built, tvm.cpu())
    feeds = [tvm.runtime.tensor(inputs[spec.name]) for spec in loaded.signature.inputs]
    result = machine["main"](*feeds, *held)
    got = (result if isinstance(result, tvm.runtime.Tensor) else result[0]).numpy()
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5 * max(1.0, float(np.abs(want).max(initial=0))))


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def followed(nodes: Nodes, activation: str) -> Nodes:
    """The nodes with an activation of the last one's output."""
    name = nodes[-1][2][0]
    for number, (kind, attrs) in enumerate(ACTIVATIONS[activation]):
        nodes = [*nodes, (kind, [name], [f"activated{number}"], attrs)]
        name = f"activated{number}"
    return nodes


@EXAMPLES
@given(
    batch=st.lists(st.integers(1, 3), max_size=2),
    m=SIZE,
    k=SIZE,
    n=SIZE,
    is_weight=st.booleans(),
    has_bias=st.booleans(),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
)
def test_products(batch: list[int], m: int, k: int, n: int, is_weight: bool, has_bias: bool, activation: str) -> None:
    inputs, weights = {"x": drawn(*batch, m, k)}, {"bias": drawn(n)}
    (weights if is_weight else inputs)["w"] = drawn(k, n) if is_weight else drawn(*batch, k, n)
    nodes: Nodes = [("MatMul", ["x", "w"], ["product"], {})]
    if has_bias:
        nodes.append(("Add", ["product", "bias"], ["sum"], {}))
    check(followed(nodes, activation), inputs, weights)


@EXAMPLES
@given(m=SIZE, k=SIZE, n=SIZE, left=st.booleans(), right=st.booleans(), alpha=st.sampled_from([1.0, 0.5]))
def test_gemm(m: int, k: int, n: int, left: bool, right: bool, alpha: float) -> None:
    nodes: Nodes = [("Gemm", ["x", "w", "c"], ["y"], {"transA": int(left), "transB": int(right), "alpha": alpha})]
    check(
        nodes, {"x": drawn(*((k, m) if left else (m, k)))}, {"w": drawn(*((n, k) if right else (k, n))), "c": drawn(n)}
    )


@EXAMPLES
@given(
    data=st.data(),
    rank=st.sampled_from([1, 2, 2, 2]),
    groups=st.sampled_from([1, 1, 2, 3]),
    channels=st.sampled_from([1, 3, 4, 5, 8, 16, 17]),
    filters=st.sampled_from([1, 2, 5, 8, 16, 24]),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    layout=st.sampled_from(["auto", "nhwc", "keep"]),
)
def test_convolutions(
    data: Any, rank: int, groups: int, channels: int, filters: int, activation: str, layout: str
) -> None:
    kernel, strides, dilations = (_each(data.draw, rank, high) for high in (5, 3, 2))
    size = [data.draw(st.integers((k - 1) * d + 1, 24)) for k, d in zip(kernel, dilations, strict=True)]
    pads = [data.draw(st.integers(0, 2)) for _ in range(2 * rank)]
    attrs = {"kernel_shape": kernel, "strides": strides, "dilations": dilations, "pads": pads, "group": groups}
    nodes: Nodes = [("Conv", ["x", "w", "b"], ["y"], attrs)]
    check(
        followed(nodes, activation),
        {"x": drawn(data.draw(st.integers(1, 2)), channels * groups, *size)},
        {"w": drawn(filters * groups, channels, *kernel), "b": drawn(filters * groups)},
        layout,
    )


@EXAMPLES
@given(data=st.data(), channels=st.sampled_from([1, 3, 8, 16]), filters=st.sampled_from([1, 5, 8, 24]))
def test_transposed_convolutions(data: Any, channels: int, filters: int) -> None:
    kernel, strides = _each(data.draw, 2, 4), _each(data.draw, 2, 3)
    extra = [data.draw(st.integers(0, stride - 1)) for stride in strides]
    pads = [data.draw(st.integers(0, (k - 1) // 2)) for k in (*kernel, *kernel)]
    attrs = {"kernel_shape": kernel, "strides": strides, "pads": pads, "output_padding": extra}
    check(
        [("ConvTranspose", ["x", "w"], ["y"], attrs)],
        {"x": drawn(1, channels, *_each(data.draw, 2, 12))},
        {"w": drawn(channels, filters, *kernel)},
    )


@EXAMPLES
@given(
    data=st.data(),
    kind=st.sampled_from(["MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"]),
    channels=st.sampled_from([1, 3, 8, 17, 32]),
    ceil=st.booleans(),
)
def test_pooling(data: Any, kind: str, channels: int, ceil: bool) -> None:
    kernel, strides = _each(data.draw, 2, 4), _each(data.draw, 2, 3)
    attrs = {"kernel_shape": kernel, "strides": strides, "ceil_mode": int(ceil)} if "Global" not in kind else {}
    size = [data.draw(st.integers(k, 20)) for k in kernel]
    check([(kind, ["x"], ["y"], attrs)], {"x": drawn(2, channels, *size)}, {})


@EXAMPLES
@given(
    data=st.data(),
    shape=st.lists(SIZE, min_size=2, max_size=3),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    kind=st.sampled_from(
        [
            "Softmax",
            "LogSoftmax",
            "LayerNormalization",
            "ReduceMean",
            "ReduceMax",
            "ReduceSum",
            "ReduceL2",
            "ReduceLogSumExp",
            "ReduceProd",
            "ArgMax",
            "CumSum",
        ]
    ),
)
def test_reductions(data: Any, shape: list[int], activation: str, kind: str) -> None:
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    inputs, weights = {"x": drawn(*shape)}, {}
    nodes: Nodes = [("Mul", ["x", "x"], ["first"], {})]
    if kind in ("Softmax", "LogSoftmax"):
        nodes.append((kind, ["first"], ["y"], {"axis": axis}))
    elif kind == "LayerNormalization":
        weights = {"scale": drawn(*shape[axis:])}
        nodes.append((kind, ["first", "scale"], ["y"], {"axis": axis}))
    elif kind == "ArgMax":
        nodes += [(kind, ["first"], ["at"], {"axis": axis}), ("Cast", ["at"], ["y"], {"to": TensorProto.FLOAT})]
    else:
        weights = {"axes": np.array(axis if kind == "CumSum" else [axis], np.int64)}
        attrs = {} if kind == "CumSum" else {"keepdims": data.draw(st.integers(0, 1))}
        nodes.append((kind, ["first", "axes"], ["y"], attrs))
    check(followed(nodes, activation), inputs, weights)


@EXAMPLES
@given(
    data=st.data(),
    shape=st.lists(SIZE, min_size=1, max_size=4).filter(lambda shape: np.prod(shape) < 1 << 18),
    length=st.integers(2, 6),
)
def test_elementwise_chains_with_broadcasting(data: Any, shape: list[int], length: int) -> None:
    nodes: Nodes = [("Abs", ["x"], ["v0"], {}), ("Add", ["v0", "one"], ["v1"], {})]
    weights: Arrays = {"one": np.float32(1)[None]}
    for number in range(2, length + 2):
        before = f"v{number - 1}"
        if data.draw(st.booleans()):
            kind = data.draw(st.sampled_from(("Sigmoid", "Tanh", "Exp", "Sin", "Abs", "Erf", "Relu", "Neg")))
            nodes.append((kind, [before], [f"v{number}"], {}))
            if kind == "Exp":
                nodes[-1] = ("Exp", [f"{before}_small"], [f"v{number}"], {})
                nodes.insert(-1, ("Tanh", [before], [f"{before}_small"], {}))
        else:
            start = data.draw(st.integers(0, len(shape)))
            other = [data.draw(st.sampled_from([1, size])) for size in shape[start:]]
            weights[f"c{number}"] = np.abs(drawn(*other, seed=number)) + 0.5
            kind = data.draw(st.sampled_from(("Add", "Sub", "Mul", "Div", "Max", "Min")))
            nodes.append((kind, [before, f"c{number}"], [f"v{number}"], {}))
    check(nodes, {"x": drawn(*shape)}, weights)


@EXAMPLES
@given(
    data=st.data(),
    shape=st.lists(SIZE, min_size=2, max_size=4).filter(lambda shape: np.prod(shape) < 1 << 18),
    kinds=st.lists(
        st.sampled_from(["Transpose", "Concat", "Slice", "Pad", "Gather", "Tile", "Unsqueeze", "Flatten", "Mul"]),
        min_size=2,
        max_size=4,
    ),
)
def test_data_movement(data: Any, shape: list[int], kinds: list[str]) -> None:
    nodes: Nodes = [("Relu", ["x"], ["v0"], {})]
    weights: Arrays = {}
    now = list(shape)
    for number, kind in enumerate(kinds, start=1):
        axis = data.draw(st.integers(0, len(now) - 1))
        takes, attrs, now = _movement(data.draw, kind, f"v{number - 1}", number, axis, now, weights)
        nodes.append((kind, takes, [f"v{number}"], attrs))
    check(nodes, {"x": drawn(*shape)}, weights)


def _movement(
    draw: Draw,
    kind: str,
    before: str,
    number: int,
    axis: int,
    shape: list[int],
    weights: Arrays,
) -> tuple[list[str], dict[str, Any], list[int]]:
    """What a node takes, its attributes, and the shape of what it gives; adds its constants to `weights`."""

    def constant(suffix: str, values: Sequence[int] | np.ndarray) -> str:
        weights[f"c{number}{suffix}"] = np.asarray(values, None if isinstance(values, np.ndarray) else np.int64)
        return f"c{number}{suffix}"

    size = shape[axis]
    changed = lambda value: [*shape[:axis], value, *shape[axis + 1 :]]  # noqa: E731
    if kind == "Transpose":
        order = draw(st.permutations(range(len(shape))))
        return [before], {"perm": list(order)}, [shape[a] for a in order]
    if kind == "Concat":
        return [before, before], {"axis": axis}, changed(2 * size)
    if kind == "Slice":
        start, step = draw(st.integers(0, size - 1)), draw(st.integers(1, 3))
        takes = [before, constant("s", [start]), constant("e", [size]), constant("a", [axis]), constant("t", [step])]
        return takes, {}, changed(-(-(size - start) // step))
    if kind == "Pad":
        low, high = draw(st.integers(0, 3)), draw(st.integers(0, 3))
        pads = [pad if a == axis else 0 for pad in (low, high) for a in range(len(shape))]
        return [before, constant("p", pads)], {}, changed(size + low + high)
    if kind == "Gather":
        indices = draw(st.lists(st.integers(-size, size - 1), min_size=1, max_size=5))
        return [before, constant("i", indices)], {"axis": axis}, changed(len(indices))
    if kind == "Tile":
        return [before, constant("r", [2 if a == axis else 1 for a in range(len(shape))])], {}, changed(2 * size)
    if kind == "Unsqueeze":
        return [before, constant("a", [axis])], {}, [*shape[:axis], 1, *shape[axis:]]
    if kind == "Flatten":
        return [before], {"axis": axis}, [int(np.prod(shape[:axis])), int(np.prod(shape[axis:]))]
    return [before, constant("w", drawn(*shape[axis:], seed=number))], {}, shape


@EXAMPLES
@given(
    data=st.data(),
    channels=st.sampled_from([1, 3, 8, 16]),
    mode=st.sampled_from(["nearest", "linear", "cubic"]),
    coordinates=st.sampled_from(["asymmetric", "half_pixel", "align_corners"]),
)
def test_resizing(data: Any, channels: int, mode: str, coordinates: str) -> None:
    size, target = _each(data.draw, 2, 20), _each(data.draw, 2, 30)
    attrs = {"mode": mode, "coordinate_transformation_mode": coordinates}
    if mode == "nearest":
        attrs["nearest_mode"] = "floor"
    nodes: Nodes = [("Resize", ["x", "", "", "sizes"], ["y"], attrs), ("Relu", ["y"], ["z"], {})]
    check(nodes, {"x": drawn(1, channels, *size)}, {"sizes": np.array([1, channels, *target], np.int64)})


def _each(draw: Draw, count: int, high: int) -> list[int]:
    return [draw(st.integers(1, high)) for _ in range(count)]
