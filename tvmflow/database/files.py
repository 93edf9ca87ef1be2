"""One file of records: one canonical JSON line per key, sorted by key. Read strictly and bounded, written whole.

A line that holds no record costs that line alone. It is never thrown away in silence: a newer tvmflow may have written
it, so that writing keeps it, verbatim, behind the records.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tvmflow.database.record import MAX_LINE_BYTES, LineError, Record, better, parse, to_line
from tvmflow.errors import DatabaseError

MAX_FILE_BYTES = 64 << 20
MAX_FAULTS = 100
CHUNK_BYTES = 1 << 20
TEMPORARY = ".records."
TIDY = "`tvmflow db prune` writes it in order"

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


@dataclass(frozen=True)
class Page:
    """What one file holds: the best record per key, sorted by key; its faults; where its faulty lines lie.

    A file that is not `readable` as a whole is left as it is.
    """

    records: tuple[Record, ...] = ()
    faults: tuple[Fault, ...] = ()
    faulty: tuple[Span, ...] = ()
    readable: bool = True


def read(path: Path) -> Page:
    """The page of a file; an unreadable or oversized one is a page with one fault and nothing else."""
    try:
        if not path.is_file():
            return _unread(path, "no regular file", "remove it")
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > MAX_FILE_BYTES:
                return _unread(path, f"{size >> 20} MiB, more than the {MAX_FILE_BYTES >> 20} MiB of a file of records",
                               "restore it from git's history, or split it over two databases")  # fmt: skip
            return read_stream(stream, path)
    except OSError as exc:
        return _unread(path, f"cannot be read: {exc.strerror or exc}", "check its permissions and the disk")


def read_stream(stream: BinaryIO, path: Path) -> Page:
    """The page of an open file; `path` names it in faults."""
    records: dict[str, Record] = {}
    faults: list[Fault] = []
    faulty: list[Span] = []
    order: list[str] = []
    dropped = 0
    for number, span, line in _lines(stream):
        try:
            record = parse(line)
        except LineError as exc:
            _join(faulty, span)
            dropped += len(faults) >= MAX_FAULTS
            if len(faults) < MAX_FAULTS:
                faults.append(Fault(path, number, exc.key, exc.what, exc.fix))
            continue
        order.append(record.key)
        records[record.key] = better(record, records[record.key]) if record.key in records else record
    if dropped:
        faults.append(Fault(path, 0, None, f"{dropped} more lines hold no record", faults[0].fix))
    if order != sorted(set(order)):
        faults.append(Fault(path, 0, None, "not sorted by key, or a key twice; the best record is used", TIDY, False))
    return Page(tuple(records[key] for key in sorted(records)), tuple(faults), tuple(faulty))


def write(path: Path, records: Iterable[Record], faulty: tuple[Span, ...] = ()) -> None:
    """Replaces the file by these records and, behind them, its own lines at `faulty`; nothing at all removes it.

    Whoever reads at any moment, or after a crash, finds the old file or the new one. The caller holds the database's
    lock, so that what earlier writers left half done can be cleared. Raises OSError, and DatabaseError for too much.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f"{TEMPORARY}*"):
        leftover.unlink()
    handle, name = tempfile.mkstemp(prefix=TEMPORARY, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            out.writelines(f"{to_line(record)}\n".encode() for record in records)
            _copy(path, faulty, out)
            size = out.tell()
            _check_size(path, size)
            out.flush()
            os.fsync(out.fileno())
        os.chmod(name, 0o644)
        if size:
            os.replace(name, path)
        else:
            path.unlink(missing_ok=True)
    finally:
        Path(name).unlink(missing_ok=True)
    _sync_folder(path.parent)


def spans(stream: BinaryIO, wanted: tuple[Span, ...]) -> Iterator[bytes]:
    """The bytes of these spans, in chunks."""
    for start, end in wanted:
        stream.seek(start)
        while chunk := stream.read(min(CHUNK_BYTES, end - stream.tell())):
            yield chunk


def _lines(stream: BinaryIO) -> Iterator[tuple[int, Span, bytes]]:
    """Each line that is not blank: number, place, text; of an overlong one only so much that this can be seen."""
    number = start = 0
    while line := stream.readline(MAX_LINE_BYTES + 2):
        number += 1
        tail = line
        while not tail.endswith(b"\n") and (tail := stream.readline(CHUNK_BYTES)):
            pass
        end = stream.tell()
        if line.strip():
            yield number, (start, end), line.rstrip(b"\r\n")
        start = end


def _join(faulty: list[Span], span: Span) -> None:
    """Appends a span; neighbours become one, so that a file of nothing but faulty lines costs no memory."""
    if faulty and faulty[-1][1] == span[0]:
        span = (faulty.pop()[0], span[1])
    faulty.append(span)


def _copy(path: Path, faulty: tuple[Span, ...], out: BinaryIO) -> None:
    if faulty:
        with path.open("rb") as stream:
            out.writelines(spans(stream, faulty))


def _check_size(path: Path, size: int) -> None:
    if size > MAX_FILE_BYTES:
        raise DatabaseError(f"{path}: would grow to {size >> 20} MiB, more than {MAX_FILE_BYTES >> 20} MiB",
                            "`tvmflow db prune` what is no longer used, or start a second database")  # fmt: skip


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _unread(path: Path, what: str, fix: str) -> Page:
    return Page(faults=(Fault(path, 0, None, what, fix),), readable=False)
