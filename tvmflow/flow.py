"""The story: one function per command, each stage call on its own line.

What may crash (importing, compiling, running a library, running a reference) is called through `process.call`;
`children` holds what runs there.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from tvmflow import artifact, bench, config, frontend, in_model, npz, process, proof, verify
from tvmflow.audit import Audit
from tvmflow.buckets import bundling
from tvmflow.buckets import proof as bucket_proof
from tvmflow.children.tuning import Compared
from tvmflow.config import Config
from tvmflow.errors import ArtifactError, CompileError, ModelError, OutputError, UsageError
from tvmflow.findings import Attribution, Bisection
from tvmflow.manifest import Bundle, Described, Manifest, Signature, Stage, Verdict
from tvmflow.proof import attribution, bisection
from tvmflow.proof.step_search import Subject

Feeds: TypeAlias = Mapping[str, np.ndarray]
AnyManifest = TypeVar("AnyManifest", Manifest, Bundle)


@dataclass(frozen=True)
class Options:
    """How to compile, beside what the config says: none of it changes the library."""

    zipped: bool = False
    dump_ir: Path | None = None
    source: str = "CONFIG"
    """What the user calls the model, for messages that name a command."""
    on_event: proof.OnEvent = field(default=lambda event: None)


DEFAULTS = Options()


@dataclass(frozen=True)
class Selection:
    """Which tasks to tune: those that a pattern names, and of them the i-th of n parts."""

    pattern: str = "*"
    shard: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class Tuned:
    """What a session did: tasks, trials, how many times as fast all kernels together became, and that in each model;
    and what it knows of the methods of each convolution."""

    tasks: int
    trials: int
    gain: float
    settled: dict[str, in_model.Settled]
    compared: list[Compared]


def compile_model(cfg: Config, out: Path, options: Options = DEFAULTS) -> Manifest | Bundle:
    """Config -> artifact at `out`, verified unless the config says otherwise. Nothing is left behind on an error."""
    with artifact.staging(out, options.zipped) as folder:
        if cfg.shapes.bucket_sizes():
            return _compile_buckets(cfg, folder, options)
        manifest = _build(cfg, folder, options)
        feeds = None
        if cfg.verify.enabled:
            manifest, feeds = _with_verdict(cfg, folder, manifest, options)
        if feeds is not None or cfg.tuning.require_tuned is not None:
            options.on_event("timing the kernels")
            feeds = proof.accepted(cfg, manifest) if feeds is None else feeds
            (manifest,), _ = _with_shares(cfg, [(folder, manifest, feeds)], options.source)
        if cfg.verify.enabled or cfg.tuning.require_tuned is not None:
            artifact.write_manifest(folder, manifest)
    return manifest


def verify_artifact(path: Path, model: Path | None, overrides: config.Overrides, on_event: proof.OnEvent) -> Verdict:
    """Holds an artifact's outputs against its model's; `model` is where that lies now, if it was moved."""
    with artifact.opened_any(path) as (folder, manifest):
        cfg = _config_of(manifest, model, overrides)
        if isinstance(manifest, Manifest):
            return proof.verdict(cfg, folder, manifest, on_event)[0]
        return bucket_proof.verdict(cfg, folder, manifest, bucket_proof.exact(cfg, folder, manifest, on_event))


def attribute_artifact(
    path: Path, model: Path | None, overrides: config.Overrides, on_event: proof.OnEvent
) -> Attribution:
    """Splits the difference between an artifact's outputs and its model's by who made it."""
    with artifact.opened(path) as (folder, manifest):
        cfg = _config_of(manifest, model, overrides)
        return attribution.attribute(cfg, folder, manifest, on_event)


def bisect_artifact(
    path: Path, model: Path | None, overrides: config.Overrides, out: Path, on_event: proof.OnEvent
) -> Bisection:
    """Finds what makes an artifact's values wrong; `out` is a folder for a reproducer."""
    with artifact.opened(path) as (folder, manifest):
        cfg = _config_of(manifest, model, overrides)
        return bisection.bisect(Subject(cfg, folder, manifest), out, on_event)


def bisect_config(cfg: Config, out: Path, on_event: proof.OnEvent) -> Bisection:
    """Finds what makes the values of a config's library wrong, or its tuning records ones that cannot be built."""
    unchecked = cfg.model_copy(update={"verify": cfg.verify.model_copy(update={"enabled": False})})
    options, failure = Options(on_event=on_event), ""
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as name:
        folder = Path(name)
        try:
            manifest = _build(unchecked, folder, options)
        except CompileError as exc:
            if cfg.tuning.database is None:
                raise
            failure = exc.message
            untuned = cfg.tuning.model_copy(update={"database": None})
            manifest = _build(unchecked.model_copy(update={"tuning": untuned}), folder, options)
        return bisection.bisect(Subject(cfg, folder, manifest, failure, fresh=not failure), out, on_event)


def run_artifact(
    path: Path, inputs: Path | int, outputs: Path | None, threads: int | None, sizes: Mapping[str, int] | None = None
) -> dict[str, np.ndarray]:
    """Runs an artifact on the arrays of an .npz file, or on inputs drawn with a seed; `outputs` is an .npz to write.

    `sizes` are those of open dimensions to draw for.
    """
    with artifact.opened_any(path) as (folder, manifest):
        feeds = npz.read(inputs) if isinstance(inputs, Path) else _drawn(manifest, inputs, sizes or {})
        (results,) = proof.run(folder, manifest, [feeds], threads, ArtifactError)
    named = dict(zip((spec.name for spec in manifest.signature.outputs), results, strict=True))
    if outputs is not None:
        npz.write(outputs, named)
    return named


def audit_artifact(path: Path, timed: bool, model: Path | None) -> dict[str, Audit]:
    """Reads what is inside an artifact, per bucket. `timed` runs it on inputs that its model accepts, for each kernel's
    share."""
    with artifact.opened_any(path) as (folder, manifest):
        libraries = artifact.libraries(folder, manifest)
        seconds: list[dict[str, float]] | None = None
        if timed:
            if manifest.target.kind == "cuda":
                raise UsageError("--time measures kernels on a CPU, not on a GPU", "leave it out")
            feeds = [proof.accepted(_first_seed(one, model), one) for _, one in libraries]
            seconds = in_model.kernel_seconds(*zip((place for place, _ in libraries), feeds, strict=True))
        found, _ = process.call("tvmflow.children.running:audit_libraries", libraries, seconds,
                                what="auditing the library", error=ArtifactError, env=proof.RUN_ENV)  # fmt: skip
    return dict(zip((place.name if isinstance(manifest, Bundle) else "" for place, _ in libraries), found, strict=True))


def bench_artifact(
    path: Path, model: Path | None, threads: int | None, budget_s: float, on_event: proof.OnEvent
) -> dict[str, tuple[bench.Samples, ...]]:
    """Times an artifact beside ONNX Runtime or eager PyTorch: same inputs, same threads, in turns, in one process.

    With buckets, each of them takes its part of `budget_s`; the samples are by bucket.
    """
    measured = {}
    with artifact.opened_any(path) as (folder, manifest):
        libraries = artifact.libraries(folder, manifest)
        for place, one in libraries:
            name = place.name if isinstance(manifest, Bundle) else ""
            on_event(f"timing {name or one.name}")
            cfg = _first_seed(one, model)
            samples, _ = process.call(
                "tvmflow.children.running:time_beside_peer", cfg, place, proof.accepted(cfg, one), threads,
                budget_s / len(libraries), what="timing the library", error=ArtifactError,
                env={} if frontend.is_torch(cfg) else proof.RUN_ENV, torch=frontend.is_torch(cfg),
            )  # fmt: skip
            measured[name] = tuple(samples)
    return measured


def tasks(cfg: Config) -> list[dict[str, Any]]:
    """The tunable kernels of a config: one row each, with the record that serves it or what differs.

    With buckets, the rows of each bucket, which name it.
    """
    rows: list[dict[str, Any]] = []
    for name, one in bundling.configs_of(cfg).items():
        found, _ = process.call("tvmflow.children.tuning:tasks", one, what="extracting the tasks",
                                torch=frontend.needs_torch(one))  # fmt: skip
        bucket = {"bucket": name} if name else {}
        rows += [bucket | row for row in found]
    return rows


def tune(cfgs: Sequence[Config], what: Selection, on_event: Callable[[Any], None]) -> Tuned:
    """Tunes the tasks of some configs, all into one database, then settles the winners inside the whole models, and
    compares the methods of their convolutions.

    `on_event` gets a line of text, or a tuning.session.Progress after each batch. Only a session that has all tasks of
    its models does the latter two, settling only on this machine's CPU; after a part, `db merge` joins what was found.
    Of a config with buckets, each bucket is a model of its own.
    """
    progress: list[Any] = []

    def heard(event: Any) -> None:
        progress.append(event)
        on_event(event)

    models = _per_bucket(cfgs)
    with proof.cuda_env(cfgs[0].target.kind) as env:
        found, _ = process.call(
            "tvmflow.children.tuning:tune", [one for _, one in models], what.pattern, what.shard, what="tuning",
            on_event=heard, env=env, torch=frontend.needs_torch(*cfgs),
        )  # fmt: skip
    last = next((event for event in reversed(progress) if not isinstance(event, str)), None)
    settled = {}
    if found and what == Selection() and in_model.can_settle(cfgs[0]):
        for name, cfg in models:
            on_event(f"measuring the winners inside {name}")
            records = {one.key: one.records for one in found}
            settled[name] = in_model.settle(cfg, records, lambda c, folder: _build(c, folder, DEFAULTS))
    compared = compare_methods(cfgs, False, on_event) if what == Selection() else []
    return Tuned(last.tasks if last else 0, last.trials if last else 0, last.gain if last else 1.0, settled, compared)


def compare_methods(cfgs: Sequence[Config], again: bool, on_event: Callable[[Any], None]) -> list[Compared]:
    """Measures by which method the convolutions of some configs are fastest on a CPU, all into one database.

    What is known already stays unless `again`, or the direct kernel has another record now. Returns all of it.
    """
    served = [cfg for cfg in cfgs if cfg.target.kind == "llvm" and cfg.numerics.winograd != "off"]
    if not served:
        return []
    models = [one for _, one in _per_bucket(served)]
    found, _ = process.call("tvmflow.children.tuning:compare_methods", models, again, what="comparing methods",
                            on_event=on_event, torch=frontend.needs_torch(*served))  # fmt: skip
    return list(found)


def _per_bucket(cfgs: Sequence[Config]) -> list[tuple[str, Config]]:
    """The names and configs of all models: each bucket is one of its own. Two configs may name the same model."""
    return [
        (" ".join(filter(None, (config.name(cfg), bucket))), one)
        for cfg in cfgs
        for bucket, one in bundling.configs_of(cfg).items()
    ]


def passes(cfg: Config) -> dict[str, list[tuple[str, str]]]:
    """The named passes of this config's pipeline, per phase, each with why it is there."""
    listing, _ = process.call("tvmflow.children.building:passes", cfg, what="listing the passes",
                              torch=frontend.needs_torch(cfg))  # fmt: skip
    return dict(listing)


def inspect_model(cfg: Config) -> tuple[Signature, tuple[str, ...]]:
    """Imports a model and says what goes in and out, and what was rewritten on the way."""
    (signature, notes), _ = process.call("tvmflow.children.building:inspect", cfg, what="importing the model",
                                         torch=frontend.needs_torch(cfg))  # fmt: skip
    return signature, notes


# --- the parts of a command -------------------------------------------------------------------------------------------


def _build(cfg: Config, folder: Path, options: Options) -> Manifest:
    if options.dump_ir is not None:
        try:
            options.dump_ir.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise OutputError(f"--dump-ir {options.dump_ir}: {exc.strerror}", "name a folder") from None
    with proof.cuda_env(cfg.target.kind) as env:
        manifest, usage = process.call(
            "tvmflow.children.building:build", cfg, folder, options.dump_ir, what="compiling", env=env,
            on_event=options.on_event, torch=frontend.needs_torch(cfg),
        )  # fmt: skip
    built: Manifest = manifest.model_copy(update={"peak_rss_bytes": usage.peak_rss_bytes})
    artifact.write_manifest(folder, built)
    return built


def _with_verdict(cfg: Config, folder: Path, manifest: Manifest, options: Options) -> tuple[Manifest, Feeds | None]:
    """The manifest with its verdict, and inputs that the library can be timed with, where it runs on this CPU.

    Raises VerifyError where a value is wrong.
    """
    started = time.monotonic()
    feeds: Feeds | None = None
    if reason := proof.obstacle(manifest):
        manifest = _with_note(manifest, f"not run on its target: {reason}; `tvmflow verify` does it there")
        verdict = _verdict_of_twin(cfg, options)
    else:
        verdict, accepted = proof.verdict(cfg, folder, manifest, options.on_event)
        feeds = accepted if cfg.target.kind == "llvm" else None
    if not verdict.ok:
        raise proof.wrong_values(verdict, options.source)
    stages = (*manifest.stages, Stage(name="verify", seconds=time.monotonic() - started))
    return manifest.model_copy(update={"verdict": verdict, "stages": stages}), feeds


def _compile_buckets(cfg: Config, folder: Path, options: Options) -> Bundle:
    """The artifact of a config with buckets, in `folder`."""
    def build_one(one: Config, place: Path, on_event: proof.OnEvent) -> Manifest:
        dump_ir = options.dump_ir / place.name if options.dump_ir else None
        return _build(one, place, replace(options, dump_ir=dump_ir, on_event=on_event))

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
    if reason := proof.obstacle(bundle):
        bundle = _with_note(bundle, f"not run on its target: {reason}; `tvmflow verify` does it there")
        with tempfile.TemporaryDirectory(prefix="tvmflow-") as name:
            twin = _compile_buckets(_twin(cfg), Path(name), Options(on_event=options.on_event))
        bundle = bundle.model_copy(update={"verdict": _noted(twin.verdict), "padding": twin.padding,
                                           "agreement": twin.agreement})  # fmt: skip
        return bundle, None
    exact = bucket_proof.exact(cfg, folder, bundle, options.on_event)
    bundle = bucket_proof.observed(cfg, folder, bundle, exact.fallback, options.on_event)
    artifact.write_manifest(folder, bundle)
    options.on_event("running requests of random sizes")
    verdict = bucket_proof.verdict(cfg, folder, bundle, exact)
    for found in filter(None, (verdict, bundle.agreement)):
        if not found.ok:
            raise proof.wrong_values(found, options.source)
    stages = (*bundle.stages, Stage(name="verify", seconds=time.monotonic() - started))
    bundle = bundle.model_copy(update={"verdict": verdict, "stages": stages})
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
        noted.append(_with_note(manifest, in_model.shares(cfg, manifest, seconds, source)))
    return noted, [sum(seconds.values()) for seconds in measured]


def _verdict_of_twin(cfg: Config, options: Options) -> Verdict:
    """Builds the same model for this CPU and verifies that: it proves the import, not the kernels of the target."""
    twin = _twin(cfg)
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as name:
        manifest = _build(twin, Path(name), Options(on_event=options.on_event))
        verdict, _ = proof.verdict(twin, Path(name), manifest, options.on_event)
    return _noted(verdict)


def _twin(cfg: Config) -> Config:
    return cfg.model_copy(
        update={"target": config.TargetSection(), "numerics": config.NumericsSection(), "kernels": {}}
    )


def _noted(verdict: Verdict | None) -> Verdict:
    assert verdict is not None
    note = "the import and graph were verified with a build for this CPU; the target's own kernels were not run"
    return verdict.model_copy(update={"notes": (*verdict.notes, note)})


def _drawn(manifest: Manifest | Bundle, seed: int, sizes: Mapping[str, int]) -> Feeds:
    """Inputs drawn with a seed, for the smallest bucket where `sizes` say nothing else."""
    section = config.from_json(manifest.config).verify
    dims = {size for spec in manifest.signature.inputs for size in spec.shape if isinstance(size, str)}
    for name in sizes:
        if name not in dims:
            raise UsageError(f"--dim {name}: {manifest.name} has no open dimension `{name}`",
                             f"it has: {', '.join(sorted(dims)) or 'none'}")  # fmt: skip
    smallest = manifest.buckets[0].dims if isinstance(manifest, Bundle) else {}
    stated = {name: (size,) for name, size in {**smallest, **sizes}.items()}
    section = section.model_copy(update={"dims": {**section.dims, **stated}})
    return next(verify.candidates(manifest.signature, section, seed)).inputs


def _first_seed(manifest: Manifest, model: Path | None) -> Config:
    return _config_of(manifest, model, [{"verify": {"seeds": [0]}}])


def _config_of(manifest: Described, model: Path | None, overrides: config.Overrides) -> Config:
    """The config an artifact was built with; its model must be the very file it was built from."""
    extra = [{"model": {"path": str(model.resolve())}}] if model is not None else []
    where = model or Path(str(manifest.config["model"]["path"] or "."))
    if not where.exists():
        raise ModelError(f"{where}: the model that {manifest.name} was compiled from is not there",
                         "name its place with --model")  # fmt: skip
    cfg = config.from_dict(manifest.config, [*extra, *overrides], source=f"config of {manifest.name}")
    if cfg.model.path:
        artifact.check_source(cfg.model.path, manifest)
    return cfg


def _with_note(manifest: AnyManifest, note: str) -> AnyManifest:
    return manifest.model_copy(update={"notes": (*manifest.notes, note)})
