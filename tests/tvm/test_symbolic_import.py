"""Models whose sizes stay open: what the signature says of their outputs, and their values, against ONNX Runtime."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from ops_runs import assert_same, reference
from tvm import relax

from tvmflow import config, flow, runtime
from tvmflow.errors import InputError, UnsupportedError
from tvmflow.frontend.onnx.loading import load
from tvmflow.frontend.onnx.reference import run_onnx
from tvmflow.manifest import Signature

MODELS = Path(__file__).parents[2] / ".cache/models/onnx"
RNG = np.random.default_rng(7)


def shapes_at(signature: Signature, dims: dict[str, int]) -> list[tuple[int, ...]]:
    """The output shapes that a signature states, at these sizes."""
    names = {"min": min, "max": max, "__builtins__": {}}
    return [
        tuple(eval(size, names, dict(dims)) if isinstance(size, str) else size for size in spec.shape)
        for spec in signature.outputs
    ]


def feeds_at(signature: Signature, dims: dict[str, int], **given: Any) -> dict[str, np.ndarray]:
    feeds = {}
    for spec in signature.inputs:
        shape = [dims[size] if isinstance(size, str) else size for size in spec.shape]
        if spec.name in given:
            feeds[spec.name] = np.asarray(given[spec.name], spec.dtype)
        elif spec.dtype.startswith("float"):
            feeds[spec.name] = RNG.standard_normal(shape).astype(spec.dtype)
        else:
            low, high = spec.range or (0, 1)
            feeds[spec.name] = RNG.integers(int(low), int(high), shape, endpoint=True).astype(spec.dtype)
    return feeds


SIZES = [{"batch": 1, "width": 320}, {"batch": 3, "width": 101}]
CASES: dict[str, tuple[dict[str, list[Any]], list[dict[str, int]]]] = {
    "ppocr_rec": ({"x": ["batch", 3, 48, "width"]}, SIZES),
    "ppocr_det": ({"x": ["batch", 3, "h", "w"]}, [{"batch": 1, "h": 64, "w": 96}, {"batch": 2, "h": 32, "w": 64}]),
    "ppocr_cls": ({"x": ["batch", 3, 48, 192]}, SIZES),
    "realesr_fp32": ({}, [{"n": 1, "h": 7, "w": 9}, {"n": 2, "h": 4, "w": 3}]),
    "effnet_lite0": ({"x": ["batch", 3, 224, 224]}, SIZES),
    "crepe_tiny": ({"x": ["batch", 1024]}, SIZES),
    "magika": ({"bytes": ["batch", 2048]}, SIZES),
    "basic_pitch": ({"serving_default_input_2:0": ["batch", 43844, 1]}, [{"batch": 1}, {"batch": 2}]),
    "silero_ifless": ({}, [{"batch": 1, "sequence": 576}, {"batch": 3, "sequence": 576}]),
    "minilm_l6": (
        {"ids": ["batch", "tokens"], "mask": ["batch", "tokens"]},
        [{"batch": 1, "tokens": 5}, {"batch": 3, "tokens": 17}],
    ),
    "minilm_l3": ({}, [{"batch_size": 1, "sequence_length": 5}, {"batch_size": 2, "sequence_length": 9}]),
    "smollm2_4layers": ({"ids": [1, "tokens"]}, [{"tokens": 1}, {"tokens": 6}]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_real_models_signature_states_its_outputs_sizes(name):
    path = MODELS / f"{name}.onnx"
    if not path.exists():
        pytest.skip(f"{name}.onnx is not fetched: python scripts/get_models.py .cache/models {name}")
    inputs, sizes = CASES[name]
    signature = load(path, {key: config.ModelInput(shape=tuple(shape)) for key, shape in inputs.items()}, {}).signature
    if name == "ppocr_rec":  # word by word: others read these texts
        assert signature.outputs[0].shape == ("batch", "((width - 5) // 8 + 1)", 6625)
    feeds = [feeds_at(signature, dims, sr=16000) for dims in sizes]
    _, results = run_onnx(path, feeds, "onnxruntime")
    for dims, result in zip(sizes, results, strict=True):
        assert shapes_at(signature, dims) == [array.shape for array in result], dims


# What exporters compute shapes by, of x: float[a, b, 6]. Each ends in a 1-d tensor `v` of int64.
CHAINS = {
    "shape": "v = Shape (x)",
    "part": "v = Shape <start = -2, end = 9> (x)",
    "size": "n = Size (x) v = Reshape (n, one)",
    "cast": "s = Shape (x) c = Cast <to = 6> (s) p = Slice (c, one, two, zero) v = Cast <to = 7> (p)",
    "backwards": "s = Shape (x) v = Slice (s, two, zero, zero, minus)",
    "gather": "s = Shape (x) v = Gather (s, picks)",
    "scalar": "s = Shape (x) n = Gather (s, place) v = Unsqueeze (n, zero)",
    "squeeze": "s = Shape <end = 1> (x) n = Squeeze (s) v = Unsqueeze (n, zero)",
    "concat": "s = Shape <end = 2> (x) v = Concat <axis = 0> (s, five, two)",
    "add": "s = Shape (x) v = Add (s, five)",
    "sub": "s = Shape (x) v = Sub (five, s)",
    "mul": "s = Shape (x) v = Mul (s, s)",
    "int32": "s = Shape (x) c = Cast <to = 6> (s) f = Cast <to = 6> (five) m = Mul (c, f) v = Cast <to = 7> (m)",
    "div": "s = Shape (x) d = Sub (s, five) v = Div (d, two)",
    "div by a negative": "s = Shape (x) v = Div (s, minus2)",
    "div by a size": "s = Shape <end = 2> (x) p = ReduceProd <keepdims = 1> (s) f = Shape <end = 1> (x) v = Div (p, f)",
    "mod": "s = Shape (x) d = Sub (s, five) v = Mod (d, two)",
    "fmod": "s = Shape (x) d = Sub (s, five) v = Mod <fmod = 1> (d, two)",
    "min": "s = Shape (x) v = Min (s, five, four)",
    "max": "s = Shape (x) v = Max (five, s)",
    "neg": "s = Shape (x) v = Neg (s)",
    "abs": "s = Shape (x) d = Sub (s, five) v = Abs (d)",
    "product": "s = Shape (x) p = ReduceProd <keepdims = 0> (s) v = Unsqueeze (p, zero)",
    "total": "s = Shape (x) v = ReduceSum <keepdims = 1> (s)",
    "largest": "s = Shape (x) v = ReduceMax <keepdims = 1> (s)",
    "smallest": "s = Shape (x) v = ReduceMin <keepdims = 1> (s)",
    "where": "s = Shape (x) e = Equal (s, minus) v = Where (e, one, s)",
    "less": "s = Shape (x) l = Less (s, zero) n = Not (l) o = Or (l, n) v = Where (o, s, five)",
    "undecided": "s = Shape (x) e = Equal (s, five) v = Where (e, one, s)",
    "expand": "s = Shape <end = 1> (x) v = Expand (s, two)",
    "reshape": "s = Shape (x) r = Reshape (s, row) v = Reshape (r, minus)",
    "shape of a shape": "s = Shape (x) v = Shape (s)",
    "cast to float": "s = Shape (x) f = Cast <to = 1> (s) h = Mul (f, half) v = Cast <to = 7> (h)",
}
# Where the values depend on data as far as the import can see, or can be negative.
NO_SIZES = {"sub", "div", "div by a negative", "mod", "fmod", "neg", "undecided", "cast to float"}
WEIGHTS = (
    "zero = {0}, one = {1}, two = {2}, four = {4}, five = {5}, minus = {-1}, minus2 = {-2}, row = {1, 3},"
    " picks = {1, -1, 0}"
)


def parsed(body: str, inputs: str, outputs: str, weights: str = WEIGHTS) -> onnx.ModelProto:
    """A model of the body's nodes: "y = Op (x) z = ...", one after the other."""
    lengths = {name: text.count(",") + 1 for name, text in _items(weights)}
    values = ", ".join(f"int64[{lengths[name]}] {name} = {text}" for name, text in _items(weights))
    nodes = body.replace(") ", ")\n")
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 18]> g ({inputs}) => ({outputs}) '
        f"<{values}, int64 place = {{1}}, float half = {{0.5}}> {{ {nodes} }}"
    )


def _items(weights: str) -> list[tuple[str, str]]:
    return [(part.split(" = ")[0].strip(" ,"), part.split(" = ")[1] + "}") for part in weights.split("}") if part]


def run(machine: relax.VirtualMachine, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    result = machine["main"](*(tvm.runtime.tensor(array) for array in feeds.values()))
    return [array.numpy() for array in ([result] if isinstance(result, tvm.runtime.Tensor) else result)]


def test_values_computed_from_shapes(tmp_path):
    """All chains in one model: their values, and the sizes of what is filled to them."""
    nodes, outputs = [], []
    for number, (name, chain) in enumerate(CHAINS.items()):
        nodes.append(_numbered(chain, number))
        outputs.append(f"int64[k] v_{number}")
        if name not in NO_SIZES:
            nodes.append(f"z_{number} = ConstantOfShape (v_{number})")
            outputs.append(f"float[] z_{number}")
    proto = parsed(" ".join(nodes), "float[a, b, 6] x", ", ".join(outputs))
    imported, machine = _loaded(proto, tmp_path)
    for a, b in [(1, 1), *RNG.integers(1, 6, (4, 2)).tolist()]:
        feeds = {"x": np.zeros((a, b, 6), "float32")}
        want = reference(proto, feeds)
        assert_same(run(machine, feeds), want)
        assert shapes_at(imported.signature, {"a": a, "b": b}) == [array.shape for array in want]


def _numbered(chain: str, number: int) -> str:
    """The chain with values of its own."""
    return re.sub(r"\b([vscpndmfelorhtyw])\b", rf"\1_{number}", chain)


def _loaded(proto: onnx.ModelProto, folder: Path) -> tuple[Any, relax.VirtualMachine]:
    for value in proto.graph.output:
        value.type.tensor_type.ClearField("shape")
    onnx.save(proto, folder / "m.onnx")
    imported = load(folder / "m.onnx", {}, {})
    return imported, relax.VirtualMachine(tvm.compile(imported.mod, "llvm"), tvm.cpu())


# What reads such values, of x: float[a, b, 6] and z: float[a, 4, b]. Each ends in `y`.
READERS = {
    "Reshape": "s = Shape <start = 1, end = 2> (x) t = Concat <axis = 0> (zero, s, two, minus) y = Reshape (x, t)",
    "Reshape with a -1": "s = Shape <end = 1> (x) t = Concat <axis = 0> (s, minus) y = Reshape (x, t)",
    "Reshape to known sizes": "y = Reshape (x, back)",
    "Expand": "s = Shape <end = 1> (x) t = Concat <axis = 0> (s, one, one, one) y = Expand (x, t)",
    "Tile": "s = Shape (x) y = Tile (x, s)",
    "Slice": "s = Shape (x) h = Div (s, two) t = Slice (h, one, two) y = Slice (x, zero, t, one)",
    "Slice from the end": "s = Shape <end = 1> (x) t = Neg (s) y = Slice (x, t, far, one)",
    "Slice of all": "y = Slice (x, zero, far, one)",
    "Slice with steps": "y = Slice (x, zero, minus, one, two)",
    "Slice beyond the end": "y = Slice (x, zero, five, one)",
    "Range": "s = Shape <end = 1> (x) n = Squeeze (s) r = Range (nought, n, unit) y = Cast <to = 1> (r)",
    "Pad": "y = Pad (x, pads)",
    "Pad reflected": 'y = Pad <mode = "reflect"> (x, mirror)',
    "Pad by less": "y = Pad (x, cut)",
    "Squeeze": "t = Slice (x, zero, one, zero) y = Squeeze (t, zero)",
    "Add of halves": "h = MaxPool <kernel_shape = [2], strides = [2]> (x) s = Shape (x) t = Div (s, two)"
    " p = Slice (x, zero, three, two) y = Add (h, p)",
    "Pool": "y = MaxPool <kernel_shape = [3, 2], strides = [2, 1], pads = [1, 0, 1, 1]> (z4)",
    "Concat": "t = Transpose <perm = [0, 2, 1]> (z) w = Concat <axis = 2> (x, t) y = Relu (w)",
}
RESIZES = {
    "nearest": 'y = Resize <mode = "nearest", coordinate_transformation_mode = "asymmetric",'
    ' nearest_mode = "floor"> (z4, , double)',
    "linear": 'y = Resize <mode = "linear"> (z4, , double)',
    "corners": 'y = Resize <mode = "linear", coordinate_transformation_mode = "align_corners"> (z4, , double)',
    "half": 'y = Resize <mode = "linear", coordinate_transformation_mode = "align_corners"> (z4, , , t4)',
    "thirds": 'y = Resize <mode = "nearest", nearest_mode = "round_prefer_ceil"> (z4, , , t4)',
    "asymmetric": 'y = Resize <mode = "linear", coordinate_transformation_mode = "asymmetric"> (z4, , shrunk)',
    "ceil": 'y = Resize <mode = "nearest", nearest_mode = "ceil",'
    ' coordinate_transformation_mode = "half_pixel_symmetric"> (z4, , , t4)',
    "cubic": 'y = Resize <mode = "cubic", coordinate_transformation_mode = "pytorch_half_pixel"> (z4, , , t4)',
}
# What the readers and the resizes read besides.
MORE = (
    ", far = {9223372036854775807}, three = {3}, back = {-1, 3, 2}, pads = {0, 1, 0, 1, 0, 2},"
    " mirror = {0, 1, 0, 0, 2, 3}, cut = {0, -1, 0, 0, 0, -2}, more = {1, 1, 1, 1}, plus = {0, 0, 2, 1}"
)
ARRAYS = {
    "nought": np.array(0),
    "unit": np.array(1),
    "double": np.array([1, 1, 2, 2], "float32"),
    "shrunk": np.array([1, 1, 0.5, 1.5], "float32"),
}
IMAGE = (
    "u = Unsqueeze (z, two) z4 = Transpose <perm = [0, 1, 3, 2]> (u) s4 = Shape (z4) m4 = Mul (s4, more)"
    " t4 = Add (m4, plus)"
)


@pytest.mark.parametrize("bodies", [READERS, RESIZES], ids=["readers", "resizes"])
def test_operators_that_read_sizes_or_have_symbolic_axes(tmp_path, bodies):
    nodes = [IMAGE, *(_numbered(body, number) for number, body in enumerate(bodies.values()))]
    outputs = [f"float[k] y_{number}" for number in range(len(bodies))]
    proto = parsed(" ".join(nodes), "float[a, b, 6] x, float[a, 4, b] z", ", ".join(outputs), WEIGHTS + MORE)
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, key) for key, array in ARRAYS.items())
    imported, machine = _loaded(proto, tmp_path)
    for a, b in ((1, 3), (2, 4), (1, 7)):
        feeds = {
            "x": RNG.standard_normal((a, b, 6)).astype("float32"),
            "z": RNG.standard_normal((a, 4, b)).astype("float32"),
        }
        want, got = reference(proto, feeds), run(machine, feeds)
        for name, one, other in zip(bodies, got, want, strict=True):
            np.testing.assert_allclose(one, other, 1e-4, 1e-5, err_msg=f"{name} at a = {a}, b = {b}", strict=True)
        assert shapes_at(imported.signature, {"a": a, "b": b}) == [array.shape for array in want]


@pytest.mark.parametrize("nodes", ["y = Add (x, z)", "r = Relu (z) w = Mul (x, r) y = Where (c, w, z)"])
def test_sizes_of_two_names_that_agree_when_the_model_runs(tmp_path, nodes):
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> g (float[n, k] x, float[m, k] z) => (float[a, b] y) '
        f"<bool c = {{1}}> {{ {nodes} }}"
    )
    onnx.save(proto, tmp_path / "m.onnx")
    cfg = config.from_dict({"model": {"path": str(tmp_path / "m.onnx")}})
    flow.compile_model(cfg, tmp_path / "m.tvmflow")
    session = runtime.load(tmp_path / "m.tvmflow")
    for n in (3, 1, 6):
        feeds = {name: RNG.standard_normal((n, 4)).astype("float32") for name in "xz"}
        assert_same(list(session.run(feeds).values()), reference(proto, feeds))
    with pytest.raises(InputError, match="axis_0_agrees"):
        session.run({"x": np.zeros((3, 4), "float32"), "z": np.zeros((2, 4), "float32")})


def test_a_dynamic_convolutional_model_runs_at_every_size(tmp_path):
    """Strided, depthwise and padded convolutions of an open width and batch, and what is only right for some widths."""
    weights = {"w1": (16, 3, 3, 3), "w2": (16, 1, 5, 5), "w3": (32, 16, 1, 1), "w4": (8, 32, 1, 3)}
    nodes = """c1 = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (x, w1)
        r1 = Relu (c1)
        d = Conv <group = 16, pads = [2, 2, 2, 2]> (r1, w2)
        p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (d)
        up = Resize <mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"> (p, , two)
        sum = Add (up, r1)
        c3 = Conv <strides = [2, 1]> (sum, w3)
        m = Pad <mode = "reflect"> (c3, ends)
        c4 = Conv (m, w4)
        s = Softmax <axis = 1> (c4)
        f = Reshape (s, tail)
        y = Transpose <perm = [0, 2, 1]> (f)"""
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> g (float[batch, 3, 16, width] x) => (float[batch, k, 8] y) '
        f"<float[4] two = {{1, 1, 2, 2}}, int64[8] ends = {{0, 0, 0, 2, 0, 0, 0, 2}}, int64[3] tail = {{0, 8, -1}}>"
        f"{{ {nodes} }}"
    )
    proto.graph.initializer.extend(
        onnx.numpy_helper.from_array((RNG.standard_normal(shape) / np.prod(shape[1:]) ** 0.5).astype("float32"), name)
        for name, shape in weights.items()
    )
    onnx.save(proto, tmp_path / "m.onnx")
    cfg = config.from_dict(
        {"model": {"path": str(tmp_path / "m.onnx")}, "verify": {"dims": {"batch": [2, 1, 3], "width": [36, 12, 20]}}}
    )
    manifest = flow.compile_model(cfg, tmp_path / "m.tvmflow")
    assert not [kernel.name for kernel in manifest.kernels if kernel.origin == "unscheduled" and kernel.calls]
    session = runtime.load(tmp_path / "m.tvmflow")
    for batch, width in ((1, 64), (4, 16), (2, 100)):
        feeds = {"x": RNG.standard_normal((batch, 3, 16, width)).astype("float32")}
        assert_same(list(session.run(feeds).values()), reference(proto, feeds))
    for width, place in ((18, "axis_3_agrees"), (4, "axis_3_holds_what_reflect_pads")):
        with pytest.raises(InputError, match=place):
            session.run({"x": np.zeros((1, 3, 16, width), "float32")})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("s = Shape (x) d = Sub (s, five) t = Slice (d, one, two) y = Slice (x, zero, t, one)", "of unknown sign"),
        ("y = Slice (x, far, zero, one, minus)", "a negative step along an axis of symbolic size"),
        ("y = Squeeze (x)", "which axes stay depends on sizes"),
        ('u = Unsqueeze (z, two) y = Resize <mode = "nearest"> (u, , third)', "gives sizes that depend on rounding"),
    ],
)
def test_what_cannot_be_symbolic_says_what_to_do(tmp_path, body, message):
    proto = parsed(body, "float[a, b, 6] x, float[a, 4, b] z", "float[k] y", WEIGHTS + MORE)
    array = np.array([1, 1, 1, 1 / 3], "float32")
    proto.graph.initializer.append(onnx.numpy_helper.from_array(array, "third"))
    with pytest.raises(UnsupportedError, match=message) as caught:
        _loaded(proto, tmp_path)
    assert "[shapes.dims]" in caught.value.hint
