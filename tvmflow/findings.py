"""What attribution and bisection find out: frozen nouns, for tables and JSON. No TVM in here."""

from __future__ import annotations

from tvmflow.manifest import Noun, Verdict


class StageError(Noun):
    """How far one output of one build is off, the worst over all runs.

    Errors are against the reference; `change` is against the build of the stage before, so it is what this stage adds.
    None where dtype or shape already differ.
    """

    stage: str
    output: str
    ok: bool
    max_error: float | None
    max_relative_error: float | None
    mismatched: int
    total: int
    change: float | None


class Attribution(Noun):
    """Whose the difference to the reference is: one row per output and stage, stages in the order of the build."""

    verdict: Verdict
    """Of the artifact itself, which is the last stage."""
    stages: dict[str, str]
    """What each stage is, by name."""
    rows: tuple[StageError, ...]
