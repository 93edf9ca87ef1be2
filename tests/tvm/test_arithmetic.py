"""Arithmetic is IEEE 754's, and integers wrap around, in every schedule and on every target; the reference is numpy.

`python tests/tvm/search_expressions.py` draws expressions for as long as one likes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
from elementwise_cuda_on_cpu import outputs
from expression_models import Batch, batch
from expressions import FLOATS, Expression, agree, allowed, of
from test_comparisons import drawn_records
from tvm import relax

import tvmflow
from tvmflow import config, frontend
from tvmflow.config import Config
from tvmflow.database import Store
from tvmflow.flow import compile_model
from tvmflow.pipeline import plan
from tvmflow.pipeline.context import context_of
from tvmflow.pipeline.partial import EXACT
from tvmflow.pipeline.prepare import prepare, setting
from tvmflow.process import Child

HOMES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8")
ROUNDER = 12582912.0  # 1.5 * 2^23: what is added to it is rounded to an integer


def two_sum_error(m, x: int, y: int) -> int:  # type: ignore[no-untyped-def]
    total = m.Add(x, y)
    rest = m.Sub(total, x)
    return m.Add(m.Sub(x, m.Sub(total, rest)), m.Sub(y, rest))


NAMED: dict[str, Expression] = {
    "x - (x + 1)": of("float32", lambda m, x, y: m.Sub(x, m.Add(x, m.number(1, x)))),
    "(x + 1) - x": of("float32", lambda m, x, y: m.Sub(m.Add(x, m.number(1, x)), x)),
    "(x + y) - x": of("float32", lambda m, x, y: m.Sub(m.Add(x, y), x)),
    "(x + y) - y": of("float64", lambda m, x, y: m.Sub(m.Add(x, y), y)),
    "x - x": of("float32", lambda m, x, y: m.Sub(x, x)),
    "x * 0": of("float32", lambda m, x, y: m.Mul(x, m.number(0, x))),
    "x + 0": of("float32", lambda m, x, y: m.Add(x, m.number(0, x))),
    "x - -0": of("float32", lambda m, x, y: m.Sub(x, m.number(-0.0, x))),
    "0 - x": of("float32", lambda m, x, y: m.Sub(m.number(0, x), x)),
    "-x": of("float32", lambda m, x, y: m.Neg(x)),
    "0 / x": of("float32", lambda m, x, y: m.Div(m.number(0, x), x)),
    "x / 0": of("float32", lambda m, x, y: m.Div(x, m.number(0, x))),
    "x * y - x * y": of("float32", lambda m, x, y: m.Sub(m.Mul(x, y), m.Mul(x, y))),
    "max(x, y) - x": of("float32", lambda m, x, y: m.Sub(m.Max(x, y), x)),
    "x * 3 - x * 2": of("float32", lambda m, x, y: m.Sub(m.Mul(x, m.number(3, x)), m.Mul(x, m.number(2, x)))),
    "rounded": of("float32", lambda m, x, y: m.Sub(m.Add(x, m.number(ROUNDER, x)), m.number(ROUNDER, x))),
    "two-sum": of("float32", two_sum_error),
    "x < x + 1": of("int32", lambda m, x, y: m.Less(x, m.Add(x, m.number(1, x)), x, y)),
    "x + 1 < x + 2": of("int32", lambda m, x, y: m.Less(m.Add(x, m.number(1, x)), m.Add(x, m.number(2, x)), x, y)),
    "max(x + 1, x + 2)": of("int32", lambda m, x, y: m.Max(m.Add(x, m.number(1, x)), m.Add(x, m.number(2, x)))),
    "x - 1 < x in 64 bits": of("int64", lambda m, x, y: m.Less(m.Sub(x, m.number(1, x)), x, x, y)),
    "abs(x)": of("int32", lambda m, x, y: m.Abs(x)),
    "x + 1, widened": of("int32", lambda m, x, y: m.cast(m.cast(m.Add(x, m.number(1, x)), "int64"), "int32")),
    "through int8": of("int32", lambda m, x, y: m.cast(m.cast(x, "int8"), "int32")),
    "through float16": of("float32", lambda m, x, y: m.cast(m.cast(x, "float16"), "float32")),
    "through bfloat16": of("float32", lambda m, x, y: m.cast(m.cast(x, "bfloat16"), "float32")),
    "through float32": of("float64", lambda m, x, y: m.cast(m.cast(x, "float32"), "float64")),
    "square of a half": of("float32", lambda m, x, y: m.cast(m.Mul(m.cast(x, "float16"), 2), "float32")),
}
WITHOUT_BFLOAT16 = [nodes for nodes in NAMED.values() if all(node.dtype != "bfloat16" for node in nodes)]


def cfg_of(made: Batch, folder: Path, target: dict[str, object] | None = None, **sections: dict[str, object]) -> Config:
    onnx.save(made.model(), folder / "model.onnx")
    given = {"target": target or {"threads": 1}, "verify": {"enabled": False}, **sections}
    return config.of_model(str(folder / "model.onnx"), [given])


def values(cfg: Config, made: Batch, folder: Path) -> dict[str, np.ndarray]:
    compile_model(cfg, folder / "artifact")
    return dict(tvmflow.load(folder / "artifact").run(made.feeds))


@pytest.mark.parametrize(
    ("name", "x", "want"),
    [
        ("x - (x + 1)", 1e8, 0.0),
        ("x - (x + 1)", np.inf, np.nan),
        ("rounded", 2.5, 2.0),
        ("x * 0", -3.0, -0.0),
        ("x + 0", -0.0, 0.0),
        ("through float16", 70000, np.inf),
        ("through bfloat16", 257, 256),
        ("two-sum", 1e8, 0.25),
        ("square of a half", 300, np.inf),
        ("x < x + 1", 2**31 - 1, 5),
        ("abs(x)", -(2**31), -(2**31)),
        ("max(x + 1, x + 2)", 2**31 - 2, 2**31 - 1),
        ("through int8", 200, -56),
    ],
)
def test_what_numpy_allows_is_what_should_be(name: str, x: float, want: float) -> None:
    nodes = NAMED[name]
    kind = nodes[-1].dtype
    given = [np.full(64, number).astype(kind) for number in (x, 0.25 if kind in FLOATS else 5)]
    (found,) = allowed(nodes, given, widen_half=True)
    assert agree(found, [np.full(64, want, kind)]).all()


@pytest.mark.parametrize("widen_half", [True, False])
def test_default_schedules(widen_half: bool, tmp_path: Path) -> None:
    homes = HOMES if widen_half else ("float16", "bfloat16")
    made = batch(1, homes, 24, list(NAMED.values()) if widen_half else [])
    cfg = cfg_of(made, tmp_path, numerics={"widen_half": widen_half})
    assert list(made.wrong(values(cfg, made, tmp_path), widen_half)) == []


def test_schedules_of_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    made = batch(2, HOMES, 12, [NAMED[name] for name in ("two-sum", "x < x + 1", "through bfloat16")])
    cfg = cfg_of(made, tmp_path, tuning={"database": str(tmp_path / "db")})
    records = Child("drawing schedules").call(drawn_records, cfg, 0)
    Store(tmp_path / "db").add(records)
    manifest = compile_model(cfg, tmp_path / "artifact")
    assert {kernel.origin for kernel in manifest.kernels} == {"tuned"}
    assert list(made.wrong(tvmflow.load(tmp_path / "artifact").run(made.feeds))) == []


def test_kernels_without_schedules(tmp_path: Path) -> None:
    made = batch(3, HOMES, 12)
    cfg = cfg_of(made, tmp_path)
    chosen = setting(cfg)
    with chosen.entered():
        prepared, _ = prepare(cfg, frontend.load(cfg))
        rewrites = [step for step in plan.steps_of(context_of(cfg), "rewrite") if step.name in EXACT]
        lowered = plan.run(prepared, [*rewrites, *plan.steps_of(context_of(cfg), "lower")])
        machine = relax.VirtualMachine(relax.vm_build.build(lowered, chosen.tvm_target, relax_pipeline=None), tvm.cpu())
    results = machine["main"](*(tvm.runtime.tensor(array) for array in made.feeds.values()))
    got = {f"o{number}": result.numpy() for number, result in enumerate(results)}
    assert list(made.wrong(got)) == []


def test_cuda_code_run_on_a_cpu(tmp_path: Path) -> None:
    made = batch(4, ("float32", "float64", "float16", "int32", "int64", "uint8"), 16, WITHOUT_BFLOAT16, "bfloat16")
    cfg = cfg_of(made, tmp_path, {"kind": "cuda", "arch": "sm_90"})
    assert list(made.wrong(outputs(cfg, made.feeds, tmp_path), widen_half=False)) == []


TORCH = """
import torch

class Rounds(torch.nn.Module):
    def forward(self, x, i):
        half = x.half()
        total = x + 1
        return (half.float(), x.to(torch.bfloat16).float(), half.float() - x, (half * half).float(),
                x.double().float(), i.to(torch.int8).to(torch.int32), i < i + 1, total - x, x * 0, x + 0.0,
                (x + 12582912.0) - 12582912.0)

def model():
    return Rounds(), (torch.zeros(16), torch.zeros(16, dtype=torch.int32))
"""


def test_values_are_those_of_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    (tmp_path / "rounds.py").write_text(TORCH)
    cfg = config.from_dict(
        {
            "model": {"entry": "rounds:model", "folder": str(tmp_path)},
            "target": {"threads": 1},
            "verify": {"enabled": False},
        }
    )
    compile_model(cfg, tmp_path / "artifact")
    x = np.array(
        [1.0001, 70000, -1e-9, 3.1415926, 2049, 65519, 300, 257, 1e8, np.inf, -np.inf, np.nan, -0.0, 0, 2.5, 6e-8], "f4"
    )
    i = np.array([0, 1, 3, -5, 127, 128, 200, 2**31 - 1, -(2**31), *range(7)], "i4")
    got = tvmflow.load(tmp_path / "artifact").run_list({"x": x, "i": i})
    monkeypatch.syspath_prepend(str(tmp_path))
    module = __import__("rounds").Rounds()
    for result, want in zip(got, module(torch.tensor(x), torch.tensor(i)), strict=True):
        np.testing.assert_array_equal(result, want.numpy())
        if result.dtype.kind == "f":
            np.testing.assert_array_equal(np.signbit(result[result == 0]), np.signbit(want.numpy()[result == 0]))
