"""Tuning for a GPU, as far as it goes without one: spaces, the default candidate, machine code from a worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import cuda_compiler
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tvmflow import process
from tvmflow.codegen import cuda
from tvmflow.database.grammar import Where
from tvmflow.errors import TargetError
from tvmflow.process import Child
from tvmflow.replay import replay

pytestmark = cuda_compiler.needed


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a child needs: TVM's CUDA run time loadable, and this module importable."""
    paths = os.pathsep.join([process.PACKAGE_PARENT, str(Path(__file__).parent)])
    return {"PYTHONPATH": paths, **cuda.loader_env(tmp_path_factory.mktemp("cache"))}


def save_model(folder: Path) -> None:
    """m.onnx in `folder`: one matmul of 64 x 128 by 128 x 128."""
    weight = np.random.default_rng(0).standard_normal((128, 128)).astype("f4")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [64, 128])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [64, 128])],
        [numpy_helper.from_array(weight, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "m.onnx")


def built_candidates(folder: str) -> list[str]:
    """Called in a process of its own: builds a matmul's default and first drawn candidate in a worker.

    Their traces replay to the same kernels. Returns the architectures of the libraries' cubins.
    """
    import functools

    import tvm
    from tvm import te
    from tvm.s_tir import meta_schedule as ms

    from tvmflow import target as targets
    from tvmflow import tasks
    from tvmflow.codegen import candidates, cubin, numerics
    from tvmflow.config import NumericsSection, TargetSection
    from tvmflow.tuning import search, space
    from tvmflow.tuning.measure import Measurer
    from tvmflow.tuning.rpc import GUARD, GUARD_FILE, Libraries, Remote, Tracker

    section = NumericsSection()
    target = targets.to_tvm(
        targets.resolve(TargetSection(kind="cuda", arch="sm_90")), numerics.llvm_attributes(section)
    )
    a, b = te.placeholder((64, 128), name="a"), te.placeholder((128, 96), name="b")
    r = te.reduce_axis((0, 128), name="r")
    product = te.compute((64, 96), lambda i, j: te.sum(a[i, r] * b[r, j], axis=r), name="c")
    mod, _ = tasks.canonical(te.create_prim_func([a, b, product]))
    context = space.context(mod, target, "matmul", 1)
    context.pre_tuning(32, 32, space.designs(context), ms.database.MemoryDatabase(), ms.cost_model.RandomModel())
    drawn = [candidate.sch for candidate in context.generate_measure_candidates() or ()]
    schedules = [space.default(mod, target), drawn[0]]

    class Builder(Measurer):
        def __init__(self) -> None:
            step = functools.partial(candidates.cuda_step, "sm_90", section)
            place = functools.partial(
                Remote, Tracker("127.0.0.1", 1, "none"), Libraries(str(target), 2, {}, step), Path(folder)
            )
            self._start(place, 1)

    (Path(folder) / GUARD_FILE).write_text(GUARD % "")
    jobs = [search.job_of(schedule.mod) for schedule in schedules]
    with Builder() as builder, pytest.raises(TargetError, match="no TVM RPC tracker"):
        builder.measure(jobs, None)  # everything is built before anything is run
    found = []
    for number, schedule in enumerate(schedules):
        replayed = replay(mod, tasks.trace_json(schedule), Where("cuda", "x86_64", section.tf32))
        tvm.ir.assert_structural_equal(replayed.mod["main"], schedule.mod["main"])
        found += [image.arch for image in cubin.assert_machine_code(Path(folder) / f"{number}.so", "sm_90")]
    return found


def test_candidates_become_machine_code(env: dict[str, str], tmp_path: Path) -> None:
    found = Child("building candidates", env=env).call(built_candidates, str(tmp_path))
    assert found == ["sm_90", "sm_90"]


def tuned_without_a_gpu(model: str, database: str) -> None:
    """Called in a process of its own: a whole session, in which candidates are given times instead of being run."""
    from collections.abc import Sequence

    from tvmflow import config
    from tvmflow.tuning import child
    from tvmflow.tuning.measure import Measured, Measurer
    from tvmflow.tuning.worker import Job

    class Clock(Measurer):
        device = "no GPU"

        def __init__(self) -> None:
            self._workers = []

        def measure(self, jobs: Sequence[Job], best_s: float | None, turns: int = 1) -> list[Measured]:
            return [Measured((len(job.module_json) * 1e-9,)) for job in jobs]

    child._check_device = lambda cfg: None  # type: ignore[assignment]
    child._measurer = lambda cfg, setting: Clock()  # type: ignore[assignment]
    overrides = [
        {"target": {"kind": "cuda", "arch": "sm_90"}},
        {"tuning": {"database": database, "trials_per_task": 32}},
    ]
    (found,) = child.tune([config.of_model(model, overrides)], "*", (1, 1))
    assert len(found.records) >= 2


def test_compile_from_a_gpus_records(env: dict[str, str], tmp_path: Path) -> None:
    save_model(tmp_path)
    Child("tuning", env=env).call(tuned_without_a_gpu, str(tmp_path / "m.onnx"), str(tmp_path / "db"))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tvmflow.cli",
            "compile",
            "m.onnx",
            "--target",
            "cuda",
            "--arch",
            "sm_90",
            "--set",
            "tuning.database=db",
            "--no-verify",
            "--json",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    manifest = json.loads(done.stdout)
    assert [kernel["origin"] for kernel in manifest["kernels"]] == ["tuned"]
    assert [image["arch"] for image in manifest["cuda"]["cubins"]] == ["sm_90"]


@pytest.mark.skipif(cuda.detect_arch() is not None, reason="a GPU is here")
def test_tune_without_a_gpu_says_what_to_do(tmp_path: Path) -> None:
    save_model(tmp_path)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tvmflow.cli",
            "tune",
            "m.onnx",
            "--target",
            "cuda",
            "--arch",
            "sm_90",
            "--set",
            "tuning.database=db",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 6
    assert "no GPU is here" in done.stderr
    assert 'tuning.measure = "rpc"' in done.stderr
    assert not (tmp_path / "db").exists()
