"""Winograd convolutions: float64's values within a stated error, what is fused into them, and what is left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

from tvmflow import config, flow, tasks
from tvmflow.config import NumericsSection, TargetSection
from tvmflow.graph.passes.winograd import shape_of
from tvmflow.kernels.winograd import minimal_filtering
from tvmflow.kernels.winograd.minimal_filtering import Shape
from tvmflow.pipeline import plan
from tvmflow.pipeline.context import Context, context_of
from tvmflow.target import resolve, to_tvm

Epilogue = Callable[[relax.BlockBuilder, relax.Expr], relax.Expr]
# Errors over the root mean square of the outputs: (root mean square, largest), inputs and weights normal, 512 channels
# at most. The direct kernels' are (1.2e-6, 1e-5).
BOUND = {2: (8e-7, 5e-6), 4: (2.5e-6, 2.5e-5)}


def target(mcpu: str = "native") -> tvm.target.Target:
    return to_tvm(resolve(TargetSection(mcpu=mcpu, threads=2)), {})


def weights_of(shape: Shape, seed: int = 1) -> np.ndarray:
    """float32[3, 3, channels, filters] that keep the variance of the image."""
    values = np.random.default_rng(seed).standard_normal((3, 3, shape.channels, shape.filters))
    return np.asarray(values / (3 * shape.channels**0.5), np.float32)


def image_of(shape: Shape, seed: int = 0) -> np.ndarray:
    size = (shape.batch, shape.height, shape.width, shape.channels)
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def module(shape: Shape, epilogue: Epilogue | None = None, **attrs: object) -> tvm.IRModule:
    """main(x) -> the convolution in NHWC and what follows."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((shape.batch, shape.height, shape.width, shape.channels), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            made = builder.emit(
                relax.op.nn.conv2d(
                    x,
                    relax.const(weights_of(shape)),
                    padding=shape.padding,
                    data_layout="NHWC",
                    kernel_layout="HWIO",
                    **attrs,
                )
            )
            made = builder.emit_output(epilogue(builder, made) if epilogue else made)
        builder.emit_func_output(made)
    return builder.get()


def prepared(
    mod: tvm.IRModule, mode: str = "auto", on: tvm.target.Target | None = None, edge: int | None = None
) -> tvm.IRModule:
    """The fused kernels; F(edge x edge, 3 x 3), where it is stated, was measured to be fastest for all convolutions."""
    convolutions = "winograd" if mode == "auto" else "direct"
    context = Context("llvm", convolutions=convolutions, measured=lambda shape: edge, prepack=True)
    with on or target():
        return plan.run(mod, plan.steps_of(context, "replace", "fuse"))


def rules(mod: tvm.IRModule) -> list[str]:
    """The rules of the kernels that have a schedule already."""
    functions = [f for f in mod.functions.values() if isinstance(f, tvm.tirx.PrimFunc)]
    return [str(f.attrs["tvmflow.rule"]) for f in functions if "tvmflow.rule" in f.attrs]


def run(mod: tvm.IRModule, *arrays: np.ndarray, on: tvm.target.Target | None = None) -> np.ndarray:
    chosen = on or target()
    with chosen:
        weights: list[tvm.runtime.Tensor] = []
        context = Context("llvm", on_weights=weights.extend)
        lowered = plan.run(mod, plan.steps_of(context, "schedule", "rewrite", "weights", "lower"))
        built = relax.vm_build.build(lowered, chosen, relax_pipeline=None)
    machine = relax.VirtualMachine(built, tvm.cpu())
    return np.asarray(machine["main"](*map(tvm.runtime.tensor, arrays), *weights).numpy())


def reference(shape: Shape, x: np.ndarray) -> np.ndarray:
    """The convolution in float64, NHWC."""
    top, left, bottom, right = shape.padding
    whole = torch.from_numpy(np.pad(x, ((0, 0), (top, bottom), (left, right), (0, 0)))).double().permute(0, 3, 1, 2)
    weights = torch.from_numpy(weights_of(shape)).double().permute(3, 2, 0, 1)
    return np.asarray(torch.nn.functional.conv2d(whole, weights).permute(0, 2, 3, 1).numpy())


def check(edge: int, got: np.ndarray, want: np.ndarray) -> None:
    error, size = got - want, max(1.0, float(np.sqrt((want**2).mean())))
    mean, largest = BOUND[edge]
    assert np.sqrt((error**2).mean()) <= mean * size
    assert np.abs(error).max() <= largest * size


# --- values -----------------------------------------------------------------------------------------------------------

SHAPES = [
    Shape(1, 8, 8, 16, 16, (1, 1, 1, 1)),
    Shape(2, 7, 9, 8, 24, (0, 0, 0, 0)),
    Shape(1, 5, 11, 4, 12, (2, 1, 0, 3)),
    Shape(3, 6, 6, 48, 20, (1, 1, 1, 1)),
    Shape(1, 1, 1, 8, 8, (1, 1, 1, 1)),
    Shape(1, 30, 3, 512, 64, (1, 1, 1, 1)),
]


@pytest.mark.parametrize("edge", [2, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_are_those_of_float64(edge: int, shape: Shape) -> None:
    mod = prepared(module(shape), edge=edge)
    assert rules(mod) == [f"winograd F({edge}x{edge}, 3x3), {shape}, measured"]
    x = image_of(shape)
    check(edge, run(mod, x), reference(shape, x))


PADS = st.integers(0, 3)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    edge=st.sampled_from([2, 4]),
    batch=st.integers(1, 3),
    size=st.tuples(st.integers(3, 20), st.integers(3, 20)),
    channels=st.integers(1, 20),
    filters=st.integers(1, 20),
    padding=st.tuples(PADS, PADS, PADS, PADS),
)
def test_any_size(
    edge: int, batch: int, size: tuple[int, int], channels: int, filters: int, padding: tuple[int, int, int, int]
) -> None:
    shape = Shape(batch, *size, 4 * channels, 4 * filters, padding)
    mod = prepared(module(shape), edge=edge)
    assert len(rules(mod)) == 1
    x = image_of(shape)
    check(edge, run(mod, x), reference(shape, x))


@pytest.mark.parametrize("edge", [2, 4])
def test_threads_that_share_the_filters(edge: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LARGE_WEIGHTS", 0), ("FEW_TILES", 1 << 20), ("WORKING_SET", 1 << 16)):
        monkeypatch.setattr(minimal_filtering, name, value)
    shape = Shape(1, 15, 13, 64, 96, (1, 1, 1, 1))
    plan = minimal_filtering.plan(shape, edge, target())
    mod = prepared(module(shape), edge=edge)
    assert plan.by_filters
    assert plan.block < shape.tiles(edge), "more than one block"
    x = image_of(shape)
    check(edge, run(mod, x), reference(shape, x))


@pytest.mark.parametrize("mcpu", ["x86-64", "x86-64-v3"])
def test_narrower_registers(mcpu: str) -> None:
    if "avx2" not in resolve(TargetSection()).features:
        pytest.skip("code for x86-64-v3 does not run here")
    shape = Shape(1, 9, 10, 24, 24, (1, 1, 1, 1))
    mod = prepared(module(shape), on=target(mcpu), edge=4)
    x = image_of(shape)
    check(4, run(mod, x, on=target(mcpu)), reference(shape, x))


def test_an_infinity_stays_within_its_tiles() -> None:
    shape = Shape(1, 16, 16, 8, 8, (1, 1, 1, 1))
    mod = prepared(module(shape), edge=4)
    x = image_of(shape)
    x[0, 1, 1, 0] = np.inf
    got = run(mod, x)
    assert not np.isfinite(got[0, 0:3, 0:3]).all()
    np.testing.assert_allclose(got[0, 4:], reference(shape, image_of(shape))[0, 4:], atol=1e-4)


# --- what is fused ----------------------------------------------------------------------------------------------------


def bias(filters: int) -> np.ndarray:
    return np.linspace(-1, 1, filters, dtype=np.float32)


def bias_relu(b: relax.BlockBuilder, y: relax.Expr) -> relax.Expr:
    return b.emit(relax.op.nn.relu(b.emit(y + relax.const(bias(24)))))


def prelu(b: relax.BlockBuilder, y: relax.Expr) -> relax.Expr:
    return b.emit(relax.op.nn.prelu(y, relax.const(bias(24)), axis=3))


def silu(b: relax.BlockBuilder, y: relax.Expr) -> relax.Expr:
    return b.emit(y * b.emit(relax.op.sigmoid(y)))


def positive(b: relax.BlockBuilder, y: relax.Expr) -> relax.Expr:
    return b.emit(relax.op.greater(y, relax.const(np.float32(0))))


EPILOGUES: dict[str, tuple[Epilogue, Callable[[np.ndarray], np.ndarray]]] = {
    "bias and relu": (bias_relu, lambda y: np.maximum(y + bias(24), 0)),
    "prelu": (prelu, lambda y: np.where(y > 0, y, y * bias(24))),
    "silu": (silu, lambda y: y / (1 + np.exp(-y))),
    "comparison": (positive, lambda y: y > 0),
}


@pytest.mark.parametrize("name", EPILOGUES)
def test_what_follows_is_part_of_the_kernel(name: str) -> None:
    epilogue, expected = EPILOGUES[name]
    shape = Shape(1, 9, 11, 16, 24, (1, 1, 1, 1))
    mod = prepared(module(shape, epilogue), edge=4)
    assert len(rules(mod)) == sum(isinstance(f, tvm.tirx.PrimFunc) for f in mod.functions.values()) == 1
    x = image_of(shape)
    got, want = run(mod, x), expected(reference(shape, x))
    if want.dtype == bool:
        assert (got != want).mean() < 1e-3, "but for those next to zero"
    else:
        np.testing.assert_allclose(got, want, atol=2e-5)


def test_what_comes_before_and_a_residual() -> None:
    shape = Shape(2, 9, 11, 16, 16, (1, 1, 1, 1))
    builder = relax.BlockBuilder()
    x, r = (relax.Var(name, relax.TensorType((2, 9, 11, 16), "float32")) for name in "xr")
    with builder.function("main", [x, r]):
        with builder.dataflow():
            made = builder.emit(
                relax.op.nn.conv2d(
                    builder.emit(relax.op.nn.relu(x)),
                    relax.const(weights_of(shape)),
                    padding=shape.padding,
                    data_layout="NHWC",
                    kernel_layout="HWIO",
                )
            )
            made = builder.emit_output(builder.emit(made + r))
        builder.emit_func_output(made)
    mod = prepared(builder.get(), edge=4)
    assert len(rules(mod)) == 1
    image, other = image_of(shape), image_of(shape, seed=2)
    check(4, run(mod, image, other), reference(shape, np.maximum(image, 0)) + other)


# --- which convolutions -----------------------------------------------------------------------------------------------

LARGE = Shape(1, 32, 32, 64, 64, (1, 1, 1, 1))


def call(x: tuple[object, ...], w: tuple[int, ...], dtype: str = "float32", **attrs: object) -> relax.Call:
    image = relax.Var("x", relax.TensorType(x, dtype))
    layouts = {"data_layout": "NHWC", "kernel_layout": "HWIO", **attrs}
    return relax.BlockBuilder().normalize(relax.op.nn.conv2d(image, relax.const(np.zeros(w, dtype)), **layouts))


OTHERS = {
    "stride 2": call((1, 32, 32, 64), (3, 3, 64, 64), strides=2),
    "dilation": call((1, 32, 32, 64), (3, 3, 64, 64), dilation=2),
    "groups": call((1, 32, 32, 64), (3, 3, 32, 64), groups=2),
    "5 x 5": call((1, 32, 32, 64), (5, 5, 64, 64)),
    "1 x 3": call((1, 32, 32, 64), (1, 3, 64, 64)),
    "float16": call((1, 32, 32, 64), (3, 3, 64, 64), "float16"),
    "NCHW": call((1, 64, 32, 32), (64, 64, 3, 3), data_layout="NCHW", kernel_layout="OIHW"),
    "open batch": call((tvm.tirx.Var("n", "int64"), 32, 32, 64), (3, 3, 64, 64)),
    "no image": call((0, 32, 32, 64), (3, 3, 64, 64)),
}


def test_a_plain_convolution_is_recognised() -> None:
    assert shape_of(call((1, 32, 32, 64), (3, 3, 64, 64), padding=1)) == LARGE


@pytest.mark.parametrize("name", OTHERS)
def test_other_convolutions_are_left_alone(name: str) -> None:
    assert shape_of(OTHERS[name]) is None


def test_weights_must_be_constants() -> None:
    plain = call((1, 32, 32, 64), (3, 3, 64, 64), padding=1)
    weights = relax.Var("w", plain.args[1].ty)
    assert shape_of(relax.Call(plain.op, [plain.args[0], weights], plain.attrs)) is None


@pytest.mark.parametrize(
    ("shape", "edge"),
    [
        (Shape(1, 56, 56, 64, 64, (1, 1, 1, 1)), 4),
        (Shape(1, 28, 28, 128, 128, (1, 1, 1, 1)), 4),
        (Shape(1, 14, 14, 256, 256, (1, 1, 1, 1)), 2),
        (Shape(1, 7, 7, 512, 512, (1, 1, 1, 1)), 2),
        (Shape(8, 7, 7, 512, 512, (1, 1, 1, 1)), 4),
        (Shape(1, 4, 4, 512, 512, (1, 1, 1, 1)), None),  # more time for the filters than for the image
        (Shape(1, 160, 160, 96, 24, (1, 1, 1, 1)), 4),
        (Shape(1, 224, 224, 3, 64, (1, 1, 1, 1)), None),  # no vectors of channels
        (Shape(1, 8, 8, 16, 16, (1, 1, 1, 1)), None),  # a few microseconds
        (Shape(1, 2, 1, 64, 64, (0, 0, 0, 0)), None),  # no output
    ],
    ids=str,
)
def test_it_is_chosen_where_it_pays(shape: Shape, edge: int | None) -> None:
    plan = minimal_filtering.best_plan(shape, target())
    assert (plan and plan.edge) == edge


def test_off_means_never() -> None:
    assert len(rules(prepared(module(LARGE)))) == 1
    assert rules(prepared(module(LARGE), "off")) == []
    on_gpu = config.from_dict({"model": {"entry": "m:f"}, "target": {"kind": "cuda"}, "numerics": {"winograd": "auto"}})
    assert plan.steps_of(context_of(on_gpu), "replace") == ()


def test_neither_a_task_nor_a_part_of_keys() -> None:
    chosen = resolve(TargetSection(mcpu="x86-64-v3"))
    found = tasks.extract(prepared(module(LARGE)), {}, chosen, NumericsSection())
    assert found == ()
    on, off = (tasks.key_parts("0" * 64, chosen, NumericsSection(winograd=mode)) for mode in ("auto", "off"))
    assert on.key == off.key


def test_the_manifest_says_which_and_how(tmp_path: Path) -> None:
    weights = np.random.default_rng(0).standard_normal((64, 64, 3, 3)).astype("f4") / 24
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 64, 32, 32]) for name in "xy")
    graph = helper.make_graph([node], "g", [x], [y], [numpy_helper.from_array(weights, "w")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    for mode, count in (("auto", 1), ("off", 0)):
        cfg = config.of_model(
            str(tmp_path / "m.onnx"),
            [
                {
                    "numerics": {"winograd": mode},
                    "graph": {"layout": "nhwc"},
                    "verify": {"enabled": mode == "auto"},
                }
            ],
        )
        manifest = flow.compile_model(cfg, tmp_path / mode)
        assert manifest.config["numerics"]["winograd"] == mode
        assert manifest.verdict is None or manifest.verdict.ok
        rule = f"winograd F(4x4, 3x3), {LARGE}, by rule"
        assert [kernel.rule for kernel in manifest.kernels].count(rule) == count
        assert [note for note in manifest.notes if rule in note] == [f"numerics.winograd: {rule}, in 1 place"] * count
