"""Half precision on a CPU: computed in float32, rounded once, with inputs and outputs as they were."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

from tvmflow import config, flow, runtime
from tvmflow.graph.passes.compute_in_float32 import ComputeInFloat32


def model_of(dtype: int, folder: Path) -> Path:
    """A model of many operators, each weight a float16 value whatever the model's dtype; writes it to `folder`."""
    rng = np.random.default_rng(0)
    numpy_dtype = helper.tensor_dtype_to_np_dtype(dtype)
    weights = {
        "w1": rng.standard_normal((16, 3, 3, 3)) / 5,
        "b1": rng.standard_normal(16),
        "slope": np.full((16, 1, 1), 0.25),
        "w2": rng.standard_normal((16, 8, 1, 1)) / 4,
        "w3": rng.standard_normal((32, 10)) / 6,
        "scale": rng.random(16) + 0.5,
        "shift": rng.standard_normal(16),
        "mean": rng.standard_normal(16),
        "var": rng.random(16) + 0.5,
        "limit": np.float16(0.5),
    }
    constants = [
        numpy_helper.from_array(np.asarray(v).astype("float16").astype(numpy_dtype), k) for k, v in weights.items()
    ]
    constants.append(numpy_helper.from_array(np.array([8, 8]), "sizes"))
    branch = {
        name: helper.make_graph(
            [helper.make_node(op, ["r"], [f"{name}_out"])],
            name,
            [],
            [helper.make_tensor_value_info(f"{name}_out", dtype, None)],
        )
        for name, op in (("yes", "Tanh"), ("no", "Neg"))
    }
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "w1", "b1"], ["c"], pads=[1, 1, 1, 1]),
        node("PRelu", ["c", "slope"], ["p"]),
        node("BatchNormalization", ["p", "scale", "shift", "mean", "var"], ["n"]),
        node("Split", ["n", "sizes"], ["left", "right"], axis=1),
        node("Concat", ["right", "left"], ["both"], axis=1),
        node("Conv", ["both", "w2"], ["d"], group=2),
        node("MaxPool", ["d"], ["m"], kernel_shape=[2, 2], strides=[2, 2]),
        node("Resize", ["m", "", "scales"], ["u"], mode="linear"),
        node("GlobalAveragePool", ["u"], ["g"]),
        node("Flatten", ["g"], ["f"]),
        node("Concat", ["f", "f"], ["ff"], axis=1),
        node("MatMul", ["ff", "w3"], ["r"]),
        node("ReduceMax", ["r"], ["top"], keepdims=0),
        node("Greater", ["top", "limit"], ["large"]),
        node("If", ["large"], ["t"], then_branch=branch["yes"], else_branch=branch["no"]),
        node("Softmax", ["t"], ["y"]),
        node("ArgMax", ["t"], ["best"], axis=1),
    ]
    constants.append(numpy_helper.from_array(np.array([1, 1, 2, 2], "float32"), "scales"))
    info = helper.make_tensor_value_info
    outputs = [info("y", dtype, [1, 10]), info("u", dtype, [1, 16, 16, 16]), info("best", TensorProto.INT64, [1, 1])]
    graph = helper.make_graph(nodes, "half", [info("x", dtype, [1, 3, 16, 16])], outputs, constants)
    path = folder / f"{dtype}.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


@pytest.mark.parametrize("widen_half", [True, False])
def test_float16_is_rounded_once(tmp_path: Path, widen_half: bool) -> None:
    cfg = config.of_model(str(model_of(TensorProto.FLOAT16, tmp_path)), [{"numerics": {"widen_half": widen_half}}])
    manifest = flow.compile_model(cfg, tmp_path / "half.tvmflow")
    assert manifest.verdict is not None
    assert manifest.verdict.ok
    assert any("float16 is computed in float32" in note for note in manifest.notes) == widen_half
    x = np.random.default_rng(1).standard_normal((1, 3, 16, 16)).astype("float16")
    got = runtime.load(tmp_path / "half.tvmflow").run({"x": x})
    precise = onnxruntime.InferenceSession(model_of(TensorProto.FLOAT, tmp_path))
    y, u, best = precise.run(None, {"x": x.astype("float32")})
    assert {name: str(array.dtype) for name, array in got.items()} == {"y": "float16", "u": "float16", "best": "int64"}
    np.testing.assert_array_equal(got["best"], best)
    if widen_half:  # half a unit in the last place, and what float32 rounds; more behind an If, which rounds too
        for name, want, units in (("u", u, 0.51), ("y", y, 2)):
            error = np.abs(got[name].astype("float64") - want)
            assert (error <= units * np.spacing(np.abs(want).astype("float16"))).all()


def test_what_a_wide_operand_would_change_keeps_its_dtype() -> None:
    """bfloat16, operators that name their dtype, tuples, and functions called by others."""

    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 6), "bfloat16"))
    with builder.function("inner", [x], private=True):
        builder.emit_func_output(builder.emit(relax.op.exp(x)))
    inner = builder.get().get_global_var("inner")
    x = relax.Var("x", relax.TensorType((4, 6), "bfloat16"))
    with builder.function("main", [x]):
        half = builder.emit(relax.op.full((4, 6), relax.const(0.5, "bfloat16"), "bfloat16"))
        total = builder.emit(relax.op.add(builder.emit(relax.Call(inner, [x])), half))
        parts = builder.emit(relax.op.split(total, 2, axis=1))
        product = relax.op.multiply(relax.TupleGetItem(parts, 0), relax.TupleGetItem(parts, 1))
        builder.emit_func_output(relax.Tuple([total, builder.emit(product)]))
    wide = ComputeInFloat32()(builder.get())
    relax.analysis.well_formed(wide)  # raises where it is not
    built = tvm.compile(wide, target="llvm")
    x = np.random.default_rng(0).standard_normal((4, 6)).astype(ml_dtypes.bfloat16)
    first, second = relax.VirtualMachine(built, tvm.cpu())["main"](tvm.runtime.tensor(x))
    # The call of a function and the operator that names its dtype round; sum and product do not until the end.
    a = np.exp(x.astype("float64")).astype(ml_dtypes.bfloat16).astype("float64") + 0.5
    assert (str(first.dtype), str(second.dtype)) == ("bfloat16", "bfloat16")
    np.testing.assert_array_equal(first.numpy(), a.astype("float32").astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(second.numpy(), (a[:, :3] * a[:, 3:]).astype("float32").astype(ml_dtypes.bfloat16))
