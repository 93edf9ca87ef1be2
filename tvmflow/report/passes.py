"""The passes of a pipeline as a table."""

from __future__ import annotations

from tvmflow.report import tables
from tvmflow.report.tables import Shown


def pipeline(phases: dict[str, list[tuple[str, str]]]) -> Shown:
    """The named passes, phase by phase."""
    rows = (
        ("" if index else phase, name, why)
        for phase, steps in phases.items()
        for index, (name, why) in enumerate(steps)
    )
    return tables.table(("phase", "pass", "why"), rows)
