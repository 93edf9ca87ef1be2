"""Winograd's method or the direct one by measurement: what is planted is taken, `tune` measures what a build has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

import tvmflow
from tvmflow import config, flow, frontend, tasks
from tvmflow.config import Config, TargetSection
from tvmflow.database import Comparison, Match, Provenance, Store
from tvmflow.database.comparison import COMPARISONS, EDGES
from tvmflow.host import host_features
from tvmflow.kernels.winograd.minimal_filtering import Shape
from tvmflow.pipeline import layouts
from tvmflow.pipeline.context import Context
from tvmflow.pipeline.prepare import prepare, setting
from tvmflow.target import resolve, to_tvm
from tvmflow.tuning import methods

PADS = (1, 1, 1, 1)
WIDE = Shape(1, 20, 20, 64, 16, PADS)  # by rule Winograd's
NARROW = Shape(1, 20, 20, 16, 16, PADS)  # by rule the direct one's: too little work
RULED = f"winograd F(4x4, 3x3), {WIDE}, by rule"
Planted = dict[Shape, str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """WIDE with bias and ReLU, then NARROW."""
    rng = np.random.default_rng(0)
    values = {
        "w1": rng.standard_normal((16, 64, 3, 3)) / 24,
        "b1": rng.standard_normal(16),
        "w2": rng.standard_normal((16, 16, 3, 3)) / 12,
    }
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["c"], pads=PADS),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Conv", ["r", "w2"], ["y"], pads=PADS),
    ]
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("x", [1, 64, 20, 20]), ("y", [1, 16, 20, 20]))
    )
    weights = [numpy_helper.from_array(value.astype("f4"), name) for name, value in values.items()]
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    path = tmp_path_factory.mktemp("model") / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def config_of(model: Path, database: Path | None, **sections: object) -> Config:
    tuning = {"database": str(database)} if database else {}
    return config.of_model(str(model), [{"graph": {"layout": "nhwc"}, "tuning": tuning, **sections}])


def plant(cfg: Config, fastest: Planted) -> None:
    """Says of convolutions, on the config's target, which method is fastest."""
    target = setting(cfg).target
    source = Provenance(
        versions={},
        machine="x86_64",
        cpu="planted",
        threads=target.threads,
        seed=None,
        trials=3,
        date="2025-01-01T00:00:00Z",
        protocol="planted",
        tvmflow="0",
    )
    for shape, method in fastest.items():
        convolution = tasks.convolution_of(shape)
        timings_s = {name: (1e-4 if name == method else 2e-4,) for name in EDGES}
        Store(cfg.tuning.database).add_comparisons(
            [
                Comparison(
                    parts=tasks.key_parts(convolution.workload, target, cfg.numerics),
                    convolution=convolution,
                    name=str(shape),
                    direct="default",
                    timings_s=timings_s,
                    provenance=source,
                )
            ]
        )


def rules_of(cfg: Config) -> list[str]:
    """Those of the Winograd kernels that a build of the config starts from."""
    with setting(cfg).entered():
        prepared, _ = prepare(cfg, frontend.load(cfg))
    return sorted(str(f.attrs["tvmflow.rule"]) for f in prepared.functions.values() if "tvmflow.rule" in f.attrs)


@pytest.mark.parametrize(
    ("fastest", "expected"),
    [({}, [RULED]), ({WIDE: "direct", NARROW: "F(2x2)"}, [f"winograd F(2x2, 3x3), {NARROW}, measured"])],
    ids=["nothing is known", "the rule is contradicted"],
)
def test_a_build_takes_what_was_measured(model: Path, tmp_path: Path, fastest: Planted, expected: list[str]) -> None:
    cfg = config_of(model, tmp_path / "db", verify={"seeds": [0]})
    Store(tmp_path / "db").create()
    plant(cfg, fastest)
    manifest = flow.compile_model(cfg, tmp_path / "a.tvmflow")
    assert manifest.verdict.ok
    assert [kernel.rule for kernel in manifest.kernels if kernel.rule.startswith("winograd ")] == expected
    assert [note for note in manifest.notes if note.startswith("numerics.winograd: ")] == [
        f"numerics.winograd: {rule}, in 1 place" for rule in expected
    ]
    x = np.random.default_rng(1).standard_normal((1, 64, 20, 20), np.float32)
    (want,) = ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, {"x": x})
    np.testing.assert_allclose(tvmflow.load(tmp_path / "a.tvmflow").run({"x": x})["y"], want, atol=2e-5)
    (row,) = (row for row in flow.tasks(cfg) if "conv2d" in row["name"])
    assert row["shapes"].startswith("1x20x20x64" if fastest else "1x20x20x16"), "the other is left for `tune`"


def test_only_for_the_same_convolution_target_and_numerics(model: Path, tmp_path: Path) -> None:
    cfg = config_of(model, tmp_path / "db")
    plant(cfg, {Shape(1, 20, 20, 64, 16, (0, 0, 0, 0)): "direct", WIDE: "F(4x4)", NARROW: "F(2x2)"})
    measured = [f"winograd F(2x2, 3x3), {NARROW}, measured", RULED.replace("by rule", "measured")]
    assert rules_of(cfg) == measured
    for other in ({"numerics": {"fast_math": True}}, {"target": {"threads": 7}}):
        assert rules_of(config_of(model, tmp_path / "db", **other)) == [RULED]
    assert rules_of(config_of(model, tmp_path / "db", numerics={"winograd": "off"})) == []


def test_a_layout_is_chosen_for_what_was_measured() -> None:
    """Two transposes are worth it for Winograd's method, not for the direct one."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 64, 32, 32), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            made = builder.emit_output(
                builder.emit(relax.op.nn.conv2d(x, relax.const(np.ones((64, 64, 3, 3), "float32")), padding=1))
            )
        builder.emit_func_output(made)
    mod = builder.get()
    with to_tvm(resolve(TargetSection(mcpu="x86-64-v4", threads=2)), {}):
        for edge, layout in ((None, "nhwc"), (4, "nhwc"), (1, "keep")):
            context = Context("llvm", convolutions="winograd", measured=lambda shape, e=edge: e)
            assert layouts.choose(mod, "auto", context).layout == layout


@pytest.fixture(scope="module")
def rivals(model: Path) -> list[methods.Rivals]:
    cfg = config_of(model, None)
    return methods.rivals(cfg, frontend.load(cfg), setting(cfg))


def test_each_method_has_its_kernel_with_what_is_fused(rivals: list[methods.Rivals]) -> None:
    assert {one.shape: one.operators for one in rivals} == {WIDE: "conv2d add maximum", NARROW: "conv2d"}
    assert all(set(one.kernels) == {1, 2, 4} for one in rivals)


def test_the_direct_kernel_is_the_one_that_a_build_has(model: Path, rivals: list[methods.Rivals]) -> None:
    off = config_of(model, None, numerics={"winograd": "off"})
    with setting(off).entered():
        prepared, _ = prepare(off, frontend.load(off))
    kept = tasks.extract(prepared, {}, setting(off).target, off.numerics)
    convolutions = {task.parts.workload for task in kept if "conv2d" in task.name}
    assert {tasks.canonical(one.kernels[1])[1] for one in rivals} == convolutions


def test_where_channels_stay_first_there_is_nothing_to_compare(model: Path) -> None:
    cfg = config.of_model(str(model), [{"graph": {"layout": "keep"}}])
    assert methods.rivals(cfg, frontend.load(cfg), setting(cfg)) == []


# --- tune -------------------------------------------------------------------------------------------------------------


def tune(model: Path, database: Path, *more: str) -> object:
    settings = ["--set", f"tuning.database={database}", "--set", "graph.layout=nhwc"]
    command = [sys.executable, "-m", "tvmflow.cli", "tune", str(model), *settings, "--json", *more]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def tuned(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, object]:
    database = tmp_path_factory.mktemp("tuned") / "db"
    return database, tune(model, database, "--trials-per-task", "1", "--minutes", "0.5")


def test_tune_compares_the_methods_of_each_convolution(model: Path, tuned: tuple[Path, object]) -> None:
    database, said = tuned
    reading = Store(database).read()
    assert reading.faults == ()
    by_shape = {one.convolution: one for one in reading.comparisons}
    wide, narrow = by_shape[tasks.convolution_of(WIDE)], by_shape[tasks.convolution_of(NARROW)]
    assert len(by_shape) == 2
    assert all(len(one.timings_s[method]) >= methods.TURNS for one in (wide, narrow) for method in EDGES)
    assert wide.direct == "default", "the rule takes Winograd's, so that the direct kernel was no task"
    cfg = config_of(model, database)
    (record,) = (record for record in reading.records if "conv2d" in record.name)
    assert narrow.direct == f"record {record.key[:12]}, {record.gflops:.0f} GFLOP/s when tuned"
    assert isinstance(reading.lookup(record.parts, host_features()), Match)
    assert narrow.provenance.threads == setting(cfg).target.threads
    assert {row["name"]: (row["taken"], row["by rule"]) for row in said["compared"]} == {
        f"conv2d add maximum {WIDE}": (wide.taken, "F(4x4)"),
        f"conv2d {NARROW}": (narrow.taken, "direct"),
    }


def test_what_is_known_stays_until_it_is_asked_for_again(model: Path, tuned: tuple[Path, object]) -> None:
    database, _ = tuned
    (path,) = database.glob(f"*/{COMPARISONS.file_name}")
    before = path.read_bytes()
    again = flow.compare_methods([config_of(model, database)], False, lambda event: None)
    assert {one.comparison.key for one in again} == set(Store(database).comparisons())
    assert path.read_bytes() == before
    assert len(tune(model, database, "--only", "winograd")) == 2
    assert path.read_bytes() != before


def test_it_is_no_part_of_the_tasks(model: Path, tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        tune(model, tmp_path / "db", "--only", "winograd", "--shard", "1/2")
    assert "leave them out" in caught.value.stderr
