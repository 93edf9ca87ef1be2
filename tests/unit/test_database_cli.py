"""`tvmflow db`: every command by its output and exit code, as people and CI see it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from database_records import parts_of, record_of, tvmflow_db

from tvmflow.cli.db import db
from tvmflow.database import Record, Store, unpack
from tvmflow.errors import DatabaseError, UsageError
from tvmflow.frozen import evolve

A = [*(record_of(i, 1e-3) for i in range(4)), record_of(parts=parts_of(threads=4))]
B = [record_of(0, 2e-3), record_of(1, 5e-4, tvm="0.26.0"), record_of(2, 1e-3, seed=1), record_of(3, 1e-3), record_of(9)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Store(tmp_path / "tuning_db").add(A)
    Store(tmp_path / "b").add(B)
    return tmp_path


def as_json(*arguments: object) -> object:
    return json.loads(tvmflow_db(*arguments, "--json"))


def keys(*records: Record) -> list[str]:
    return sorted(record.key for record in records)


def spoil(database: Path) -> Path:
    path = sorted(database.glob("*/records.jsonl"))[0]
    path.write_bytes(path.read_bytes() + b"garbage\n")
    return path


def test_stats(folder: Path) -> None:
    two, four = as_json("stats")
    assert (two["records"], four["records"]) == (4, 1)
    assert two["target"].startswith("llvm-x86-64-v4-2t-precise-")
    assert two["median GFLOP/s"] == pytest.approx(2 * 64**3 / 1e-3 / 1e9)
    assert two["bytes"] + four["bytes"] == sum(path.stat().st_size for path in folder.glob("tuning_db/*/*"))
    assert (two["tvm"], two["first"], two["last"]) == ("0.27.0.post1", "2025-01-31", "2025-01-31")
    assert as_json("stats", "--database", "b")[0]["tvm"] == "0.26.0, 0.27.0.post1"
    assert "median GFLOP/s" in tvmflow_db("stats")


def test_an_empty_database_is_no_error(folder: Path) -> None:
    (folder / "empty").mkdir()
    assert as_json("stats", "--database", "empty") == []
    assert as_json("diff", "empty", "empty") == []
    assert as_json("verify", "--database", "empty") == []


def test_show(folder: Path) -> None:
    assert [row["key"] for row in as_json("show")] == keys(*A)
    record = A[1]
    whole = as_json("show", record.key[:10])
    assert (whole["key"], whole["trace"], whole["timings_s"]) == (record.key, record.trace, list(record.timings_s))
    assert whole["workload_json"] == unpack(record.workload_json)
    assert "target.features     avx2 avx512f" in tvmflow_db("show", record.key)
    assert record.key[:12] in tvmflow_db("show")
    with pytest.raises(DatabaseError, match="no record's key starts with zz"):
        tvmflow_db("show", "zz")


def test_what_a_record_says_is_not_markup(folder: Path) -> None:
    Store(folder / "tuning_db").add([record := evolve(record_of(7), name="[red]x[/] [/bold")])
    assert "[red]x[/] [/bold" in tvmflow_db("show")
    assert "[red]x[/] [/bold" in tvmflow_db("show", record.key)


def test_diff(folder: Path) -> None:
    found = {row["key"]: (row["where"], row["B / A"]) for row in as_json("diff", "tuning_db", "b")}
    assert found == {
        A[0].key: ("A faster", 2),
        A[1].key: ("B faster", 0.5),
        A[2].key: ("changed", 1),
        A[4].key: ("only A", None),
        B[4].key: ("only B", None),
    }


def test_merge_joins_and_reports_faults_after_the_work(folder: Path) -> None:
    spoil(folder / "b")
    with pytest.raises(DatabaseError, match="that cost records: 1"):
        tvmflow_db("merge", "--no-replay", "tuning_db", "b")
    assert [r.key for r in Store(folder / "tuning_db").read().records] == keys(*A, B[4])
    assert Store(folder / "tuning_db").read().by_key[A[1].key] == B[1]
    (row,) = as_json("merge", "--no-replay", "new/place", "tuning_db")
    assert row == {"source": "tuning_db", "records": 6, "new": 6, "improved": 0, "faults": 0}
    with pytest.raises(DatabaseError, match="typo: no tuning database"):
        tvmflow_db("merge", "--no-replay", "another", "tuning_db", "typo")
    assert not (folder / "another").exists()


@pytest.mark.parametrize(
    ("arguments", "removed"),
    [
        ([], []),
        (["--key", A[0].key[:12], "--key", A[1].key], [A[0], A[1]]),
        (["--key", A[0].key, "--target", "*-4t-*"], []),
        (["--target", "*-4t-*"], [A[4]]),
        (["--before", "2025-01-31"], []),
        (["--before", "2025-02-01"], A),
        (["--keep-keys", "keys.txt"], A[1:]),
        (["--tvm-before", "0.27.0"], []),
        (["--tvm-before", "0.28"], A),
    ],
)
def test_prune(folder: Path, arguments: list[str], removed: list[Record]) -> None:
    (folder / "keys.txt").write_text(f"{A[0].key}\n")
    store = Store(folder / "tuning_db")
    assert [row["key"] for row in as_json("prune", *arguments, "--dry-run")] == keys(*removed)
    assert len(store.read().records) == len(A)
    assert [row["key"] for row in as_json("prune", *arguments)] == keys(*removed)
    assert [record.key for record in store.read().records] == keys(*(r for r in A if r not in removed))


def test_prune_wants_a_version(folder: Path) -> None:
    with pytest.raises(UsageError, match="no version"):
        tvmflow_db("prune", "--tvm-before", "old")


def test_prune_drops_faulty_lines_only_when_told(folder: Path) -> None:
    path = spoil(folder / "tuning_db")
    tvmflow_db("prune")
    assert path.read_bytes().endswith(b"garbage\n")
    tvmflow_db("prune", "--faulty")
    assert as_json("verify", "--no-replay") == []


def test_explain(folder: Path) -> None:
    lines = as_json("explain", A[4].key)
    assert lines == {"key": A[4].key, "against": A[0].key, "difference": ["target.threads: 4 against 2"]}
    assert len(as_json("explain", A[0].key, A[1].key)["difference"]) == 1
    (folder / "parts.json").write_text(parts_of(1, mcpu="znver5").model_dump_json())
    assert "target.mcpu: znver5 against x86-64-v4" in tvmflow_db("explain", "parts.json")
    (folder / "parts.json").write_text("{}")
    with pytest.raises(UsageError, match="not the parts of a key: Field required"):
        tvmflow_db("explain", "parts.json")
    with pytest.raises(UsageError, match="5 keys start so"):
        tvmflow_db("explain", "")
    Store(folder / "one").add([A[0]])
    with pytest.raises(DatabaseError, match="no other record"):
        tvmflow_db("explain", A[0].key, "--database", "one")


def test_verify_names_places_and_fails(folder: Path) -> None:
    assert tvmflow_db("verify", "--no-replay") == "tuning_db: 5 records, no faults\n"
    path = spoil(folder / "tuning_db").relative_to(folder)
    done = subprocess.run(
        [sys.executable, "-m", "tvmflow.cli", "db", "verify", "--json", "--no-replay"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 15
    (fault,) = json.loads(done.stdout)
    assert (fault["path"], fault["line"], fault["skipped"]) == (str(path), 5, True)
    assert f"skipped: {path}:5: no JSON" in done.stderr
    assert "Traceback" not in done.stderr


def test_untidiness_does_not_fail(folder: Path) -> None:
    path = sorted((folder / "tuning_db").glob("*/records.jsonl"))[0]
    path.write_bytes(b"".join(reversed(path.read_bytes().splitlines(keepends=True))))
    assert [fault["skipped"] for fault in as_json("verify", "--no-replay")] == [False]


@pytest.mark.parametrize("command", ["stats", "show", "verify", "prune"])
def test_what_is_no_database_is_an_error(folder: Path, command: str) -> None:
    with pytest.raises(DatabaseError, match=r"\.: no tuning database: it holds (b|tuning_db) and no file of records"):
        tvmflow_db(command, "--database", ".")
    with pytest.raises(DatabaseError, match="missing: no tuning database is there"):
        tvmflow_db(command, "--database", "missing")
    (folder / "file").touch()
    done = CliRunner().invoke(db, [command, "--database", "file"])
    assert (done.exit_code, "'file' is a file" in done.stderr) == (2, True)
    (folder / "empty").mkdir()
    assert "no records" in tvmflow_db("verify", "--database", "empty")


@pytest.mark.parametrize("command", sorted(db.commands))
def test_every_command_explains_itself(command: str) -> None:
    assert len(tvmflow_db(command, "--help")) > 300
