"""Places of extremes and orders, beside infinities, NaN and the widest integers; through the whole pipeline.

References: ONNX Runtime for ONNX, eager PyTorch for PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from ops_runs import assert_same, compiled, reference

import tvmflow
from tvmflow import config
from tvmflow.flow import compile_model

NAN, INF = np.nan, np.inf
INTEGERS = ("int64", "uint8")


def floats(dtype: str) -> np.ndarray:
    low = np.finfo(dtype).min
    return np.array(
        [
            [NAN, 1, INF, 2],
            [1, NAN, INF, INF],
            [-INF, NAN, -INF, NAN],
            [NAN] * 4,
            [NAN, -INF, NAN, INF],
            [INF, NAN, INF, NAN],
            [-INF, -INF, NAN, -INF],
            [-INF] * 4,
            [INF] * 4,
            [low] * 4,
            [-INF, low, -INF, low],
            [low, -INF, -INF, low],
            [INF, -low, -low, INF],
            [0, -0.0, 0, -0.0],
        ],
        dtype,
    )


def whole(dtype: str) -> np.ndarray:
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    return np.array([[low, low + 1, low, low], [high, high - 1, high, high], [low] * 4, [high] * 4], dtype)


def model() -> tuple[onnx.ModelProto, Mapping[str, np.ndarray]]:
    feeds = {"f32": floats("float32"), "f64": floats("float64")}
    feeds |= {dtype: whole(dtype) for dtype in INTEGERS}
    nodes = [
        helper.make_node("Hardmax", ["f32"], ["hard"]),
        helper.make_node("Transpose", ["f32"], ["turned"]),
        helper.make_node("Constant", [], ["k"], value_ints=[4]),
    ]
    for op_type in ("ArgMax", "ArgMin"):
        for last in (0, 1):
            for name in feeds:
                nodes.append(
                    helper.make_node(
                        op_type, [name], [f"{op_type}_{name}_{last}"], axis=-1, keepdims=last, select_last_index=last
                    )
                )
            nodes.append(helper.make_node(op_type, ["turned"], [f"{op_type}_t_{last}"], axis=0, select_last_index=last))
    for name in ("f32", "f64", "int64"):
        for largest in (0, 1):
            outputs = [f"top_{name}_{largest}", f"at_{name}_{largest}"]
            nodes.append(helper.make_node("TopK", [name, "k"], outputs, largest=largest))
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in feeds.items()
    ]
    names = [name for node in nodes for name in node.output if name not in ("turned", "k")]
    graph = helper.make_graph(nodes, "places", inputs, [helper.make_empty_tensor_value_info(name) for name in names])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    return onnx.shape_inference.infer_shapes(made), feeds


def test_onnx(tmp_path: Path) -> None:
    made, feeds = model()
    onnx.save(made, tmp_path / "m.onnx")
    compile_model(config.of_model(str(tmp_path / "m.onnx"), [{"verify": {"enabled": False}}]), tmp_path / "a")
    got = tvmflow.load(tmp_path / "a").run(feeds)
    for value, want in zip(made.graph.output, reference(made, feeds), strict=True):
        np.testing.assert_array_equal(got[value.name], want, err_msg=value.name)


TORCH = """
import torch

def found(x):
    return (x.argmax(1), x.argmin(0, keepdim=True), *x.sort(dim=1, descending=True, stable=True))

def all_found(x):
    return (*found(x), x.argmax(), *x.max(1), *x.min(0), x.median(), *x.median(1), x.argsort(dim=0, stable=True),
            x.topk(3, 1)[0], x.topk(4, 1, largest=False)[0])

class Places(torch.nn.Module):
    def forward(self, f32, f64, f16, int64, uint8, base, exponent):
        powers = base**exponent, base**64, uint8**7
        return (*all_found(f32), *found(f64), *found(f16), *found(int64), *found(uint8), *powers)

def make():
    kinds = {"float32": 14, "float64": 14, "float16": 14, "int64": 4, "uint8": 4}
    args = [torch.zeros(rows, 4, dtype=getattr(torch, kind)) for kind, rows in kinds.items()]
    return Places(), (*args, torch.ones(7, dtype=torch.int64), torch.ones(7, dtype=torch.int64))
"""


def test_pytorch(tmp_path: Path) -> None:
    (tmp_path / "places.py").write_text(TORCH)
    np.savez(
        tmp_path / "numbers.npz",
        f32=floats("float32"),
        f64=floats("float64"),
        f16=floats("float16"),
        int64=whole("int64"),
        uint8=whole("uint8"),
        base=np.array([3, -5, 2, 0, -1, 1, -1]),
        exponent=np.array([65, 2**40 + 7, 70, 64, -65, -3, 2**62 + 1]),
    )
    inputs = {"inputs": str(tmp_path / "numbers.npz")}
    cfg = config.from_dict({"model": {"entry": "places:make", "folder": str(tmp_path)}, "verify": inputs})
    manifest = compile_model(cfg, tmp_path / "a")
    assert manifest.verdict is not None
    assert manifest.verdict.ok


def powers(base: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    """By Python's integers."""
    size = 1 << base.dtype.itemsize * 8
    units = {1: lambda _: 1, -1: lambda n: 1 if n % 2 == 0 else -1}
    found = [
        pow(b, n, size) if n >= 0 else units.get(b, lambda _: 0)(n) % size
        for b, n in zip(base.tolist(), exponent.tolist(), strict=True)
    ]
    return np.array(found, f"u{base.dtype.itemsize}").view(base.dtype)


@pytest.mark.parametrize("exponents", ["int64", "uint64"])
def test_integer_powers(exponents: str, tmp_path: Path) -> None:
    rng, nodes, feeds, wanted = np.random.default_rng(0), [], {}, []
    for dtype in ("int64", "int32", "uint8"):
        limits = np.iinfo(dtype)
        base = np.r_[rng.integers(limits.min, limits.max, 30, dtype=dtype), np.arange(9).astype(dtype)].astype(dtype)
        if dtype != "uint8":
            base[-3:] = -1, -2, -3
        exponent = np.r_[rng.integers(0, 2**63 - 1, 20), 0, 1, 2, 62, 63, 64, 65, 127, 128, 129, np.full(9, 64)]
        exponent = exponent.astype(exponents)
        if exponents == "int64":
            exponent[:3], exponent[-3:] = -1, (-3, -4, 65)
        feeds |= {f"a_{dtype}": base, f"b_{dtype}": exponent}
        nodes.append(helper.make_node("Pow", [f"a_{dtype}", f"b_{dtype}"], [dtype]))
        wanted.append(powers(base, exponent))
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in feeds.items()
    ]
    outputs = [helper.make_empty_tensor_value_info(node.output[0]) for node in nodes]
    graph = helper.make_graph(nodes, "powers", inputs, outputs)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)], ir_version=8)
    assert_same(compiled(made, feeds, tmp_path), wanted)
