"""The text of MetaSchedule's own two files: a workload per line, and a tuning record per line that points at one.

A record names its workload by line number, so that a line that cannot be read stays counted. What a line means, the
trace and the workload themselves, only TVM can tell.
"""

from __future__ import annotations

import ast
import math
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic_core import from_json

from tvmflow.database.files import Fault, LineError, lines, shown
from tvmflow.database.keys import canonical
from tvmflow.database.record import Provenance
from tvmflow.errors import DatabaseError

WORKLOADS, TUNING_RECORDS = "database_workload.json", "database_tuning_record.json"
MAX_FILE_BYTES = 256 << 20
MAX_LINE_BYTES = 24 << 20  # a workload of 16 MiB in base64
FAILED_S = 1e9  # MetaSchedule writes 1e10 s for a candidate that could not be measured
FIX = "restore the line, or leave it out: the others are read all the same"

# What TVMScript's printer writes for a kernel that was never scheduled. Anything else, a name that is bound nowhere
# above all, could be Python that its parser would run.
PLAIN = (
    ast.Module,
    ast.FunctionDef,
    ast.arguments,
    ast.arg,
    ast.Expr,
    ast.Assign,
    ast.AnnAssign,
    ast.For,
    ast.With,
    ast.withitem,
    ast.While,
    ast.If,
    ast.IfExp,
    ast.Call,
    ast.keyword,
    ast.Attribute,
    ast.Name,
    ast.Subscript,
    ast.Slice,
    ast.Constant,
    ast.Tuple,
    ast.List,
    ast.Dict,
    ast.BinOp,
    ast.UnaryOp,
    ast.BoolOp,
    ast.Compare,
    ast.operator,
    ast.unaryop,
    ast.boolop,
    ast.cmpop,
    ast.expr_context,
)


@dataclass(frozen=True)
class Candidate:
    """One measured line: where it stands, its workload's and its own text, and its median time."""

    line: int
    workload_line: int
    target: str
    """Its target's canonical JSON."""
    workload: str
    """TVM's JSON of the workload, in base64 behind its length."""
    text: str
    median_s: float


@dataclass(frozen=True)
class Reading:
    """The candidates, those for the same workload and target side by side with the fastest first; how many lines hold
    one that could not be measured; and the faults."""

    candidates: tuple[Candidate, ...]
    unmeasured: int
    faults: tuple[Fault, ...]


@dataclass(frozen=True)
class Stated:
    """What the files do not say of a record, or do not say always; None leaves it to the record's target."""

    numerics: dict[str, bool]
    mcpu: str | None
    mtriple: str | None
    threads: int | None
    provenance: Provenance
    """`threads` and `trials` are put in per record."""


def read(folder: Path) -> Reading:
    """What both files in a folder hold. Raises DatabaseError where one is missing or too large."""
    faults: list[Fault] = []
    workloads: dict[int, str] = {}
    for number, line in _lines(folder / WORKLOADS):
        try:
            workloads[number] = _workload(line)
        except LineError as exc:
            faults.append(Fault(folder / WORKLOADS, number, None, exc.what, FIX))
    found: list[Candidate] = []
    unmeasured = 0
    for number, line in _lines(folder / TUNING_RECORDS):
        try:
            candidate = _candidate(number, line, workloads)
            found += [candidate] if candidate is not None else []
            unmeasured += candidate is None
        except LineError as exc:
            faults.append(Fault(folder / TUNING_RECORDS, number, None, exc.what, FIX))
    found.sort(key=lambda one: (one.workload_line, one.target, one.median_s, one.line))
    return Reading(tuple(found), unmeasured, tuple(faults))


def write(folder: Path, entries: Iterable[tuple[str, Sequence[str], Sequence[object]]]) -> int:
    """Writes both files; each entry is a workload's name, its line's values and its record's values.

    Workloads of the same name are written once. Returns how many records were written. Raises DatabaseError where the
    files exist or cannot be written.
    """
    workloads: dict[str, int] = {}
    texts: dict[str, list[str]] = {WORKLOADS: [], TUNING_RECORDS: []}
    for name, workload, record in entries:
        if name not in workloads:
            workloads[name] = len(workloads)
            texts[WORKLOADS].append(canonical(list(workload)))
        texts[TUNING_RECORDS].append(canonical([workloads[name], list(record)]))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file_name, rows in texts.items():
            with (folder / file_name).open("x", encoding="ascii") as out:
                out.writelines(f"{row}\n" for row in rows)
    except FileExistsError as exc:
        raise DatabaseError(f"{exc.filename}: is there already", "name another folder, or remove it") from None
    except OSError as exc:
        raise DatabaseError(
            f"{exc.filename or folder}: cannot be written: {exc.strerror}", "check permissions and space"
        ) from None
    return len(texts[TUNING_RECORDS])


def check_plain(script: str) -> None:
    """Raises ValueError where a kernel's TVMScript holds more than loops, arithmetic and calls into `T`.

    TVMScript is Python, and its parser runs whatever it does not know. A module that somebody else wrote can name a
    function so that the printed script would run code; TVM quotes strings and cleans variables' names, but not those.
    Strings that need an escape are refused too, so that no later rewriting of the text can end one early.
    """
    if "\\" in script:
        raise ValueError("the workload's script holds a string with an escape")
    tree = ast.parse(script)
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    if "T" in bound or "range" in bound or sum(isinstance(node, ast.FunctionDef) for node in ast.walk(tree)) != 1:
        raise ValueError("the workload's script binds T or range, or is not one function")
    for node in ast.walk(tree):
        if not isinstance(node, PLAIN):
            raise ValueError(f"the workload's script holds a Python {type(node).__name__}")
        if isinstance(node, ast.Name) and node.id not in bound and node.id not in ("T", "range"):
            raise ValueError(f"the workload's script uses the unknown name {node.id}")
        if isinstance(node, ast.Attribute) and not _is_plain(node, bound):
            raise ValueError(f"the workload's script uses {ast.unparse(node)}")
        if isinstance(node, ast.Call) and not isinstance(node.func, ast.Attribute | ast.Name):
            raise ValueError(f"the workload's script calls {ast.unparse(node.func)}")


def _is_plain(node: ast.Attribute, bound: set[str]) -> bool:
    """T.name, T.axis.name, or an attribute of a variable."""
    if node.attr.startswith("_"):
        return False
    if isinstance(node.value, ast.Name):
        return node.value.id == "T" or node.value.id in bound
    return ast.unparse(node.value) == "T.axis"


def _lines(path: Path) -> Iterable[tuple[int, bytes]]:
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > MAX_FILE_BYTES:
                raise DatabaseError(
                    f"{path}: {size >> 20} MiB, more than the {MAX_FILE_BYTES >> 20} MiB that are read",
                    "split it, each part with its own workloads",
                )
            for number, _, line in lines(stream, MAX_LINE_BYTES):
                yield number, line
    except OSError as exc:
        raise DatabaseError(
            f"{path}: cannot be read: {exc.strerror}", f"name the folder that holds {WORKLOADS} and {TUNING_RECORDS}"
        ) from None


def _parsed(line: bytes) -> object:
    if len(line) > MAX_LINE_BYTES:
        raise LineError(f"longer than {MAX_LINE_BYTES >> 20} MiB")
    try:
        return from_json(line)
    except ValueError as exc:
        raise LineError(f"no JSON: {exc}") from None


def _workload(line: bytes) -> str:
    body = _parsed(line)
    match body:
        case [str(), str() as text]:
            return text
    raise LineError("no workload: not [hash, text]")


def _candidate(number: int, line: bytes, workloads: dict[int, str]) -> Candidate | None:
    """The candidate of a line; None for one that could not be measured."""
    match _parsed(line):
        case [int() as index, [[list(), list()], seconds, dict() as target, _]]:
            pass
        case _:
            raise LineError("no tuning record: not [workload, [trace, seconds, target, arguments]]")
    if seconds is None:
        return None
    if not isinstance(seconds, list) or not seconds or not all(_is_time(value) for value in seconds):
        raise LineError(f"no run times: {shown(str(seconds))[:100]}")
    if max(seconds) >= FAILED_S:
        return None
    if index + 1 not in workloads:
        raise LineError(f"its workload, line {index + 1} of {WORKLOADS}, is none")
    median_s = statistics.median(seconds)
    return Candidate(number, index + 1, canonical(target), workloads[index + 1], line.decode(), median_s)


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
