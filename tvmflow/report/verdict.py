"""A verdict as a table."""

from __future__ import annotations

from collections.abc import Iterator

from tvmflow.manifest import RunVerdict, Verdict
from tvmflow.report import tables
from tvmflow.report.figures import percent, scientific
from tvmflow.report.tables import Cell, Column, Shown

UNVERIFIED = ("not verified", "yellow")
NOTE = ("note ", "yellow")
COLUMNS = (
    "inputs",
    "output",
    "",
    Column("max error", right=True),
    Column("mean error", right=True),
    Column("max relative", right=True),
    "tolerance",
    Column("top-1", right=True),
    Column("top-5", right=True),
)


def verdict(noun: Verdict | None) -> Shown:
    """One row per output of each run."""
    if noun is None:
        return tables.line(UNVERIFIED)
    rows = (row for run in noun.runs for row in _rows(run))
    table = tables.table(COLUMNS, rows, f"against {noun.reference}")
    return tables.stack(table, *notes(noun.notes))


def notes(texts: tuple[str, ...] | list[str]) -> list[Shown]:
    """A line per note."""
    return [tables.line(NOTE, note) for note in texts]


def state(ok: bool, reason: str = "") -> Cell:
    """Whether something holds and, where it does not, why."""
    return ("ok", "green") if ok else [("WRONG", "red"), f" {reason}" if reason else ""]


def _rows(run: RunVerdict) -> Iterator[list[Cell]]:
    sizes = "".join(f" {name}={size}" for name, size in run.dims.items())
    for out in run.outputs:
        yield [
            run.inputs + sizes,
            out.name,
            state(out.ok, out.reason),
            scientific(out.max_error),
            scientific(out.mean_error),
            scientific(out.max_relative_error),
            f"{out.atol:.1e} + {out.rtol:g}|x|",
            percent(out.top1_agreement),
            percent(out.top5_agreement),
        ]
