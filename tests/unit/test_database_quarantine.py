"""The quarantine: candidates that killed their worker are remembered, in bounded files that merge."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from database_records import parts_of, record_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tvmflow.cli.db import db
from tvmflow.database import Store, fingerprint
from tvmflow.database.merge import merge
from tvmflow.database.quarantine import LIMIT, QUARANTINE, Accusation, charged, limited
from tvmflow.errors import DatabaseError
from tvmflow.frozen import evolve

PARTS = parts_of(0)
ONE, TWO = (fingerprint(["trace", i]) for i in range(2))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "tuning_db")


def file_of(store: Store) -> Path:
    (path,) = store.path.glob("*/quarantine.jsonl")
    return path


def test_the_second_accusation_convicts(store: Store) -> None:
    assert store.quarantined(PARTS) == frozenset()
    store.accuse(PARTS, ONE, "crashed (exit code -11)")
    store.accuse(PARTS, TWO, "took too long")
    assert store.quarantined(PARTS) == frozenset()
    store.accuse(PARTS, ONE, "crashed (exit code -4)")
    assert store.quarantined(PARTS) == {ONE}
    assert store.quarantined(parts_of(1)) == frozenset(), "another workload"
    assert store.quarantined(parts_of(0, threads=4)) == frozenset(), "another target"
    store.accuse(parts_of(0, threads=4), ONE, "x")
    assert store.quarantined(PARTS) == {ONE}
    assert store.read().records == ()


def test_lines_are_canonical_and_beside_the_records(store: Store) -> None:
    store.add([record_of(0)])
    store.accuse(PARTS, TWO, "b\x1b[31m\n\u00e9")
    store.accuse(PARTS, ONE, "e" * 1000)
    lines = file_of(store).read_text().splitlines()
    assert lines == sorted(lines, key=lambda line: json.loads(line)["trace_sha256"])
    assert {json.loads(line)["error"] for line in lines} == {"b?[31m??", "e" * 200}
    assert lines[0] == json.dumps(json.loads(lines[0]), sort_keys=True, separators=(",", ":"))
    assert json.loads(lines[0]).keys() == {"format_version", "workload", "trace_sha256", "error", "count"}
    assert {path.name for path in file_of(store).parent.iterdir()} == {"records.jsonl", "quarantine.jsonl"}


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (b"garbage", "no JSON: expected value"),
        (b"<<<<<<< HEAD", "a conflict marker of git"),
        (b'{"format_version":2}', "format version 2, this tvmflow reads 1"),
        (b'{"format_version":1}', "workload: Field required"),
        (b"{}", "format version None"),
        (b"[" * (1 << 20), "no JSON: recursion limit exceeded"),
    ],
)
def test_a_faulty_line_costs_itself_alone(store: Store, bad: bytes, what: str) -> None:
    for _ in range(2):
        store.accuse(PARTS, ONE, "crashed")
    path = file_of(store)
    path.write_bytes(bad + b"\n" + path.read_bytes())
    assert store.quarantined(PARTS) == {ONE}
    (fault,) = store.verify()
    assert (fault.path, fault.line, fault.skipped) == (path, 1, True)
    assert fault.what.startswith(what)
    store.accuse(PARTS, TWO, "crashed")
    assert path.read_bytes().endswith(bad + b"\n"), "a newer tvmflow may have written it"
    store.prune(lambda record: True)
    assert bad in path.read_bytes()
    store.prune(lambda record: True, faulty=True)
    assert store.verify() == ()
    assert store.quarantined(PARTS) == {ONE}


@pytest.mark.parametrize(
    "field",
    [
        {"count": 0},
        {"count": True},
        {"count": 1e30},
        {"workload": "x"},
        {"error": "\n"},
        {"trace_sha256": None},
        {"surprise": 1},
    ],
)
def test_what_is_no_accusation_is_skipped(store: Store, field: dict[str, object]) -> None:
    store.accuse(PARTS, ONE, "crashed")
    path = file_of(store)
    path.write_text(json.dumps(json.loads(path.read_text()) | field) + "\n")
    assert [fault.line for fault in store.accused().faults] == [1]


def test_a_file_stays_bounded(store: Store) -> None:
    longest = Accusation(workload=PARTS.workload, trace_sha256=ONE, error="e" * 200, count=10**9)
    assert LIMIT * (len(QUARANTINE.to_line(longest)) + 1) < QUARANTINE.max_bytes
    some = [evolve(longest, trace_sha256=fingerprint(i), count=5) for i in range(LIMIT)]
    new = evolve(longest, count=1)
    assert len(charged(some, new)) == LIMIT
    assert charged(some, new)[-1] == new, "else it could never be accused twice"
    assert limited([*some, new]) == tuple(sorted(some, key=lambda one: one.key))
    store.accuse(PARTS, ONE, "crashed")
    with file_of(store).open("r+b") as stream:
        stream.truncate(1 << 30)
    assert store.quarantined(PARTS) == frozenset()
    assert "more than the 4 MiB" in store.verify()[0].what
    with pytest.raises(DatabaseError, match="more than the 4 MiB"):
        store.accuse(PARTS, ONE, "crashed")


accusations = st.lists(
    st.builds(
        Accusation,
        workload=st.just(PARTS.workload),
        trace_sha256=st.sampled_from([ONE, TWO]),
        error=st.sampled_from("ab"),
        count=st.integers(1, 3),
    ),
    max_size=3,
)


@settings(max_examples=40, deadline=None)
@given(accusations, accusations, accusations)
def test_merging_knows_no_order(a: list[Accusation], b: list[Accusation], c: list[Accusation]) -> None:
    base, ours, theirs = ("".join(f"{QUARANTINE.to_line(one)}\n" for one in side).encode() for side in (a, b, c))
    merged = merge(base, ours, theirs, QUARANTINE)
    assert merged == merge(base, theirs, ours, QUARANTINE)
    assert merge(b"", merged.text, merged.text, QUARANTINE).text == merged.text
    counts = {one.trace_sha256: max(x.count for x in b + c if x.key == one.key) for one in b + c}
    both = merge(b"", ours, theirs, QUARANTINE).text
    assert {one.trace_sha256: one.count for one in map(QUARANTINE.parse, both.splitlines())} == counts


def test_a_merge_stays_bounded() -> None:
    lines = [
        QUARANTINE.to_line(Accusation(workload=PARTS.workload, trace_sha256=fingerprint(i), error="", count=i + 1))
        for i in range(LIMIT + 4)
    ]
    ours, theirs = ("\n".join(side).encode() for side in (lines[::2], lines[1::2]))
    kept = [QUARANTINE.parse(line).count for line in merge(b"", ours, theirs, QUARANTINE).text.splitlines()]
    assert sorted(kept) == list(range(5, LIMIT + 5))


def test_git_merges_quarantines(store: Store, tmp_path: Path) -> None:
    store.accuse(PARTS, ONE, "crashed")
    path = file_of(store)
    ours = path.read_bytes()
    store.accuse(PARTS, ONE, "crashed")
    store.accuse(PARTS, TWO, "crashed")
    sides = [tmp_path / name for name in ("base", "ours", "theirs")]
    for side, text in zip(sides, (b"", ours, path.read_bytes()), strict=True):
        side.write_bytes(text)
    driver = [sys.executable, "-P", "-m", "tvmflow.cli", "db", "merge-driver", *map(str, sides), f"db/x/{path.name}"]
    assert subprocess.run(driver, check=False).returncode == 0
    assert sides[1].read_bytes() == path.read_bytes()


def test_commands_keep_it(store: Store, tmp_path: Path) -> None:
    store.add([record_of(0)])
    for _ in range(3):
        store.accuse(PARTS, ONE, "crashed")
    store.accuse(PARTS, TWO, "crashed")
    other = Store(tmp_path / "other")
    other.accuse(PARTS, TWO, "crashed")
    other.accuse(PARTS, TWO, "crashed")
    run = CliRunner().invoke(db, ["merge", "--no-replay", str(other.path), str(store.path)])
    assert run.exit_code == 0, run.output
    assert other.quarantined(PARTS) == {ONE, TWO}
    (row,) = json.loads(CliRunner().invoke(db, ["stats", "--database", str(other.path), "--json"]).stdout)
    assert row["quarantined"] == 2
    other.prune(lambda record: False)
    assert other.quarantined(PARTS) == {ONE, TWO}
    assert other.read().records == ()
