"""`tvmflow bisect` finds planted faults: of the import, a graph pass, a schedule, a record, a kernel of the user's.

The values are held against ONNX Runtime's; each reproducer is run and must show the difference by itself.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from planted_faults import plant

from tvmflow import config, flow, frontend, tasks
from tvmflow.config import Config
from tvmflow.database import Provenance, Record, Store, pack
from tvmflow.diagnosis.findings import Bisection
from tvmflow.errors import DatabaseError
from tvmflow.frozen import evolve
from tvmflow.process import Child

PROVENANCE = Provenance(
    versions={"apache-tvm": "0.27.0.post1"},
    machine="x86_64",
    cpu="some CPU",
    threads=1,
    date="2026-01-31T00:00:00Z",
    seed=0,
    trials=1,
    protocol="planted",
    tvmflow="0.1.0",
)
KERNEL_OFF = """
import tvm
from tvm import te

def shifted(call):
    (x,) = call.args
    a = te.placeholder(x.shape, name="a", dtype=x.dtype)
    out = te.compute(x.shape, lambda *i: tvm.tirx.tanh(a[i]) + tvm.tirx.const(0.01, "float32"))
    return te.create_prim_func([a, out])
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three dense layers of different widths, with Relu, Tanh and Relu behind them."""
    rng, widths = np.random.default_rng(0), (24, 20, 36, 24)
    nodes, weights, last = [], [], "x"
    for index, function in enumerate(("Relu", "Tanh", "Relu")):
        weight = rng.standard_normal(widths[index : index + 2]).astype("float32") / 4
        weights.append(numpy_helper.from_array(weight, f"w{index}"))
        nodes.append(helper.make_node("MatMul", [last, f"w{index}"], [f"m{index}"], name=f"dense{index}"))
        nodes.append(helper.make_node(function, [f"m{index}"], [f"r{index}"], name=f"function{index}"))
        last = f"r{index}"
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [16, 24]) for name in ("x", last)]
    graph = helper.make_graph(nodes, "dense", values[:1], values[1:], weights)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    made.ir_version = 8
    path = tmp_path_factory.mktemp("model") / "dense.onnx"
    onnx.save(made, path)
    return path


def of(model: Path, database: Path | None = None) -> Config:
    tables = [{"target": {"threads": 1}, "verify": {"seeds": [0]}}]
    return config.of_model(str(model), [*tables, {"tuning": {"database": str(database)}}] if database else tables)


def bisected(cfg: Config, out: Path) -> Bisection:
    return flow.bisect_config(cfg, out, lambda event: None)


def reproduce(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(folder / "reproduce.py")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def tvmflow(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tvmflow.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def planted_records(cfg: Config, kind: str) -> list[Record]:
    """A record per dense layer, tiled as MetaSchedule would; `kind` says what is wrong with them. For a child."""
    from tvm import ir
    from tvm.s_tir import Schedule

    from tvmflow.codegen import library
    from tvmflow.kernels.schedules.axes import blocks_of
    from tvmflow.pipeline.prepare import prepare, setting
    from tvmflow.tuning import space

    chosen, found = setting(cfg), []
    with chosen.entered():
        prepared, _ = prepare(cfg, frontend.load(cfg))
        dense = tasks.extract(prepared, library.calls(prepared), chosen.target, cfg.numerics)
    for task in sorted(dense, key=lambda task: task.name):
        schedule = space.context(task.mod, chosen.tvm_target, "main", seed=1).generate_design_space()[0]
        if kind == "float16" and "tanh" in task.name:  # rounds the product to float16: off by about 1e-3
            schedule = Schedule(task.mod, debug_mask="none")
            schedule.unsafe_set_dtype(next(iter(blocks_of(schedule))), 0, "float16")
        found.append(
            Record(
                parts=task.parts,
                name=task.name,
                workload_json=pack(ir.save_json(task.mod)),
                flop=task.flop,
                trace=tasks.trace_json(schedule),
                timings_s=(1e-6,),
                provenance=PROVENANCE,
            )
        )
    return found


def database(folder: Path, cfg: Config, kind: str) -> Path:
    records = Child("planting records").call(planted_records, cfg, kind)
    if kind == "swapped":
        traces = [record.trace for record in records]
        records = [evolve(r, trace=t) for r, t in zip(records, traces[1:] + traces[:1], strict=True)]
    Store(folder).add(records)
    return folder


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")


@pytest.mark.usefixtures("importable")
def test_a_record_that_narrows_values_is_not_kept(model: Path, tmp_path: Path) -> None:
    """What would make a kernel wrong is outside the grammar of records, so that there is nothing to bisect."""
    with pytest.raises(DatabaseError, match="UnsafeSetDType"):
        database(tmp_path / "db", of(model), "float16")


@pytest.mark.usefixtures("importable")
def test_traces_of_another_shape_are_named_though_their_values_are_right(model: Path, tmp_path: Path) -> None:
    folder = database(tmp_path / "db", of(model), "swapped")
    found = bisected(of(model, folder), tmp_path / "found")
    assert found.culprit is None
    for record in Store(folder).read().records:
        assert any(record.key[:12] in note for note in found.unusable_records)
    assert all("another shape" in note or "no longer applies" in note for note in found.unusable_records)


def test_a_kernel_of_the_users_that_is_off_by_a_hundredth(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernels.py").write_text(KERNEL_OFF)
    kernels = {"shifted": {"entry": "kernels:shifted", "folder": str(tmp_path), "replaces": "tanh"}}
    cfg = config.from_dict({"model": {"path": str(model)}, "kernels": kernels, "verify": {"seeds": [0]}})
    with monkeypatch.context() as patched:  # a child that may import torch takes three times as long to start
        patched.setattr(frontend, "needs_torch", lambda *configs: False)
        found = bisected(cfg, tmp_path / "found")
    assert found.culprit is not None
    assert (found.culprit.step, found.culprit.kernel) == ("ReplaceOperators", "user kernel shifted")
    assert found.culprit.kernels[0].max_error == pytest.approx(1e-2, rel=1e-3)
    assert reproduce(tmp_path / "found").returncode == 1


def test_a_default_schedule_that_is_off_by_a_hundredth(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(
        tmp_path / "site",
        monkeypatch,
        "tvmflow.kernels.schedules.default_schedule",
        """
        real = module.scheduled

        def scheduled(function):
            import tvm
            text = real(function).script(show_meta=False)
            if "tanh" not in text:
                return real(function)
            wrong = text.replace("T.tanh(", "T.float32(0.01) + T.tanh(")
            assert wrong != text
            return tvm.script.from_source(wrong)

        module.scheduled = scheduled
    """,
    )
    unverified = evolve(of(model), verify=config.VerifySection(enabled=False, seeds=(0,)))
    flow.compile_model(unverified, tmp_path / "wrong.tvmflow")
    found = flow.bisect_artifact(tmp_path / "wrong.tvmflow", None, [], tmp_path / "found", lambda event: None)
    assert found.culprit is not None
    assert found.culprit.step == "DefaultSchedule"
    assert "tanh" in str(found.culprit.kernel)
    assert len(found.culprit.kernels) == 1
    assert found.culprit.kernels[0].max_error == pytest.approx(1e-2, rel=1e-3)
    assert reproduce(tmp_path / "found").returncode == 1


def test_a_kernel_that_ends_the_process_is_named(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A default schedule that writes 2^34 rows behind its output."""
    plant(
        tmp_path / "site",
        monkeypatch,
        "tvmflow.kernels.schedules.default_schedule",
        """
        import re
        real = module.scheduled

        def scheduled(function):
            import tvm
            text = real(function).script(show_meta=False)
            if "T.tanh(" not in text:
                return real(function)
            wrong = re.sub(r"(\\w+)\\[([^]]+)\\] = T.tanh", r"\\1[T.int64(1 << 34) + \\2] = T.tanh", text)
            assert wrong != text
            return tvm.script.from_source(wrong)

        module.scheduled = scheduled
    """,
    )
    found = bisected(of(model), tmp_path / "found")
    assert found.culprit is not None
    assert found.culprit.step == "DefaultSchedule"
    assert "tanh" in str(found.culprit.kernel)
    assert "it ends the process" in found.culprit.summary
    assert any("SIGSEGV" in check.reason for check in found.checks)
    assert reproduce(tmp_path / "found").returncode == -signal.SIGSEGV


def test_a_kernel_of_the_users_that_ends_the_process_is_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernels.py").write_text(KERNEL_OFF.replace("a[i]", "a[i[0] + (1 << 34), i[1]]"))
    kernels = {"shifted": {"entry": "kernels:shifted", "folder": str(tmp_path), "replaces": "tanh"}}
    cfg = config.from_dict({"model": {"path": str(model)}, "kernels": kernels, "verify": {"seeds": [0]}})
    with monkeypatch.context() as patched:
        patched.setattr(frontend, "needs_torch", lambda *configs: False)
        found = bisected(cfg, tmp_path / "found")
    assert found.culprit is not None
    assert (found.culprit.step, found.culprit.kernel) == ("ReplaceOperators", "user kernel shifted")
    assert "it ends the process" in found.culprit.summary
    assert reproduce(tmp_path / "found").returncode == -signal.SIGSEGV


def test_a_wrong_import_is_traced_to_its_node(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(
        tmp_path / "site",
        monkeypatch,
        "tvmflow.frontend.onnx.ops",
        """
        from tvm import relax
        from types import MappingProxyType
        real = module.convert_map

        class Wrong:
            @classmethod
            def get_converter(cls, opset):
                return lambda builder, inputs, attributes, params: relax.op.sin(inputs[0])

        module.convert_map = lambda: MappingProxyType({**real(), "Tanh": Wrong})
    """,
    )
    found = bisected(of(model), tmp_path / "found")
    assert found.culprit is not None
    assert found.culprit.step == "import"
    assert "function1" in str(found.culprit.kernel)
    assert len(onnx.load(tmp_path / "found" / "node.onnx").graph.node) == 1
    shown = reproduce(tmp_path / "found")
    assert (shown.returncode, "values differ" in shown.stdout) == (1, True), shown.stderr


def test_nothing_is_found_where_nothing_is_wrong(model: Path, tmp_path: Path) -> None:
    done = tvmflow("bisect", str(model), "--set", "verify.seeds=[0]", cwd=tmp_path)
    assert (done.returncode, "nothing is wrong" in done.stdout) == (0, True), done.stderr
    assert not list(tmp_path.iterdir())
