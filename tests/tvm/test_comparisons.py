"""Values for NaN do not depend on the schedule: default schedules, and ones drawn from the space that tuning searches.

The reference is ONNX Runtime, but for maxima over a window or an axis, of which it drops NaN by where it stands: there,
numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from ops_runs import assert_same, reference
from tvm import te, topi
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms

import tvmflow
from tvmflow import config, frontend, tasks
from tvmflow.config import Config
from tvmflow.database import Provenance, Record, Store, pack
from tvmflow.flow import compile_model
from tvmflow.kernels.rewrites import compare_exactly
from tvmflow.kernels.schedules.axes import blocks_of
from tvmflow.process import Child

PROVENANCE = Provenance(
    versions={"apache-tvm": "0.27.0.post1"},
    machine="x86_64",
    cpu="some CPU",
    threads=1,
    date="2026-01-31T00:00:00Z",
    seed=0,
    trials=1,
    protocol="drawn",
    tvmflow="0.1.0",
)
ROWS, COLUMNS = 32, 64
BOOL = ("Not", "Or", "And", "Xor")


ATTRIBUTES = {
    "MaxPool": {"kernel_shape": [2, 2], "strides": [2, 2]},
    "ReduceMax": {"axes": [1], "keepdims": 0},
    "Concat": {"axis": 0},
}


class Graph:
    """Nodes under construction: `graph.Add(a, b)` adds one and returns its output's name."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []

    def __getattr__(self, op_type: str) -> Callable[..., str]:
        def add(*inputs: str) -> str:
            name = f"t{len(self.nodes)}"
            self.nodes.append(helper.make_node(op_type, inputs, [name], **ATTRIBUTES.get(op_type, {})))
            return name

        return add


# What TVM's simplifier makes something else of, which differs for NaN.
CONDITIONS: dict[str, Callable[[Graph, str, str], str]] = {
    "not equal": lambda g, x, y: g.Not(g.Equal(x, y)),
    "not less": lambda g, x, y: g.Not(g.Less(x, y)),
    "not nan": lambda g, x, y: g.Not(g.IsNaN(x)),
    "either": lambda g, x, y: g.Or(g.LessOrEqual(y, x), g.Less(x, y)),
    "neither": lambda g, x, y: g.Not(g.Or(g.Less(x, y), g.Greater(x, "half"))),
    "both": lambda g, x, y: g.And(g.Not(g.Equal(x, y)), g.Not(g.Less(x, y))),
    "one": lambda g, x, y: g.Xor(g.Less(x, y), g.Not(g.Less(y, x))),
    "joined": lambda g, x, y: g.Not(g.Concat(g.Not(g.Less(x, y)), g.Equal(x, y))),
    "of a product": lambda g, x, y: g.Not(g.Less(g.MatMul(x, "w"), y)),
}
VALUES: dict[str, Callable[[Graph, str, str], str]] = {
    "product not equal": lambda g, x, y: g.Where(g.Not(g.Equal(g.MatMul(x, "w"), y)), "one", "half"),
    "product clipped": lambda g, x, y: g.Clip(g.MatMul(x, "w"), "half", "two"),
    "product larger": lambda g, x, y: g.Max(g.MatMul(x, "w"), y),
    "convolution": lambda g, x, y: g.Not(g.Less(g.Conv(g.Reshape(x, "image"), "filter"), "half")),
    "nested": lambda g, x, y: g.Where(g.Less(x, y), "one", g.Where(g.LessOrEqual(y, x), "two", "half")),
    "larger": lambda g, x, y: g.Min(g.Max(x, y), x),
    "clipped": lambda g, x, y: g.Clip(g.Relu(x), "half", "two"),
}
EXTREMES: dict[str, Callable[[Graph, str, str], str]] = {
    "pooled": lambda g, x, y: g.MaxPool(g.Reshape(x, "image")),
    "largest": lambda g, x, y: g.ReduceMax(x),
    "largest column": lambda g, x, y: g.Not(g.Less(g.ReduceMax(g.MatMul(x, "w")), "half")),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases, each with inputs of its own, so that no two share a part."""
    graph, outputs = Graph(), []
    cases = [*CONDITIONS.values(), *VALUES.values(), *EXTREMES.values()]
    cases += [lambda g, x, y, made=made: g.Where(made(g, x, y), "one", "half") for made in CONDITIONS.values()]
    for index, case in enumerate(cases):
        name = case(graph, f"x{index}", f"y{index}")
        kind = TensorProto.BOOL if graph.nodes[-1].op_type in BOOL else TensorProto.FLOAT
        outputs.append(helper.make_tensor_value_info(name, kind, None))
    rng = np.random.default_rng(1)
    weights = {
        "half": np.array(0.5, "f4"),
        "one": np.array(1, "f4"),
        "two": np.array(2, "f4"),
        "image": np.array([1, 16, 8, 16]),
        "w": rng.integers(-2, 3, (COLUMNS, COLUMNS)).astype("f4"),
        "filter": rng.integers(-2, 3, (16, 16, 1, 1)).astype("f4"),
    }
    used = {name for node in graph.nodes for name in node.input}
    inputs = [name for index in range(len(cases)) for name in (f"x{index}", f"y{index}") if name in used]
    made = helper.make_graph(
        graph.nodes,
        "cases",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [ROWS, COLUMNS]) for name in inputs],
        outputs,
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    path = tmp_path_factory.mktemp("model") / "cases.onnx"
    whole = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(onnx.shape_inference.infer_shapes(whole), path)
    return path


@pytest.fixture(scope="module")
def feeds(model: Path) -> dict[str, np.ndarray]:
    """Few different numbers, so that many are equal, and NaN."""
    rng, found = np.random.default_rng(0), {}
    for value in onnx.load(model).graph.input:
        numbers = rng.integers(-3, 4, (ROWS, COLUMNS)).astype("f4")
        numbers[rng.random(numbers.shape) < 0.05] = np.nan
        found[value.name] = numbers
    return found


@pytest.fixture(scope="module")
def wanted(model: Path, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The outputs by ONNX Runtime, and by numpy where a maximum is over more than two numbers."""
    made = onnx.load(model)
    results = reference(made, feeds)
    first = len(CONDITIONS) + len(VALUES)
    pooled, largest, columns = (feeds[f"x{first + index}"] for index in range(len(EXTREMES)))
    weight = next(numpy_helper.to_array(one) for one in made.graph.initializer if one.name == "w")
    windows = pooled.reshape(1, 16, 4, 2, 8, 2)
    extremes = windows.max((3, 5)), largest.max(1), ~((columns @ weight).max(1) < 0.5)
    return [*results[:first], *extremes, *results[first + len(EXTREMES) :]]


def of(model: Path, **tuning: str) -> Config:
    return config.of_model(str(model), [{"target": {"threads": 1}, "verify": {"enabled": False}, "tuning": tuning}])


def drawn_records(cfg: Config, seed: int) -> list[Record]:
    """A record per kernel, the last of a few candidates drawn from its space; for a child."""
    from tvmflow.codegen import library
    from tvmflow.pipeline.prepare import prepare, setting
    from tvmflow.tuning import space

    chosen, found = setting(cfg), []
    with chosen.entered():
        prepared, _ = prepare(cfg, frontend.load(cfg))
        kernels = tasks.extract(prepared, library.calls(prepared), chosen.target, cfg.numerics)
    for task in kernels:
        searched = space.context(task.mod, chosen.tvm_target, "main", seed)
        context = ms.TuneContext(
            mod=task.mod,
            target=chosen.tvm_target,
            space_generator=searched.space_generator,
            search_strategy="replay-trace",
            rand_state=seed,
            num_threads=1,
        )
        context.pre_tuning(4, 4, space.designs(searched), ms.database.MemoryDatabase(), ms.cost_model.RandomModel())
        schedule = context.generate_measure_candidates()[-1].sch
        found.append(
            Record(
                parts=task.parts,
                name=task.name,
                workload_json=pack(tvm.ir.save_json(task.mod)),
                flop=task.flop,
                trace=tasks.trace_json(schedule),
                timings_s=(1e-6,),
                provenance=PROVENANCE,
            )
        )
    return found


def test_default_schedules_know_nan(
    model: Path, feeds: dict[str, np.ndarray], wanted: list[np.ndarray], tmp_path: Path
) -> None:
    compile_model(of(model), tmp_path / "a")
    assert_same(list(tvmflow.load(tmp_path / "a").run(feeds).values()), wanted)


@pytest.mark.parametrize("seed", [0])
def test_schedules_of_the_search_know_nan(
    model: Path,
    feeds: dict[str, np.ndarray],
    wanted: list[np.ndarray],
    seed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    cfg = of(model, database=str(tmp_path / "db"))
    records = Child("drawing schedules").call(drawn_records, cfg, seed)
    Store(tmp_path / "db").add(records)
    manifest = compile_model(cfg, tmp_path / "a")
    assert {kernel.origin for kernel in manifest.kernels} == {"tuned"}
    assert_same(list(tvmflow.load(tmp_path / "a").run(feeds).values()), wanted)


TORCH = """
import torch
from torch.nn import functional

class Picks(torch.nn.Module):
    def forward(self, x, y):
        return (x.amax(1), x.amin((0, 2)), x.max(), functional.max_pool2d(x, 2, 1, 1),
                functional.adaptive_max_pool2d(x, 1), x != y, ~(x < y), ~(x >= y), (x <= y) | (y < x),
                torch.where(x != y, x, y))

def model():
    return Picks(), (torch.zeros(4, 6, 16), torch.zeros(4, 6, 16))
"""


def test_values_for_nan_are_those_of_pytorch(tmp_path: Path) -> None:
    (tmp_path / "picks.py").write_text(TORCH)
    rng = np.random.default_rng(0)
    numbers = {name: rng.integers(-3, 4, (4, 6, 16)).astype("f4") for name in ("x", "y")}
    for values in numbers.values():
        values[rng.random(values.shape) < 0.1] = np.nan
    np.savez(tmp_path / "numbers.npz", **numbers)
    cfg = config.from_dict(
        {
            "model": {"entry": "picks:model", "folder": str(tmp_path)},
            "verify": {"inputs": str(tmp_path / "numbers.npz")},
        }
    )
    manifest = compile_model(cfg, tmp_path / "a")
    assert manifest.verdict is not None
    assert manifest.verdict.ok


@pytest.mark.parametrize("lanes", [1, 4])
def test_cuda_code_compares_as_the_model_says(lanes: int) -> None:
    """Its text, for there is no GPU: neither `not x < y` nor `x <= y or y < x` becomes another comparison."""
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90", "max_threads_per_block": 1024})
    x, y = (te.placeholder((64, 64), name=name) for name in "xy")
    kernels = []
    for made in (topi.logical_not(topi.less(x, y)), topi.logical_or(topi.less_equal(x, y), topi.less(y, x))):
        schedule = Schedule(te.create_prim_func([x, y, topi.cast(made, "float32")]))
        *before, last = blocks_of(schedule)
        for block in before:
            schedule.compute_inline(block)
        rows, columns = schedule.get_loops(last)
        schedule.bind(rows, "blockIdx.x")
        columns, vector = schedule.split(columns, [None, lanes])
        schedule.bind(columns, "threadIdx.x")
        schedule.vectorize(vector)
        text = str(tvm.compile(compare_exactly.exact(schedule.mod, "cuda"), target).mod.imports[0].inspect_source())
        kernels.append(text[text.rindex("main_kernel(") :])
    negated, covering = kernels
    assert "<" in negated
    assert "<=" not in negated
    assert "!" not in negated  # which CUDA has not for vectors
    assert "<=" in covering
