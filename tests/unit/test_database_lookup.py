"""Lookup: the exact key, else a portable level that the CPU has, else the nearest and why not."""

from __future__ import annotations

from pathlib import Path

import pytest
from database_records import NATIVE, V2, V3, V4, parts_of, record_of

from tvmflow.database import Match, Miss, Record, Store
from tvmflow.frozen import evolve


def lookup(tuned: list[Record], build: Record, cpu: tuple[str, ...], tmp_path: Path) -> Match | Miss:
    store = Store(tmp_path / "db")
    store.add(tuned)
    return store.lookup(build.parts, cpu)


def test_an_exact_match_wins(tmp_path: Path) -> None:
    native = record_of(parts=parts_of(mcpu="sapphirerapids", features=NATIVE))
    portable = record_of(median_s=1e-9)
    found = lookup([portable, native], native, NATIVE, tmp_path)
    assert found == Match(native, exact=True)


@pytest.mark.parametrize(
    ("tuned", "build", "cpu", "serves"),
    [
        (("x86-64-v4", V4), ("sapphirerapids", NATIVE), NATIVE, "x86-64-v4"),
        (("x86-64-v3", V3), ("sapphirerapids", NATIVE), NATIVE, "x86-64-v3"),
        (("x86-64-v3", V3), ("x86-64-v4", V4), NATIVE, "x86-64-v3"),
        (("sapphirerapids", NATIVE), ("x86-64-v4", V4), NATIVE, None),  # the reverse
        (("x86-64-v4", V4), ("x86-64-v3", V3), NATIVE, None),  # the build does not use what the CPU has
        (("x86-64-v4", V4), ("sapphirerapids", NATIVE), V3, None),  # the CPU lacks it, e.g. in a virtual machine
        (("skylake", V3), ("sapphirerapids", NATIVE), NATIVE, None),  # no portable level
        (("x86-64-v2", V2), ("haswell", V3), V3, "x86-64-v2"),
    ],
)
def test_portable_levels(
    tuned: tuple[str, tuple[str, ...]],
    build: tuple[str, tuple[str, ...]],
    cpu: tuple[str, ...],
    serves: str | None,
    tmp_path: Path,
) -> None:
    record = record_of(parts=parts_of(mcpu=tuned[0], features=tuned[1]))
    found = lookup([record], record_of(parts=parts_of(mcpu=build[0], features=build[1])), cpu, tmp_path)
    if serves:
        assert found == Match(record, exact=False)
    else:
        assert isinstance(found, Miss)
        assert found.nearest == record
        assert found.difference[-1].startswith("target.mcpu") or len(found.difference) == 2


def test_the_highest_level_serves(tmp_path: Path) -> None:
    levels = [record_of(parts=parts_of(mcpu=f"x86-64-v{n}", features=f)) for n, f in ((2, V2), (4, V4), (3, V3))]
    native = record_of(parts=parts_of(mcpu="znver5", features=NATIVE))
    assert lookup(levels, native, NATIVE, tmp_path) == Match(levels[1], exact=False)


@pytest.mark.parametrize(
    "other",
    [
        parts_of(threads=4),
        parts_of(fast_math=True),
        parts_of(workload=9),
        evolve(parts_of(), preparation=2),
    ],
)
def test_other_parts_never_match(other: object, tmp_path: Path) -> None:
    native = record_of(parts=parts_of(mcpu="znver5", features=NATIVE))
    assert isinstance(lookup([record_of(parts=other)], native, NATIVE, tmp_path), Miss)


def test_a_miss_names_the_nearest_of_the_same_workload(tmp_path: Path) -> None:
    near, far = record_of(1, parts=parts_of(1, threads=8, fast_math=True)), record_of(2)
    missed = lookup([near, far], record_of(1), V4, tmp_path)
    assert missed == Miss(near, ("target.threads: 2 against 8", "numerics.fast_math: False against True"))
    assert Store(tmp_path / "db").lookup(record_of(2).parts, V4) == Match(far, exact=True)


def test_an_empty_database_has_no_nearest(tmp_path: Path) -> None:
    (tmp_path / "db").mkdir()
    assert Store(tmp_path / "db").lookup(parts_of(), V4) == Miss(None, ())
