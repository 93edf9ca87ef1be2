"""What is done with an artifact: run, verify, attribute, bisect, audit, time."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np
from pydantic import ValidationError

from tvmflow import artifact, bench, config, frontend, npz, process
from tvmflow.audit import Audit
from tvmflow.buckets import verification as bucket_verification
from tvmflow.config import Config
from tvmflow.diagnosis import attribution, bisection
from tvmflow.diagnosis.findings import Attribution, Bisection
from tvmflow.diagnosis.step_search import Subject
from tvmflow.errors import ArtifactError, CompileError, ModelError, UsageError
from tvmflow.flow import compiling
from tvmflow.frozen import evolve
from tvmflow.manifest import Bundle, Described, Manifest, Verdict
from tvmflow.process import Child
from tvmflow.tuning import in_model
from tvmflow.verification import child, compare, judgement, reference, running
from tvmflow.verification.running import OnEvent

Feeds: TypeAlias = Mapping[str, np.ndarray]


def verify_artifact(path: Path, model: Path | None, overrides: config.Overrides, on_event: OnEvent) -> Verdict:
    """Holds an artifact's outputs against its model's; `model` is where that lies now, if it was moved."""
    with artifact.opened_any(path) as (folder, manifest):
        cfg = config_of(path, manifest, model, overrides)
        if isinstance(manifest, Manifest):
            return judgement.verify(cfg, folder, manifest, on_event)[0]
        return bucket_verification.verify(
            cfg, folder, manifest, bucket_verification.exact(cfg, folder, manifest, on_event)
        )


def attribute_artifact(path: Path, model: Path | None, overrides: config.Overrides, on_event: OnEvent) -> Attribution:
    """Splits the difference between an artifact's outputs and its model's by who made it."""
    with artifact.opened(path) as (folder, manifest):
        cfg = config_of(path, manifest, model, overrides)
        return attribution.attribute(cfg, folder, manifest, on_event)


def bisect_artifact(
    path: Path, model: Path | None, overrides: config.Overrides, out: Path, on_event: OnEvent
) -> Bisection:
    """Finds what makes an artifact's values wrong; `out` is a folder for a reproducer."""
    with artifact.opened(path) as (folder, manifest):
        cfg = config_of(path, manifest, model, overrides)
        return bisection.bisect(Subject(cfg, folder, manifest), out, on_event)


def bisect_config(cfg: Config, out: Path, on_event: OnEvent) -> Bisection:
    """Finds what makes the values of a config's library wrong, or its tuning records ones that cannot be built."""
    unchecked = evolve(cfg, verify=evolve(cfg.verify, enabled=False))
    options, failure = compiling.Options(on_event=on_event), ""
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as name:
        folder = Path(name)
        try:
            manifest = compiling.build(unchecked, folder, options)
        except CompileError as exc:
            if cfg.tuning.database is None:
                raise
            failure = exc.message
            untuned = evolve(unchecked, tuning=evolve(cfg.tuning, database=None))
            manifest = compiling.build(untuned, folder, options)
        return bisection.bisect(Subject(cfg, folder, manifest, failure, fresh=not failure), out, on_event)


def run_artifact(
    path: Path, inputs: Path | int, outputs: Path | None, threads: int | None, sizes: Mapping[str, int] | None = None
) -> dict[str, np.ndarray]:
    """Runs an artifact on the arrays of an .npz file, or on inputs drawn with a seed; `outputs` is an .npz to write.

    `sizes` are those of open dimensions to draw for.
    """
    with artifact.opened_any(path) as (folder, manifest):
        feeds = npz.read(inputs) if isinstance(inputs, Path) else _drawn(manifest, inputs, sizes or {})
        (results,) = running.run(folder, manifest, [feeds], threads, ArtifactError)
    named = dict(zip((spec.name for spec in manifest.signature.outputs), results, strict=True))
    if outputs is not None:
        npz.write(outputs, named)
    return named


def audit_artifact(path: Path, timed: bool, model: Path | None, given: Config | None = None) -> dict[str, Audit]:
    """Reads what is inside an artifact, per bucket. `timed` runs it on inputs that its model accepts, for each kernel's
    share. `given` is the config that says what is allowed; without one, the artifact's own does.
    """
    with artifact.opened_any(path) as (folder, manifest):
        libraries = artifact.libraries(folder, manifest, path)
        seconds: list[dict[str, float]] | None = None
        if timed:
            if manifest.target.kind == "cuda":
                raise UsageError("--time measures kernels on a CPU, not on a GPU", "leave it out")
            base = artifact.base_of(path, manifest)
            feeds = [reference.draw_accepted(_first_seed(one, model, base), one) for _, one in libraries]
            seconds = in_model.kernel_seconds(*zip((place for place, _ in libraries), feeds, strict=True))
        auditor = Child("auditing the library", ArtifactError, env=running.RUN_ENV)
        found = auditor.call(child.audit_libraries, libraries, seconds, given)
    return dict(zip((place.name if isinstance(manifest, Bundle) else "" for place, _ in libraries), found, strict=True))


def bench_artifact(
    path: Path, model: Path | None, threads: int | None, budget_s: float, on_event: OnEvent
) -> dict[str, tuple[bench.Samples, ...]]:
    """Times an artifact beside ONNX Runtime or eager PyTorch: same inputs, same threads, in turns, in one process.

    With buckets, each of them takes its part of `budget_s`; the samples are by bucket.
    """
    measured = {}
    with artifact.opened_any(path) as (folder, manifest):
        libraries = artifact.libraries(folder, manifest, path)
        for place, one in libraries:
            name = place.name if isinstance(manifest, Bundle) else ""
            on_event(f"timing {name or one.name}")
            cfg = _first_seed(one, model, artifact.base_of(path, manifest))
            feeds = reference.draw_accepted(cfg, one)
            with_torch = frontend.is_torch(cfg)
            env = {} if with_torch else running.RUN_ENV
            timer = Child("timing the library", ArtifactError, env, with_torch, timed=False)
            measured[name] = timer.call(child.time_beside_peer, cfg, place, feeds, threads, budget_s / len(libraries))
    return measured


def _drawn(manifest: Manifest | Bundle, seed: int, sizes: Mapping[str, int]) -> Feeds:
    """Inputs drawn with a seed, for the smallest bucket where `sizes` say nothing else."""
    section = _stated(manifest).verify
    dims = {size for spec in manifest.signature.inputs for size in spec.shape if isinstance(size, str)}
    for name in sizes:
        if name not in dims:
            raise UsageError(
                f"--dim {name}: {manifest.name} has no open dimension `{name}`",
                f"it has: {', '.join(sorted(dims)) or 'none'}",
            )
    smallest = manifest.buckets[0].dims if isinstance(manifest, Bundle) else {}
    usual = next(compare.candidates(manifest.signature, section, seed)).dims
    limits = compare.open_ranges(manifest.signature, section)[0]
    return compare.drawn(manifest.signature, section, {**usual, **smallest, **sizes}, seed, limits).inputs


def _stated(manifest: Described) -> Config:
    """The config as the manifest states it; raises ArtifactError where it is none."""
    try:
        return config.from_json(manifest.config)
    except ValidationError as exc:
        place = ".".join(map(str, ("config", *exc.errors()[0]["loc"])))
        raise ArtifactError(
            f"{manifest.name}: manifest.json: {place}: {exc.errors()[0]['msg']}", "compile the model again"
        ) from None


def _first_seed(manifest: Manifest, model: Path | None, base: Path) -> Config:
    return _config_from(manifest, model, [{"verify": {"seeds": [0]}}], base)


def config_of(path: Path, manifest: Described, model: Path | None, overrides: config.Overrides) -> Config:
    """The config that the artifact at `path` was built with; its model must be the very file it was built from."""
    return _config_from(manifest, model, overrides, artifact.base_of(path, manifest))


def _config_from(manifest: Described, model: Path | None, overrides: config.Overrides, base: Path) -> Config:
    """Like `config_of`, for paths that start at `base`."""
    stated = _stated(manifest).model.path
    where = model or (base / stated if stated else base)
    if not os.path.exists(where):
        raise ModelError(
            f"{os.path.normpath(where)}: the model that {manifest.name} was compiled from is not there",
            "name its place with --model PATH",
        )
    extra = [{"model": {"path": str(model.resolve())}}] if model is not None else []
    cfg = config.from_dict(manifest.config, [*extra, *overrides], source=f"config of {manifest.name}", folder=base)
    if cfg.model.path:
        artifact.check_source(cfg.model.path, manifest)
    process.limit(cfg.limits.memory_gib, cfg.limits.minutes)
    return cfg
