"""What attribution and bisection find out: frozen nouns, for tables and JSON. No TVM in here."""

from __future__ import annotations

from typing import Literal

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


class StepCheck(Noun):
    """One build that `bisect` made: the first `count` steps, of which the last is `step`, and whether it is right."""

    count: int
    step: str
    outcome: Literal["right", "wrong", "not built"]
    reason: str


class KernelError(Noun):
    """How far a kernel of one build is off from that of another, on the arguments that it has in the model."""

    kernel: str
    call: int
    """Which kernel call of the run it is, from 1."""
    ok: bool
    reason: str
    max_error: float | None
    share: float
    """The largest error as a share of the output's largest magnitude."""
    rtol: float
    atol: float


class Culprit(Noun):
    """What makes a model wrong: a step, and within it a kernel, a record, a kernel of the user's or a node."""

    step: str
    count: int
    summary: str
    kernel: str | None = None
    origin: str = ""
    """Where the kernel's schedule comes from, e.g. "record 0123456789ab, 5 GFLOP/s when tuned"."""
    kernels: tuple[KernelError, ...] = ()
    """All that are wrong, in the order in which they run; where none is, those that are furthest off."""


class Bisection(Noun):
    """What `bisect` found; `culprit` is None where all values are the reference's."""

    reference: str
    steps: tuple[str, ...]
    checks: tuple[StepCheck, ...]
    culprit: Culprit | None
    unusable_records: tuple[str, ...]
    """Of the tuning database: what it says of records that could not be read or applied, and were skipped."""
    reproducer: str | None
