"""Cross builds for 64-bit ARM: what comes out, that it is refused here, and its values under QEMU."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from onnx import TensorProto, helper, numpy_helper

import tvmflow
from tvmflow import artifact
from tvmflow.errors import ArtifactError, SetupError
from tvmflow.frozen import evolve

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "run_aarch64.py"
SILERO = ROOT / ".cache" / "models" / "onnx" / "silero_ifless.onnx"
AARCH64 = ("--set", "target.mtriple=aarch64-linux-gnu", "--set", "target.mcpu=generic", "--set", "target.threads=2")

pytestmark = pytest.mark.skipif(platform.machine() == "aarch64", reason="for aarch64 this machine builds natively")
needs_linker = pytest.mark.skipif(
    shutil.which("aarch64-linux-gnu-gcc") is None, reason="no cross linker: apt-get install gcc-aarch64-linux-gnu"
)


def run(*command: str | Path, cwd: Path, path: str | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **({} if path is None else {"PATH": path})}
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, cwd=cwd, env=env)


def compile_for_aarch64(model: Path, out: Path, *options: str) -> None:
    done = run("-m", "tvmflow.cli", "compile", model, *AARCH64, *options, "-o", out, cwd=out.parent)
    assert done.returncode == 0, done.stderr


def run_under_qemu(library: Path, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    folder = library.parent
    np.savez(folder / "x.npz", **inputs)
    done = run(SCRIPT, library, "--inputs", "x.npz", "--outputs", "y.npz", cwd=folder)
    if done.returncode == SetupError.exit_code:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    with np.load(folder / "y.npz") as outputs:
        return dict(outputs)


def assert_like_onnxruntime(model: Path, inputs: dict[str, np.ndarray], got: dict[str, np.ndarray]) -> None:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    assert list(got) == names
    for name, want in zip(names, session.run(None, inputs), strict=True):
        assert got[name].dtype == want.dtype
        np.testing.assert_allclose(got[name], want, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """x[n, 3, 16, 16] -> convolution, erf, mean, product, softmax and argmax: floats, integers, a function of libm."""
    rng = np.random.default_rng(0)
    shapes = {"k": (8, 3, 3, 3), "kb": (8,), "w": (8, 10), "b": (10,)}
    nodes = [
        helper.make_node("Conv", ["x", "k", "kb"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Erf", ["c"], ["e"]),
        helper.make_node("GlobalAveragePool", ["e"], ["g"]),
        helper.make_node("Flatten", ["g"], ["f"]),
        helper.make_node("Gemm", ["f", "w", "b"], ["l"]),
        helper.make_node("Softmax", ["l"], ["p"], axis=1),
        helper.make_node("ArgMax", ["p"], ["i"], axis=1),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 16, 16])],
        [
            helper.make_tensor_value_info("p", TensorProto.FLOAT, None),
            helper.make_tensor_value_info("i", TensorProto.INT64, None),
        ],
        [numpy_helper.from_array(rng.standard_normal(shape, "f4"), name) for name, shape in shapes.items()],
    )
    path = tmp_path_factory.mktemp("cross") / "small.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.fixture(scope="module")
def library(model: Path) -> Path:
    out = model.parent / "small.tvmflow"
    compile_for_aarch64(model, out)
    return out


@needs_linker
def test_the_library_is_aarch64_and_names_what_it_needs(library: Path) -> None:
    with (library / artifact.LIBRARY).open("rb") as stream:
        elf = ELFFile(stream)
        dynamic = elf.get_section_by_name(".dynamic")
        assert isinstance(dynamic, DynamicSection)
        needed = [tag.needed for tag in dynamic.iter_tags("DT_NEEDED")]
        assert elf["e_machine"] == "EM_AARCH64"
    assert "libm.so.6" in needed


@needs_linker
def test_the_manifest_says_that_only_a_twin_was_verified(library: Path) -> None:
    manifest = json.loads((library / artifact.MANIFEST).read_text())
    assert (manifest["target"]["machine"], manifest["target"]["mcpu"]) == ("aarch64", "generic")
    assert manifest["target"]["features"] == ["neon"]
    assert manifest["verdict"]["ok"] is True
    assert any("the target's own kernels were not run" in note for note in manifest["verdict"]["notes"])


@needs_linker
def test_it_is_refused_here(library: Path) -> None:
    with pytest.raises(ArtifactError, match=f"built for aarch64, this machine is {platform.machine()}"):
        tvmflow.load(library)
    for command in (("verify", library, "--attribute"), ("bisect", library)):
        done = run("-m", "tvmflow.cli", *command, cwd=library.parent)
        assert done.returncode == 9
        assert "cannot be run here" in done.stderr
        assert f"built for aarch64, this machine is {platform.machine()}" in done.stderr


@needs_linker
def test_values_under_qemu(library: Path, model: Path) -> None:
    inputs = {"x": np.random.default_rng(0).standard_normal((5, 3, 16, 16), "f4")}
    assert_like_onnxruntime(model, inputs, run_under_qemu(library, inputs))


@needs_linker
@pytest.mark.skipif(not SILERO.is_file(), reason="scripts/get_models.py silero_ifless fetches the model")
def test_a_real_model_under_qemu(tmp_path: Path) -> None:
    compile_for_aarch64(ROOT / "configs" / "silero_ifless.toml", tmp_path / "silero.tvmflow", "--no-verify")
    rng = np.random.default_rng(0)
    audio, state = rng.standard_normal((1, 576), "f4") / 10, rng.standard_normal((2, 1, 128), "f4") / 10
    inputs = {"input": audio, "sr": np.array(16000), "state": state}
    assert_like_onnxruntime(SILERO, inputs, run_under_qemu(tmp_path / "silero.tvmflow", inputs))


@needs_linker
def test_the_script_refuses_another_machines_artifact(library: Path, tmp_path: Path) -> None:
    """Before anything is downloaded or compiled."""
    other = tmp_path / "other.tvmflow"
    shutil.copytree(library, other)
    manifest = artifact.read_manifest(other)
    target = evolve(manifest.target, machine="x86_64")
    artifact.write_manifest(other, evolve(manifest, target=target))
    done = run(SCRIPT, other, "--inputs", "x", "--outputs", "y", "--cache", "c", cwd=tmp_path)
    assert (done.returncode, [p.name for p in tmp_path.iterdir()]) == (ArtifactError.exit_code, ["other.tvmflow"])
    assert "built for llvm on x86_64, not for an aarch64 CPU" in done.stderr


def test_a_missing_cross_linker_is_named_with_its_package(model: Path, tmp_path: Path) -> None:
    done = run("-m", "tvmflow.cli", "compile", model, *AARCH64, "--no-verify", "-o", "a", cwd=tmp_path, path="")
    assert done.returncode == 8
    assert "aarch64-linux-gnu-gcc, which is not installed" in done.stderr
    assert "apt-get install gcc-aarch64-linux-gnu" in done.stderr


@needs_linker
def test_missing_tools_of_the_script_are_named_with_their_packages(library: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.zeros((1, 3, 16, 16), "f4"))
    done = run(SCRIPT, library, "--inputs", "x.npz", "--outputs", "y.npz", cwd=tmp_path, path="")
    assert done.returncode == SetupError.exit_code
    assert "not installed: aarch64-linux-gnu-g++, qemu-aarch64" in done.stderr
    assert "apt-get install g++-aarch64-linux-gnu qemu-user" in done.stderr
