"""Splits a library's difference to the reference by who made it: import, schedules, Winograd, approximate arithmetic.

The same model is built several times, each time with one more of these, and each build is run on the same inputs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tvmflow import proof
from tvmflow.config import Config
from tvmflow.diagnosis.findings import Attribution, StageError
from tvmflow.errors import VerifyError
from tvmflow.manifest import Manifest, RunVerdict
from tvmflow.pipeline.partial import FAST_MATH, TF32, WINOGRAD, Part
from tvmflow.verification import compare

Outputs = Sequence[list[np.ndarray]]  # per run, per output


@dataclass(frozen=True)
class _Stage:
    name: str
    why: str
    part: Part | None  # None is the artifact as it is


def attribute(cfg: Config, folder: Path, manifest: Manifest, on_event: proof.OnEvent) -> Attribution:
    """Builds the model of the artifact in `folder` stage by stage and holds each build against the reference.

    Raises what building and running raise, and ArtifactError where the artifact cannot be run on this machine.
    """
    proof.check_runs_here(manifest)
    on_event("running the reference")
    truth = proof.reference(cfg, manifest)
    stages = _stages(cfg, manifest)
    rows: list[StageError] = []
    before: Outputs | None = None
    for number, stage in enumerate(stages, 1):
        on_event(f"{stage.name}: {number} of {len(stages)} builds")
        got = _outputs(stage, folder, manifest, truth)
        verdict = proof.judged(cfg, manifest, truth, got)
        rows += _rows(stage, verdict.runs, _changes(manifest, got, before))
        before = got
    return Attribution(verdict=verdict, stages={stage.name: stage.why for stage in stages}, rows=tuple(rows))


def _stages(cfg: Config, manifest: Manifest) -> list[_Stage]:
    numerics = cfg.numerics
    approximate = [name for name in (FAST_MATH, TF32) if getattr(numerics, name.partition(".")[2])]
    layout = manifest.layout.choice
    stages = [
        _Stage("import", "as imported: no graph pass, no fusion, no schedule, functions of libm", Part(cfg, layout, 0)),
        _Stage(
            "schedule",
            "all passes and schedules, precise arithmetic, no Winograd",
            Part(cfg, layout, without=(*WINOGRAD, FAST_MATH, TF32)),
        ),
    ]
    if any(kernel.rule.startswith("winograd ") for kernel in manifest.kernels):
        stages.append(
            _Stage(
                "winograd",
                "the same, and numerics.winograd as configured",
                Part(cfg, layout, without=(FAST_MATH, TF32)),
            )
        )
    last = " + ".join(name.partition(".")[2] for name in approximate)
    why = f"the artifact: the same with {' and '.join(approximate)}" if last else "the artifact, as it was built"
    return [*stages, _Stage(last or "artifact", why, None)]


def _outputs(stage: _Stage, folder: Path, manifest: Manifest, truth: proof.Truth) -> Outputs:
    feeds = [feeds.inputs for feeds in truth.feeds]
    if stage.part is None:
        return proof.run(folder, manifest, feeds, None, VerifyError)
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as name:
        built = proof.build_part(stage.part, Path(name), manifest)
        return proof.run(Path(name), built, feeds, None, VerifyError)


def _changes(manifest: Manifest, got: Outputs, before: Outputs | None) -> list[list[float | None]] | None:
    """Per run and output the largest difference to the build before."""
    if before is None:
        return None
    names = [spec.name for spec in manifest.signature.outputs]
    return [
        [
            compare.compare_output(name, now, then, (0.0, 0.0)).max_error
            for name, now, then in zip(names, run, run_before, strict=True)
        ]
        for run, run_before in zip(got, before, strict=True)
    ]


def _rows(stage: _Stage, runs: Sequence[RunVerdict], changes: list[list[float | None]] | None) -> list[StageError]:
    """One row per output: the worst of all runs."""
    rows = []
    for index, output in enumerate(runs[0].outputs):
        verdicts = [run.outputs[index] for run in runs]
        rows.append(
            StageError(
                stage=stage.name,
                output=output.name,
                ok=all(one.ok for one in verdicts),
                max_error=_worst([one.max_error for one in verdicts]),
                max_relative_error=_worst([one.max_relative_error for one in verdicts]),
                mismatched=sum(one.mismatched for one in verdicts),
                total=sum(one.total for one in verdicts),
                change=_worst([run[index] for run in changes]) if changes is not None else None,
            )
        )
    return rows


def _worst(errors: Sequence[float | None]) -> float | None:
    known = [error for error in errors if error is not None]
    return max(known) if len(known) == len(errors) else None
