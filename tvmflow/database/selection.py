"""Which records to remove: those that meet every condition given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from fnmatch import fnmatch

from packaging.version import InvalidVersion, Version

from tvmflow.database.comparison import Comparison
from tvmflow.database.record import Record
from tvmflow.database.store import folder_name
from tvmflow.database.tables import COMPILER
from tvmflow.errors import UsageError


def select(
    keys: tuple[str, ...] = (),
    keep_keys: Iterable[str] | None = None,
    tvm_before: str | None = None,
    before: datetime | None = None,
    target: str | None = None,
) -> Callable[[Record | Comparison], bool]:
    """Whether a record or comparison meets all conditions that are given; without any, none does.

    `keys`: its key starts with one of these. `keep_keys`: it is a record whose key is no line of these. `tvm_before`:
    it was tuned with an older TVM, or nobody knows which. `before`: it was tuned before this day. `target`: its folder
    matches.
    Raises UsageError for a version that is none.
    """
    tests: list[Callable[[Record | Comparison], bool]] = []
    if keys:
        tests.append(lambda record: record.key.startswith(keys))
    if keep_keys is not None:
        kept = frozenset(line.strip() for line in keep_keys)
        tests.append(lambda record: isinstance(record, Record) and record.key not in kept)
    if tvm_before is not None:
        limit = _version(tvm_before)
        if limit is None:
            raise UsageError(f"--tvm-before {tvm_before}: no version", "e.g. --tvm-before 0.27.0")
        tests.append(lambda record: (_version(record.provenance.versions.get(COMPILER, "")) or Version("0")) < limit)
    if before is not None:
        day = f"{before:%Y-%m-%d}"
        tests.append(lambda record: record.provenance.date < day)
    if target is not None:
        tests.append(lambda record: fnmatch(folder_name(record.parts), target))
    return lambda record: bool(tests) and all(test(record) for test in tests)


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None
