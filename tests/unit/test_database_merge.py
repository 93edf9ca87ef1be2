"""Merging by key: algebra over random records, and a real git repository."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from database_records import parts_of, record_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tvmflow.database import Record, Store
from tvmflow.database import merge as merging
from tvmflow.database.merge import install
from tvmflow.database.record import RECORDS, parse, to_line
from tvmflow.errors import DatabaseError

MANY = settings(max_examples=60, deadline=None)
# Few keys and few timings, so that keys meet and medians tie.
records = st.builds(record_of, st.integers(0, 3), st.sampled_from([1e-3, 2e-3]), seed=st.integers(0, 1))
contents = st.lists(records, max_size=4)


def text(*rows: Record) -> bytes:
    return b"".join(f"{to_line(record)}\n".encode() for record in rows)


def merge(base: bytes, ours: bytes, theirs: bytes) -> merging.Merged:
    return merging.merge(base, ours, theirs, RECORDS)


def union(a: bytes, b: bytes) -> bytes:
    merged = merge(b"", a, b)
    assert merged.faults == ()
    return merged.text


@MANY
@given(contents, contents, contents)
def test_a_union_is_commutative_associative_and_idempotent(a: list[Record], b: list[Record], c: list[Record]) -> None:
    x, y, z = (text(*rows) for rows in (a, b, c))
    assert union(x, y) == union(y, x)
    assert union(union(x, y), z) == union(x, union(y, z))
    once = union(x, x)
    assert union(once, once) == once
    best = {record.key: min(r.median_s for r in a + b if r.key == record.key) for record in a + b}
    assert {r.key: r.median_s for r in map(parse, union(x, y).splitlines())} == best


@MANY
@given(contents, contents, contents)
def test_a_three_way_merge_does_not_know_left_from_right(a: list[Record], b: list[Record], c: list[Record]) -> None:
    base, ours, theirs = (text(*rows) for rows in (a, b, c))
    assert merge(base, ours, theirs) == merge(base, theirs, ours)
    assert merge(base, ours, base).text == union(ours, ours)
    assert merge(base, ours, ours).text == union(ours, ours)


OLD, NEW, OTHER = record_of(1, 1e-3), record_of(1, 2e-3), record_of(1, 3e-3)


@pytest.mark.parametrize(
    ("base", "ours", "theirs", "result"),
    [
        ([], [NEW], [OLD], [OLD]),  # both tuned: the better
        ([OLD], [NEW], [OLD], [NEW]),  # only we changed it, though for a slower one: a wrong timing was put right
        ([OLD], [NEW], [OTHER], [NEW]),
        ([OLD], [], [OLD], []),  # pruned
        ([OLD], [], [NEW], [NEW]),  # pruned here, tuned anew there
        ([OLD], [], [], []),
    ],
)
def test_three_ways(base: list[Record], ours: list[Record], theirs: list[Record], result: list[Record]) -> None:
    assert merge(text(*base), text(*ours), text(*theirs)).text == text(*result)


@pytest.mark.parametrize("bad", [b"garbage\n", b"garbage", b'{"format_version":2}\n', b"\xff\xfe\n"])
def test_invalid_lines_are_a_conflict_and_the_rest_is_merged(bad: bytes) -> None:
    merged = merge(b"", text(OLD) + bad, text(record_of(2)))
    good = text(*sorted([OLD, record_of(2)], key=lambda record: record.key))
    assert merged.text == good + b"<<<<<<< ours\n" + bad.rstrip(b"\n") + b"\n=======\n>>>>>>> theirs\n"
    assert [(str(fault.path), fault.line) for fault in merged.faults] == [("ours", 2)]


class Repository:
    """A git repository in a folder, with a database that git merges."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = Store(folder / "tuning_db")
        self.env = os.environ | {
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_SYSTEM": os.devnull,
            "GIT_EDITOR": "true",
            **{f"GIT_{who}_{what}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
        }
        self.git("init", "-q", "-b", "main")
        install(self.store.path)
        self.commit([record_of(0, 5e-3), record_of(1, 5e-3), record_of(2, 5e-3)])

    def git(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["git", *arguments], cwd=self.folder, env=self.env, check=check, capture_output=True, text=True
        )

    def commit(self, rows: list[Record]) -> None:
        self.store.add(rows)
        self.git("add", "-A")
        self.git("commit", "-qm", "tuned")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    folder = tmp_path / "a repository"
    folder.mkdir()
    repository = Repository(folder)
    repository.git("checkout", "-qb", "branch")
    repository.commit([record_of(0, 1e-3), record_of(1, 2e-3), record_of(3), record_of(5)])
    repository.git("checkout", "-q", "main")
    repository.commit([record_of(0, 2e-3), record_of(1, 1e-3), record_of(4), record_of(5, seed=1)])
    repository.store.prune(lambda record: record.key != record_of(2).key)
    repository.commit([record_of(6, parts=parts_of(6, threads=4))])
    return repository


def assert_merged(store: Store) -> None:
    reading = store.read()
    assert reading.faults == ()
    best = [record_of(0, 1e-3), record_of(1, 1e-3), record_of(3), record_of(4), record_of(5)]
    found = {record.key: record.median_s for record in reading.records}
    assert found == {r.key: r.median_s for r in [*best, record_of(6, parts=parts_of(6, threads=4))]}
    for path in store.path.glob("*/records.jsonl"):
        lines = path.read_bytes()
        assert merge(b"", lines, lines).text == lines


@pytest.mark.parametrize("command", ["merge", "rebase", "cherry-pick"])
def test_git_merges_two_branches_that_both_tuned(repository: Repository, command: str) -> None:
    if command == "rebase":
        repository.git("checkout", "-q", "branch")
        repository.git("rebase", "-q", "main")
    elif command == "merge":
        repository.git("merge", "-q", "--no-edit", "branch")
    else:
        repository.git("cherry-pick", "branch")
    assert_merged(repository.store)
    assert repository.git("status", "--porcelain").stdout == ""


def test_git_reports_lines_it_cannot_merge(repository: Repository) -> None:
    (path,) = repository.store.path.glob("*-2t-*/records.jsonl")
    path.write_bytes(path.read_bytes() + b"garbage\n")
    repository.commit([])
    done = repository.git("merge", "--no-edit", "branch", check=False)
    assert done.returncode == 1
    assert "ours:5: no JSON: expected value" in done.stderr
    assert "error: tuning_db/llvm-x86-64-v4-2t-precise-" in done.stderr
    assert repository.git("status", "--porcelain").stdout.startswith("UU tuning_db/")
    assert path.read_bytes().endswith(b"<<<<<<< ours\ngarbage\n=======\n>>>>>>> theirs\n")
    assert len([fault for fault in repository.store.read().faults if fault.skipped]) == 4
    repository.store.prune(lambda record: True, faulty=True)
    repository.git("add", "-A")
    repository.git("commit", "-qm", "merged")
    assert_merged(repository.store)


def test_without_the_driver_prune_resolves_the_conflict(repository: Repository) -> None:
    repository.git("config", "--remove-section", "merge.tvmflow-db")
    assert repository.git("merge", "--no-edit", "branch", check=False).returncode == 1
    repository.store.prune(lambda record: True, faulty=True)
    repository.store.prune(lambda record: record.key != record_of(2).key)  # git cannot know that main removed it
    assert_merged(repository.store)


def test_the_driver_loads_no_code_from_the_repository(repository: Repository) -> None:
    (repository.folder / "click.py").write_text("raise SystemExit('hostile code ran')")
    repository.git("merge", "-q", "--no-edit", "branch")
    assert_merged(repository.store)


def test_install_says_what_it_did_and_does_it_once(repository: Repository, tmp_path: Path) -> None:
    assert install(repository.store.path) == ()
    attributes = (repository.folder / ".gitattributes").read_text()
    assert attributes == '"tuning_db/**/*.jsonl" text eol=lf merge=tvmflow-db\n'
    (repository.folder / ".gitattributes").write_text("*.png binary")
    assert len(install(repository.store.path)) == 1
    assert (repository.folder / ".gitattributes").read_text() == "*.png binary\n" + attributes
    assert sys.executable in repository.git("config", "merge.tvmflow-db.driver").stdout
    with pytest.raises(DatabaseError, match="not a git repository"):
        install(tmp_path / "elsewhere" / "tuning_db")
