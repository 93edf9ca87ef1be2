"""Libraries where they are deployed: without the compiler, from threads, over DLPack, from C++; their memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import tvmflow
from tvmflow import runtime
from tvmflow.errors import InputError, SetupError
from tvmflow.runtime import vm

ROOT = Path(__file__).resolve().parents[2]
ROWS, WIDTH = 16, 256
RNG = np.random.default_rng(0)
FIRST, SECOND = (RNG.standard_normal((WIDTH, WIDTH)).astype("f4") / 16 for _ in range(2))
COUNTED = f"""
import ctypes, sys
import numpy as np
import tvmflow

counter = ctypes.CDLL(None).large_allocations
session = tvmflow.load(sys.argv[1], threads=2)
for x in (np.ones(({ROWS}, {WIDTH}), "f4"), np.ones(({WIDTH}, {ROWS}), "f4").T):  # read in place or not, and strided
    for _ in range(10):
        session.run({{"x": x}})
    before = counter()
    for _ in range(100):
        y = session.run({{"x": x}})["y"]
    warm = counter() - before
    kept = [session.run({{"x": x}})["y"] for _ in range(20)]
    print(y.nbytes, warm, counter() - before - warm)
"""
ALONE = """
import sys
import numpy as np
import tvmflow

session = tvmflow.load(sys.argv[1])
np.save(sys.argv[2], session.run({"x": np.load(sys.argv[3])})["y"])
maps = open("/proc/self/maps").read()
print(sorted({"tvm", "onnx", "onnxruntime", "torch", "click", "pandas"} & set(sys.modules)), "libtvm_compiler" in maps)
"""


def want(x: np.ndarray) -> np.ndarray:
    hidden = np.maximum(x.astype("f8") @ FIRST, 0)
    return hidden @ SECOND


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """max(x[16, 256] @ a, 0) @ b -> y."""
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "b"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "layers",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [ROWS, WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [ROWS, WIDTH])],
        [numpy_helper.from_array(FIRST, "a"), numpy_helper.from_array(SECOND, "b")],
    )
    folder = tmp_path_factory.mktemp("layers")
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "m.onnx")
    return tvmflow.compile(folder / "m.onnx", out=folder / "layers.tvmflow")


def drawn(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((ROWS, WIDTH)).astype("f4")


def test_memory_is_planned_and_no_call_asks_for_more(layers: Path, tmp_path: Path) -> None:
    """After warm-up no buffer is allocated, but for outputs that the caller keeps."""
    compiler = shutil.which("cc") or pytest.skip("no C compiler is here")
    shim = tmp_path / "allocations.so"
    source = Path(__file__).with_name("allocations.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", source, "-o", shim], check=True)
    done = subprocess.run(
        [sys.executable, "-c", COUNTED, layers],
        env={**os.environ, "LD_PRELOAD": str(shim)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        size, warm, kept = map(int, line.split())
        assert (size, warm) == (ROWS * WIDTH * 4, 0)
        assert 16 <= kept <= 22  # one for each kept output beyond what the pool holds; lists may grow
    assert runtime.load(layers).manifest.planned_bytes == 2 * ROWS * WIDTH * 4


def test_runs_without_the_compiler_and_without_tvm(layers: Path, tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    subprocess.run([sys.executable, ROOT / "scripts" / "make_runtime.py", parts], check=True, stdout=subprocess.PIPE)
    assert not list(parts.rglob("libtvm_compiler*"))
    np.save(tmp_path / "x.npy", drawn(0))
    python = Path(sys.executable).resolve()  # outside the virtual environment, and without site-packages by -S
    done = subprocess.run(
        [python, "-S", "-c", ALONE, layers, tmp_path / "y.npy", tmp_path / "x.npy"],
        env={"PYTHONPATH": str(parts)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[] False\n"
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), tvmflow.load(layers).run({"x": drawn(0)})["y"])


def test_a_run_time_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    vm._load.cache_clear()
    with pytest.raises(SetupError, match=r"libtvm_runtime\.so of TVM's run time is not here"):
        vm.load_parts(on_gpu=False)


def test_threads_share_a_session(layers: Path) -> None:
    session = tvmflow.load(layers, threads=1)
    inputs = [drawn(seed) for seed in range(8)]
    together = threading.Barrier(8)

    def calls(x: np.ndarray) -> int:
        together.wait()
        expected = want(x)
        return sum(np.allclose(session.run({"x": x})["y"], expected, rtol=1e-4, atol=1e-4) for _ in range(100))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(calls, inputs)) == [100] * 8
    assert 1 <= len(session._idle) <= 8


def test_threads_that_come_and_go_leave_nothing(layers: Path) -> None:
    """TVM keeps a thread's workers when it ends: from some number on, lasting threads make the calls."""
    session = tvmflow.load(layers, threads=2)
    x, got = drawn(1), []

    def come_and_go() -> None:
        thread = threading.Thread(target=lambda: got.append(session.run({"x": x})["y"]))
        thread.start()
        thread.join()

    for _ in range(vm.MOST_POOLS + 8):
        come_and_go()
    settled = len(list(Path("/proc/self/task").iterdir()))
    for _ in range(40):
        come_and_go()
    assert (
        len(list(Path("/proc/self/task").iterdir())) < settled + 40
    )  # each of them would have left one, a lasting one may come
    for y in got:
        np.testing.assert_array_equal(y, got[0])
    np.testing.assert_allclose(got[0], want(x), rtol=1e-4, atol=1e-4)


def test_an_error_leaves_the_session_usable(layers: Path) -> None:
    session = tvmflow.load(layers)
    for _ in range(3):
        with pytest.raises(InputError, match="`x`: dtype float64, expected float32"):
            session.run({"x": drawn(0).astype("f8")})
        np.testing.assert_allclose(session.run({"x": drawn(0)})["y"], want(drawn(0)), rtol=1e-4, atol=1e-4)


def test_torch_in_and_out_without_a_copy(layers: Path) -> None:
    torch = pytest.importorskip("torch", reason="the extra `torch` is not installed")
    session = tvmflow.load(layers)
    x = torch.from_numpy(drawn(2)).clone()  # PyTorch's memory is aligned
    y = session.run({"x": x}, into=torch.from_dlpack)["y"]
    assert isinstance(y, torch.Tensor)
    np.testing.assert_allclose(y.numpy(), want(x.numpy()), rtol=1e-4, atol=1e-4)
    places = []

    def around(_function: object, _name: str, _before: bool, _result: object, *args: object) -> int:
        places.extend(arg.data_ptr() for arg in args if hasattr(arg, "data_ptr"))
        return 0

    result = session.watch_kernels({"x": x}, around)[0]
    assert {x.data_ptr(), result.ctypes.data} <= set(places)
    strided = torch.from_numpy(drawn(2).T.copy()).T
    np.testing.assert_array_equal(session.run({"x": strided})["y"], y.numpy())


@pytest.mark.parametrize("make", ["meta", "text"])
def test_what_is_no_array(make: str, layers: Path) -> None:
    torch = pytest.importorskip("torch", reason="the extra `torch` is not installed")
    value = torch.empty((ROWS, WIDTH), device="meta") if make == "meta" else "x"
    with pytest.raises(InputError, match=r"`x`: (not an array|dtype <U1)"):
        tvmflow.load(layers).run({"x": value})


def test_cpp_example(layers: Path, tmp_path: Path) -> None:
    shutil.which("g++") or pytest.skip("no g++ is here")
    shutil.which("make") or pytest.skip("no make is here")
    settings = [f"TVM_PYTHON={sys.executable}", f"OUT={tmp_path}"]
    subprocess.run(["make", "-C", ROOT / "examples" / "cpp", *settings], check=True, stdout=subprocess.PIPE)
    drawn(3).tofile(tmp_path / "x.bin")
    program = [tmp_path / "run_artifact", layers]
    done = subprocess.run(
        [*program, "--runs", "3", f"x={tmp_path / 'x.bin'}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    head, _, values = done.stdout.strip().partition("] ")
    assert head == f"y float32 [{ROWS}, {WIDTH}"
    got = np.array(values.split(), "f4").reshape(ROWS, WIDTH)
    np.testing.assert_array_equal(got, tvmflow.load(layers).run({"x": drawn(3)})["y"])
    wrong = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stderr) == (1, "error: x: missing; give x=FILE\n")
    needed = subprocess.run(["ldd", program[0]], capture_output=True, text=True, check=True).stdout
    assert "libtvm_runtime.so" in needed
    assert "libtvm_compiler" not in needed
