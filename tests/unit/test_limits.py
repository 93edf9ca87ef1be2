"""What a machine leaves to its processes, and what a process holds."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import psutil

from tvmflow import limits


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_control_groups_of_both_versions(tmp_path: Path) -> None:
    write(tmp_path / "two/memory.max", "max\n")
    write(tmp_path / "two/jobs/memory.max", "4096\n")
    write(tmp_path / "two/jobs/mine/memory.max", "max\n")
    member = write(tmp_path / "cgroup2", "0::/jobs/mine\n")
    assert list(limits._group_limits(tmp_path / "two", member)) == [4096]
    write(tmp_path / "one/memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(tmp_path / "one/memory/box/memory.limit_in_bytes", "8192\n")
    member = write(tmp_path / "cgroup1", "5:cpu:/box\n4:memory:/box\n0::/\n")
    assert min(limits._group_limits(tmp_path / "one", member)) == 8192
    assert list(limits._group_limits(tmp_path, tmp_path / "none")) == []


def test_the_default_is_a_share_of_the_machine() -> None:
    assert 0 < limits.default().memory_bytes < psutil.virtual_memory().total


def test_the_kernel_counts_whom_it_ends(tmp_path: Path) -> None:
    assert limits.out_of_memory_kills(write(tmp_path / "new", "pgfault 7\noom_kill 3\n")) == 3
    assert limits.out_of_memory_kills(write(tmp_path / "old", "pgfault 7\n")) is None
    assert limits.out_of_memory_kills(tmp_path / "none") is None


def test_mapped_files_are_not_held(tmp_path: Path) -> None:
    size = 64 << 20
    path = tmp_path / "weights"
    with path.open("wb") as stream:
        stream.truncate(size)
    for measure in (limits.held_bytes, limits.held_exactly_bytes):
        before = measure(os.getpid())
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            assert sum(mapped[::4096]) == 0
            assert measure(os.getpid()) - before < size // 2
        own = bytearray(b"1" * size)
        assert measure(os.getpid()) - before > size // 2
        del own
    assert limits.held_bytes(2**22 + 1) == 0
