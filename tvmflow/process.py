"""Runs one function in a Python process of its own, because what it calls may crash.

The compiler, a compiled library, ONNX Runtime and PyTorch are all native code that a bad model can bring down.
`Child.call` gives back the function's value, raises its TvmflowError, or says which signal or limit ended it. It is
typed by the function: a type checker sees a wrong argument in it as it does in any other call.

The child is a fresh interpreter, not a fork and not `multiprocessing`: native thread pools do not survive a fork,
and `multiprocessing` would run the caller's main script a second time.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib
import os
import pickle
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import IO, Any, ParamSpec, TypeVar

from tvmflow import limits
from tvmflow.errors import CompileError, TvmflowError

PACKAGE_PARENT = str(Path(__file__).resolve().parent.parent)
PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Variables by which TVM, its CUDA compile step or ptxas would change a build behind the config's back.
IGNORED_PREFIXES = ("TVM_", "NVCC_", "CUDA_PTX")


@dataclass(frozen=True)
class Usage:
    """What one call cost: wall seconds and the peak resident memory in bytes."""

    wall_s: float
    peak_rss_bytes: int


P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Child:
    """How a function is run in a process of its own; each call starts a new one.

    The function is one of a module, whose place the child imports it from. A module that holds such functions imports
    tvm, torch and the like inside them, because the parent imports it too.
    """

    what: str
    """The work, as messages name it: "building the library"."""
    error: type[TvmflowError] = CompileError
    """What is raised where the child crashed, or raised anything but a TvmflowError."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables to add. Those by which TVM's behaviour could be changed from outside are not passed on."""
    torch: bool = False
    """Whether the child can import torch: tvm would, where it is installed, and take three times as long to start."""
    timed: bool = True
    """Whether the limit of time holds: not for work that ends by itself at a time that the user has stated."""
    on_event: Callable[[Any], None] | None = None
    """Receives what the child passes to `emit`. Where it crashed, the message holds the last text."""

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The value of `function` called with these arguments.

        Raises the child's TvmflowError, BudgetError where it exceeded a limit, or `error` with its traceback and output
        in `details`.
        """
        return self.measure(function, *args, **kwargs)[0]

    def measure(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T, Usage]:
        """Like `call`, with what the call cost."""
        value, usage = _run(self, (_name_of(function), args, kwargs))
        return value, usage


def _name_of(function: Callable[..., object]) -> tuple[str, str]:
    """The module and the name under which a child finds the function; raises TypeError where it could not."""
    if isinstance(function, FunctionType) and function.__module__ != "__main__":
        name = (function.__module__, function.__qualname__)
        if getattr(sys.modules.get(name[0]), name[1], None) is function:
            return name
    raise TypeError(f"{function!r} is no function of an importable module, so that no other process can find it")


def _run(settings: Child, request: object) -> tuple[Any, Usage]:
    allowed = _limits if settings.timed else dataclasses.replace(_limits, seconds=limits.UNLIMITED)
    started, killed_before = time.monotonic(), limits.out_of_memory_kills()
    with tempfile.TemporaryFile() as log:
        child, read_fd = _start(settings, log)
        watchdog = limits.Watchdog(child.pid, allowed, _Others(child.pid))
        _running.add(child)
        try:
            reply, doing = _exchange(child, read_fd, (allowed.memory_bytes, request), settings.on_event)
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it keeps its number until nobody kills by that
        except BaseException:
            watchdog.stop()
            _kill(child)
            raise
        finally:
            _running.discard(child)
        watchdog.stop()
        status, peak_rss_bytes = _wait(child)
        log.seek(max(0, log.seek(0, os.SEEK_END) - 64_000))
        output = log.read().decode(errors="replace")
    usage = Usage(time.monotonic() - started, peak_rss_bytes)
    what = f"{settings.what} ({doing})" if reply is None and isinstance(doing, str) else settings.what
    if reply is None and watchdog.hit:
        raise limits.exceeded(what, watchdog.hit, allowed, output)
    if reply is None and status == -signal.SIGKILL:
        raise limits.killed(what, watchdog.most_bytes, killed_before, settings.error, output)
    return _value_of(reply, status, what, settings.error, output), usage


def _start(settings: Child, log: IO[bytes]) -> tuple[subprocess.Popen[bytes], int]:
    """A child that waits for its request, and the descriptor that its replies come from."""
    child_env = {k: v for k, v in os.environ.items() if not k.startswith(IGNORED_PREFIXES)}
    child_env["PYTHONPATH"] = os.pathsep.join([PACKAGE_PARENT, *filter(None, [os.environ.get("PYTHONPATH")])])
    child_env.update(settings.env)
    read_fd, write_fd = os.pipe()
    try:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "tvmflow.process", str(write_fd), str(int(settings.torch))],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=child_env,
            pass_fds=[write_fd],
            start_new_session=True,
        )
    finally:
        os.close(write_fd)
    return child, read_fd


def limit(memory_gib: float | None, minutes: float) -> None:
    """What children that are called from now on may take: memory together, time each; None is the default."""
    global _limits
    memory_bytes = limits.default().memory_bytes if memory_gib is None else int(memory_gib * limits.GIB)
    _limits = limits.Limits(memory_bytes, minutes * 60)


def memory_limit_bytes() -> float:
    """Inside a function run by a Child: the most memory that it may take; infinite in the parent."""
    return _memory_limit_bytes


def kill_all() -> None:
    """Ends every child that other threads wait for; their calls then raise."""
    for child in list(_running):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def emit(event: object) -> None:
    """Tells the parent, from inside a function run by a Child, what is being done; without a parent, nothing."""
    if _reply_to is not None:
        _send(_reply_to, ("event", event))


def _exchange(
    child: subprocess.Popen[bytes], read_fd: int, request: object, on_event: Callable[[Any], None] | None
) -> tuple[tuple[str, Any] | None, object]:
    """Sends the request, passes events on, and returns the reply, None where the child died, and the last event."""
    reply, last = None, None
    with os.fdopen(read_fd, "rb") as replies:
        try:
            with child.stdin or os.fdopen(os.devnull) as stdin:  # type: ignore[call-overload] # stdin is a pipe
                stdin.write(pickle.dumps(request))
        except BrokenPipeError:
            return None, None
        while message := _receive(replies):
            if message[0] != "event":
                reply = message
                continue
            last = message[1]
            if on_event is not None:
                on_event(last)
    return reply, last


def _wait(child: subprocess.Popen[bytes]) -> tuple[int, int]:
    _, wait_status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(wait_status)
    return child.returncode, usage.ru_maxrss * 1024


def _kill(child: subprocess.Popen[bytes]) -> None:
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _value_of(reply: tuple[str, Any] | None, status: int, what: str, error: type[TvmflowError], output: str) -> Any:
    if reply is not None and reply[0] == "value":
        return reply[1]
    if reply is not None and reply[0] == "error":
        raise reply[1]
    if reply is not None:
        summary, trace = reply[1]
        raise error(f"{what} failed: {summary}", "--debug shows the whole trace", f"{trace}\n{output}")
    reason = f"signal {-status}, {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
    crash = error(f"{what} crashed ({reason})", "--debug shows what it printed", output)
    crash.crashed = True
    raise crash


class _Others:
    """The process ids of the children that run beside one."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def __iter__(self) -> Iterator[int]:
        return iter([child.pid for child in list(_running) if child.pid != self._pid])


def _send(stream: IO[bytes], message: tuple[str, Any]) -> None:
    body = pickle.dumps(message)
    stream.write(struct.pack("<Q", len(body)) + body)
    stream.flush()


def _receive(stream: IO[bytes]) -> tuple[str, Any] | None:
    header = stream.read(8)
    if len(header) < 8:
        return None
    body = stream.read(struct.unpack("<Q", header)[0])
    message: tuple[str, Any] = pickle.loads(body)  # noqa: S301 # from a child of ours
    return message


_reply_to: IO[bytes] | None = None
_running: set[subprocess.Popen[bytes]] = set()
_limits = limits.default()
_memory_limit_bytes = limits.UNLIMITED


def _summary(exc: BaseException) -> str:
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    text = next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "")
    return f"{type(exc).__name__}: {text}"[:500]


def _run_request() -> tuple[str, Any]:
    try:
        global _memory_limit_bytes
        _memory_limit_bytes, ((module, name), args, kwargs) = pickle.load(sys.stdin.buffer)  # noqa: S301 # the parent's
        return "value", getattr(importlib.import_module(module), name)(*args, **kwargs)
    except TvmflowError as exc:
        exc.details = exc.details or traceback.format_exc()
        return "error", exc
    except SystemExit as exc:
        return "exception", (f"it ended the process: sys.exit({exc.code})", traceback.format_exc())
    except MemoryError:
        return "error", CompileError("memory ran out", "give the machine more memory or make the shapes smaller")
    except Exception as exc:
        return "exception", (_summary(exc), traceback.format_exc())


def main() -> None:
    """The child: one request from standard input, its reply to the inherited descriptor."""
    from tvmflow import process  # the importable twin of __main__, whose `emit` the called function sees

    if not int(sys.argv[2]):
        sys.modules["torch"] = None  # type: ignore[assignment] # Python's own way to say that there is no such module
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # however the parent ends, so does this
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    Path("/proc/self/oom_score_adj").write_text("900")  # if memory runs out, this process goes, not the user's shell
    with os.fdopen(int(sys.argv[1]), "wb") as replies:
        process._reply_to = replies
        reply = process._run_request()  # the twin's, for what the request says of limits
        _send(replies, reply)
    sys.stdout.flush()
    os._exit(0)  # native libraries' exit handlers may crash once the work is done


if __name__ == "__main__":
    main()
