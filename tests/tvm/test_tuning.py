"""Tasks, keys, workers and sessions: real searches on small kernels, candidates that crash, hang or devour memory."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from tuning_candidates import aborting, copying, job, sleeping
from tvm import te

import tvmflow
from tvmflow import target as targets
from tvmflow import tasks
from tvmflow.config import NumericsSection, TargetSection
from tvmflow.database import Store
from tvmflow.database.grammar import Where
from tvmflow.errors import SetupError
from tvmflow.replay import ReplayError, replay
from tvmflow.tuning import search, space
from tvmflow.tuning.measure import Measurer
from tvmflow.tuning.transfer import Experience
from tvmflow.tuning.worker import Job

CPU = Where("llvm", "x86_64", False)
TARGET = '{"kind": "llvm", "num-cores": 2}'


def matmul(m: int, n: int, k: int, names: str = "ABC") -> tvm.tirx.PrimFunc:
    a, b = te.placeholder((m, k), name=names[0]), te.placeholder((k, n), name=names[1])
    r = te.reduce_axis((0, k), name="r")
    return te.create_prim_func(
        [a, b, te.compute((m, n), lambda i, j: te.sum(a[i, r] * b[r, j], axis=r), name=names[2])]
    )


def test_keys_do_not_depend_on_names() -> None:
    (_, one), (mod, other) = tasks.canonical(matmul(8, 16, 4)), tasks.canonical(matmul(8, 16, 4, "xyz"))
    assert one == other
    plain, renamed = (f.without_attr("global_symbol") for f in (matmul(8, 16, 4), mod["main"]))
    tvm.ir.assert_structural_equal(renamed, plain, map_free_vars=True)
    assert tasks.canonical(matmul(8, 16, 5))[1] != one


def test_a_trace_does_not_apply_to_another_kernel() -> None:
    mod, _ = tasks.canonical(matmul(8, 16, 4))
    schedule = tvm.s_tir.Schedule(mod)
    (name,) = (schedule.get(block).name_hint for block in schedule.get_child_blocks(schedule.get_sblock("root")))
    i, *_ = schedule.get_loops(schedule.get_sblock(name))
    schedule.split(i, [2, 4])
    trace = json.loads(json.dumps(schedule.trace.as_json(), default=int))
    replayed = replay(mod, trace, CPU)
    tvm.ir.assert_structural_equal(replayed.mod, schedule.mod)
    with pytest.raises(ReplayError, match="its trace does not apply to its workload"):
        replay(tvm.IRModule({"main": te.create_prim_func([te.placeholder((3,), name="A")])}), trace, CPU)
    with pytest.raises(ReplayError, match="trace, instruction 0"):
        replay(mod, [["nonsense"], []], CPU)


# --- workers ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measurer() -> Iterator[Measurer]:
    with Measurer(TARGET, threads=2, workers=2) as made:
        yield made


def test_killers_cost_themselves_alone(measurer: Measurer) -> None:
    jobs = [job(f) for f in (copying, aborting, copying, sleeping, copying, aborting, copying)]
    results = measurer.measure(jobs, None)
    assert [bool(result.samples_s) for result in results] == [True, False, True, False, True, False, True]
    assert "crashed" in results[1].error
    assert "took too long" in results[3].error


def test_memory_bombs_and_nonsense_are_errors(measurer: Measurer) -> None:
    bomb, nonsense = job(copying, 1 << 36), Job("{", (), ())
    results = measurer.measure([bomb, nonsense, job(copying)], None)
    assert [bool(result.samples_s) for result in results] == [False, False, True]
    assert all(result.error for result in results[:2])


def test_hopeless_candidates_end_early(measurer: Measurer) -> None:
    (result,) = measurer.measure([job(copying)], 1e-12)
    assert len(result.samples_s) == 1


def test_workers_that_cannot_start_are_one_error() -> None:
    with pytest.raises(SetupError, match=r"a process for candidates did not start"):
        Measurer("no target", threads=2, workers=2)


# --- sessions ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with m.onnx: two matmuls with a Relu between, 64 x 128."""
    folder = tmp_path_factory.mktemp("tune")
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array(rng.standard_normal((128, 128)).astype("f4"), name) for name in ("v", "w")]
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "v"], ["h"]),
            helper.make_node("Relu", ["h"], ["r"]),
            helper.make_node("MatMul", ["r", "w"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [64, 128])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [64, 128])],
        weights,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "m.onnx")
    return folder


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tvmflow.cli", *arguments, "--set", "tuning.database=db"]


def run(folder: Path, *arguments: str, **env: str) -> str:
    done = subprocess.run(
        command(*arguments), cwd=folder, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_keys_are_the_same_in_every_process(model: Path) -> None:
    first, second = (run(model, "tasks", "m.onnx", "--json", PYTHONHASHSEED=seed) for seed in ("1", "2"))
    assert json.loads(first) == json.loads(second)
    assert len(json.loads(first)) == 2


@pytest.fixture(scope="module")
def tuned(model: Path) -> dict[str, Any]:
    """What `tune` says of the model's two kernels, whose records are in `db` from then on."""
    return dict(json.loads(run(model, "tune", "m.onnx", "--minutes", "30", "--trials-per-task", "32", "--json")))


def test_tune_then_compile_from_the_records(model: Path, tuned: dict[str, Any]) -> None:
    assert tuned["gain"] >= 1
    reading = Store(model / "db").read()
    assert reading.faults == ()
    rows = json.loads(run(model, "tasks", "m.onnx", "--json"))
    assert {row["key"] for row in rows} == set(reading.by_key)
    assert {row["record"] for row in rows} == {"exact"}
    manifest = json.loads(run(model, "compile", "m.onnx", "--json", "-o", "a"))
    assert manifest["verdict"]["ok"]
    assert {kernel["origin"] for kernel in manifest["kernels"]} == {"tuned"}
    assert all(kernel["rule"].startswith("record ") for kernel in manifest["kernels"])
    again = json.loads(run(model, "compile", "m.onnx", "--json", "-o", "b", "--no-verify"))
    assert again["files"] == manifest["files"]
    other = json.loads(run(model, "compile", "m.onnx", "--json", "-o", "c", "--set", "numerics.fast_math=true"))
    assert {kernel["origin"] for kernel in other["kernels"]} == {"default schedule"}
    more = json.loads(run(model, "tune", "m.onnx", "--minutes", "30", "--trials-per-task", "32", "--json"))
    assert more["trials"] == tuned["trials"]


def test_winners_are_settled_in_the_model_and_what_is_required_is_checked(model: Path, tuned: dict[str, Any]) -> None:
    untuned = command("compile", "m.onnx", "-o", "d", "--require-tuned", "0.9", "--set", "numerics.fast_math=true")
    fails = subprocess.run(untuned, cwd=model, capture_output=True, text=True, check=False)
    assert fails.returncode == 7
    assert "tuned kernels take 0.0% of the time, tuning.require_tuned is 90.0%" in fails.stderr
    assert "next: tvmflow tune m.onnx" in fails.stderr
    assert not (model / "d").exists()
    assert tuned["settled"]["m"]["kept_s"] <= tuned["settled"]["m"]["default_s"]
    manifest = json.loads(run(model, "compile", "m.onnx", "-o", "d", "--require-tuned", "0.5", "--json"))
    records = Store(model / "db").read().by_key
    assert {kernel["key"] for kernel in manifest["kernels"]} <= set(records)
    assert all(kernel["gflops"] == pytest.approx(records[kernel["key"]].gflops) for kernel in manifest["kernels"])


@pytest.mark.usefixtures("tuned")
def test_two_checkouts_with_one_database_build_the_same_bytes(model: Path, tmp_path: Path) -> None:
    shutil.copytree(Path(tvmflow.__file__).parent, tmp_path / "tvmflow", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(model / "m.onnx", tmp_path)
    shutil.copytree(model / "db", tmp_path / "db")
    here, there = (json.loads(run(folder, "compile", "m.onnx", "-o", "e", "--json")) for folder in (model, tmp_path))
    assert here["files"] == there["files"]
    assert {kernel["origin"] for kernel in there["kernels"]} == {"tuned"}


def test_shards_share_the_tasks_out(model: Path) -> None:
    parts = []
    for index in (1, 2):
        subprocess.run(
            [
                sys.executable,
                "-m",
                "tvmflow.cli",
                "tune",
                "m.onnx",
                "--shard",
                f"{index}/2",
                "--trials-per-task",
                "8",
                "--set",
                f"tuning.database=part{index}",
            ],
            cwd=model,
            check=True,
            capture_output=True,
        )
        parts.append(set(Store(model / f"part{index}").read().by_key))
    assert not parts[0] & parts[1]
    assert parts[0] | parts[1] == {row["key"] for row in json.loads(run(model, "tasks", "m.onnx", "--json"))}
    done = subprocess.run(
        command("tune", "m.onnx", "--shard", "3/2"), cwd=model, capture_output=True, text=True, check=False
    )
    assert (done.returncode, "--shard 3/2: not of the form I/N" in done.stderr) == (2, True)


def test_candidates_in_quarantine_are_not_run(tmp_path: Path, measurer: Measurer) -> None:
    target = tvm.target.Target(json.loads(TARGET))
    mod, workload = tasks.canonical(matmul(32, 32, 32))
    numerics = NumericsSection()
    parts = tasks.key_parts(workload, targets.resolve(TargetSection(threads=2)), numerics)
    store, task = Store(tmp_path), tasks.Task("matmul", parts, mod, 1, 2 * 32**3, 2)
    drawn = search.Search(task, seed=3)
    search.begin(drawn, None, Experience([]), measurer, (target, space.cost_model(3)))
    assert drawn.context is not None
    candidates = list(drawn.context.generate_measure_candidates())[:8]
    for candidate in candidates[::2]:
        for _ in range(2):
            store.accuse(parts, search.trace_hash(candidate.sch), "crashed")
    results = search._measure(drawn, candidates, measurer, store.quarantined(parts))
    assert [result.error for result in results[::2]] == ["in quarantine"] * 4
    assert all(result.samples_s for result in results[1::2])


@pytest.mark.usefixtures("tuned")
def test_a_session_killed_as_it_writes_leaves_a_valid_database(model: Path, tmp_path: Path) -> None:
    shutil.copy(model / "m.onnx", tmp_path)
    shutil.copytree(model / "db", tmp_path / "db")
    child = subprocess.Popen(
        command("tune", "m.onnx", "--minutes", "30", "--trials-per-task", "4096"),
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for _ in range(2):
        before = state(tmp_path / "db")
        while state(tmp_path / "db") == before:
            assert child.poll() is None
            time.sleep(0.001)
    child.send_signal(signal.SIGKILL)
    child.wait()
    reading = Store(tmp_path / "db").read()
    assert (len(reading.records), reading.faults) == (2, ())


def state(folder: Path) -> set[tuple[str, int, int]]:
    """The files of records, those that are being written among them, their sizes and times."""
    found = set()
    for path in folder.rglob("*records*"):
        with contextlib.suppress(FileNotFoundError):  # gone since it was listed
            found.add((str(path), path.stat().st_size, path.stat().st_mtime_ns))
    return found


def test_tune_says_what_it_needs(model: Path) -> None:
    bare = [sys.executable, "-m", "tvmflow.cli", "tune", "m.onnx"]
    done = subprocess.run(bare, cwd=model, capture_output=True, text=True, check=False)
    assert (done.returncode, "tuning.database: missing" in done.stderr) == (3, True)
    (model / "file").touch()
    done = subprocess.run(
        [*bare, "--set", "tuning.database=file"], cwd=model, capture_output=True, text=True, check=False
    )
    assert (done.returncode, "file: cannot be written: File exists" in done.stderr) == (15, True)
    done = subprocess.run(
        command("tune", "m.onnx", "--tasks", "zzz"), cwd=model, capture_output=True, text=True, check=False
    )
    assert (done.returncode, "matches none of 2 tasks" in done.stderr) == (3, True)
