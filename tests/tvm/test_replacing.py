"""Artifacts that are replaced: each load gives one version, whole; writers that die leave the old or the new one."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from replacing import X, values

import tvmflow
from tvmflow import artifact
from tvmflow.errors import ArtifactError
from tvmflow.frozen import evolve
from tvmflow.manifest import Constant, Signature, TensorSpec

SCRIPT = Path(__file__).with_name("replacing.py")
ROOT = SCRIPT.parents[2]
FORKED = """
import os, sys
sys.modules["torch"] = None
import numpy as np, tvmflow
from tvmflow.errors import SetupError

def told(call):
    try:
        call()
    except SetupError as exc:
        return "survive a fork" in exc.message and "spawn" in exc.hint

session, x = tvmflow.load(sys.argv[1]), np.ones((4, 8), "f4")
session.run({"x": x})
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
sys.exit(sum(map(told, (lambda: session.run({"x": x}), lambda: tvmflow.load(sys.argv[2])))))
"""
X_SPEC = TensorSpec(name="x", dtype="float32", shape=(4, 8))
UNVERIFIED = [{"verify": {"enabled": False}}]
W = np.random.default_rng(1).standard_normal((8, 8)).astype("f4")


def compiled(folder: Path, operator: str, w: np.ndarray, out: str) -> Path:
    """operator(x[4, 8] @ w) -> y."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node(operator, ["h"], ["y"])]
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 8]) for name in "xy"]
    graph = helper.make_graph(nodes, "m", tensors[:1], tensors[1:], [numpy_helper.from_array(w, "w")])
    file = folder / f"{Path(out).stem}.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), file)
    return tvmflow.compile(file, out=folder / out, overrides=UNVERIFIED)


def rewritten(folder: Path, change: Mapping[str, object] = MappingProxyType({})) -> None:
    """Makes the digests of an artifact anew, after a change of its files or, here, its manifest."""
    manifest = artifact.read(folder)
    files = {name: artifact.file_entry(folder / name) for name in manifest.files}
    artifact.write_manifest(folder, evolve(manifest, files=files, **change))


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of other code, and of the first one's code with other weights."""
    folder = tmp_path_factory.mktemp("versions")
    first, second = compiled(folder, "Relu", W, "first.tvmflow"), compiled(folder, "Neg", W, "second.tvmflow")
    third = folder / "third.tvmflow"
    shutil.copytree(first, third)
    (third / artifact.CONSTANTS).write_bytes((2 * np.fromfile(first / artifact.CONSTANTS, "f4")).tobytes())
    rewritten(third)
    return [first, second, third]


def by_exchange(version: Path, out: Path) -> None:
    with artifact.staging(out, False) as folder:
        shutil.copytree(version, folder, dirs_exist_ok=True)


def by_rename(version: Path, out: Path) -> None:
    shutil.rmtree(out)
    shutil.copytree(version, out)


def in_place(version: Path, out: Path) -> None:
    for file in version.iterdir():
        (out / file.name).write_bytes(file.read_bytes())


@pytest.mark.parametrize("replace", [by_exchange, by_rename, in_place])
def test_a_load_gives_what_is_there_now(
    replace: object, versions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = X.astype("f8") @ W
    want = [np.maximum(hidden, 0), -hidden, np.maximum(2 * hidden, 0)]
    shutil.copytree(versions[0], tmp_path / "m.tvmflow")
    monkeypatch.chdir(tmp_path)
    sessions = []
    for index in (0, 1, 2, 0):
        replace(versions[index], tmp_path / "m.tvmflow")  # type: ignore[operator] # one of the functions above
        sessions.append(tvmflow.load("m.tvmflow"))
        np.testing.assert_allclose(sessions[-1].run({"x": X})["y"], want[index], rtol=1e-5, atol=1e-5)
    if replace is not in_place:  # which writes into the weights that are in use
        for index, session in zip((0, 1, 2, 0), sessions, strict=True):
            np.testing.assert_allclose(session.run({"x": X})["y"], want[index], rtol=1e-5, atol=1e-5)
    assert not [name for name in os.listdir(tmp_path) if name != "m.tvmflow"]


def test_a_relative_path_is_taken_from_where_the_process_is_now(
    versions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version in zip("ab", versions, strict=False):
        shutil.copytree(version, tmp_path / name / "m.tvmflow")
        monkeypatch.chdir(tmp_path / name)
        assert values(Path("m.tvmflow")) == values(version)


def test_equal_libraries_are_one_and_descriptors_do_not_add_up(versions: list[Path]) -> None:
    sessions = [tvmflow.load(versions[index]) for index in (0, 2, 0)]
    assert sessions[0]._library is sessions[1]._library is sessions[2]._library
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        tvmflow.load(versions[1])
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_where_files_in_memory_cannot_be_had(versions: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from tvmflow.runtime import content

    def refused(*_: object) -> int:
        raise PermissionError

    want = [values(version) for version in versions[:2]]
    monkeypatch.setattr(content, "_loaded", {})
    monkeypatch.setattr(os, "memfd_create", refused)
    assert [values(version) for version in versions[:2]] == want


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[: len(data) // 2], "is not a whole library"),
        (lambda data: data[:-1], "is not a whole library"),
        (lambda data: data[:30], "is not a whole library"),
        (lambda data: b"", "is not a whole library"),
        (lambda data: b"\x7fELF" * (len(data) // 4), "is not a whole library"),
        (lambda data: Path(np._core._multiarray_umath.__file__).read_bytes(), "library.so"),
    ],
    ids=["half", "one byte less", "header", "nothing", "noise", "another library"],
)
def test_a_library_that_is_none(
    change: Callable[[bytes], bytes], message: str, versions: list[Path], tmp_path: Path
) -> None:
    """Its hash says that it is as it should be."""
    copy = Path(shutil.copytree(versions[0], tmp_path / "m"))
    (copy / artifact.LIBRARY).write_bytes(change((copy / artifact.LIBRARY).read_bytes()))
    rewritten(copy)
    with pytest.raises(ArtifactError, match=message):
        tvmflow.load(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"constants": (Constant(offset=0, dtype="int32", shape=(8, 8)),)}, "its library failed"),
        ({"constants": (Constant(offset=0, dtype="float32", shape=(4, 16)),)}, "its library failed"),
        ({"constants": ()}, "its library failed"),
        ({"signature": Signature(inputs=(X_SPEC,), outputs=())}, "signature.outputs: the library gives others"),
        (
            {"signature": Signature(inputs=(X_SPEC,), outputs=(evolve(X_SPEC, dtype="bfloat16"),))},
            "gives o",
        ),
        ({"signature": Signature(inputs=(X_SPEC,), outputs=(evolve(X_SPEC, shape=(8, 4)),))}, "gives o"),
        (
            {"signature": Signature(inputs=(X_SPEC, evolve(X_SPEC, name="z")), outputs=(X_SPEC,))},
            "failed",
        ),
    ],
)
def test_a_manifest_that_does_not_fit_its_library(
    change: dict[str, object], message: str, versions: list[Path], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(versions[0], tmp_path / "m"))
    rewritten(copy, change)
    session = tvmflow.load(copy)
    with pytest.raises(ArtifactError, match=message):
        session.run({spec.name: X for spec in session.signature.inputs})


def started(kind: str, out: Path, seconds: float, versions: list[Path]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, SCRIPT, kind, out, str(seconds), *versions],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("name", ["m.tvmflow", "m.zip"])
def test_no_load_fails_while_it_is_replaced(name: str, versions: list[Path], tmp_path: Path) -> None:
    out = tmp_path / name
    with artifact.staging(out, out.suffix == ".zip") as folder:
        shutil.copytree(versions[0], folder, dirs_exist_ok=True)
    writers = [started("write", out, 2, versions) for _ in range(2)]
    readers = [started("read", out, 2, versions) for _ in range(2)]
    for process in [*readers, *writers]:
        report, errors = process.communicate()
        assert process.returncode == 0, errors
        assert report.split()[1:] in ([], ["0", "0"]), errors
        assert int(report.split()[0]) > 0
    with artifact.staging(out, out.suffix == ".zip") as folder:
        shutil.copytree(versions[0], folder, dirs_exist_ok=True)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_writer_that_is_killed_leaves_a_whole_version(versions: list[Path], tmp_path: Path) -> None:
    out, known, rng = tmp_path / "m.tvmflow", {values(version) for version in versions}, random.Random(0)
    for _ in range(3):
        writers = [started("write", out, 60, versions) for _ in range(2)]
        while not out.exists():
            time.sleep(0.01)
        time.sleep(0.5 + 0.3 * rng.random())
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            with writer:
                pass
        assert values(out) in known
    by_exchange(versions[0], out)
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_a_killed_compile_leaves_the_old_one_and_the_next_cleans_up(versions: list[Path], tmp_path: Path) -> None:
    shutil.copytree(versions[0], tmp_path / "m.tvmflow")
    command = [
        sys.executable,
        "-m",
        "tvmflow.cli",
        "compile",
        versions[1].with_suffix(".onnx"),
        "--no-verify",
        "-o",
        "m.tvmflow",
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    compiling = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, env=env)
    while len(os.listdir(tmp_path)) < 2:
        time.sleep(0.01)
    compiling.kill()
    with compiling:
        pass
    assert values(tmp_path / "m.tvmflow") == values(versions[0])
    by_exchange(versions[1], tmp_path / "m.tvmflow")
    assert os.listdir(tmp_path) == ["m.tvmflow"]


def test_two_builds_of_a_config_differ_only_in_their_log(versions: list[Path], tmp_path: Path) -> None:
    again = tvmflow.compile(
        versions[0].with_suffix(".onnx"), out=versions[0].with_name("again.tvmflow"), overrides=UNVERIFIED
    )
    names = [{path.name for path in one.iterdir()} for one in (versions[0], again)]
    assert names == [{artifact.LIBRARY, artifact.CONSTANTS, artifact.MANIFEST, artifact.LOG}] * 2
    for name in names[0] - {artifact.LOG}:
        assert (versions[0] / name).read_bytes() == (again / name).read_bytes()
    assert str(versions[0].parent) not in (again / artifact.MANIFEST).read_text()
    for out, version in zip("ab", (versions[0], again), strict=True):
        with artifact.staging(tmp_path / f"{out}.zip", True) as folder:
            shutil.copytree(version, folder, dirs_exist_ok=True)
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()


def test_a_forked_child_gets_an_error(versions: list[Path]) -> None:
    # A fork may catch a lock of the interpreter or the C library held, and then the child hangs before it gets to us.
    for attempt in range(3):
        try:
            done = subprocess.run([sys.executable, "-c", FORKED, *versions], timeout=60, check=False)
            break
        except subprocess.TimeoutExpired:
            if attempt == 2:
                raise
    assert done.returncode == 2


def test_cpp_loads_what_is_there_now(versions: list[Path], tmp_path: Path) -> None:
    compiler = shutil.which("g++") or pytest.skip("no g++ is here")
    import tvm_ffi

    packages = Path(tvm_ffi.__file__).parents[1]
    folders = [packages / "tvm" / "lib", packages / "tvm_ffi" / "lib"]
    subprocess.run(
        [
            compiler,
            "-std=c++17",
            "-O1",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-isystem",
            packages / "tvm_ffi" / "include",
            "-I",
            ROOT / "examples" / "cpp",
            SCRIPT.with_name("versions.cc"),
            "-o",
            tmp_path / "versions",
            *(f"-L{folder}" for folder in folders),
            *(f"-Wl,-rpath,{folder}" for folder in folders),
            "-Wl,--no-as-needed",
            "-ltvm_runtime",
            "-ltvm_runtime_extra",
            "-ltvm_ffi",
        ],
        check=True,
    )
    want = [tvmflow.load(version).run({"x": np.ones((4, 8), "f4")})["y"][0, 0] for version in versions]
    for index, replace in ((1, by_rename), (2, by_exchange)):
        out = tmp_path / f"{index}.tvmflow"
        shutil.copytree(versions[0], out)
        process = subprocess.Popen(
            [tmp_path / "versions", out], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout
        assert process.stdout.readline() == "loaded\n"
        replace(versions[index], out)
        report, _ = process.communicate("go on\n")
        got = [np.float32(word) for word in report.split()[1:]]
        np.testing.assert_array_equal(got, [want[0], want[index]])
