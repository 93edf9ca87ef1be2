"""Merges two versions of a file of records, of comparisons or of a quarantine, so that git never asks a person to.

Entries are merged by key, as git merges lines: who alone changed, added or removed one is followed; where both did,
the better one stays. Lines that hold none cannot be merged and become a conflict.
"""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tvmflow.database import files
from tvmflow.database.files import Entry, Form
from tvmflow.database.store import form_of
from tvmflow.errors import DatabaseError

DRIVER = "tvmflow-db"


@dataclass(frozen=True)
class Merged:
    """The merged file; `faults` name the lines of either side that hold no record and stand in a conflict block."""

    text: bytes
    faults: tuple[files.Fault, ...]


def merge(base: bytes, ours: bytes, theirs: bytes, form: Form[Entry]) -> Merged:
    """The three-way merge of three files of one form. The order of `ours` and `theirs` does not matter for entries."""
    sides = [
        files.read_stream(io.BytesIO(text), Path(name), form)
        for text, name in ((base, "base"), (ours, "ours"), (theirs, "theirs"))
    ]
    was, mine, other = ({form.key(entry): entry for entry in page.entries} for page in sides)
    refused = _refused(was, mine, form), _refused(was, other, form)
    for side, lines in zip((mine, other), refused, strict=True):
        for key in lines:
            del side[key]
    keys = sorted(mine.keys() | other.keys())
    merged = [_merged(was.get(key), mine.get(key), other.get(key), form) for key in keys]
    kept = sorted(form.kept(entry for entry in merged if entry is not None), key=form.key)
    text = b"".join(f"{form.to_line(entry)}\n".encode() for entry in kept)
    unread = [fault for page in sides[1:] for fault in page.faults if fault.skipped]
    outside = [
        files.Fault(Path(name), page.places[key], key, exc.what, exc.fix)
        for name, page, found in zip(("ours", "theirs"), sides[1:], refused, strict=True)
        for key, (_, exc) in found.items()
    ]
    faults = (*unread, *outside)
    if faults:
        blocks = (
            _faulty(side, page.faulty) + b"".join(f"{line}\n".encode() for line, _ in found.values())
            for side, page, found in zip((ours, theirs), sides[1:], refused, strict=True)
        )
        text += _conflict(*blocks)
    return Merged(text, faults)


def merge_files(base: Path, ours: Path, theirs: Path, name: str) -> tuple[files.Fault, ...]:
    """What git calls: merges the files into `ours`, known to people as `name`; returns the faults of a conflict.

    Raises DatabaseError where a file is too large to be one of records; `ours` is untouched then.
    """
    form = form_of(Path(name))
    texts = []
    for path in (base, ours, theirs):
        if path.stat().st_size > form.max_bytes:
            raise DatabaseError(
                f"{name}: more than {form.max_bytes >> 20} MiB on one side, not merged",
                "restore the damaged side from git's history",
            )
        texts.append(path.read_bytes())
    was, mine, other = texts
    merged = merge(was, mine, other, form)
    ours.write_bytes(merged.text)
    return merged.faults


def install(database: Path) -> tuple[str, ...]:
    """Makes git merge this database's files with `merge_files`; returns what was done, empty if nothing was to do.

    Writes the repository's own .git/config, which each clone needs once, and .gitattributes, which is committed.
    Raises DatabaseError where no git repository is.
    """
    folder = next(parent for parent in (database.resolve(), *database.resolve().parents) if parent.is_dir())
    root = Path(_git(folder, "rev-parse", "--show-toplevel"))
    python = shlex.quote(sys.executable)
    # -P: no module may come from the folder git runs in, which is what somebody else wrote.
    wanted = {"driver": f"{python} -P -m tvmflow.cli db merge-driver %O %A %B %P", "name": "tuning records by key"}
    done = []
    for key, value in wanted.items():
        if _git(root, "config", "--default", "", "--get", f"merge.{DRIVER}.{key}") != value:
            _git(root, "config", f"merge.{DRIVER}.{key}", value)
            done.append(f"git config merge.{DRIVER}.{key}")
    inside = database.resolve().relative_to(root)
    if not _git(root, "check-attr", "merge", "--", str(inside / "x" / "records.jsonl")).endswith(f": {DRIVER}"):
        _append(root / ".gitattributes", f'"{(inside / "**" / "*.jsonl").as_posix()}" text eol=lf merge={DRIVER}\n')
        done.append(f"{root / '.gitattributes'}: commit it")
    return tuple(done)


def _merged(base: Entry | None, ours: Entry | None, theirs: Entry | None, form: Form[Entry]) -> Entry | None:
    if ours == theirs or theirs == base:
        return ours
    if ours == base:
        return theirs
    return form.better(ours, theirs) if ours and theirs else ours or theirs


def _refused(was: dict[str, Entry], now: dict[str, Entry], form: Form[Entry]) -> dict[str, tuple[str, files.LineError]]:
    """The lines of the entries that a side brings in and that must not be, by key, and what is wrong with them."""
    found = {}
    for key, entry in now.items():
        if was.get(key) != entry:
            try:
                form.examine(entry)
            except files.LineError as exc:
                found[key] = form.to_line(entry), exc
    return found


def _faulty(text: bytes, faulty: tuple[files.Span, ...]) -> bytes:
    lines = b"".join(files.spans(io.BytesIO(text), faulty))
    return lines + b"\n" if lines and not lines.endswith(b"\n") else lines


def _conflict(ours: bytes, theirs: bytes) -> bytes:
    return b"<<<<<<< ours\n" + ours + b"=======\n" + theirs + b">>>>>>> theirs\n"


def _append(path: Path, line: str) -> None:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    path.write_text(text + ("\n" if text and not text.endswith("\n") else "") + line, encoding="utf-8")


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"LC_ALL": "C"},
        )
    except FileNotFoundError:
        raise DatabaseError("git is not installed", "install git") from None
    if done.returncode:
        raise DatabaseError(
            f"{folder}: git {arguments[0]}: {done.stderr.strip()}",
            "run it inside the git repository that holds the database",
        )
    return done.stdout.strip()
