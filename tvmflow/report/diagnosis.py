"""What attribution and bisection found, as tables."""

from __future__ import annotations

from tvmflow.diagnosis.findings import Attribution, Bisection
from tvmflow.report import tables
from tvmflow.report.figures import scientific
from tvmflow.report.tables import Cell, Column, Shown
from tvmflow.report.verdict import notes, state, verdict

COLOURS = {"right": "green", "wrong": "red", "not built": "yellow"}
STAGE_COLUMNS = (
    "output",
    "stage",
    "",
    Column("max error", right=True),
    Column("max relative", right=True),
    Column("mismatched", right=True),
    Column("change by this stage", right=True),
)
KERNEL_COLUMNS = (
    "kernel",
    Column("call", right=True),
    "",
    Column("max error", right=True),
    Column("of the largest value", right=True),
)


def attribution(noun: Attribution) -> Shown:
    """The verdict, then one row per output and stage."""
    order = list(dict.fromkeys(row.output for row in noun.rows))
    rows = [
        [
            row.output,
            row.stage,
            state(row.ok),
            scientific(row.max_error),
            scientific(row.max_relative_error),
            f"{row.mismatched} of {row.total}",
            scientific(row.change),
        ]
        for row in sorted(noun.rows, key=lambda row: order.index(row.output))
    ]
    table = tables.table(STAGE_COLUMNS, rows, "whose the difference is, the worst of all runs")
    stages = (tables.line(f"{name}: {why}") for name, why in noun.stages.items())
    return tables.stack(verdict(noun.verdict), table, *stages)


def bisection(noun: Bisection) -> Shown:
    """The builds that were made, and what is at fault."""
    checks: list[list[Cell]] = [
        [str(check.count), check.step, [(check.outcome, COLOURS[check.outcome]), f" {check.reason}"]]
        for check in sorted(noun.checks, key=lambda check: check.count)
    ]
    kernels: list[list[Cell]] = [
        [one.kernel, str(one.call), state(one.ok, one.reason), scientific(one.max_error), scientific(one.share)]
        for one in (noun.culprit.kernels if noun.culprit else ())
    ]
    parts: list[Shown] = []
    if checks:
        title = f"{len(noun.steps)} steps, against {noun.reference}"
        parts.append(tables.table((Column("steps", right=True), "the last of them", "values"), checks, title))
    if kernels:
        parts.append(tables.table(KERNEL_COLUMNS, kernels))
    parts.append(tables.line(f"first bad step: {noun.culprit.step}" if noun.culprit else "nothing is wrong"))
    return tables.stack(*parts, *notes(noun.unusable_records))
