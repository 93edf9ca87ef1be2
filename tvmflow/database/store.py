"""The tuning database: a folder of text files that git can hold, that two people can change at once and merge.

    tuning_db/llvm-x86-64-v4-2t-precise-1a2b3c4d/records.jsonl
                                                 comparisons.jsonl
                                                 quarantine.jsonl

One folder per target and numerics mode, in it one line per workload, one per convolution whose methods were compared,
and one per candidate that killed its worker.
Reading never fails for what a file holds: what is no record is a located fault. Writers take turns through a lock on
the database's folder, and each file is replaced whole, so that it is valid at every moment.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tvmflow.database import files
from tvmflow.database.comparison import COMPARISONS, Comparison
from tvmflow.database.files import TIDY, Entry, Fault, Form, LineError, Page
from tvmflow.database.keys import KeyParts, fingerprint
from tvmflow.database.lock import locked
from tvmflow.database.lookup import Kept, Match, Miss, find
from tvmflow.database.quarantine import CONVICTED, QUARANTINE, Accusation, accusation, charged
from tvmflow.database.record import RECORDS, Record, parse, to_line
from tvmflow.errors import DatabaseError

FORMS: tuple[Form[Any], ...] = (RECORDS, COMPARISONS, QUARANTINE)

Replay = Callable[[Sequence[Record]], Mapping[str, str]]
"""Applies the trace of each record to its workload; what is wrong, by key, for those where not all is well."""


@dataclass(frozen=True)
class Reading:
    """What a database holds: the best record per key, sorted by key, and every fault found on the way.

    `comparisons` are the newest of each convolution, sorted by key; `faults` are of both.
    """

    records: tuple[Record, ...]
    faults: tuple[Fault, ...]
    comparisons: tuple[Comparison, ...] = ()

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
class Accused:
    """The quarantine, per folder of a target, and the faults of its files."""

    by_folder: dict[str, tuple[Accusation, ...]]
    faults: tuple[Fault, ...]

    @property
    def quarantined(self) -> dict[str, int]:
        """How many candidates are in quarantine, per folder."""
        return {folder: sum(one.count >= CONVICTED for one in group) for folder, group in self.by_folder.items()}


@dataclass(frozen=True)
class Store:
    """A database in a folder. It holds nothing open; every method reads what is there now."""

    path: Path

    def create(self) -> None:
        """Makes the folder where there is none. Raises DatabaseError where that cannot be."""
        with locked(self.path):
            pass

    def read(self) -> Reading:
        """All records, comparisons and faults. Raises DatabaseError where no folder is."""
        self._check_there()
        return _reading(self._pages(RECORDS), self._pages(COMPARISONS))

    def comparisons(self) -> dict[str, Comparison]:
        """The newest comparison per key. Raises DatabaseError where no folder is; faults are in `read`."""
        self._check_there()
        return files.joined(COMPARISONS, (one for page in self._pages(COMPARISONS).values() for one in page.entries))

    def lookup(self, parts: KeyParts, cpu_features: Collection[str]) -> Match | Miss:
        """`read().lookup(...)`; who has many keys to look up reads once."""
        return self.read().lookup(parts, cpu_features)

    def add(self, records: Iterable[Record]) -> Added:
        """Merges records into the files; of each key the better record stays.

        Raises DatabaseError where a record cannot be kept (nothing is written then) or the folder cannot be written.
        """
        records = list(records)
        for record in records:
            _check_keepable(record)
        new: list[str] = []
        improved: list[str] = []
        with locked(self.path):
            for folder, group in _by_folder(records).items():
                old, merged = self._merge(folder, RECORDS, group)
                new += merged.keys() - old.keys()
                improved += [key for key in old if merged[key] != old[key]]
        return Added(tuple(sorted(new)), tuple(sorted(improved)))

    def add_comparisons(self, comparisons: Iterable[Comparison]) -> None:
        """Merges comparisons into the files; of each key the newer one stays. Raises DatabaseError like `add`."""
        with locked(self.path):
            for folder, group in _by_folder(comparisons).items():
                self._merge(folder, COMPARISONS, group)

    def keep(self, record: Record) -> None:
        """`add` for one record."""
        self.add([record])

    def replace(self, record: Record, old: Record) -> None:
        """Puts `record` where `old` is, though it be slower: it was measured with more care.

        Where another record stands there meanwhile, the better one stays. Raises DatabaseError like `add`.
        """
        _check_keepable(record)
        path = self.path / folder_name(record.parts) / RECORDS.file_name
        with locked(self.path):
            page = files.read(path, RECORDS)
            merged = files.joined(RECORDS, (*(one for one in page.entries if one != old), record))
            _write(path, RECORDS, merged.values(), page, page.faulty)

    def prune(
        self, keep: Callable[[Record | Comparison], bool], faulty: bool = False
    ) -> tuple[Record | Comparison, ...]:
        """Removes the records and comparisons that `keep` refuses, and with `faulty` the lines that hold none; returns
        the removed.

        What stays is written in order, each in the folder of its target. A file that cannot be read as a
        whole stays as it is. Raises DatabaseError where no folder is or it cannot be written.
        """
        self._check_there()
        with locked(self.path):
            records = self._prune(RECORDS, keep, faulty)
            comparisons = self._prune(COMPARISONS, keep, faulty)
            for path, page in self._pages(QUARANTINE).items():
                _tidy(path, QUARANTINE, page, page.entries, faulty)
        return (*records, *comparisons)

    def _prune(self, form: Form[Kept], keep: Callable[[Kept], bool], faulty: bool) -> tuple[Kept, ...]:
        pages = self._pages(form)
        entries, _ = _gathered(form, pages)
        removed = tuple(entry for entry in entries if not keep(entry))
        gone = {entry.key for entry in removed}
        groups = _by_folder(entry for entry in entries if entry.key not in gone)
        for path in sorted({self.path / folder / form.file_name for folder in groups} | pages.keys()):
            _tidy(path, form, pages.get(path, Page()), tuple(groups.get(path.parent.name, [])), faulty)
        return removed

    def quarantined(self, parts: KeyParts) -> frozenset[str]:
        """The candidates for this key that are not to be tried again: sha256 of the canonical JSON of their traces.

        Empty where no database is yet; a faulty line is skipped, and `verify` names it.
        """
        page = files.read(self.path / folder_name(parts) / QUARANTINE.file_name, QUARANTINE)
        return frozenset(
            one.trace_sha256 for one in page.entries if one.workload == parts.workload and one.count >= CONVICTED
        )

    def accuse(self, parts: KeyParts, trace_sha256: str, error: str) -> None:
        """Notes that a candidate, named by `fingerprint(trace)`, ended its worker; twice, and it is quarantined.

        Raises DatabaseError where the file cannot be written.
        """
        new = accusation(parts.workload, trace_sha256, error)
        path = self.path / folder_name(parts) / QUARANTINE.file_name
        with locked(self.path):
            page = files.read(path, QUARANTINE)
            _write(path, QUARANTINE, charged(page.entries, new), page, page.faulty)

    def accused(self) -> Accused:
        """The whole quarantine. Raises DatabaseError where no folder is."""
        self._check_there()
        pages = self._pages(QUARANTINE)
        faults = tuple(fault for page in pages.values() for fault in page.faults)
        return Accused({path.parent.name: page.entries for path, page in pages.items()}, faults)

    def add_accused(self, by_folder: Mapping[str, Iterable[Accusation]]) -> None:
        """Merges another database's quarantine: of each candidate the higher count stays."""
        with locked(self.path):
            for folder, group in by_folder.items():
                self._merge(folder, QUARANTINE, group)

    def verify(self, replay: Replay | None = None) -> tuple[Fault, ...]:
        """Every fault: of the files, and of each record that `replay` says something about.

        Without it, of the records whose workload is outside the grammar.
        """
        reading = self.read()
        faults = reading.faults + self.accused().faults
        return faults + self.located((replay or examined)(reading.records))

    def located(self, wrong: Mapping[str, str]) -> tuple[Fault, ...]:
        """The faults of records, given what is wrong with them by key."""
        pages = self._pages(RECORDS)
        return tuple(
            Fault(
                *_place(pages, record),
                record.key,
                wrong[record.key],
                f"tune it again, or remove it: `tvmflow db prune --key {record.key[:12]}`",
            )
            for record in _reading(pages, {}).records
            if record.key in wrong
        )

    def _check_there(self) -> None:
        """Raises DatabaseError where no database is: no folder, or one of something else."""
        hint = "give the folder that `tvmflow tune` made"
        if not self.path.is_dir():
            raise DatabaseError(f"{self.path}: no tuning database is there", hint)
        names = sorted(path.name for path in self.path.iterdir() if not _may_be_beside(path))
        if names and not any(self._paths(form) for form in FORMS):
            raise DatabaseError(f"{self.path}: no tuning database: it holds {names[0]} and no file of records", hint)

    def _paths(self, form: Form[Entry]) -> list[Path]:
        return sorted(self.path.glob(f"*/{form.file_name}"))

    def _pages(self, form: Form[Entry]) -> dict[Path, Page[Entry]]:
        return {path: files.read(path, form) for path in self._paths(form)}

    def _merge(
        self, folder: str, form: Form[Entry], group: Iterable[Entry]
    ) -> tuple[dict[str, Entry], dict[str, Entry]]:
        """Puts entries into one file, under the lock; returns by key what was there and what is there now."""
        path = self.path / folder / form.file_name
        page = files.read(path, form)
        old = {form.key(entry): entry for entry in page.entries}
        merged = files.joined(form, (*page.entries, *group))
        if merged != old:
            _write(path, form, merged.values(), page, page.faulty)
        return old, merged


def examined(records: Iterable[Record]) -> dict[str, str]:
    """What is wrong with the workloads of records, by key, where not all is well."""
    found = {}
    for record in records:
        try:
            RECORDS.examine(record)
        except LineError as exc:
            found[record.key] = exc.what
    return found


def folder_name(parts: KeyParts) -> str:
    """The folder of a target and numerics mode: readable, and unambiguous through 8 digits of a hash."""
    kind, threads = parts.target["kind"], parts.target["threads"]
    chip = parts.target.get("arch") or parts.target["mcpu"]
    mode = "+".join(sorted(name for name, allowed in parts.numerics.items() if allowed)) or "precise"
    readable = re.sub(r"[^A-Za-z0-9_.+-]", "_", f"{kind}-{chip}-{threads}t-{mode}")[:80]
    return f"{readable}-{fingerprint({'target': parts.target, 'numerics': parts.numerics})[:8]}"


def form_of(path: Path) -> Form[Any]:
    """How a database's file of this name spells its entries; that of records where the name is none of them."""
    return next((form for form in FORMS if form.file_name == path.name), RECORDS)


def _reading(records: dict[Path, Page[Record]], comparisons: dict[Path, Page[Comparison]]) -> Reading:
    (best, faults), (newest, others) = _gathered(RECORDS, records), _gathered(COMPARISONS, comparisons)
    return Reading(best, faults + others, newest)


def _gathered(form: Form[Kept], pages: dict[Path, Page[Kept]]) -> tuple[tuple[Kept, ...], tuple[Fault, ...]]:
    """The entries of all files of one form, sorted by key, and their faults."""
    faults: list[Fault] = []
    for path, page in pages.items():
        faults += page.faults
        astray = [entry for entry in page.entries if folder_name(entry.parts) != path.parent.name]
        if astray:
            what = f"{len(astray)} records of other targets, the first for {folder_name(astray[0].parts)}"
            faults.append(Fault(path, 0, astray[0].key, what, TIDY, skipped=False))
    found = files.joined(form, (entry for page in pages.values() for entry in page.entries))
    return tuple(found[key] for key in sorted(found)), tuple(faults)


def _place(pages: dict[Path, Page[Record]], record: Record) -> tuple[Path, int]:
    """The file and line from which a record was read."""
    path, page = next((path, page) for path, page in pages.items() if record in page.entries)
    return path, page.places[record.key]


def _may_be_beside(path: Path) -> bool:
    """Whether something in a folder says nothing against its being a database without records."""
    if path.is_dir():
        return all(inner.name.startswith(".") for inner in path.iterdir())  # a first writer was killed
    return path.name.startswith(".") or path.suffix == ".md"


def _by_folder(entries: Iterable[Kept]) -> dict[str, list[Kept]]:
    groups: dict[str, list[Kept]] = {}
    for entry in entries:
        groups.setdefault(folder_name(entry.parts), []).append(entry)
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


def _tidy(path: Path, form: Form[Entry], page: Page[Entry], entries: tuple[Entry, ...], faulty: bool) -> None:
    """Writes a file anew where it holds anything but `entries` in order; without `faulty` its faulty lines stay."""
    if entries != page.entries or (page.readable and page.faults):
        _write(path, form, entries, page, () if faulty else page.faulty)
    with suppress(OSError):  # not empty
        path.parent.rmdir()


def _write(
    path: Path, form: Form[Entry], entries: Iterable[Entry], page: Page[Entry], faulty: tuple[files.Span, ...]
) -> None:
    if not page.readable:
        raise DatabaseError(str(page.faults[0]), page.faults[0].fix)
    files.write(path, form, entries, faulty)
