"""Running libraries and references, each in a process of its own, and holding one against the other."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tvmflow import artifact, frontend, host, npz, process
from tvmflow.config import Config
from tvmflow.errors import ArtifactError, ReferenceRunError, TvmflowError, VerifyError
from tvmflow.manifest import Described, Manifest, RunVerdict, Signature, Verdict
from tvmflow.pipeline.partial import Part
from tvmflow.runtime import inputs
from tvmflow.verification import compare

OnEvent = Callable[[str], None]
RUN_ENV = {"TVM_USE_RUNTIME_LIB": "1"}  # a process that only runs a library needs no compiler


@dataclass(frozen=True)
class Truth:
    """Inputs that the reference accepts, its name, and per input its outputs in the signature's order."""

    feeds: Sequence[compare.Feeds]
    name: str
    want: Sequence[list[np.ndarray]]


@contextmanager
def cuda_env(kind: str) -> Iterator[dict[str, str]]:
    """The variables with which TVM's CUDA run time loads in a child, with or without a driver."""
    if kind != "cuda":
        yield {}
        return
    from tvmflow.codegen import cuda

    with tempfile.TemporaryDirectory(prefix="tvmflow-") as stub:
        yield cuda.loader_env(Path(stub))


def build_part(part: Part, folder: Path, whole: Manifest) -> Manifest:
    """Builds a part in a process of its own; `whole` is the manifest of the whole build."""
    with cuda_env(part.cfg.target.kind) as env:
        manifest, _ = process.call(
            "tvmflow.pipeline.partial:build",
            part,
            folder,
            whole,
            what="compiling a part",
            env=env,
            torch=frontend.needs_torch(part.cfg),
        )
    built: Manifest = manifest
    return built


def obstacle(manifest: Described) -> str:
    """Why a library cannot be run on this machine; empty where it can."""
    if manifest.target.kind == "cuda":
        from tvmflow.codegen import cuda

        return "" if cuda.detect_arch() else "no GPU is here"
    try:
        artifact.check_machine(manifest, host.host_features(), {})
    except ArtifactError as exc:
        return exc.message
    return ""


def check_runs_here(manifest: Described) -> None:
    """Raises ArtifactError where the library cannot be run on this machine, before anything is built for that."""
    if reason := obstacle(manifest):
        raise ArtifactError(
            f"{manifest.name} was built for {manifest.target.arch or manifest.target.mcpu} and cannot be run here, so "
            f"its values cannot be looked into: {reason}",
            "do it on a machine that can run it; a build for this CPU (--target llvm) shows what is wrong with the "
            "import and the graph",
        )


def run(
    folder: Path,
    manifest: Described,
    feeds: Sequence[Mapping[str, np.ndarray]],
    threads: int | None,
    error: type[TvmflowError],
) -> list[list[np.ndarray]]:
    with cuda_env(manifest.target.kind) as env:
        results, _ = process.call(
            "tvmflow.verification.child:run",
            folder,
            feeds,
            threads,
            what="running the library",
            error=error,
            env=RUN_ENV | env,
        )
    return list(results)


def verdict(
    cfg: Config, folder: Path, manifest: Manifest, on_event: OnEvent
) -> tuple[Verdict, Mapping[str, np.ndarray]]:
    """Runs the reference and the library in `folder` on the config's inputs and compares all outputs.

    Returns the verdict, and the first of the inputs: some that the model accepts.
    """
    on_event("running the reference")
    truth = reference(cfg, manifest)
    on_event("running the library")
    got = run(folder, manifest, [f.inputs for f in truth.feeds], None, VerifyError)
    return judged(cfg, manifest, truth, got), truth.feeds[0].inputs


def judged(cfg: Config, manifest: Manifest, truth: Truth, got: Sequence[list[np.ndarray]]) -> Verdict:
    """The verdict on a library's outputs, one list for each of the truth's inputs."""
    signature, narrowest = manifest.signature, manifest.narrowest_float
    runs = tuple(
        compared(cfg, signature, narrowest, f, g, w) for f, g, w in zip(truth.feeds, got, truth.want, strict=True)
    )
    ok = all(output.ok for run in runs for output in run.outputs)
    return Verdict(ok=ok, reference=truth.name, notes=_weaknesses(truth.feeds), runs=runs)


def wrong_values(verdict: Verdict, source: str) -> VerifyError:
    """The error for a verdict that is not ok: which outputs of which runs, and how far off.

    `source` is what the user calls the model or artifact.
    """
    wrong = [(run.inputs, output) for run in verdict.runs for output in run.outputs if not output.ok]
    lines = [f"\n  {inputs}, output `{output.name}`: {output.reason}" for inputs, output in wrong]
    more = f"\n  and {len(lines) - 6} more" if len(lines) > 6 else ""
    return VerifyError(
        f"the library's values are not those of {verdict.reference}:" + "".join(lines[:6]) + more,
        f"`tvmflow bisect {source}` with the same options finds the step and kernel at fault; if the difference is "
        "acceptable, state it: [verify] rtol, atol or [verify.outputs.NAME]",
    )


def reference(cfg: Config, manifest: Manifest) -> Truth:
    """What the reference gives on inputs that it accepts."""
    return first_accepted(cfg, list(_feeds(cfg, manifest)))


def first_accepted(cfg: Config, rows: Sequence[Sequence[compare.Feeds]]) -> Truth:
    """What the reference gives on the first of `rows` that it accepts as a whole.

    All rows go to one process. Where one of them brings that down, each gets a process of its own.
    """
    inputs = [[feeds.inputs for feeds in row] for row in rows]
    errors: list[ReferenceRunError] = []
    for start, batch in [(0, inputs), *((index, [row]) for index, row in enumerate(inputs))]:
        try:
            (index, name, outputs), _ = process.call(
                "tvmflow.frontend:first_accepted",
                cfg,
                batch,
                what="the reference",
                error=ReferenceRunError,
                torch=frontend.is_torch(cfg),
            )
            return Truth(rows[start + index], name, outputs)
        except ReferenceRunError as exc:
            errors.append(exc)
        if not errors[0].crashed:
            break
    raise ReferenceRunError(
        f"the reference accepts none of the inputs tried, so nothing can be verified. {errors[0].message}",
        'give inputs that the model accepts: [verify] inputs = "x.npz" (--verify-inputs), ranges or dims',
        errors[0].details,
    )


def each_accepted(cfg: Config, feeds: Sequence[compare.Feeds]) -> list[list[np.ndarray] | None]:
    """What the reference gives on each of `feeds`; None where it refuses them, as models do wrong sizes."""
    if not feeds:
        return []
    try:
        return list(first_accepted(cfg, [feeds]).want)
    except ReferenceRunError as exc:
        if exc.crashed:
            raise
    outputs, _ = process.call(
        "tvmflow.frontend:each_accepted",
        cfg,
        [one.inputs for one in feeds],
        what="the reference",
        error=ReferenceRunError,
        torch=frontend.is_torch(cfg),
    )
    return list(outputs)


def accepted(cfg: Config, manifest: Manifest) -> Mapping[str, np.ndarray]:
    """Inputs that the reference accepts."""
    return reference(cfg, manifest).feeds[0].inputs


def compared(
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


def _feeds(cfg: Config, manifest: Manifest) -> Iterator[list[compare.Feeds]]:
    """Inputs to try, the most telling first: one list, with one entry per seed, after another."""
    if cfg.verify.inputs is not None:
        arrays = npz.read(cfg.verify.inputs)
        inputs.check(manifest.signature, arrays)
        yield [compare.Feeds(arrays, {}, cfg.verify.inputs.name)]
        return
    per_seed = (compare.candidates(manifest.signature, cfg.verify, seed) for seed in cfg.verify.seeds)
    examples = _examples(cfg)
    yield from ([*examples, *row] for row in zip(*per_seed, strict=True))
    if examples:
        yield examples


def _examples(cfg: Config) -> list[compare.Feeds]:
    """The inputs that the model brings along, if any."""
    if not frontend.is_torch(cfg):
        return []
    inputs, _ = process.call(
        "tvmflow.frontend:examples", cfg, what="the reference", error=ReferenceRunError, torch=True
    )
    return [compare.Feeds(inputs, {}, "example")]
