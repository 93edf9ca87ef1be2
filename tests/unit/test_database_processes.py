"""The database under other processes: two writers, a killed writer, a hostile file in bounded memory."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from database_records import record_of

from tvmflow.database import Store, lock
from tvmflow.database.record import pack, to_line
from tvmflow.errors import DatabaseError

PYTHON = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from database_records import record_of
from tvmflow.database import Store
store = Store(Path(sys.argv[1]))
"""
ADD_MANY = (
    PYTHON
    + """
first = int(sys.argv[2])
print(flush=True)
sys.stdin.readline()
for start in range(first, first + 200, 10):
    store.add([record_of(i, 1e-3 + first * 1e-9) for i in range(start, start + 10)])
"""
)
ADD_FOR_EVER = (
    PYTHON
    + """
for i in range(10**6):
    store.add([record_of(i)])
    print(i, flush=True)
"""
)
READ = (
    PYTHON
    + """
def peak_mib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024
store.read()
before = peak_mib()
reading = Store(Path(sys.argv[2])).read()
print(peak_mib() - before, len(reading.records), [fault.what for fault in reading.faults])
"""
)


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def test_two_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    """Each adds 200 records, half of them under the same keys."""
    writers = [start(ADD_MANY, tmp_path, first) for first in (0, 100)]
    for writer in writers:
        writer.stdout.readline()
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        with writer:
            assert writer.wait(60) == 0
    reading = Store(tmp_path).read()
    assert reading.faults == ()
    expected = [record_of(i, 1e-3 if i < 200 else 1e-3 + 100e-9) for i in range(300)]
    assert reading.by_key == {record.key: record for record in expected}


def test_a_killed_writer_leaves_a_valid_database(tmp_path: Path) -> None:
    """kill -9 at random moments: what was acknowledged is there, the file is whole, leftovers vanish."""
    for seed in range(8):
        with start(ADD_FOR_EVER, tmp_path) as writer:
            writer.stdout.readline()
            time.sleep(random.Random(seed).random() * 0.1)
            writer.kill()
            acknowledged = writer.stdout.read().split()
        reading = Store(tmp_path).read()
        assert reading.faults == ()
        assert all(record_of(int(i)).key in reading.by_key for i in acknowledged[-3:])
    Store(tmp_path).add([record_of(-1)])
    assert [path.name for path in tmp_path.glob("*/*")] == ["records.jsonl"]


@pytest.mark.parametrize("hostile", ["one line of 60 MiB", "1 GiB", "nested lists", "zip bomb", "wide object"])
def test_a_hostile_file_does_not_exhaust_memory(hostile: str, tmp_path: Path) -> None:
    database = tmp_path / "db"
    Store(database).add([record_of()])
    (path,) = database.glob("*/records.jsonl")
    good = path.read_bytes()
    with path.open("wb") as stream:
        if hostile == "one line of 60 MiB":
            stream.truncate(60 << 20)
            stream.seek(60 << 20)
        elif hostile == "1 GiB":
            stream.truncate(1 << 30)
        elif hostile == "nested lists":
            stream.write(b"[" * (3 << 20))
        elif hostile == "zip bomb":
            packed = pack("0" * (200 << 20)).encode()
            stream.write(good.replace(record_of().workload_json.encode(), packed).rstrip())
        else:
            stream.write(b"{" + b",".join(b'"%d":1' % i for i in range(300_000)) + b"}")
        stream.write(b"\n" + good)
    empty = tmp_path / "empty"
    empty.mkdir()
    with start(READ, empty, database) as reader:
        peak_mib, records, what = reader.stdout.read().split(maxsplit=2)
    assert float(peak_mib) < 100
    assert int(records) == (0 if hostile == "1 GiB" else 1)
    assert what.count("'") + what.count('"') >= 2, "one fault"


def test_a_writer_that_was_stopped_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "LOCK_TIMEOUT_S", 0.05)
    with lock.locked(tmp_path), pytest.raises(DatabaseError, match="another process"):
        Store(tmp_path).add([record_of()])
    Store(tmp_path).add([record_of()])


def test_lines_are_the_same_in_every_process(tmp_path: Path) -> None:
    code = PYTHON + "from tvmflow.database.record import to_line; print(to_line(record_of()))"
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code, tmp_path],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        )
        assert done.stdout.rstrip() == to_line(record_of())
