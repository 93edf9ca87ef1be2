"""The tuning database: a folder of text files that git can hold, that two people can change at once and merge.

    tuning_db/llvm-x86-64-v4-2t-precise-1a2b3c4d/records.jsonl

One folder per target and numerics mode, in it one line per workload. Reading never fails for what a file holds: what
is no record is a located fault. Writers take turns through a lock on the database's folder, and each file is replaced
whole, so that it is valid at every moment.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tvmflow.database import files
from tvmflow.database.files import TIDY, Fault
from tvmflow.database.keys import KeyParts, fingerprint
from tvmflow.database.lookup import Match, Miss, find
from tvmflow.database.record import LineError, Record, better, parse, to_line
from tvmflow.errors import DatabaseError

RECORDS = "records.jsonl"
LOCK_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Reading:
    """Everything a database holds: the best record per key, sorted by key, and every fault found on the way."""

    records: tuple[Record, ...]
    faults: tuple[Fault, ...]

    @cached_property
    def by_key(self) -> dict[str, Record]:
        return {record.key: record for record in self.records}

    def lookup(self, parts: KeyParts, cpu_features: Collection[str]) -> Match | Miss:
        """See `lookup.find`."""
        return find(self.by_key, parts, cpu_features)


@dataclass(frozen=True)
class Added:
    """The keys that `add` wrote: those that were not there, and those whose record was replaced by a better one."""

    new: tuple[str, ...]
    improved: tuple[str, ...]


@dataclass(frozen=True)
class Store:
    """A database in a folder. It holds nothing open; every method reads what is there now."""

    path: Path

    def read(self) -> Reading:
        """All records and faults. Raises DatabaseError where no folder is."""
        self._check_there()
        return _reading(self._pages())

    def lookup(self, parts: KeyParts, cpu_features: Collection[str]) -> Match | Miss:
        """`read().lookup(...)`; who has many keys to look up reads once."""
        return self.read().lookup(parts, cpu_features)

    def add(self, records: Iterable[Record]) -> Added:
        """Merges records into the files; of each key the better record stays.

        Raises DatabaseError where a record cannot be kept (nothing is written then) or the folder cannot be written.
        """
        given: dict[str, Record] = {}
        for record in records:
            _check_keepable(record)
            given[record.key] = better(record, given[record.key]) if record.key in given else record
        new: list[str] = []
        improved: list[str] = []
        with self._locked():
            for folder, group in _by_folder(given.values()).items():
                path = self.path / folder / RECORDS
                page = files.read(path) if path.exists() else files.Page()
                old = {record.key: record for record in page.records}
                merged = old | {r.key: better(r, old[r.key]) if r.key in old else r for r in group}
                if merged != old:
                    _write(path, merged.values(), page, page.faulty)
                new += merged.keys() - old.keys()
                improved += [key for key in old if merged[key] != old[key]]
        return Added(tuple(sorted(new)), tuple(sorted(improved)))

    def keep(self, record: Record) -> None:
        """`add` for one record."""
        self.add([record])

    def prune(self, keep: Callable[[Record], bool], faulty: bool = False) -> tuple[Record, ...]:
        """Removes the records that `keep` refuses, and with `faulty` the lines that hold none; returns the removed.

        What stays is written in order, each record in the folder of its target. A file that cannot be read as a
        whole stays as it is. Raises DatabaseError where no folder is or it cannot be written.
        """
        self._check_there()
        with self._locked():
            pages = self._pages()
            records = _reading(pages).records
            removed = tuple(record for record in records if not keep(record))
            gone = {record.key for record in removed}
            groups = _by_folder(record for record in records if record.key not in gone)
            for path in sorted({self.path / folder / RECORDS for folder in groups} | pages.keys()):
                page = pages.get(path, files.Page())
                group = groups.get(path.parent.name, [])
                if tuple(group) != page.records or (page.readable and page.faults):
                    _write(path, group, page, () if faulty else page.faulty)
                with suppress(OSError):  # not empty
                    path.parent.rmdir()
        return removed

    def verify(self, replay: Callable[[Record], str | None] | None = None) -> tuple[Fault, ...]:
        """Every fault: of the files and, with `replay`, of each record that it says something about.

        `replay` applies a record's trace to its workload and returns what is wrong, None where all is well.
        """
        reading = self.read()
        if replay is None:
            return reading.faults
        found = [(record, replay(record)) for record in reading.records]
        return reading.faults + tuple(
            Fault(self.path / folder_name(record.parts) / RECORDS, 0, record.key, what,
                  f"tune it again, or remove it: `tvmflow db prune --key {record.key[:12]}`")
            for record, what in found if what is not None
        )  # fmt: skip

    def _check_there(self) -> None:
        if not self.path.is_dir():
            raise DatabaseError(f"{self.path}: no tuning database is there",
                                "give its folder; `tvmflow tune` makes one")  # fmt: skip

    def _pages(self) -> dict[Path, files.Page]:
        paths = sorted(self.path.glob(f"*/{RECORDS}"))
        return {path: files.read(path) for path in paths}

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the database for one writer. Raises DatabaseError for whatever the system refuses meanwhile."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                _wait_for_lock(handle, self.path)
                yield
            finally:
                fcntl.flock(handle, fcntl.LOCK_UN)  # a process forked meanwhile has the handle too
                os.close(handle)
        except OSError as exc:
            raise DatabaseError(f"{exc.filename or self.path}: cannot be written: {exc.strerror or exc}",
                                "check permissions and space; what was there before is whole") from None  # fmt: skip


def folder_name(parts: KeyParts) -> str:
    """The folder of a target and numerics mode: readable, and unambiguous through 8 digits of a hash."""
    kind, threads = parts.target["kind"], parts.target["threads"]
    chip = parts.target.get("arch") or parts.target["mcpu"]
    mode = "+".join(sorted(name for name, allowed in parts.numerics.items() if allowed)) or "precise"
    readable = re.sub(r"[^A-Za-z0-9_.+-]", "_", f"{kind}-{chip}-{threads}t-{mode}")[:80]
    return f"{readable}-{fingerprint({'target': parts.target, 'numerics': parts.numerics})[:8]}"


def _reading(pages: dict[Path, files.Page]) -> Reading:
    records: dict[str, Record] = {}
    faults: list[Fault] = []
    for path, page in pages.items():
        faults += page.faults
        for record in page.records:
            records[record.key] = better(record, records[record.key]) if record.key in records else record
        astray = [record for record in page.records if folder_name(record.parts) != path.parent.name]
        if astray:
            what = f"{len(astray)} records of other targets, the first for {folder_name(astray[0].parts)}"
            faults.append(Fault(path, 0, astray[0].key, what, TIDY, skipped=False))
    return Reading(tuple(records[key] for key in sorted(records)), tuple(faults))


def _by_folder(records: Iterable[Record]) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(folder_name(record.parts), []).append(record)
    return groups


def _check_keepable(record: Record) -> None:
    """What was written must be readable: a record is its own line, read back."""
    try:
        if parse(to_line(record).encode()) == record:
            return
        what = "it does not survive being written as JSON"
    except (LineError, ValueError) as exc:
        what = str(exc)
    raise DatabaseError(f"the record of {record.name[:100]} cannot be kept: {what}", "this is a bug of its maker")


def _write(path: Path, records: Iterable[Record], page: files.Page, faulty: tuple[files.Span, ...]) -> None:
    if not page.readable:
        raise DatabaseError(str(page.faults[0]), page.faults[0].fix)
    files.write(path, sorted(records, key=lambda record: record.key), faulty)


def _wait_for_lock(handle: int, path: Path) -> None:
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise DatabaseError(f"{path}: another process has been writing to it for {LOCK_TIMEOUT_S:.0f} s",
                                    "see which with `fuser`, and end it") from None  # fmt: skip
            time.sleep(0.01)
