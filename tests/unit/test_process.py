"""Children: values, errors, events, crashes, and what they do not inherit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tvmflow import process
from tvmflow.errors import BudgetError, CompileError, ModelError, VerifyError

HERE = "test_process_children"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("children")
    (folder / f"{HERE}.py").write_text(
        "import os, sys\n"
        "from tvmflow.errors import ModelError\n"
        "from tvmflow.process import emit\n"
        "def add(a, b):\n    emit('adding')\n    return a + b\n"
        "def fail():\n    raise ModelError('bad file', 'mend it')\n"
        "def bug():\n    print('on the way')\n    raise ValueError('first\\nsecond')\n"
        "def die(number):\n    print('last words', flush=True)\n    os.kill(os.getpid(), number)\n"
        "def linger(folder):\n    import pathlib, time\n"
        "    part = pathlib.Path(folder, 'part')\n    part.write_text(str(os.getpid()))\n"
        "    part.rename(pathlib.Path(folder, 'pid'))\n    time.sleep(600)\n"
        "def leave():\n    os._exit(3)\n"
        "def variable(name):\n    return os.environ.get(name)\n"
        "def has(name):\n    import importlib.util\n    return importlib.util.find_spec(name) is not None\n"
        "def hoard(size):\n    import time\n    emit('hoarding')\n    block = b'1' * size\n    time.sleep(600)\n"
        "def allowed():\n    from tvmflow import process\n    return process.memory_limit_bytes()\n"
        "def have_hoarded(size):\n    import subprocess\n"
        "    subprocess.run([sys.executable, '-c', f'import time; b = b\"1\" * {size}; time.sleep(600)'])\n"
        "def grow(size):\n    block = bytearray(size)\n    block[::4096] = b'1' * len(block[::4096])\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_value_and_events() -> None:
    events: list[str] = []
    value, usage = process.call(f"{HERE}:add", 2, 3, what="adding", on_event=events.append)
    assert (value, events) == (5, ["adding"])
    assert usage.wall_s > 0


def test_its_own_error_comes_through_whole() -> None:
    with pytest.raises(ModelError) as caught:
        process.call(f"{HERE}:fail", what="failing")
    assert (caught.value.message, caught.value.hint) == ("bad file", "mend it")
    assert "in fail" in caught.value.details


def test_any_other_exception_becomes_the_stated_error() -> None:
    with pytest.raises(VerifyError) as caught:
        process.call(f"{HERE}:bug", what="running it", error=VerifyError)
    assert caught.value.message == "running it failed: ValueError: second"
    assert "in bug" in caught.value.details
    assert "on the way" in caught.value.details


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL])
def test_a_crash_is_an_error_that_names_the_signal(number: signal.Signals) -> None:
    with pytest.raises(CompileError) as caught:
        process.call(f"{HERE}:die", int(number), what="compiling")
    assert caught.value.message == f"compiling crashed (signal {int(number)}, {number.name})"
    assert "last words" in caught.value.details


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([3, 4], "compiling was killed by the system, most likely because memory ran out: it had taken 0 GiB"),
        ([None, None], "compiling was killed by the system, most likely because memory ran out: it had taken 0 GiB"),
        ([3, 3], "compiling was killed by another process (signal 9); memory did not run out: it had taken 0 GiB"),
    ],
)
def test_lack_of_memory_is_told_from_a_kill(
    counts: list[int | None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process.limits, "out_of_memory_kills", lambda: counts.pop(0))
    monkeypatch.setattr(process.limits, "held_bytes", lambda pid: 0)
    with pytest.raises(CompileError) as caught:
        process.call(f"{HERE}:die", int(signal.SIGKILL), what="compiling")
    assert caught.value.message == message
    assert caught.value.crashed


@pytest.mark.parametrize("function", ["hoard", "have_hoarded"])
def test_too_much_memory_ends_a_child_with_what_it_started(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_limits", process._limits)
    process.limit(0.25, 60)
    with pytest.raises(BudgetError) as caught:
        process.call(f"{HERE}:{function}", 1 << 29, what="compiling")
    doing = " (hoarding)" if function == "hoard" else ""
    assert caught.value.message == f"compiling{doing} took more than 0.25 GiB of memory, which is limits.memory_gib"
    assert "--set limits.memory_gib=" in caught.value.hint
    assert not caught.value.crashed


def test_too_much_time_ends_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_limits", process._limits)
    process.limit(None, 0.005)
    with pytest.raises(BudgetError) as caught:
        process.call(f"{HERE}:hoard", 1, what="compiling")
    assert caught.value.message.endswith("took longer than 0.005 minutes, which is limits.minutes")
    assert caught.value.hint == "allow more: --set limits.minutes=0.01"
    process.limit(2, 0.0001)
    assert process.call(f"{HERE}:allowed", what="asking", timed=False)[0] == 2 << 30


def test_a_child_does_not_outlive_its_parent(tmp_path: Path) -> None:
    code = f"from tvmflow import process\nprocess.call('{HERE}:linger', r'{tmp_path}', what='lingering')"
    parent = subprocess.Popen([sys.executable, "-c", code])
    while not (tmp_path / "pid").exists():
        time.sleep(0.05)
    child = psutil.Process(int((tmp_path / "pid").read_text()))
    parent.kill()
    parent.wait()
    assert psutil.wait_procs([child], timeout=20)[1] == []


def test_a_silent_exit_is_an_error() -> None:
    with pytest.raises(CompileError, match=r"crashed \(exit code 3\)"):
        process.call(f"{HERE}:leave", what="compiling")


@pytest.mark.parametrize("name", ["TVM_NUM_THREADS", "TVM_CUDA_NVCC_NO_FAST_MATH", "NVCC_APPEND_FLAGS"])
def test_variables_that_change_a_build_are_not_passed_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    assert process.call(f"{HERE}:variable", name, what="asking")[0] is None
    assert process.call(f"{HERE}:variable", name, what="asking", env={name: "2"})[0] == "2"


def test_other_variables_are() -> None:
    assert process.call(f"{HERE}:variable", "PATH", what="asking")[0] == os.environ["PATH"]


def test_torch_is_hidden_unless_asked_for() -> None:
    pytest.importorskip("torch", reason="the extra `torch` is not installed")
    assert process.call(f"{HERE}:has", "torch", what="looking")[0] is False
    assert process.call(f"{HERE}:has", "torch", what="looking", torch=True)[0] is True


def test_peak_memory_is_the_childs() -> None:
    _, usage = process.call(f"{HERE}:grow", 300 << 20, what="growing")
    assert usage.peak_rss_bytes > 300 << 20


def test_emit_without_a_parent_does_nothing() -> None:
    assert process._reply_to is None
    process.emit("nobody hears this")
