"""Comparisons of a convolution's methods: which is taken, what a line must hold, and what the commands do with them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from database_records import NATIVE, V3, V4, record_of, tvmflow_db

from tvmflow.database import Comparison, Convolution, KeyParts, Record, Store
from tvmflow.database.comparison import COMPARISONS, newer, parse, to_line
from tvmflow.database.files import LineError
from tvmflow.database.lookup import serving
from tvmflow.database.merge import merge_files
from tvmflow.errors import DatabaseError
from tvmflow.frozen import evolve


def comparison_of(
    filters: int = 64,
    direct: float = 4e-4,
    two: float | None = 3e-4,
    four: float | None = 2e-4,
    day: int = 1,
    mcpu: str = "x86-64-v4",
    features: tuple[str, ...] = V4,
) -> Comparison:
    convolution = Convolution(batch=1, height=32, width=32, channels=64, filters=filters, padding=(1, 1, 1, 1))
    parts = KeyParts(
        workload=convolution.workload,
        numerics={"fast_math": False, "tf32": False},
        preparation=1,
        target={"kind": "llvm", "machine": "x86_64", "mcpu": mcpu, "features": features, "threads": 2},
    )
    medians = {"direct": direct, "F(2x2)": two, "F(4x4)": four}
    return Comparison(
        parts=parts,
        convolution=convolution,
        name=f"conv2d 1x32x32x64 -> {filters}",
        direct="default",
        timings_s={method: (s * 1.2, s, s * 0.9) for method, s in medians.items() if s is not None},
        provenance=evolve(record_of().provenance, date=f"2025-02-{day:02}T12:00:00Z"),
    )


def by_key(comparisons: Iterable[Comparison]) -> dict[str, Comparison]:
    return {one.key: one for one in comparisons}


@pytest.mark.parametrize(
    ("direct", "two", "four", "taken"),
    [
        (4e-4, 3e-4, 2e-4, "F(4x4)"),
        (4e-4, 2e-4, 3e-4, "F(2x2)"),
        (2e-4, 3e-4, 4e-4, "direct"),
        (1e-3, 0.99e-3, 2e-3, "direct"),  # a hundredth is no more than what measurements differ by
        (1e-3, 0.97e-3, 2e-3, "F(2x2)"),
        (1e-3, None, 0.5e-3, "F(4x4)"),
        (1e-3, None, None, "direct"),
    ],
)
def test_the_fastest_is_taken_if_it_is_so_by_a_margin(
    direct: float, two: float | None, four: float | None, taken: str
) -> None:
    assert comparison_of(direct=direct, two=two, four=four).taken == taken


def test_a_line_is_read_back() -> None:
    assert parse(to_line(one := comparison_of()).encode()) == one


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"format_version": 2}, "format version 2"),
        ({"key": "0" * 64}, "the key does not fit its parts"),
        ({"timings_s": {"F(2x2)": [1e-3]}}, "no timings of the direct kernel"),
        ({"timings_s": {"direct": [-1.0]}}, "greater than 0"),
        ({"timings_s": {"direct": []}}, "at least 1 item"),
        ({"timings_s": {"direct": [1e-3], "F(6x6)": [1e-3]}}, "Input should be 'direct'"),
        ({"filters": 65}, "not that of its convolution"),
        ({"padding": [1, 1]}, "convolution.padding"),
        ({"channels": "64"}, "convolution.channels"),
    ],
)
def test_a_line_that_is_not_exactly_one_is_refused(change: dict[str, object], what: str) -> None:
    body = json.loads(to_line(comparison_of()))
    for name, value in change.items():
        (body["convolution"] if name in body["convolution"] else body)[name] = value
    with pytest.raises(LineError, match=what.replace("(", r"\(")):
        parse(json.dumps(body).encode())


def test_a_portable_level_serves_a_cpu_that_has_it_and_never_the_reverse() -> None:
    portable, native = comparison_of(), comparison_of(mcpu="znver4", features=NATIVE)
    assert serving({portable.key: portable}, native.parts, NATIVE) == portable
    assert serving({native.key: native}, portable.parts, NATIVE) is None
    assert serving({portable.key: portable}, comparison_of(mcpu="haswell", features=V3).parts, NATIVE) is None
    assert serving({portable.key: portable}, comparison_of(65, mcpu="znver4", features=NATIVE).parts, NATIVE) is None


def test_the_newer_one_stays_whatever_the_order(tmp_path: Path) -> None:
    old, new = comparison_of(direct=1e-4, day=1), comparison_of(direct=9e-4, day=2)
    assert newer(old, new) == newer(new, old) == new
    Store(tmp_path / "a").add_comparisons([new, comparison_of(32)])
    Store(tmp_path / "b").add_comparisons([old, comparison_of(96)])
    Store(tmp_path / "b").add([record_of()])
    tvmflow_db("merge", "--no-replay", tmp_path / "ab", tmp_path / "a", tmp_path / "b")
    tvmflow_db("merge", "--no-replay", tmp_path / "ba", tmp_path / "b", tmp_path / "a")
    (ab, ba) = (Store(tmp_path / name).read() for name in ("ab", "ba"))
    assert ab == ba
    assert ab.records == (record_of(),)
    assert by_key(ab.comparisons) == by_key([new, comparison_of(32), comparison_of(96)])


def test_git_merges_them_by_key(tmp_path: Path) -> None:
    sides = {
        "base": [comparison_of(32)],
        "ours": [comparison_of(32, day=3), comparison_of(64)],
        "theirs": [comparison_of(32, day=2), comparison_of(96)],
    }
    for name, entries in sides.items():
        (tmp_path / name).write_text("".join(f"{to_line(one)}\n" for one in entries))
    faults = merge_files(*(tmp_path / name for name in sides), f"db/x/{COMPARISONS.file_name}")
    assert faults == ()
    found = map(parse, (tmp_path / "ours").read_bytes().splitlines())
    assert by_key(found) == by_key([comparison_of(32, day=3), comparison_of(64), comparison_of(96)])


def test_a_damaged_line_is_named_and_costs_itself_alone(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    store.add([record_of()])
    store.add_comparisons([comparison_of(32), comparison_of(64)])
    (path,) = (tmp_path / "db").glob(f"*/{COMPARISONS.file_name}")
    first, second = path.read_bytes().splitlines()
    path.write_bytes(first[:200] + b"\n" + second + b"\n")
    reading = store.read()
    assert reading.records == (record_of(),)
    assert reading.comparisons == (parse(second),)
    (fault,) = store.verify()
    assert str(fault).startswith(f"{path}:1: no JSON")
    with pytest.raises(DatabaseError, match="that cost records: 1"):
        tvmflow_db("verify", "--no-replay", "--database", tmp_path / "db")
    store.add_comparisons([comparison_of(96)])
    assert len(store.read().comparisons) == 2
    assert len(store.read().faults) == 1, "kept when the file is written"
    tvmflow_db("prune", "--faulty", "--database", tmp_path / "db")
    assert tvmflow_db("verify", "--no-replay", "--database", tmp_path / "db").endswith(
        "1 records, 2 comparisons, no faults\n"
    )


@pytest.mark.parametrize(
    ("conditions", "left"),
    [
        ([], {32, 64}),
        (["--key", comparison_of(32).key[:12]], {64}),
        (["--before", "2025-02-02"], {64}),
        (["--target", "llvm-x86-64-v4-*"], set()),
        (["--keep-keys", "/dev/null"], {32, 64}),
    ],
)
def test_prune(tmp_path: Path, conditions: list[str], left: set[int]) -> None:
    store = Store(tmp_path)
    store.add([record := record_of()])
    store.add_comparisons([comparison_of(32), comparison_of(64, day=2)])
    tvmflow_db("prune", "--database", tmp_path, "--dry-run", *conditions)
    assert len(store.read().comparisons) == 2
    tvmflow_db("prune", "--database", tmp_path, *conditions)
    assert {one.convolution.filters for one in store.read().comparisons} == left
    assert store.read().records == ((record,) if conditions[:1] in ([], ["--key"]) else ())


def test_they_are_listed(tmp_path: Path) -> None:
    Store(tmp_path).add_comparisons([one := comparison_of(four=None)])
    (row,) = json.loads(tvmflow_db("comparisons", "--database", tmp_path, "--json"))
    assert (row["key"], row["taken"], row["schedule"]) == (one.key, "F(2x2)", "default")
    assert (row["direct s"], row["F(2x2) s"], row["F(4x4) s"]) == (4e-4, 3e-4, None)
    assert "1x32x32x64 -> 64" in tvmflow_db("comparisons", "--database", tmp_path)


def test_a_database_without_any_is_as_before(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add([record_of()])
    reading = store.read()
    assert reading.comparisons == ()
    assert store.comparisons() == {}
    assert [path.name for path in tmp_path.glob("*/*")] == ["records.jsonl"]
    assert isinstance(reading.records[0], Record)
