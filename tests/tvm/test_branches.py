"""Operators inside the branches of an If, and branches that differ, held against ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper
from onnx.helper import make_node
from onnx.numpy_helper import from_array
from ops_runs import assert_as_reference, assert_same, one_node, reference
from test_ops_attributes import Draw
from tvm import relax

import tvmflow
from tvmflow import config, flow
from tvmflow.errors import InputError, ReferenceRunError, UnsupportedError
from tvmflow.frontend.model import Model
from tvmflow.frontend.onnx.loading import load
from tvmflow.frontend.onnx.reference import run_onnx

SILERO = Path(__file__).resolve().parents[2] / ".cache" / "models" / "onnx" / "silero_vad.onnx"
MICROSOFT = "com.microsoft"


def normal(*shape: int) -> np.ndarray:
    """The same values for the same shape, whichever tests run."""
    return Draw(sum(shape)).normal(*shape)


LSTM = {"w": normal(1, 16, 3), "r": normal(1, 16, 4)}


def recurrence(op_type: str, gates: int) -> Callable[[], tuple[onnx.ModelProto, dict[str, Any]]]:
    def make() -> tuple[onnx.ModelProto, dict[str, Any]]:
        feeds = {"x": normal(5, 2, 3)}
        weights = {
            "w": normal(2, gates * 4, 3),
            "r": normal(2, gates * 4, 4),
            "b": normal(2, 2 * gates * 4),
            "lengths": np.array([5, 3], "i4"),
        }
        return one_node(
            op_type,
            feeds,
            weights,
            outputs=3 if op_type == "LSTM" else 2,
            opset=14,
            hidden_size=4,
            direction="bidirectional",
        ), feeds

    return make


def quantised_lstm() -> tuple[onnx.ModelProto, dict[str, Any]]:
    feeds = {"x": normal(4, 1, 3)}
    rng = np.random.default_rng(0)
    weights: dict[str, Any] = {
        "w": rng.integers(-128, 128, (1, 3, 16)).astype("i1"),
        "r": rng.integers(-128, 128, (1, 4, 16)).astype("i1"),
    }
    for name in "wr":
        weights |= {f"{name}_scale": np.full(1, 0.004, "f4"), f"{name}_zero": np.zeros(1, "i1")}
    order = ["x", "w", "r", "", "", "", "", "", "w_scale", "w_zero", "r_scale", "r_zero"]
    return one_node(
        "DynamicQuantizeLSTM", feeds, weights, outputs=3, order=order, domain=MICROSOFT, hidden_size=4
    ), feeds


def quantised_product() -> tuple[onnx.ModelProto, dict[str, Any]]:
    feeds, weights = {"x": normal(4, 6)}, {"b": np.arange(-15, 15, dtype="i1").reshape(6, 5)}
    weights |= {"scale": np.array(0.02, "f4"), "zero": np.array(3, "i1")}
    return one_node("DynamicQuantizeMatMul", feeds, weights, domain=MICROSOFT), feeds


def integer_product() -> tuple[onnx.ModelProto, dict[str, Any]]:
    feeds = {"x": np.arange(24, dtype="u1").reshape(4, 6)}
    weights = {
        "b": np.arange(-15, 15, dtype="i1").reshape(6, 5),
        "xs": np.array(0.1, "f4"),
        "bs": np.array(0.02, "f4"),
        "xz": np.array(12, "u1"),
        "bz": np.array(3, "i1"),
    }
    return one_node("MatMulIntegerToFloat", feeds, weights, domain=MICROSOFT), feeds


def skip_normalisation() -> tuple[onnx.ModelProto, dict[str, Any]]:
    feeds = {"x": normal(2, 3, 8)}
    weights = {"skip": normal(2, 3, 8), "g": normal(8), "b": normal(8)}
    return one_node("SkipLayerNormalization", feeds, weights, domain=MICROSOFT), feeds


def quick_gelu() -> tuple[onnx.ModelProto, dict[str, Any]]:
    feeds = {"x": normal(2, 8)}
    return one_node("QuickGelu", feeds, domain=MICROSOFT), feeds


def conditional(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model's node in both branches of an If: on its inputs, and on others; all else is outside."""
    node, graph = model.graph.node[0], model.graph
    branches = {}
    for name in ("then", "else"):
        inputs = [f"{name}_{used}" if used in {value.name for value in graph.input} else used for used in node.input]
        within = helper.make_node(
            node.op_type, inputs, [f"{name}_{result}" for result in node.output], f"{name}_node", domain=node.domain
        )
        within.attribute.extend(node.attribute)
        branches[f"{name}_branch"] = helper.make_graph(
            [within], name, [], [helper.make_empty_tensor_value_info(result) for result in within.output]
        )
    inputs = [helper.make_tensor_value_info("taken", TensorProto.BOOL, [])]
    for name in ("then", "else"):
        for value in graph.input:
            copy = onnx.ValueInfoProto.FromString(value.SerializeToString())
            copy.name = f"{name}_{value.name}"
            inputs.append(copy)
    outer = helper.make_graph(
        [make_node("If", ["taken"], node.output, "choice", **branches)],
        "outer",
        inputs,
        graph.output,
        graph.initializer,
    )
    return helper.make_model(outer, opset_imports=model.opset_import, ir_version=10)


@pytest.mark.parametrize(
    "make",
    [
        recurrence("LSTM", 4),
        recurrence("GRU", 3),
        recurrence("RNN", 1),
        quantised_lstm,
        quantised_product,
        integer_product,
        skip_normalisation,
        quick_gelu,
    ],
    ids=[
        "LSTM",
        "GRU",
        "RNN",
        "DynamicQuantizeLSTM",
        "DynamicQuantizeMatMul",
        "MatMulIntegerToFloat",
        "SkipLayerNormalization",
        "QuickGelu",
    ],
)
@pytest.mark.parametrize("taken", [True, False])
def test_operators_within_a_branch(
    make: Callable[[], tuple[onnx.ModelProto, dict[str, Any]]], taken: bool, tmp_path: Path
) -> None:
    model, feeds = make()
    both = {"taken": np.array(taken)}
    both |= {f"then_{name}": value for name, value in feeds.items()}
    both |= {f"else_{name}": value[::-1].copy() for name, value in feeds.items()}
    assert_as_reference(conditional(model), both, tmp_path)


def decided_by_sizes() -> onnx.ModelProto:
    """An LSTM on x [b, n, 3] without its axis 1 where n is 1; with it the LSTM has one axis too many to run."""

    def graph(name: str, nodes: list[onnx.NodeProto]) -> onnx.GraphProto:
        return helper.make_graph(nodes, name, [], [helper.make_empty_tensor_value_info(nodes[-1].output[0])])

    flat = graph("flat", [make_node("Squeeze", ["x", "one"], ["flat_x"])])
    whole = graph("whole", [make_node("Identity", ["x"], ["whole_x"])])
    taken = graph(
        "recurrent",
        [
            make_node("Shape", ["x"], ["n"], start=1, end=2),
            make_node("Equal", ["n", "one"], ["is_one"]),
            make_node("If", ["is_one"], ["rows"], "by_size", then_branch=flat, else_branch=whole),
            make_node("Unsqueeze", ["rows", "zero"], ["steps"]),
            make_node("LSTM", ["steps", "w", "r"], ["", "last"], "recurrence", hidden_size=4),
            make_node("Squeeze", ["last", "zero"], ["recurrent_y"]),
        ],
    )
    other = graph(
        "mean",
        [
            make_node("ReduceMean", ["x", "both"], ["mean"], keepdims=0),
            make_node("Unsqueeze", ["mean", "one"], ["column"]),
            make_node("Mul", ["column", "ones"], ["mean_y"]),
        ],
    )
    weights = {
        "one": np.array([1]),
        "zero": np.array([0]),
        "both": np.array([1, 2]),
        "ones": np.ones((1, 4), "f4"),
        **LSTM,
    }
    return helper.make_model(
        helper.make_graph(
            [make_node("If", ["c"], ["y"], "by_value", then_branch=other, else_branch=taken)],
            "outer",
            [
                helper.make_tensor_value_info("c", TensorProto.BOOL, []),
                helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", "n", 3]),
            ],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["b", 4])],
            [from_array(value, name) for name, value in weights.items()],
        ),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=10,
    )


def imported(folder: Path, **dims: int) -> Model:
    onnx.save(decided_by_sizes(), folder / "m.onnx")
    return load(folder / "m.onnx", {}, dims)


def run(model: Model, taken: bool, x: np.ndarray) -> np.ndarray:
    machine = relax.VirtualMachine(tvm.compile(model.mod, "llvm"), tvm.cpu())
    result: np.ndarray = machine["main"](tvm.runtime.tensor(np.array(taken)), tvm.runtime.tensor(x)).numpy()
    return result


@pytest.mark.parametrize("batch", [{"b": 2}, {}])
def test_an_if_whose_condition_follows_from_sizes_is_its_branch(batch: dict[str, int], tmp_path: Path) -> None:
    model = imported(tmp_path, **batch, n=1)
    assert len(model.mod.functions) == 3  # main and both branches of the If that only a run decides
    assert not any("stops" in note for note in model.notes)
    for taken in (True, False):
        feeds = {"c": np.array(taken), "x": normal(2, 1, 3)}
        assert_same([run(model, taken, feeds["x"])], reference(decided_by_sizes(), feeds))


@pytest.mark.parametrize("batch", [{"b": 2}, {}])
def test_a_branch_that_cannot_run_at_the_given_sizes_stops_a_run_that_takes_it(
    batch: dict[str, int], tmp_path: Path
) -> None:
    model, x = imported(tmp_path, **batch, n=5), normal(2, 5, 3)
    assert any(
        note.startswith(
            "If 'by_value': a run that takes its else_branch stops with an error: LSTM "
            "'recurrence': it cannot run at these sizes: First input tensor must have rank 3"
        )
        for note in model.notes
    )
    assert_same([run(model, True, x)], reference(decided_by_sizes(), {"c": np.array(True), "x": x}))
    with pytest.raises(RuntimeError, match="If_by_value_else_branch_fits_the_sizes"):
        run(model, False, x)
    with pytest.raises(ReferenceRunError, match="must have 3 dimensions"):
        run_onnx(tmp_path / "m.onnx", [{"c": np.array(False), "x": x}], "onnxruntime")


def test_branches_of_different_ranks_are_refused_by_name_where_sizes_decide_at_run_time(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedError,
        match="If 'by_size': output 'rows' has rank 2 and dtype float32 where the "
        "condition holds, rank 3 and dtype float32 where not",
    ) as caught:
        imported(tmp_path, b=2)
    assert "fix those of the inputs" in caught.value.hint


@pytest.mark.parametrize(("length", "rates"), [(288, (16000, 8000)), (576, (16000,))])
def test_silero_takes_its_branch_for_the_sample_rate(length: int, rates: tuple[int, ...], tmp_path: Path) -> None:
    """A signal in chunks, each with the state of the one before; then what the other rate says to this length."""
    if not SILERO.exists():
        pytest.skip("silero_vad.onnx is not fetched: python scripts/get_models.py .cache/models silero_vad")
    shapes = {"input": [1, length], "state": [2, 1, 128]}
    settings = {
        "model": {"path": str(SILERO), "inputs": {name: {"shape": shape} for name, shape in shapes.items()}},
        "verify": {"enabled": False},
    }
    flow.compile_model(config.from_dict(settings), tmp_path / "silero.tvmflow")
    session = tvmflow.load(tmp_path / "silero.tvmflow")
    signal = (np.sin(np.arange(6 * length) ** 1.5 / 50) / 4).astype("f4").reshape(6, 1, length)
    for rate in rates:
        state = normal(2, 1, 128)
        for chunk in signal:
            feeds = {"input": chunk, "state": state, "sr": np.array(rate)}
            _, (want,) = run_onnx(SILERO, [feeds], "onnxruntime")
            got = session.run(feeds)
            assert_same(list(got.values()), want, rtol=1e-3, atol=1e-5 * float(np.abs(want[1]).max()))
            state = got["stateN"]
    if 8000 not in rates:
        with pytest.raises(InputError, match="If_If_0_else_branch_fits_the_sizes does not hold"):
            session.run({**feeds, "sr": np.array(8000)})


def test_a_node_that_cannot_run_outside_of_branches_is_refused_in_the_words_of_the_standard(tmp_path: Path) -> None:
    model = one_node("LSTM", {"x": normal(1, 5, 2, 3)}, LSTM, outputs=2, opset=14, hidden_size=4)
    del model.graph.output[:]
    model.graph.output.append(helper.make_empty_tensor_value_info("y1"))
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "t"
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(UnsupportedError, match="cannot run at these sizes: First input tensor must have rank 3"):
        load(tmp_path / "m.onnx", {}, {})
