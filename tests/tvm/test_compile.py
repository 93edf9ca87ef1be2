"""The main path end to end, through the command line: compile, verify, run, inspect; real models and bad ones."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import tvmflow
from tvmflow.errors import InputError
from tvmflow.frozen import evolve

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / ".cache" / "models" / "onnx"


def run(*arguments: str | Path, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tvmflow.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        check=False,
    )


def save_small(path: Path, nodes: list[onnx.NodeProto] | None = None, **weights: np.ndarray) -> Path:
    """x[n, 4] @ w[4, 8] + b -> y, or other nodes between x and y."""
    weights = weights or {"w": np.arange(32, dtype="f4").reshape(4, 8) / 32, "b": np.ones(8, "f4")}
    nodes = nodes or [helper.make_node("Gemm", ["x", "w", "b"], ["y"], name="layer")]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("my.company", 1)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), path)
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small.onnx and what `compile` made of it, small.tvmflow."""
    folder = tmp_path_factory.mktemp("small")
    save_small(folder / "small.onnx")
    done = run("compile", "small.onnx", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_compile_states_its_config_and_verdict(small: Path) -> None:
    manifest = json.loads((small / "small.tvmflow" / "manifest.json").read_text())
    assert manifest["signature"]["inputs"] == [{"name": "x", "dtype": "float32", "shape": ["n", 4], "range": None}]
    assert manifest["signature"]["outputs"][0]["shape"] == ["n", 8]
    assert manifest["config"]["numerics"] == {
        "fast_math": False,
        "tf32": False,
        "winograd": "auto",
        "widen_half": True,
        "fp16_accumulate": False,
        "denormals": "keep",
    }
    assert manifest["config"]["target"]["mcpu"] != "native"
    assert manifest["config"]["target"]["threads"] == len(os.sched_getaffinity(0))
    assert manifest["versions"]["apache-tvm"] == "0.27.0.post1"
    assert manifest["verdict"]["ok"] is True
    assert len(manifest["verdict"]["runs"]) == 3
    log = json.loads((small / "small.tvmflow" / "build.log.json").read_text())
    assert len(log["seconds"]) == len(manifest["stages"])
    assert all(seconds >= 0 for seconds in log["seconds"])
    assert {kernel["origin"] for kernel in manifest["kernels"]} <= {"default schedule", "unscheduled"}


@pytest.mark.parametrize("n", [1, 2, 7, 100])
def test_run_gives_the_values(small: Path, n: int) -> None:
    x = np.random.default_rng(0).standard_normal((n, 4)).astype("f4")
    np.savez(small / "x.npz", x=x)
    done = run("run", "small.tvmflow", "--inputs", "x.npz", "--outputs", "y.npz", cwd=small)
    assert done.returncode == 0, done.stderr
    with np.load(small / "y.npz") as outputs:
        want = x @ (np.arange(32, dtype="f4").reshape(4, 8) / 32) + 1
        np.testing.assert_allclose(outputs["y"], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", [0, 3])
def test_inputs_are_drawn_for_any_size(small: Path, tmp_path: Path, n: int) -> None:
    done = run("run", small / "small.tvmflow", "--seed", "0", "--dim", f"n={n}", "--outputs", "y.npz", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "y.npz") as outputs:
        assert outputs["y"].shape == (n, 8)


def test_python_interface(small: Path) -> None:
    session = tvmflow.load(small / "small.tvmflow", threads=1)
    x = np.ones((2, 4), "f4")
    assert session.threads == 1
    np.testing.assert_allclose(session.run({"x": x})["y"], x @ (np.arange(32).reshape(4, 8) / 32) + 1, rtol=1e-5)
    odd = np.ones((4, 2), "f4").T  # neither contiguous nor aligned: copied
    np.testing.assert_array_equal(session.run({"x": odd})["y"], session.run({"x": x})["y"])


def test_outputs_are_arrays_of_their_own(tmp_path: Path) -> None:
    """An input, a weight or one value given back twice: writing to one output changes nothing else."""
    weight = np.arange(4096, dtype="f4")
    shape = [1, 4096]
    nodes = [
        helper.make_node("Identity", ["x"], ["same"]),
        helper.make_node("Identity", ["w"], ["weight"]),
        helper.make_node("Relu", ["x"], ["one"]),
        helper.make_node("Identity", ["one"], ["two"]),
    ]
    outputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, size)
        for name, size in (("same", shape), ("weight", [4096]), ("one", shape), ("two", shape))
    ]
    graph = helper.make_graph(
        nodes,
        "alias",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        outputs,
        [numpy_helper.from_array(weight, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "a.onnx")
    assert run("compile", "a.onnx", cwd=tmp_path).returncode == 0
    session = tvmflow.load(tmp_path / "a.tvmflow")
    torch = pytest.importorskip("torch", reason="the extra `torch` is not installed")
    x = torch.full(shape, 2.0).numpy()  # stands where the library reads it in place
    for _ in range(2):
        got = session.run({"x": x})
        want = {"same": x.copy(), "weight": weight, "one": x.copy(), "two": x.copy()}
        for name in got:
            np.testing.assert_array_equal(got[name], want[name])
            got[name][:] = -1
        np.testing.assert_array_equal(x, np.full(shape, 2.0, "f4"))


def test_dlpack_inputs_need_no_copy_by_the_user(small: Path) -> None:
    torch = pytest.importorskip("torch", reason="the extra `torch` is not installed")
    session = tvmflow.load(small / "small.tvmflow")
    x = torch.arange(8, dtype=torch.float32).reshape(2, 4)
    np.testing.assert_array_equal(session.run({"x": x})["y"], session.run({"x": x.numpy()})["y"])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "`x`: missing"),
        ({"x": np.ones((2, 4), "f4"), "z": np.ones(1)}, "`z`: no such input"),
        ({"x": np.ones((2, 4))}, "`x`: dtype float64, expected float32"),
        ({"x": np.ones((2, 5), "f4")}, "`x`: axis 1 has size 5, expected 4"),
        ({"x": np.ones(4, "f4")}, "`x`: rank 1, expected 2"),
    ],
)
def test_wrong_inputs(small: Path, inputs: dict[str, np.ndarray], message: str) -> None:
    session = tvmflow.load(small / "small.tvmflow")
    with pytest.raises(InputError, match=message):
        session.run(inputs)


def test_run_refuses_what_is_no_npz(small: Path) -> None:
    (small / "bad.npz").write_text("no zip")
    np.savez(small / "objects.npz", x=np.array([{}], object))
    (small / "empty.npz").touch()
    np.save(small / "array.npy", np.ones(1))
    for name in ("bad.npz", "objects.npz", "empty.npz", "array.npy"):
        done = run("run", "small.tvmflow", "--inputs", name, cwd=small)
        assert (done.returncode, "not an .npz of arrays" in done.stderr) == (12, True)
    done = run("run", "small.tvmflow", "--inputs", "none.npz", cwd=small)
    assert (done.returncode, "none.npz: no such file" in done.stderr) == (12, True)


def test_outputs_only_replace_files(small: Path, tmp_path: Path) -> None:
    done = run("run", "small.tvmflow", "--seed", "0", "--outputs", tmp_path, cwd=small)
    assert (done.returncode, "is no file" in done.stderr) == (13, True)
    done = run("run", "small.tvmflow", "--seed", "0", "--outputs", "/dev/null", cwd=small)
    assert (done.returncode, Path("/dev/null").is_char_device()) == (13, True)


def test_a_full_standard_output_is_an_output_error(small: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tvmflow.cli", "inspect", "small.tvmflow"],
            cwd=small,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, "Traceback" in done.stderr) == (13, False)


def test_folders_of_the_working_directory_hide_nothing(small: Path, tmp_path: Path) -> None:
    for name in ("onnx", "tvm", "queue"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('the wrong one')")
    (tmp_path / "x.toml").write_text(f'[model]\npath = "{small / "small.onnx"}"')
    script = shutil.which("tvmflow", path=str(Path(sys.executable).parent))
    done = subprocess.run(
        [str(script), "compile", "x.toml", "-o", "a"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_names_under_verify_must_exist(small: Path, tmp_path: Path) -> None:
    for key, value in (("ranges.q", "[0, 1]"), ("dims.q", "[2]"), ("outputs.q", "{rtol = 1.0, atol = 1.0}")):
        done = run("compile", small / "small.onnx", "--set", f"verify.{key}={value}", "-o", "a", cwd=tmp_path)
        assert (done.returncode, "the model has no `q`" in done.stderr) == (3, True), done.stderr


def test_verify_again_and_after_the_model_changed(small: Path, tmp_path: Path) -> None:
    done = run("verify", "small.tvmflow", "--set", "verify.seeds=[5]", "--json", cwd=small)
    assert (done.returncode, json.loads(done.stdout)["ok"]) == (0, True)
    other = save_small(tmp_path / "other.onnx", w=np.zeros((4, 8), "f4"), b=np.ones(8, "f4"))
    done = run("verify", "small.tvmflow", "--model", other, cwd=small)
    assert (done.returncode, "not the file that small was compiled from" in done.stderr) == (9, True)


def test_a_changed_byte_of_external_data_is_another_model(tmp_path: Path) -> None:
    onnx.save(
        onnx.load(save_small(tmp_path / "small.onnx")),
        tmp_path / "small.onnx",
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    assert run("compile", "small.onnx", cwd=tmp_path).returncode == 0
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("small.onnx", "weights.bin"):
        (tmp_path / name).rename(moved / name)
    command = ("verify", "small.tvmflow", "--model", "moved/small.onnx")
    done = run(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    data = bytearray((moved / "weights.bin").read_bytes())
    data[0] ^= 1
    (moved / "weights.bin").write_bytes(data)
    done = run(*command, cwd=tmp_path)
    assert done.returncode == 9
    assert "moved/weights.bin: not the file that small was compiled from" in done.stderr
    (moved / "weights.bin").unlink()
    done = run(*command, cwd=tmp_path)
    assert (done.returncode, "weights.bin: not the file that" in done.stderr) == (9, True)


def test_a_wrong_value_is_found_and_named(small: Path, tmp_path: Path) -> None:
    """An artifact whose weights and digests were both changed: only running it can tell."""
    from tvmflow import artifact

    broken = tmp_path / "broken.tvmflow"
    shutil.copytree(small / "small.tvmflow", broken)
    manifest = artifact.read_manifest(broken)
    weights = broken / artifact.CONSTANTS
    data = np.fromfile(weights, "f4")
    data[0] += 0.5
    data.tofile(weights)
    files = {**manifest.files, artifact.CONSTANTS: artifact.file_entry(weights)}
    artifact.write_manifest(broken, evolve(manifest, files=files))
    done = run("verify", broken, cwd=tmp_path)
    assert done.returncode == 10
    assert "output `y`" in done.stderr


def test_a_library_that_fails_verification_is_not_kept(tmp_path: Path) -> None:
    save_small(tmp_path / "t.onnx", [helper.make_node("Tanh", ["x"], ["y"])], w=np.zeros(1, "f4"))
    exact = ("--set", "verify.rtol=0", "--set", "verify.atol=0", "--dim", "n=1000")
    done = run("compile", "t.onnx", *exact, "-o", "a", cwd=tmp_path)
    assert done.returncode == 10, "two implementations of tanh agree in every bit"
    assert "output `y`" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["t.onnx"]


def test_damage_is_refused_before_loading(small: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.tvmflow"
    shutil.copytree(small / "small.tvmflow", broken)
    library = broken / "library.so"
    library.write_bytes(library.read_bytes()[:-1] + b"x")
    done = run("run", broken, "--seed", "0", cwd=tmp_path)
    assert (done.returncode, "changed or damaged" in done.stderr) == (9, True)


def test_zip_and_inspect(small: Path, tmp_path: Path) -> None:
    done = run("compile", small / "small.onnx", "--zip", "--dim", "n=2", "--no-verify", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["small.tvmflow.zip"]
    shown = json.loads(run("inspect", "small.tvmflow.zip", "--json", cwd=tmp_path).stdout)
    assert shown["verdict"] is None
    assert shown["signature"]["inputs"][0]["shape"] == [2, 4]
    assert run("run", "small.tvmflow.zip", "--seed", "1", cwd=tmp_path).returncode == 0
    assert "float32  n x 4" in run("inspect", small / "small.onnx", cwd=tmp_path).stdout


def test_building_twice_gives_the_same_bytes(small: Path, tmp_path: Path) -> None:
    again = run(
        "compile",
        small / "small.onnx",
        "-o",
        tmp_path / "again",
        "--no-verify",
        cwd=tmp_path,
        env={"PYTHONHASHSEED": "7", "TVM_NUM_THREADS": "1"},
    )
    assert again.returncode == 0, again.stderr
    for name in ("library.so", "constants.bin"):
        assert (tmp_path / "again" / name).read_bytes() == (small / "small.tvmflow" / name).read_bytes()


def test_dump_ir_and_passes(small: Path, tmp_path: Path) -> None:
    done = run("compile", small / "small.onnx", "--dump-ir", "ir", "--no-verify", "-o", "a", "--json", cwd=tmp_path)
    hashes = {s["name"]: s["ir_hash"] for s in json.loads(done.stdout)["stages"] if s["ir_hash"]}
    dumped = sorted(p.name for p in (tmp_path / "ir").iterdir())
    assert dumped[0] == "01_DropEmpty.py"
    assert hashes["graph: VMShapeLower"] in (tmp_path / "ir" / f"{len(dumped) - 1}_VMShapeLower.py").read_text()
    names = [
        name
        for steps in json.loads(run("passes", small / "small.onnx", "--json", cwd=tmp_path).stdout).values()
        for name, _ in steps
    ]
    assert names.index("FoldBatchnormToConv2D") < names.index("DecomposeOpsForInference") < names.index("FuseOps")


def test_layout_budget(tmp_path: Path) -> None:
    save_small(tmp_path / "t.onnx", [helper.make_node("Transpose", ["x"], ["y"], perm=[1, 0])], w=np.zeros(1, "f4"))
    done = run("compile", "t.onnx", "--set", "graph.max_layout_transforms=0", "-o", "a", cwd=tmp_path)
    assert done.returncode == 7
    assert "input -> permute_dims -> output" in done.stderr


# --- bad models: one clear line, the exit code of its kind, nothing left behind ---------------------------------------


def cyclic(path: Path) -> None:
    save_small(
        path,
        [
            helper.make_node("Add", ["x", "t"], ["u"], name="first"),
            helper.make_node("Relu", ["u"], ["t"], name="second"),
            helper.make_node("Relu", ["t"], ["y"]),
        ],
        w=np.zeros(1, "f4"),
    )


def truncated(path: Path) -> None:
    save_small(path)
    path.write_bytes(path.read_bytes()[:-20])


def without_external_data(path: Path) -> None:
    save_small(path, w=np.ones((4, 3), "f4"), b=np.ones(3, "f4"))
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    (path.parent / "weights.bin").unlink()


def enormous(path: Path) -> None:
    save_small(
        path,
        [
            helper.make_node("ConstantOfShape", ["s"], ["c"]),
            helper.make_node("ReduceSum", ["c"], ["r"]),
            helper.make_node("Add", ["x", "r"], ["y"]),
        ],
        s=np.array([10**6, 10**6], "i8"),
    )


def foreign(path: Path) -> None:
    save_small(path, [helper.make_node("Relu", ["x"], ["y"], domain="my.company", name="theirs")], w=np.zeros(1, "f4"))


@pytest.mark.parametrize(
    ("make", "code", "message"),
    [
        (lambda path: path.write_bytes(b""), 4, "bad.onnx"),
        (lambda path: path.write_bytes(b"\x7fELF" + bytes(999)), 4, "bad.onnx"),
        (lambda path: path.mkdir(), 3, "directory"),
        (truncated, 4, "bad.onnx"),
        (without_external_data, 4, "weights.bin"),
        (cyclic, 4, "cycle"),
        (enormous, 4, "bytes"),
        (foreign, 5, "my.company"),
    ],
    ids=["empty", "not protobuf", "directory", "truncated", "no external data", "cyclic", "enormous", "foreign domain"],
)
def test_bad_models(make: object, code: int, message: str, tmp_path: Path) -> None:
    make(tmp_path / "bad.onnx")  # type: ignore[operator] # a function of the path
    before = sorted(tmp_path.iterdir())
    done = run("compile", "bad.onnx", cwd=tmp_path)
    assert done.returncode in (code, 5 if make is enormous else code)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--set", "target.mcpu=pentium9"], 6, "LLVM knows no CPU `pentium9`"),
        (
            ["--set", "target.mtriple=foo-linux-gnu", "--set", "target.mcpu=generic", "--set", "target.threads=2"],
            6,
            "LLVM has no architecture `foo`",
        ),
        (["--shape", "q=1x4"], 3, "q"),
        (["--dim", "q=1"], 3, "no dimension 'q'"),
        (["--shape", "x=1x5"], 3, "x"),
    ],
)
def test_bad_options(small: Path, options: list[str], code: int, message: str, tmp_path: Path) -> None:
    done = run("compile", small / "small.onnx", *options, cwd=tmp_path)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr
    assert not list(tmp_path.iterdir())


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 100 KiB: the library fits, the weights do not."""
    place = tmp_path / "small_disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", place]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root and the right to mount")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_disk_leaves_nothing_behind(small: Path, full_disk: Path) -> None:
    rng = np.random.default_rng(0)
    model = save_small(small / "large.onnx", w=rng.standard_normal((4, 50_000)).astype("f4"), b=np.ones(50_000, "f4"))
    done = run("compile", model, "-o", full_disk / "a", cwd=small)
    assert done.returncode == 13, done.stderr
    assert "o space left" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(full_disk.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_leaves_nothing_behind(number: signal.Signals, small: Path, tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "tvmflow.cli", "compile", str(small / "small.onnx"), "-o", "a"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not list(tmp_path.glob(".a.*.tmp")):
        time.sleep(0.05)
    child.send_signal(number)
    _, stderr = child.communicate(timeout=60)
    assert (child.returncode, "nothing else was left behind" in stderr) == (130, True)
    assert not list(tmp_path.iterdir())


# --- real models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["silero_ifless", "magika", "ppocr_cls", "minilm_l6", "effnet_lite0", "voicefilter_int8"]
)
def test_real_models(name: str, tmp_path: Path) -> None:
    if not (MODELS / f"{name}.onnx").exists():
        pytest.skip(f"{name}.onnx is not fetched: python scripts/get_models.py .cache/models {name}")
    done = run("compile", ROOT / "configs" / f"{name}.toml", "--json", "-o", "a", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"]["ok"]
    assert run("bench", "a", "--seconds", "0.5", cwd=tmp_path).returncode == 0
