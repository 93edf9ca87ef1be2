"""One file of entries: one canonical JSON line per key, sorted by key. Read strictly and bounded, written whole.

What an entry is says a `Form`: a record, or an accusation of the quarantine. A line that holds none costs that line
alone. It is never thrown away in silence: a newer tvmflow may have written it, so that writing keeps it, verbatim,
behind the entries.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

from pydantic_core import from_json

from tvmflow import atomic
from tvmflow.errors import DatabaseError

MAX_LINE_BYTES = 4 << 20
MAX_FAULTS = 100
CHUNK_BYTES = 1 << 20
TEMPORARY = ".records."
TIDY = "`tvmflow db prune` writes it in order"
WHOLE = "restore the line from git's history, or drop it: `tvmflow db prune --faulty`"

Entry = TypeVar("Entry")
Span = tuple[int, int]
"""First byte and the byte behind the last."""


@dataclass(frozen=True)
class Fault:
    """What is wrong in one place, and what to do. Line 0 means the whole file."""

    path: Path
    line: int
    key: str | None
    what: str
    fix: str
    skipped: bool = True
    """False where every record was read and the file is merely not in the form in which it is written."""

    def __str__(self) -> str:
        place = f"{self.path}:{self.line}" if self.line else str(self.path)
        return f"{place}: {f'{self.key[:12]}: ' if self.key else ''}{self.what}"


class LineError(Exception):
    """A line that holds no entry: what is wrong, what to do, and its key as far as it can be told."""

    def __init__(self, what: str, fix: str = WHOLE, key: str | None = None) -> None:
        super().__init__(what)
        self.what = shown(what)  # it may quote the line, which anybody may have written
        self.fix, self.key = fix, key


@dataclass(frozen=True)
class Form(Generic[Entry]):
    """How one kind of file spells its entries. `parse` raises LineError for anything that is not exactly one."""

    file_name: str
    parse: Callable[[bytes], Entry]
    to_line: Callable[[Entry], str]
    key: Callable[[Entry], str]
    better: Callable[[Entry, Entry], Entry]
    """Which of two with the same key stays, whatever their order."""
    max_bytes: int
    kept: Callable[[Iterable[Entry]], Iterable[Entry]] = lambda entries: entries
    """Those of all entries for which a file has room."""
    examine: Callable[[Entry], None] = lambda entry: None
    """What reading leaves out because it takes long: raises LineError for an entry that must not be taken in."""


@dataclass(frozen=True)
class Page(Generic[Entry]):
    """What one file holds: the best entry per key, sorted by key; its faults; where its faulty lines lie.

    A file that is not `readable` as a whole is left as it is.
    """

    entries: tuple[Entry, ...] = ()
    faults: tuple[Fault, ...] = ()
    faulty: tuple[Span, ...] = ()
    readable: bool = True
    places: Mapping[str, int] = field(default_factory=dict)
    """The line of each entry by its key."""


def shown(text: str) -> str:
    """What somebody else wrote, fit for a terminal and a line."""
    return re.sub(r"[^ -~]", "?", text)[:500]


def body_of(line: bytes) -> dict[str, object]:
    """The JSON object of a line; raises LineError where it is too long, none, or left behind by git."""
    if len(line) > MAX_LINE_BYTES:
        raise LineError(f"longer than {MAX_LINE_BYTES >> 20} MiB")
    if line.startswith((b"<<<<<<<", b"=======", b">>>>>>>")):
        raise LineError("a conflict marker of git", "resolve the conflict; `tvmflow db install-merge-driver` avoids it")
    try:
        body = from_json(line, allow_inf_nan=False)
    except ValueError as exc:
        raise LineError(f"no JSON: {exc}") from None
    if not isinstance(body, dict):
        raise LineError("no JSON object")
    return body


def joined(form: Form[Entry], entries: Iterable[Entry]) -> dict[str, Entry]:
    """The best entry per key."""
    best: dict[str, Entry] = {}
    for entry in entries:
        key = form.key(entry)
        best[key] = form.better(entry, best[key]) if key in best else entry
    return best


def read(path: Path, form: Form[Entry]) -> Page[Entry]:
    """The page of a file, empty where none is; an unreadable or oversized one is a page with one fault alone."""
    try:
        if not os.path.lexists(path):
            return Page()
        if not path.is_file():
            return _unread(path, "no regular file", "remove it")
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > form.max_bytes:
                return _unread(
                    path,
                    f"{size >> 20} MiB, more than the {form.max_bytes >> 20} MiB that are read",
                    "restore it from git's history, or split it over two databases",
                )
            return read_stream(stream, path, form)
    except OSError as exc:
        return _unread(path, f"cannot be read: {exc.strerror or exc}", "check its permissions and the disk")


def read_stream(stream: BinaryIO, path: Path, form: Form[Entry]) -> Page[Entry]:
    """The page of an open file; `path` names it in faults."""
    entries: dict[str, Entry] = {}
    faults: list[Fault] = []
    faulty: list[Span] = []
    order: list[str] = []
    places: dict[str, int] = {}
    dropped = 0
    for number, span, line in lines(stream):
        try:
            entry = form.parse(line)
        except LineError as exc:
            _join(faulty, span)
            dropped += len(faults) >= MAX_FAULTS
            if len(faults) < MAX_FAULTS:
                faults.append(Fault(path, number, exc.key, exc.what, exc.fix))
            continue
        order.append(key := form.key(entry))
        entries[key] = form.better(entry, entries[key]) if key in entries else entry
        if entries[key] is entry:
            places[key] = number
    if dropped:
        faults.append(Fault(path, 0, None, f"{dropped} more lines hold no record", faults[0].fix))
    if order != sorted(set(order)):
        faults.append(Fault(path, 0, None, "not sorted by key, or a key twice; the best record is used", TIDY, False))
    return Page(tuple(entries[key] for key in sorted(entries)), tuple(faults), tuple(faulty), places=places)


def write(path: Path, form: Form[Entry], entries: Iterable[Entry], faulty: tuple[Span, ...] = ()) -> None:
    """Replaces the file by these entries, sorted, and behind them its own lines at `faulty`; nothing at all removes it.

    The caller holds the database's lock, so that what earlier writers left half done can be cleared. Raises OSError,
    and DatabaseError for too much.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f"{TEMPORARY}*"):
        leftover.unlink()
    with atomic.replacing(path, TEMPORARY) as out:
        out.writelines(f"{form.to_line(entry)}\n".encode() for entry in sorted(form.kept(entries), key=form.key))
        _copy(path, faulty, out)
        size = out.tell()
        _check_size(path, size, form.max_bytes)
    if not size:
        path.unlink()


def lines(stream: BinaryIO, max_bytes: int = MAX_LINE_BYTES) -> Iterator[tuple[int, Span, bytes]]:
    """Each line that is not blank: number, place, text; of an overlong one only so much that this can be seen."""
    number = start = 0
    while line := stream.readline(max_bytes + 2):
        number += 1
        tail = line
        while not tail.endswith(b"\n") and (tail := stream.readline(CHUNK_BYTES)):
            pass
        end = stream.tell()
        if line.strip():
            yield number, (start, end), line.rstrip(b"\r\n")
        start = end


def spans(stream: BinaryIO, wanted: tuple[Span, ...]) -> Iterator[bytes]:
    """The bytes of these spans, in chunks."""
    for start, end in wanted:
        stream.seek(start)
        while chunk := stream.read(min(CHUNK_BYTES, end - stream.tell())):
            yield chunk


def _join(faulty: list[Span], span: Span) -> None:
    """Appends a span; neighbours become one, so that a file of nothing but faulty lines costs no memory."""
    if faulty and faulty[-1][1] == span[0]:
        span = (faulty.pop()[0], span[1])
    faulty.append(span)


def _copy(path: Path, faulty: tuple[Span, ...], out: BinaryIO) -> None:
    if faulty:
        with path.open("rb") as stream:
            out.writelines(spans(stream, faulty))


def _check_size(path: Path, size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise DatabaseError(
            f"{path}: would grow to {size >> 20} MiB, more than {max_bytes >> 20} MiB",
            "`tvmflow db prune` what is no longer used, or start a second database",
        )


def _unread(path: Path, what: str, fix: str) -> Page[Entry]:
    return Page(faults=(Fault(path, 0, None, what, fix),), readable=False)
