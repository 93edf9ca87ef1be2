"""Children: values, errors, events, crashes, and what they do not inherit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import process_children as children
import psutil
import pytest

from tvmflow import process
from tvmflow.errors import BudgetError, CompileError, ModelError, VerifyError
from tvmflow.process import Child

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))


def test_value_and_events() -> None:
    events: list[str] = []
    child = Child("adding", on_event=events.append)
    assert (child.call(children.add, 2, 3), events) == (5, ["adding"])
    assert child.call(children.add, 2, b=5) == 7
    value, usage = child.measure(children.add, 2)
    assert value == 3
    assert usage.wall_s > 0


@pytest.mark.parametrize(
    "function",
    [lambda: None, children.Family.of, children.Family.plain, children.Family, len, partial(children.add, 1)],
)
def test_only_a_modules_own_functions_can_be_called(function: Callable[..., object]) -> None:
    with pytest.raises(TypeError, match="is no function of an importable module"):
        Child("calling").call(function)


def test_its_own_error_comes_through_whole() -> None:
    with pytest.raises(ModelError) as caught:
        Child("failing").call(children.fail)
    assert (caught.value.message, caught.value.hint) == ("bad file", "mend it")
    assert "in fail" in caught.value.details


def test_any_other_exception_becomes_the_stated_error() -> None:
    with pytest.raises(VerifyError) as caught:
        Child("running it", VerifyError).call(children.bug)
    assert caught.value.message == "running it failed: ValueError: second"
    assert "in bug" in caught.value.details
    assert "on the way" in caught.value.details


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL])
def test_a_crash_is_an_error_that_names_the_signal(number: signal.Signals) -> None:
    with pytest.raises(CompileError) as caught:
        Child("compiling").call(children.die, int(number))
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
        Child("compiling").call(children.die, int(signal.SIGKILL))
    assert caught.value.message == message
    assert caught.value.crashed


@pytest.mark.parametrize("function", [children.hoard, children.have_hoarded])
def test_too_much_memory_ends_a_child_with_what_it_started(
    function: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_limits", process._limits)
    process.limit(0.25, 60)
    with pytest.raises(BudgetError) as caught:
        Child("compiling").call(function, 1 << 29)
    doing = " (hoarding)" if function is children.hoard else ""
    assert caught.value.message == f"compiling{doing} took more than 0.25 GiB of memory, which is limits.memory_gib"
    assert "--set limits.memory_gib=" in caught.value.hint
    assert not caught.value.crashed


def test_too_much_time_ends_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_limits", process._limits)
    process.limit(None, 0.005)
    with pytest.raises(BudgetError) as caught:
        Child("compiling").call(children.hoard, 1)
    assert caught.value.message.endswith("took longer than 0.005 minutes, which is limits.minutes")
    assert caught.value.hint == "allow more: --set limits.minutes=0.01"
    process.limit(2, 0.0001)
    assert Child("asking", timed=False).call(children.allowed) == 2 << 30


def test_a_child_does_not_outlive_its_parent(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, process_children\nfrom tvmflow.process import Child\n"
        "Child('lingering').call(process_children.linger, pathlib.Path(sys.argv[1]))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    while not (tmp_path / "pid").exists():
        time.sleep(0.05)
    child = psutil.Process(int((tmp_path / "pid").read_text()))
    parent.kill()
    parent.wait()
    assert psutil.wait_procs([child], timeout=20)[1] == []


def test_a_silent_exit_is_an_error() -> None:
    with pytest.raises(CompileError, match=r"crashed \(exit code 3\)"):
        Child("compiling").call(children.leave)


@pytest.mark.parametrize("name", ["TVM_NUM_THREADS", "TVM_CUDA_NVCC_NO_FAST_MATH", "NVCC_APPEND_FLAGS"])
def test_variables_that_change_a_build_are_not_passed_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    assert Child("asking").call(children.variable, name) is None
    assert Child("asking", env={name: "2"}).call(children.variable, name) == "2"


def test_other_variables_are() -> None:
    assert Child("asking").call(children.variable, "PATH") == os.environ["PATH"]


def test_torch_is_hidden_unless_asked_for() -> None:
    pytest.importorskip("torch", reason="the extra `torch` is not installed")
    assert Child("looking").call(children.has, "torch") is False
    assert Child("looking", torch=True).call(children.has, "torch") is True


def test_peak_memory_is_the_childs() -> None:
    _, usage = Child("growing").measure(children.grow, 300 << 20)
    assert usage.peak_rss_bytes > 300 << 20


def test_emit_without_a_parent_does_nothing() -> None:
    assert process._reply_to is None
    process.emit("nobody hears this")
