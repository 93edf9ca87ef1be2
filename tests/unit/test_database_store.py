"""The store: nothing is lost, every fault is located, whatever is in the files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from database_records import V3, parts_of, record_of

from tvmflow.database import Record, Store, files
from tvmflow.database import store as stores
from tvmflow.database.files import MAX_LINE_BYTES
from tvmflow.database.record import FORMAT_VERSION, RECORDS, pack, to_line, unpack
from tvmflow.errors import DatabaseError
from tvmflow.frozen import evolve

KEYS = [record.key for record in map(record_of, range(3))]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "tuning_db")
    made.add(map(record_of, range(3)))
    return made


def file_of(store: Store) -> Path:
    (path,) = store.path.glob("*/records.jsonl")
    return path


def changed(**fields: object) -> Callable[[str], str]:
    """A line with fields replaced; the key is left as it was."""
    return lambda line: json.dumps(json.loads(line) | fields)


def inside(section: str, **fields: object) -> Callable[[str], str]:
    return lambda line: json.dumps((body := json.loads(line)) | {section: body[section] | fields})


def test_what_is_added_is_read(store: Store) -> None:
    reading = store.read()
    assert reading.records == tuple(sorted(map(record_of, range(3)), key=lambda r: r.key))
    assert reading.faults == ()
    assert file_of(store).parent.name.startswith("llvm-x86-64-v4-2t-precise-")
    lines = file_of(store).read_text().splitlines()
    assert lines == sorted(lines, key=lambda line: json.loads(line)["key"])
    assert all(json.loads(line)["format_version"] == FORMAT_VERSION for line in lines)
    assert {path.name for path in store.path.rglob("*") if path.is_file()} == {"records.jsonl"}


def test_targets_and_numerics_have_folders_of_their_own(store: Store) -> None:
    store.add(
        [
            record_of(parts=parts_of(mcpu="x86-64-v3", features=V3)),
            record_of(parts=parts_of(threads=4)),
            record_of(parts=parts_of(fast_math=True)),
            record_of(parts=parts_of(features=V3)),
            record_of(parts=parts_of(mcpu="../../etc/\u00e9")),
        ]
    )
    names = sorted(path.parent.name[:-9] for path in store.path.rglob("records.jsonl"))
    assert names == [
        "llvm-.._.._etc__-2t-precise",
        "llvm-x86-64-v3-2t-precise",
        "llvm-x86-64-v4-2t-fast_math",
        *["llvm-x86-64-v4-2t-precise"] * 2,
        "llvm-x86-64-v4-4t-precise",
    ]
    assert len(store.read().records) == 8
    assert store.read().faults == ()


def test_what_was_measured_with_more_care_replaces_what_it_confirms(store: Store) -> None:
    lucky, careful, better = record_of(1, 1e-3), record_of(1, 2e-3), record_of(1, 1.5e-3)
    store.add([lucky])
    others = [record for record in store.read().records if record.key != lucky.key]
    store.replace(careful, lucky)
    assert set(store.read().by_key) == {careful.key, *(record.key for record in others)}
    assert store.read().by_key[careful.key] == careful
    store.keep(better)  # somebody else was faster meanwhile
    store.replace(record_of(1, 1.8e-3), careful)
    assert store.read().by_key[careful.key] == better


def test_the_better_record_stays_whatever_the_order(store: Store, tmp_path: Path) -> None:
    fast, slow, tie = record_of(1, 5e-4), record_of(1, 2e-3), record_of(1, 5e-4, seed=7)
    added = store.add([slow, fast, record_of(9)])
    assert (added.new, added.improved) == ((record_of(9).key,), (fast.key,))
    assert store.add([slow]).improved == ()
    other = Store(tmp_path / "other")
    for record in (tie, record_of(9), fast, record_of(0), record_of(2)):
        other.add([record])
    store.add([tie])
    assert file_of(store).read_bytes() == file_of(other).read_bytes()


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda line: line[: len(line) // 2], "no JSON: EOF while parsing"),
        (lambda line: "garbage", "no JSON: expected value"),
        (lambda line: "[1, 2]", "no JSON object"),
        (lambda line: "<<<<<<< HEAD", "a conflict marker of git"),
        (lambda line: "[" * 100_000, "no JSON: recursion limit exceeded"),
        (changed(trace=json.loads("[" * 300 + "]" * 300)), "no JSON: recursion limit exceeded"),
        (lambda line: line.replace("0.25", "1e999"), "instruction 3 (SampleCategorical): attribute 1: `[inf, 0.75]`"),
        (changed(key="0" * 64), "the key does not fit its parts, which make"),
        (changed(key=None), "the key does not fit its parts"),
        (inside("parts", preparation=2), "the key does not fit its parts"),
        (changed(format_version=FORMAT_VERSION + 1), f"format version 2, this tvmflow reads {FORMAT_VERSION}"),
        (changed(format_version=True), "format version True"),
        (changed(timings_s=[1e-3, float("nan")]), "no JSON"),
        (changed(timings_s=[1e-3, -1.0]), "timings_s.1: Input should be greater than 0"),
        (changed(timings_s=["0.001"]), "timings_s.0: Input should be a valid number"),
        (changed(timings_s=[]), "timings_s: Tuple should have at least 1 item"),
        (changed(timings_s=[1e-3] * 60_000), "more than 256 KiB beside workload and trace"),
        (changed(surprise=1), "surprise: Extra inputs are not permitted"),
        (changed(**{"\x1b[31m": 1}), "?[31m: Extra inputs are not permitted"),
        (changed(name="\x1b[31m"), "name: String should match pattern"),
        (changed(name="\ud800"), "no JSON"),
        (lambda line: line.replace('"m', '"\udcff'), "no JSON: invalid unicode code point"),
        (changed(workload_json="not base64!"), "workload_json: Value error, damaged"),
        (changed(workload_json="AAAA"), "workload_json: Value error, damaged"),
        (changed(workload_json=pack("x" * (17 << 20))), "workload_json: Value error, unpacks to more than 16 MiB"),
        (inside("provenance", date="yesterday"), "provenance.date: String should match pattern"),
        (inside("provenance", seed="0"), "provenance.seed: Input should be a valid integer"),
        (inside("parts", target={"kind": "llvm"}), "parts.target: Value error, `mcpu` is missing"),
        (lambda line: " " * MAX_LINE_BYTES + line, "longer than 4 MiB"),
    ],
)
def test_a_bad_line_costs_itself_alone(store: Store, damage: Callable[[str], str], what: str) -> None:
    path = file_of(store)
    lines = path.read_text().splitlines()
    bad = damage(lines[1]).encode(errors="surrogateescape" if "\udcff" in damage(lines[1]) else "strict")
    path.write_bytes(b"\n".join([lines[0].encode(), bad, lines[2].encode(), b""]))
    reading = store.read()
    (fault,) = reading.faults
    assert fault.what.startswith(what) or what in fault.what
    assert (fault.path, fault.line, fault.skipped) == (path, 2, True)
    assert fault.fix
    assert str(fault).isprintable()
    assert [record.key for record in reading.records] == [json.loads(lines[i])["key"] for i in (0, 2)]
    # Writing keeps the bad line as it is, and a better tvmflow or a person can still save it.
    store.add([record_of(50)])
    assert bad in path.read_bytes().split(b"\n")
    assert (len(store.read().records), len(store.read().faults)) == (3, 1)
    store.prune(lambda record: True, faulty=True)
    assert (len(store.read().records), store.read().faults) == (3, ())


def test_a_fault_names_the_key_where_it_can(store: Store) -> None:
    path = file_of(store)
    path.write_text(path.read_text().replace('"seed":0', '"seed":"zero"', 1))
    (fault,) = store.read().faults
    assert fault.key in KEYS
    assert str(fault) == f"{path}:1: {fault.key[:12]}: provenance.seed: Input should be a valid integer"


def test_a_truncated_last_line_keeps_the_rest(store: Store) -> None:
    path = file_of(store)
    path.write_bytes(path.read_bytes()[:-100])
    assert [fault.line for fault in store.read().faults] == [3]
    added = store.add(map(record_of, range(3)))
    assert len(added.new) == 1
    assert len(store.read().records) == 3


def test_order_and_twins_are_mended(store: Store) -> None:
    path = file_of(store)
    good = path.read_bytes()
    lines = good.splitlines(keepends=True)
    twin = to_line(record_of(1, 0.5)).encode() + b"\r\n"
    path.write_bytes(b"\n" + b"".join(reversed(lines)) + twin + b"\n\n")
    reading = store.read()
    assert reading.records == tuple(sorted(map(record_of, range(3)), key=lambda r: r.key))
    assert [fault.skipped for fault in reading.faults] == [False]
    store.prune(lambda record: True)
    assert path.read_bytes() == good


def test_a_record_in_a_foreign_folder_is_used_and_moved(store: Store) -> None:
    path = file_of(store)
    good = path.read_bytes()
    astray = store.path / "elsewhere" / "records.jsonl"
    path.parent.rename(astray.parent)
    reading = store.read()
    assert len(reading.records) == 3
    assert "3 records of other targets" in reading.faults[0].what
    store.prune(lambda record: True)
    assert path.read_bytes() == good
    assert not astray.parent.exists()


def test_many_faults_are_summed_up(store: Store) -> None:
    path = file_of(store)
    path.write_bytes(b"x\n" * 5000 + path.read_bytes())
    reading = store.read()
    assert len(reading.records) == 3
    assert len(reading.faults) == files.MAX_FAULTS + 1
    assert reading.faults[-1].what == f"{5000 - files.MAX_FAULTS} more lines hold no record"
    store.add([record_of(3)])
    assert path.read_bytes().endswith(b"x\n" * 5000)


@pytest.mark.parametrize("kind", ["too large", "folder", "pipe"])
def test_a_file_that_is_none_is_never_replaced(store: Store, kind: str) -> None:
    path = file_of(store)
    path.unlink()
    if kind == "too large":
        with path.open("wb") as stream:
            stream.truncate(1 << 30)
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    store.add([record_of(parts=parts_of(threads=4))])
    with pytest.raises(DatabaseError, match=r"MiB|no regular file"):
        store.add([record_of(7)])
    store.prune(lambda record: True, faulty=True)
    assert path.exists()
    reading = store.read()
    assert len(reading.records) == 1
    assert len(reading.faults) == 1
    assert reading.faults[0].line == 0


def test_a_file_does_not_outgrow_what_is_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "RECORDS", replace(RECORDS, max_bytes=file_of(store).stat().st_size + 10))
    before = file_of(store).read_bytes()
    with pytest.raises(DatabaseError, match="would grow"):
        store.add([record_of(7)])
    assert file_of(store).read_bytes() == before
    assert len(list(store.path.rglob("*"))) == 2


@pytest.mark.parametrize("trace", [float("nan"), float("inf"), "\ud800", {1, 2}, "x" * (5 << 20), object()])
def test_a_record_that_could_not_be_read_back_is_not_written(store: Store, trace: object) -> None:
    before = file_of(store).read_bytes()
    broken = evolve(record_of(8), trace=trace)
    with pytest.raises(DatabaseError, match="cannot be kept"):
        store.add([record_of(9), broken])
    assert file_of(store).read_bytes() == before


def test_unicode_names_survive(store: Store) -> None:
    record = evolve(record_of(5), name="畳み込み é 🙂")
    store.add([record])
    assert store.read().by_key[record.key] == record
    assert file_of(store).read_bytes().isascii()


def test_workloads_are_packed() -> None:
    text = '{"é": [1, 2]}' * 1000
    assert unpack(pack(text)) == text
    assert len(pack(text)) < 300


def test_nothing_there_is_an_error_and_unwritable_too(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="no tuning database is there"):
        Store(tmp_path / "typo").read()
    with pytest.raises(DatabaseError, match="no tuning database is there"):
        Store(tmp_path / "typo").prune(lambda record: True)
    (tmp_path / "file").write_text("")
    with pytest.raises(DatabaseError, match="cannot be written"):
        Store(tmp_path / "file").add([record_of()])


def test_prune_removes_and_leaves_nothing_empty(store: Store) -> None:
    assert [record.key for record in store.prune(lambda record: record.key != KEYS[0])] == [KEYS[0]]
    assert len(store.read().records) == 2
    store.prune(lambda record: False)
    assert list(store.path.iterdir()) == []


def test_verify_replays_each_record(store: Store) -> None:
    def replay(records: Sequence[Record]) -> dict[str, str]:
        assert [record.key for record in records] == sorted(KEYS)
        return {KEYS[1]: "does not apply"}

    assert store.verify() == ()
    (fault,) = store.verify(replay)
    assert (fault.path, fault.key, fault.what) == (file_of(store), KEYS[1], "does not apply")
    assert json.loads(file_of(store).read_text().splitlines()[fault.line - 1])["key"] == KEYS[1]


@pytest.mark.parametrize("other", ["setup.py", "src/a.c", "records.jsonl", "a/b/records.jsonl"])
def test_a_folder_of_something_else_is_no_database(tmp_path: Path, other: str) -> None:
    path = tmp_path / other
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")
    for action in (Store(tmp_path).read, Store(tmp_path).verify, Store(tmp_path).accused):
        with pytest.raises(DatabaseError, match=rf"it holds {other.split('/')[0]} and no file of records"):
            action()
    with pytest.raises(DatabaseError, match="no file of records"):
        Store(tmp_path).prune(lambda record: True)
    Store(tmp_path).add([record_of()])
    assert len(Store(tmp_path).read().records) == 1, "a database may stand beside other things"


def test_a_database_without_records_is_one(tmp_path: Path) -> None:
    (tmp_path / "llvm-x-2t-precise-00000000").mkdir()
    (tmp_path / "llvm-x-2t-precise-00000000" / ".records.killed").touch()
    (tmp_path / ".gitkeep").touch()
    (tmp_path / "README.md").touch()
    assert Store(tmp_path).verify() == ()
