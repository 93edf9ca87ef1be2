"""From a config to a verified artifact, with one library or a library per bucket."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np

from tvmflow import artifact, config, frontend
from tvmflow.buckets import bundling
from tvmflow.buckets import verification as bucket_verification
from tvmflow.config import Config
from tvmflow.errors import OutputError
from tvmflow.frozen import evolve
from tvmflow.manifest import Bundle, Manifest, Signature, Stage, Verdict
from tvmflow.pipeline import building
from tvmflow.process import Child
from tvmflow.tuning import in_model
from tvmflow.verification import judgement, reference, running
from tvmflow.verification.running import OnEvent

Feeds: TypeAlias = Mapping[str, np.ndarray]
AnyManifest = TypeVar("AnyManifest", Manifest, Bundle)


@dataclass(frozen=True)
class Options:
    """How to compile, beside what the config says: none of it changes the library."""

    zipped: bool = False
    dump_ir: Path | None = None
    source: str = "CONFIG"
    """What the user calls the model, for messages that name a command."""
    on_event: OnEvent = field(default=lambda event: None)


DEFAULTS = Options()


def compile_model(cfg: Config, out: Path, options: Options = DEFAULTS) -> Manifest | Bundle:
    """Config -> artifact at `out`, verified unless the config says otherwise. Nothing is left behind on an error."""
    with artifact.staging(out, options.zipped) as folder:
        base = out.resolve().parent
        if cfg.shapes.bucket_sizes():
            return artifact.finish(folder, _compile_buckets(cfg, folder, options), base)
        manifest = build(cfg, folder, options)
        feeds = None
        if cfg.verify.enabled:
            manifest, feeds = _with_verdict(cfg, folder, manifest, options)
        if feeds is not None or cfg.tuning.require_tuned is not None:
            options.on_event("timing the kernels")
            feeds = reference.draw_accepted(cfg, manifest) if feeds is None else feeds
            (manifest,), _ = _with_shares(cfg, [(folder, manifest, feeds)], options.source)
        return artifact.finish(folder, manifest, base)


def passes(cfg: Config) -> dict[str, list[tuple[str, str]]]:
    """The named passes of this config's pipeline, per phase, each with why it is there."""
    return Child("listing the passes", torch=frontend.needs_torch(cfg)).call(building.passes, cfg)


def inspect_model(cfg: Config) -> tuple[Signature, tuple[str, ...]]:
    """Imports a model and says what goes in and out, and what was rewritten on the way."""
    return Child("importing the model", torch=frontend.needs_torch(cfg)).call(building.inspect, cfg)


def build(cfg: Config, folder: Path, options: Options = DEFAULTS) -> Manifest:
    """Builds one library in `folder`, whose manifest has no verdict yet."""
    if options.dump_ir is not None:
        try:
            options.dump_ir.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise OutputError(f"--dump-ir {options.dump_ir}: {exc.strerror}", "name a folder") from None
    with running.cuda_env(cfg.target.kind) as env:
        compiler = Child("compiling", env=env, torch=frontend.needs_torch(cfg), on_event=options.on_event)
        manifest, usage = compiler.measure(building.build, cfg, folder, options.dump_ir)
    built = evolve(manifest, peak_rss_bytes=usage.peak_rss_bytes)
    artifact.write_manifest(folder, built)
    return built


def _with_verdict(cfg: Config, folder: Path, manifest: Manifest, options: Options) -> tuple[Manifest, Feeds | None]:
    """The manifest with its verdict, and inputs that the library can be timed with, where it runs on this CPU.

    Raises VerifyError where a value is wrong.
    """
    started = time.monotonic()
    feeds: Feeds | None = None
    if reason := running.find_obstacle(manifest.target):
        manifest = _with_note(manifest, f"not run on its target: {reason}; `tvmflow verify` does it there")
        verdict = _verdict_of_twin(cfg, options)
    else:
        verdict, accepted = judgement.verify(cfg, folder, manifest, options.on_event)
        feeds = accepted if cfg.target.kind == "llvm" else None
    if not verdict.ok:
        raise judgement.describe_wrong_values(verdict, options.source)
    stages = (*manifest.stages, Stage(name="verify", seconds=time.monotonic() - started))
    return evolve(manifest, verdict=verdict, stages=stages), feeds


def _compile_buckets(cfg: Config, folder: Path, options: Options) -> Bundle:
    """The artifact of a config with buckets, in `folder`."""

    def build_one(one: Config, place: Path, on_event: OnEvent) -> Manifest:
        dump_ir = options.dump_ir / place.name if options.dump_ir else None
        return build(one, place, replace(options, dump_ir=dump_ir, on_event=on_event))

    bundle = bundling.build(cfg, folder, build_one, options.on_event)
    feeds: Sequence[Feeds] | None = None
    if cfg.verify.enabled:
        bundle, feeds = _proved(cfg, folder, bundle, options)
    if feeds is not None:
        options.on_event("timing the kernels")
        libraries = artifact.libraries(folder, bundle)
        manifests, seconds = _with_shares(
            cfg, [(place, one, fed) for (place, one), fed in zip(libraries, feeds, strict=True)], options.source
        )
        bundle = bundling.timed(folder, bundle, manifests, seconds)
    artifact.write_manifest(folder, bundle)
    return bundle


def _proved(cfg: Config, folder: Path, bundle: Bundle, options: Options) -> tuple[Bundle, Sequence[Feeds] | None]:
    """The bundle with its verdict and what padding does, and inputs for each bucket, where it runs on this CPU."""
    started = time.monotonic()
    if reason := running.find_obstacle(bundle.target):
        bundle = _with_note(bundle, f"not run on its target: {reason}; `tvmflow verify` does it there")
        with tempfile.TemporaryDirectory(prefix="tvmflow-") as name:
            twin = _compile_buckets(_twin(cfg), Path(name), Options(on_event=options.on_event))
        bundle = evolve(bundle, verdict=_noted(twin.verdict), padding=twin.padding, agreement=twin.agreement)
        return bundle, None
    exact = bucket_verification.exact(cfg, folder, bundle, options.on_event)
    bundle = bucket_verification.observed(cfg, folder, bundle, exact.fallback, options.on_event)
    artifact.write_manifest(folder, bundle)
    options.on_event("running requests of random sizes")
    verdict = bucket_verification.verify(cfg, folder, bundle, exact)
    for found in filter(None, (verdict, bundle.agreement)):
        if not found.ok:
            raise judgement.describe_wrong_values(found, options.source)
    stages = (*bundle.stages, Stage(name="verify", seconds=time.monotonic() - started))
    bundle = evolve(bundle, verdict=verdict, stages=stages)
    return bundle, [feeds.inputs for feeds in exact.feeds] if cfg.target.kind == "llvm" else None


def _with_shares(
    cfg: Config, libraries: Sequence[tuple[Path, Manifest, Feeds]], source: str
) -> tuple[list[Manifest], list[float]]:
    """The manifests with a note of where their time goes, and the seconds of all kernels of a run.

    Raises BudgetError where tuned kernels take too little of it.
    """
    measured = in_model.kernel_seconds(*((folder, feeds) for folder, _, feeds in libraries))
    noted = []
    for (_, manifest, _), seconds in zip(libraries, measured, strict=True):
        in_model.check_tuned(cfg, manifest, seconds, source)
        timing = (in_model.shares(cfg, manifest, seconds, source),)
        noted.append(evolve(manifest, timing=timing))
    return noted, [sum(seconds.values()) for seconds in measured]


def _verdict_of_twin(cfg: Config, options: Options) -> Verdict:
    """Builds the same model for this CPU and verifies that: it proves the import, not the kernels of the target."""
    twin = _twin(cfg)
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as name:
        manifest = build(twin, Path(name), Options(on_event=options.on_event))
        verdict, _ = judgement.verify(twin, Path(name), manifest, options.on_event)
    return _noted(verdict)


def _twin(cfg: Config) -> Config:
    return evolve(cfg, target=config.TargetSection(), numerics=config.NumericsSection(), kernels={})


def _noted(verdict: Verdict | None) -> Verdict:
    assert verdict is not None
    note = "the import and graph were verified with a build for this CPU; the target's own kernels were not run"
    return evolve(verdict, notes=(*verdict.notes, note))


def _with_note(manifest: AnyManifest, note: str) -> AnyManifest:
    return evolve(manifest, notes=(*manifest.notes, note))
