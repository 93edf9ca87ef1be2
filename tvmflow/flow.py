"""The story: one function per command, each stage call on its own line.

What may crash (importing, compiling, running a library, running a reference) is called through `process.call`;
children.py holds what runs there.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from tvmflow import artifact, attribution, bench, bisection, config, frontend, in_model, npz, process, proof, verify
from tvmflow.audit import Audit
from tvmflow.config import Config
from tvmflow.errors import ArtifactError, CompileError, ModelError, OutputError, UsageError
from tvmflow.findings import Attribution, Bisection
from tvmflow.manifest import Manifest, Signature, Stage, Verdict
from tvmflow.step_search import Subject

Feeds: TypeAlias = Mapping[str, np.ndarray]


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
    """What a session did: tasks, trials, how many times as fast all kernels together became, and that in each model."""

    tasks: int
    trials: int
    gain: float
    settled: dict[str, in_model.Settled]


def compile_model(cfg: Config, out: Path, options: Options = DEFAULTS) -> Manifest:
    """Config -> artifact at `out`, verified unless the config says otherwise. Nothing is left behind on an error."""
    with artifact.staging(out, options.zipped) as folder:
        manifest = _build(cfg, folder, options)
        feeds = None
        if cfg.verify.enabled:
            manifest, feeds = _with_verdict(cfg, folder, manifest, options)
        if feeds is not None or cfg.tuning.require_tuned is not None:
            options.on_event("timing the kernels")
            manifest = _with_shares(cfg, folder, manifest, feeds, options.source)
        if cfg.verify.enabled or cfg.tuning.require_tuned is not None:
            artifact.write_manifest(folder, manifest)
    return manifest


def verify_artifact(path: Path, model: Path | None, overrides: config.Overrides, on_event: proof.OnEvent) -> Verdict:
    """Holds an artifact's outputs against its model's; `model` is where that lies now, if it was moved."""
    with artifact.opened(path) as (folder, manifest):
        cfg = _config_of(manifest, model, overrides)
        return proof.verdict(cfg, folder, manifest, on_event)[0]


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


def run_artifact(path: Path, inputs: Path | int, outputs: Path | None, threads: int | None) -> dict[str, np.ndarray]:
    """Runs an artifact on the arrays of an .npz file, or on inputs drawn with a seed; `outputs` is an .npz to write."""
    with artifact.opened(path) as (folder, manifest):
        feeds = npz.read(inputs) if isinstance(inputs, Path) else _drawn(manifest, inputs).inputs
        (results,) = proof.run(folder, manifest, [feeds], threads, ArtifactError)
    named = dict(zip((spec.name for spec in manifest.signature.outputs), results, strict=True))
    if outputs is not None:
        npz.write(outputs, named)
    return named


def audit_artifact(path: Path, timed: bool, model: Path | None) -> Audit:
    """Reads what is inside an artifact. `timed` runs it on inputs that its model accepts, for each kernel's share."""
    with artifact.opened(path) as (folder, manifest):
        seconds = None
        if timed:
            if manifest.target.kind == "cuda":
                raise UsageError("--time measures kernels on a CPU, not on a GPU", "leave it out")
            cfg = _config_of(manifest, model, [{"verify": {"seeds": [0]}}])
            seconds = in_model.kernel_seconds(folder, proof.accepted(cfg, manifest))
        found, _ = process.call("tvmflow.children:audit_library", folder, manifest, seconds,
                                what="auditing the library", error=ArtifactError, env=proof.RUN_ENV)  # fmt: skip
    return found  # type: ignore[no-any-return] # what a process replies has no type


def bench_artifact(path: Path, model: Path | None, threads: int | None, budget_s: float) -> tuple[bench.Samples, ...]:
    """Times an artifact beside ONNX Runtime or eager PyTorch: same inputs, same threads, in turns, in one process."""
    with artifact.opened(path) as (folder, manifest):
        cfg = _config_of(manifest, model, [{"verify": {"seeds": [0]}}])
        feeds = proof.accepted(cfg, manifest)
        samples, _ = process.call(
            "tvmflow.children:time_beside_peer", cfg, folder, feeds, threads, budget_s, what="timing the library",
            error=ArtifactError, env={} if frontend.is_torch(cfg) else proof.RUN_ENV, torch=frontend.is_torch(cfg),
        )  # fmt: skip
    return tuple(samples)


def tasks(cfg: Config) -> list[dict[str, Any]]:
    """The tunable kernels of a config: one row each, with the record that serves it or what differs."""
    rows, _ = process.call("tvmflow.tuning_children:tasks", cfg, what="extracting the tasks",
                           torch=frontend.needs_torch(cfg))  # fmt: skip
    return list(rows)


def tune(cfgs: Sequence[Config], what: Selection, on_event: Callable[[Any], None]) -> Tuned:
    """Tunes the tasks of some configs, all into one database, then settles the winners inside the whole models.

    `on_event` gets a line of text, or a tuning.session.Progress after each batch. Only a session that has all tasks of
    its models settles them there, and only on this machine's CPU; after a part, `db merge` joins what the parts found.
    """
    progress: list[Any] = []

    def heard(event: Any) -> None:
        progress.append(event)
        on_event(event)

    with proof.cuda_env(cfgs[0].target.kind) as env:
        found, _ = process.call(
            "tvmflow.tuning_children:tune", cfgs, what.pattern, what.shard, what="tuning", on_event=heard,
            env=env, torch=frontend.needs_torch(*cfgs),
        )  # fmt: skip
    last = next((event for event in reversed(progress) if not isinstance(event, str)), None)
    settled = {}
    if found and what == Selection() and in_model.can_settle(cfgs[0]):
        for cfg in cfgs:
            on_event(f"measuring the winners inside {config.name(cfg)}")
            records = {one.key: one.records for one in found}
            settled[config.name(cfg)] = in_model.settle(cfg, records, lambda c, folder: _build(c, folder, DEFAULTS))
    return Tuned(last.tasks if last else 0, last.trials if last else 0, last.gain if last else 1.0, settled)


def passes(cfg: Config) -> dict[str, list[tuple[str, str]]]:
    """The named passes of this config's pipeline, per phase, each with why it is there."""
    listing, _ = process.call("tvmflow.children:passes", cfg, what="listing the passes",
                              torch=frontend.needs_torch(cfg))  # fmt: skip
    return dict(listing)


def inspect_model(cfg: Config) -> tuple[Signature, tuple[str, ...]]:
    """Imports a model and says what goes in and out, and what was rewritten on the way."""
    (signature, notes), _ = process.call("tvmflow.children:inspect", cfg, what="importing the model",
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
            "tvmflow.children:build", cfg, folder, options.dump_ir, what="compiling", env=env,
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


def _with_shares(cfg: Config, folder: Path, manifest: Manifest, feeds: Feeds | None, source: str) -> Manifest:
    """The manifest with a note of where its time goes; raises BudgetError where tuned kernels take too little of it."""
    seconds = in_model.kernel_seconds(folder, proof.accepted(cfg, manifest) if feeds is None else feeds)
    in_model.check_tuned(cfg, manifest, seconds, source)
    return _with_note(manifest, in_model.shares(cfg, manifest, seconds, source))


def _verdict_of_twin(cfg: Config, options: Options) -> Verdict:
    """Builds the same model for this CPU and verifies that: it proves the import, not the kernels of the target."""
    section = config.TargetSection()
    twin = cfg.model_copy(update={"target": section, "numerics": config.NumericsSection(), "kernels": {}})
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as name:
        manifest = _build(twin, Path(name), Options(on_event=options.on_event))
        verdict, _ = proof.verdict(twin, Path(name), manifest, options.on_event)
    note = "the import and graph were verified with a build for this CPU; the target's own kernels were not run"
    return verdict.model_copy(update={"notes": (*verdict.notes, note)})


def _drawn(manifest: Manifest, seed: int) -> verify.Feeds:
    cfg = config.from_json(manifest.config)
    return next(verify.candidates(manifest.signature, cfg.verify, seed))


def _config_of(manifest: Manifest, model: Path | None, overrides: config.Overrides) -> Config:
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


def _with_note(manifest: Manifest, note: str) -> Manifest:
    return manifest.model_copy(update={"notes": (*manifest.notes, note)})
