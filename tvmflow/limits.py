"""How much memory and time a child process may take, and the thread that ends it when it takes more.

What counts is memory that the system cannot take back: the anonymous and shared pages of the child and of everything
that it started. Address space says nothing, because compilers and GPU run times reserve far more than they use; pages
of mapped files can be dropped at any time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from tvmflow.errors import BudgetError, TvmflowError

GIB = 1 << 30
SHARE = 0.9  # of the machine's memory, where no limit is stated
MINUTES = 120.0
POLL_S = 0.2
TREE_S = 1.0  # how often to look for what the child has started
UNLIMITED = float("inf")


@dataclass(frozen=True)
class Limits:
    """The most that children may take: bytes of memory together, and seconds each."""

    memory_bytes: int
    seconds: float = MINUTES * 60


def default() -> Limits:
    return Limits(int(SHARE * machine_memory_bytes()))


def machine_memory_bytes() -> int:
    """This machine's memory, or what its control groups leave of it to this process."""
    return min([psutil.virtual_memory().total, *_group_limits(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))])


def out_of_memory_kills(vmstat: Path = Path("/proc/vmstat")) -> int | None:
    """How many processes the kernel has ended for lack of memory since it started, None where it does not say."""
    try:
        counts = dict(line.split() for line in vmstat.read_text().splitlines())
    except (OSError, ValueError):
        return None
    return int(counts["oom_kill"]) if "oom_kill" in counts else None


def held_bytes(pid: int) -> int:
    """Anonymous and shared memory of one process; what it shares with others counts in part. 0 where it has ended."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        resident, shared = (int(pages) for pages in Path(f"/proc/{pid}/statm").read_text().split()[1:3])
        return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
    return 0


def held_exactly_bytes(pid: int) -> int:
    """The same, with pages that several processes share divided among them; it takes longer to find out."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return held_bytes(pid)
    sizes = {line.split()[0]: line.split()[1] for line in lines[1:]}
    if "Pss_Anon:" not in sizes:
        return held_bytes(pid)
    return sum(int(sizes.get(name, 0)) << 10 for name in ("Pss_Anon:", "Pss_Shmem:"))


class Watchdog:
    """Ends the process group of a child that exceeds the limits, in a thread of its own; `hit` then says which.

    `others` are the children that run at the same time. Where all together take too much, the largest of them ends.
    """

    def __init__(self, pid: int, limits: Limits, others: Iterable[int]) -> None:
        self.hit: str = ""
        self.most_bytes = 0
        self._pid, self._limits, self._others = pid, limits, others
        self._deadline = time.monotonic() + limits.seconds
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tvmflow limits", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns once nothing will be ended any more."""
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        tree, looked_at = [self._pid], -TREE_S
        while not self._done.wait(POLL_S):
            now = time.monotonic()
            if now > self._deadline:
                return self._end("minutes")
            if now - looked_at >= TREE_S:
                tree, looked_at = _tree(self._pid), now
            held = sum(map(held_bytes, tree))
            self.most_bytes = max(self.most_bytes, held)
            if held + sum(map(held_bytes, self._others)) > self._limits.memory_bytes and self._is_to_blame(tree):
                return self._end("memory_gib")
        return None

    def _is_to_blame(self, tree: list[int]) -> bool:
        """Whether the limit is exceeded by exact numbers, and no other child takes more than this one."""
        own = sum(map(held_exactly_bytes, tree))
        others = [sum(map(held_exactly_bytes, _tree(pid))) for pid in list(self._others)]
        return own + sum(others) > self._limits.memory_bytes and own >= max(others, default=0)

    def _end(self, which: str) -> None:
        self.hit = which
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)


def exceeded(what: str, which: str, allowed: Limits, output: str) -> BudgetError:
    """What is raised of a child that a Watchdog ended; `which` is its `hit`."""
    if which == "minutes":
        minutes = allowed.seconds / 60
        return BudgetError(
            f"{what} took longer than {minutes:g} minutes, which is limits.minutes",
            f"allow more: --set limits.minutes={2 * minutes:g}",
            output,
        )
    gib = allowed.memory_bytes / GIB
    return BudgetError(
        f"{what} took more than {gib:.3g} GiB of memory, which is limits.memory_gib",
        "make the shapes smaller, or allow more: --set limits.memory_gib=... (unset, it is nine tenths "
        "of this machine's memory)",
        output,
    )


def killed(
    what: str, most_bytes: int, killed_before: int | None, error: type[TvmflowError], output: str
) -> TvmflowError:
    """SIGKILL is what the kernel sends when memory runs out; it counts how often it did."""
    taken = f"it had taken {most_bytes / GIB:.2g} GiB"
    count = out_of_memory_kills()
    if killed_before is not None and count == killed_before:
        crash = error(
            f"{what} was killed by another process (signal 9); memory did not run out: {taken}",
            "find out what ends processes on this machine, and do it again",
            output,
        )
    else:
        crash = error(
            f"{what} was killed by the system, most likely because memory ran out: {taken}",
            "give the machine more memory or make the model's shapes smaller",
            output,
        )
    crash.crashed = True
    return crash


def _tree(pid: int) -> list[int]:
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        return [pid]


def _group_limits(root: Path, membership: Path) -> Iterable[int]:
    """The memory limits of the control groups that this process is in, outermost ones included; versions 1 and 2."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base, file = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        for folder in (Path(group), *Path(group).parents):
            with contextlib.suppress(OSError, ValueError):
                yield int((base / str(folder).lstrip("/") / file).read_text())
