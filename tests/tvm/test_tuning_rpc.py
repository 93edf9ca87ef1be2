"""Tuning through TVM's RPC: a tracker and a server on loopback, candidates that bring the server's session down."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tuning_candidates import aborting, copying, job, sleeping
from tvm.script import tirx as T  # noqa: N812 # TVMScript's own name

from tvmflow.database import Store
from tvmflow.errors import SetupError, TargetError
from tvmflow.tuning import rpc
from tvmflow.tuning.rpc import Libraries, RpcMeasurer, Tracker
from tvmflow.tuning.worker import Job

LIBRARIES = Libraries('{"kind": "llvm", "num-cores": 2}', 2, {})


@T.prim_func(s_tir=True)
def counting(a: T.Buffer((64,), "float32"), b: T.Buffer((64,), "float32")) -> None:
    if T.call_packed("runtime.NumThreads") != 2:
        T.evaluate(T.call_extern("int32", "abort"))


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def started(module: str, *arguments: str) -> Iterator[int]:
    """One of TVM's programs on a free port."""
    port = free_port()
    where = ("--host", "127.0.0.1", "--port", str(port), "--port-end", str(port + 1))
    env = {**os.environ, "TVM_NUM_THREADS": "1"}  # not what the kernels are tuned for
    child = subprocess.Popen(
        [sys.executable, "-m", module, *where, *arguments],
        env=env,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), timeout=5).close()
                break
            time.sleep(0.2)
        yield port
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


@pytest.fixture(scope="module")
def tracker() -> Iterator[Tracker]:
    """A tracker with one server, whose key is "loop"."""
    with started("tvm.exec.rpc_tracker") as port:
        address = f"127.0.0.1:{port}"
        for _ in range(4):  # another process may take the server's port before it does
            with started("tvm.exec.rpc_server", "--tracker", address, "--key", "loop"):
                if is_registered(Tracker.of(address, "loop")):
                    yield Tracker.of(address, "loop")
                    return
        pytest.fail("no server has registered with the tracker")


def is_registered(tracker: Tracker) -> bool:
    """Whether the server tells the tracker within half a minute that it is there."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        with contextlib.suppress(TargetError):
            tracker.check()
            return True
        time.sleep(0.2)
    return False


def test_killers_cost_themselves_alone(tracker: Tracker) -> None:
    good = [job(counting), job(copying, weights=(1,)), job(copying)]
    bad = [job(aborting), job(sleeping), Job("{", (), ())]
    with RpcMeasurer(tracker, LIBRARIES, workers=1) as measurer:
        results = measurer.measure([job for pair in zip(good, bad, strict=True) for job in pair], None)
        assert [result.killed for result in results[1::2]] == [True, True, False]
        assert not any(result.samples_s for result in results[1::2])
        late = [one for one, result in zip(good, results[::2], strict=True) if not result.samples_s]
        for _ in range(4):  # on a machine so busy that their time was over
            late = [one for one in late if not measurer.measure([one], None)[0].samples_s]
    assert not late


def test_a_tracker_that_does_not_answer() -> None:
    with pytest.raises(TargetError, match="no TVM RPC tracker answers at ") as caught:
        RpcMeasurer(Tracker.of(f"127.0.0.1:{free_port()}", "loop"), LIBRARIES, workers=1)
    assert "python -m tvm.exec.rpc_tracker" in caught.value.hint


def test_a_device_that_is_not_there(tracker: Tracker) -> None:
    with pytest.raises(TargetError, match="has no device `pi`; it has loop") as caught:
        RpcMeasurer(Tracker(tracker.host, tracker.port, "pi"), LIBRARIES, workers=1)
    assert f"python -m tvm.exec.rpc_server --tracker {tracker.address} --key pi" in caught.value.hint


def test_the_extra_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SetupError, match="needs tornado") as caught:
        RpcMeasurer(Tracker("lab", 9190, "pi"), LIBRARIES, workers=1)
    assert caught.value.hint == "pip install tvmflow[rpc]"


def test_tune_then_compile_from_the_records(tracker: Tracker, tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((128, 128)).astype("f4")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [64, 128])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [64, 128])],
        [numpy_helper.from_array(weight, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    settings = {"database": "db", "measure": "rpc", "tracker": tracker.address, "device_key": "loop"}
    options = [word for key, value in settings.items() for word in ("--set", f"tuning.{key}={value}")]

    def command(*arguments: str) -> dict[str, object]:
        done = subprocess.run(
            [sys.executable, "-m", "tvmflow.cli", *arguments, *options, "--json"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    summary = command("tune", "m.onnx", "--minutes", "30", "--trials-per-task", "32")
    assert (summary["tasks"], summary["trials"], summary["settled"]) == (1, 32, {})
    (record,) = Store(tmp_path / "db").read().records
    assert record.provenance.protocol.startswith("over RPC")
    assert record.provenance.cpu == "loop over RPC"
    manifest = command("compile", "m.onnx", "-o", "a")
    assert [kernel["origin"] for kernel in manifest["kernels"]] == ["tuned"]
    assert manifest["verdict"]["ok"]
