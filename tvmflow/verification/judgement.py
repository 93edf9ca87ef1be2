"""Compares a library's outputs with the reference's: the verdict, and the error for one that is not ok."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tvmflow import text
from tvmflow.config import Config
from tvmflow.errors import VerifyError
from tvmflow.manifest import Manifest, RunVerdict, Signature, Verdict
from tvmflow.verification import compare
from tvmflow.verification.reference import Truth, run_reference
from tvmflow.verification.running import OnEvent, run


def verify(
    cfg: Config, folder: Path, manifest: Manifest, on_event: OnEvent
) -> tuple[Verdict, Mapping[str, np.ndarray]]:
    """Runs the reference and the library in `folder` on the config's inputs and compares all outputs.

    Returns the verdict, and the first of the inputs: some that the model accepts.
    """
    on_event("running the reference")
    truth = run_reference(cfg, manifest)
    on_event("running the library")
    got = run(folder, manifest, [f.inputs for f in truth.feeds], None, VerifyError)
    return judge(cfg, manifest, truth, got), truth.feeds[0].inputs


def judge(cfg: Config, manifest: Manifest, truth: Truth, got: Sequence[list[np.ndarray]]) -> Verdict:
    """The verdict on a library's outputs, one list for each of the truth's inputs."""
    signature, narrowest = manifest.signature, manifest.narrowest_float
    runs = tuple(
        compare_run(cfg, signature, narrowest, f, g, w) for f, g, w in zip(truth.feeds, got, truth.want, strict=True)
    )
    ok = all(output.ok for run in runs for output in run.outputs)
    return Verdict(ok=ok, reference=truth.name, notes=_weaknesses(truth.feeds), runs=runs)


def describe_wrong_values(verdict: Verdict, source: str) -> VerifyError:
    """The error for a verdict that is not ok: which outputs of which runs, and how far off.

    `source` is what the user calls the model or artifact.
    """
    wrong = [(run.inputs, output) for run in verdict.runs for output in run.outputs if not output.ok]
    lines = [f"{inputs}, output `{output.name}`: {output.reason}" for inputs, output in wrong]
    return VerifyError(
        f"the library's values are not those of {verdict.reference}:",
        f"`tvmflow bisect {shlex.quote(source)}` with the same options finds the step and kernel at fault; if the "
        "difference is acceptable, state it: [verify] rtol, atol or [verify.outputs.NAME]",
        items=text.listed(lines, 6),
    )


def compare_run(
    cfg: Config,
    signature: Signature,
    narrowest: str,
    feeds: compare.Feeds,
    got: list[np.ndarray],
    want: list[np.ndarray],
) -> RunVerdict:
    """Holds all outputs of one run against the reference's, in the signature's order.

    `narrowest` is the narrowest float dtype that the library computes in.
    """
    tolerances = [
        compare.tolerance(spec.name, w, cfg.verify, narrowest) for spec, w in zip(signature.outputs, want, strict=True)
    ]
    outputs = tuple(
        compare.compare_output(spec.name, g, w, tolerance)
        for spec, g, w, tolerance in zip(signature.outputs, got, want, tolerances, strict=True)
    )
    return RunVerdict(inputs=feeds.origin, dims=feeds.dims, outputs=outputs)


def _weaknesses(feeds: Sequence[compare.Feeds]) -> tuple[str, ...]:
    sizes = [f.dims for f in feeds if f.dims]
    if sizes and all(size == 1 for dims in sizes for size in dims.values()):
        return ("symbolic dimensions were only tried with size 1; [verify.dims] gives better ones",)
    return ()
