"""Measuring on a device that a TVM RPC tracker lends: built and linked here, uploaded, and timed by the device itself.

Each candidate gets a session of its own, which is a process of its own on the device. TVM's RPC server survives a
session that ends, or that it ends itself when its time is over, but stops serving for good when one crashes. So every
library brings a few lines of C that turn a crash into the session's end, and state the thread count before the device's
thread pool reads it.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm

from tvmflow.errors import SetupError, TargetError
from tvmflow.host import THREADING
from tvmflow.tuning import evaluator, worker
from tvmflow.tuning.measure import RUN_TIMEOUT_S, Measurer, run_timeout_s
from tvmflow.tuning.worker import Arg, Job, KilledError

CONNECT_S = 20.0  # for the tracker to answer
WAIT_S = 120.0  # for a device that others use, or whose server starts again
SESSION_S = 5.0  # for upload, loading and filling arguments, beside the runs
SLOWNESS = 4  # times as slow as this machine may the device be before candidates run out of time
GUARD_FILE = "guard.c"
GUARD = """
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>
static void end_session(int number) { (void)number; _exit(0); }
__attribute__((constructor)) static void guard(void) {
  static const int crashes[] = {SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGTRAP};
  for (unsigned i = 0; i < sizeof(crashes) / sizeof(crashes[0]); ++i) signal(crashes[i], end_session);
%s
}
"""


@dataclass(frozen=True)
class Tracker:
    """A TVM RPC tracker and the key of the devices wanted from it."""

    host: str
    port: int
    device_key: str

    @classmethod
    def of(cls, address: str, device_key: str) -> Tracker:
        """From "host:port"."""
        host, _, port = address.rpartition(":")
        return cls(host.strip("[]"), int(port), device_key)

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def check(self) -> None:
        """Raises TargetError where the tracker does not answer within CONNECT_S, or has no such device."""
        with self._connected() as tracker:
            servers = tracker.summary()["server_info"]
        keys = sorted({str(server["key"]).removeprefix("server:") for server in servers})
        if self.device_key not in keys:
            raise TargetError(
                f"tuning.device_key: the tracker at {self.address} has no device `{self.device_key}`; "
                f"it has {', '.join(keys) or 'none'}",
                self._hint(),
            )

    @contextmanager
    def session(self, timeout_s: float) -> Iterator[Any]:
        """A tvm.rpc.RPCSession that the device ends after `timeout_s`. Raises TargetError if none is free in time."""
        end = time.monotonic() + WAIT_S
        while True:
            with self._connected() as tracker:
                try:
                    session = tracker.request(self.device_key, session_timeout=timeout_s, max_retry=1)
                    break
                except (RuntimeError, tvm.error.RPCError):  # none free in CONNECT_S, or gone between the two steps
                    if time.monotonic() > end:
                        raise TargetError(
                            f"the tracker at {self.address} had no free device `{self.device_key}` for {WAIT_S:.0f} s",
                            f"a server may have crashed or be in use by others; {self._hint()}",
                        ) from None
        yield session

    @contextmanager
    def _connected(self) -> Iterator[Any]:
        """A tvm.rpc.TrackerSession none of whose steps takes longer than CONNECT_S; raises TargetError."""
        from tvm import rpc

        socket.setdefaulttimeout(CONNECT_S)  # TVM's sockets have none of their own
        try:
            # TVM would try for a minute where nothing listens.
            socket.create_connection((self.host, self.port)).close()
            yield rpc.connect_tracker(self.host, self.port)
        except (OSError, OverflowError, UnicodeError, RuntimeError) as exc:
            raise TargetError(
                f"tuning.tracker: no TVM RPC tracker answers at {self.address}: {exc}",
                f"start one: python -m tvm.exec.rpc_tracker --host 0.0.0.0 --port {self.port}",
            ) from None
        finally:
            socket.setdefaulttimeout(None)

    def _hint(self) -> str:
        return (
            f"start one on the device: python -m tvm.exec.rpc_server --tracker {self.address} --key {self.device_key}"
        )


@dataclass(frozen=True)
class Libraries:
    """How candidates become shared libraries: for which target and thread count, linked and built with what."""

    target_json: str
    threads: int
    linker: Mapping[str, Any]
    """Options of TVM's export_library."""
    building: Callable[[], AbstractContextManager[None]] = nullcontext
    """What each candidate is built inside of."""


class RpcMeasurer(Measurer):
    """A Measurer whose workers build here and run on a tracker's device, one candidate at a time."""

    protocol = (
        "over RPC, median of 3-6 samples: single runs, all arguments but the first flushed from the caches, "
        "where a kernel has weights; single runs, caches flushed, on a GPU; else of 1 ms"
    )
    overhead_s = WAIT_S + 2 * CONNECT_S + SESSION_S + SLOWNESS * RUN_TIMEOUT_S

    def __init__(self, tracker: Tracker, libraries: Libraries, workers: int) -> None:
        """Raises TargetError where the tracker or its device cannot be had, SetupError without the extra `rpc`."""
        if importlib.util.find_spec("tornado") is None:
            raise SetupError('tuning.measure = "rpc" needs tornado, which is not installed', "pip install tvmflow[rpc]")
        tracker.check()
        self.device = f"{tracker.device_key} over RPC"
        self._folder = tempfile.TemporaryDirectory(prefix="tvmflow-")
        folder = Path(self._folder.name)
        stated = {"TVM_NUM_THREADS": str(libraries.threads), **THREADING}
        lines = [f'  setenv("{name}", "{value}", 1);' for name, value in stated.items()]
        (folder / GUARD_FILE).write_text(GUARD % "\n".join(lines))
        self._start(functools.partial(Remote, tracker, libraries, folder), workers)

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self._folder.cleanup()


class Remote:
    """A worker's Place: libraries go to a folder here, and run on the device."""

    def __init__(self, tracker: Tracker, libraries: Libraries, folder: Path) -> None:
        self._tracker, self._libraries, self._folder = tracker, libraries, folder
        self._target = tvm.target.Target(json.loads(libraries.target_json))

    def build(self, number: int, job: Job) -> Path:
        linker = self._libraries.linker
        path = self._folder / f"{number}.so"
        options = [*linker.get("options", ()), str(self._folder / GUARD_FILE)]
        with self._libraries.building():
            worker.library(job, self._target).export_library(str(path), **{**linker, "options": options})
        return path

    def run(self, built: Path, job: Job, best_s: float | None) -> tuple[float, ...]:
        with self._tracker.session(SLOWNESS * run_timeout_s(best_s) + SESSION_S) as session:
            try:
                return self._run(session, built, job, best_s)
            except Exception as exc:
                if _answers(session):
                    raise
                raise KilledError(f"ended its session on the device: {exc}") from None

    def _run(self, session: Any, built: Path, job: Job, best_s: float | None) -> tuple[float, ...]:
        session.upload(str(built))
        module = session.load_module(built.name)
        kind = str(self._target.kind.name)
        device = session.device("cpu" if kind == "llvm" else kind)
        fill = session.get_function("tvm.contrib.random.random_fill_for_measure")
        args = [_filled(arg, seed, device, fill) for seed, arg in enumerate(job.args)]
        return evaluator.seconds(module, device, args, evaluator.conditions(kind, bool(job.weights)), best_s)


def _filled(arg: Arg, seed: int, device: Any, fill: Any) -> Any:
    """A tensor on the device: floats drawn there, so that weights need not travel; zeros for integers, as indices."""
    dtype, shape = arg
    tensor = tvm.runtime.empty(shape, dtype, device)
    if dtype in ("float16", "float32", "float64"):
        fill(tensor)
    else:
        worker.filled(dtype, shape, seed).copyto(tensor)
    return tensor


def _answers(session: Any) -> bool:
    """Whether a session's process still lives."""
    try:
        session.get_function("tvm.rpc.server.workpath")
    except Exception:  # whatever TVM makes of a closed connection
        return False
    return True
