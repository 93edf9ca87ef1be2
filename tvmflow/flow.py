"""The story: one function per command, each stage call on its own line.

What may crash (importing, compiling, running a library, running a reference) is called through `process.call`;
children.py holds what runs there.
"""

from __future__ import annotations

import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tvmflow import artifact, bench, config, frontend, process, verify
from tvmflow.artifact import Manifest, RunVerdict, Stage, Verdict
from tvmflow.config import Config
from tvmflow.errors import (
    ArtifactError,
    CompileError,
    InputError,
    OutputError,
    ReferenceRunError,
    TvmflowError,
    VerifyError,
)

OnEvent = Callable[[str], None]
RUN_ENV = {"TVM_USE_RUNTIME_LIB": "1"}  # a process that only runs a library needs no compiler


@dataclass(frozen=True)
class Options:
    """How to compile, beside what the config says: none of it changes the library."""

    zipped: bool = False
    dump_ir: Path | None = None
    on_event: OnEvent = field(default=lambda event: None)


DEFAULTS = Options()


def compile_model(cfg: Config, out: Path, options: Options = DEFAULTS) -> Manifest:
    """Config -> artifact at `out`, verified unless the config says otherwise. Nothing is left behind on an error."""
    with artifact.staging(out, options.zipped) as folder:
        manifest = _build(cfg, folder, options)
        if cfg.verify.enabled:
            manifest = _with_verdict(cfg, folder, manifest, options)
            artifact.write_manifest(folder, manifest)
    return manifest


def verify_artifact(path: Path, model: Path | None, overrides: config.Overrides, on_event: OnEvent) -> Verdict:
    """Holds an artifact's outputs against its model's; `model` is where that lies now, if it was moved."""
    with artifact.opened(path) as (folder, manifest):
        cfg = _config_of(manifest, model, overrides)
        return _verdict(cfg, folder, manifest, on_event)


def run_artifact(path: Path, inputs: Path | int, outputs: Path | None, threads: int | None) -> dict[str, np.ndarray]:
    """Runs an artifact on the arrays of an .npz file, or on inputs drawn with a seed; `outputs` is an .npz to write."""
    with artifact.opened(path) as (folder, manifest):
        feeds = read_npz(inputs) if isinstance(inputs, Path) else _drawn(manifest, inputs).inputs
        (results,) = _run(folder, manifest, [feeds], threads, ArtifactError)
    named = dict(zip((spec.name for spec in manifest.signature.outputs), results, strict=True))
    if outputs is not None:
        write_npz(outputs, named)
    return named


def bench_artifact(path: Path, model: Path | None, threads: int | None, budget_s: float) -> tuple[bench.Samples, ...]:
    """Times an artifact beside ONNX Runtime or eager PyTorch: same inputs, same threads, in turns, in one process."""
    with artifact.opened(path) as (folder, manifest):
        cfg = _config_of(manifest, model, [{"verify": {"seeds": [0]}}])
        feeds = _reference(cfg, manifest)[0][0].inputs
        samples, _ = process.call(
            "tvmflow.children:time_beside_peer", cfg, folder, feeds, threads, budget_s, what="timing the library",
            error=ArtifactError, env={} if frontend.is_torch(cfg) else RUN_ENV,
        )  # fmt: skip
    return tuple(samples)


def tasks(cfg: Config) -> list[dict[str, Any]]:
    """The tunable kernels of a config: one row each, with the record that serves it or what differs."""
    rows, _ = process.call("tvmflow.tuning_children:tasks", cfg, what="extracting the tasks", error=CompileError)
    return list(rows)


def tune(cfg: Config, pattern: str, on_progress: Callable[[str, float], None]) -> dict[str, float]:
    """Tunes a config's tasks into its database; `on_progress` gets a line and the seconds left."""
    last: dict[str, float] = {"tasks": 0, "trials": 0, "gain": 1.0}

    def on_event(event: Any) -> None:
        if isinstance(event, str):
            on_progress(event, cfg.tuning.minutes * 60)
            return
        last.update(tasks=event.tasks, trials=event.trials, gain=event.gain)
        text = (f"{event.task[:40]} {event.best_gflops:.0f} GFLOP/s; {event.done_tasks} of {event.tasks} done, "
                f"{event.trials} trials, {event.gain:.2f} x as fast")  # fmt: skip
        on_progress(text, event.left_s)

    process.call("tvmflow.tuning_children:tune", cfg, pattern, what="tuning", error=CompileError, on_event=on_event)
    return last


def passes(cfg: Config) -> dict[str, list[tuple[str, str]]]:
    """The named passes of this config's pipeline, per phase, each with why it is there."""
    listing, _ = process.call("tvmflow.children:passes", cfg, what="listing the passes", error=CompileError)
    return dict(listing)


def inspect_model(cfg: Config) -> tuple[artifact.Signature, tuple[str, ...]]:
    """Imports a model and says what goes in and out, and what was rewritten on the way."""
    (signature, notes), _ = process.call("tvmflow.children:inspect", cfg, what="importing the model")
    return signature, notes


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file by name; raises InputError. Pickled objects are refused."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, zipfile.BadZipFile, AttributeError) as exc:
        hint = "write it with numpy.savez(path, name=array)"
        raise InputError(f"{path}: not an .npz of arrays: {exc}", hint) from None


def write_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays by name, whole or not at all; raises OutputError."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".npz", delete=False) as stream:
            temporary = Path(stream.name)
            try:
                with zipfile.ZipFile(stream, "w") as archive:
                    for name, array in arrays.items():
                        with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                            np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
                stream.flush()
                temporary.replace(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
    except OSError as exc:
        raise OutputError(f"{path}: cannot be written: {exc.strerror}", "choose another place") from None


# --- the parts of a command -------------------------------------------------------------------------------------------


def _build(cfg: Config, folder: Path, options: Options) -> Manifest:
    if options.dump_ir is not None:
        options.dump_ir.mkdir(parents=True, exist_ok=True)
    with _cuda_env(cfg.target.kind) as env:
        manifest, usage = process.call(
            "tvmflow.children:build", cfg, folder, options.dump_ir, what="compiling", env=env, on_event=options.on_event
        )
    built: Manifest = manifest.model_copy(update={"peak_rss_bytes": usage.peak_rss_bytes})
    artifact.write_manifest(folder, built)
    return built


@contextmanager
def _cuda_env(kind: str) -> Iterator[dict[str, str]]:
    """The variables with which TVM's CUDA run time loads in a child, with or without a driver."""
    if kind != "cuda":
        yield {}
        return
    from tvmflow.build import cuda

    with tempfile.TemporaryDirectory(prefix="tvmflow-") as stub:
        yield cuda.loader_env(Path(stub))


def _run(folder: Path, manifest: Manifest, feeds: Sequence[Mapping[str, np.ndarray]], threads: int | None,
         error: type[TvmflowError]) -> list[list[np.ndarray]]:  # fmt: skip
    with _cuda_env(manifest.target.kind) as env:
        results, _ = process.call(
            "tvmflow.children:run", folder, feeds, threads, what="running the library", error=error, env=RUN_ENV | env
        )
    return list(results)


def _with_verdict(cfg: Config, folder: Path, manifest: Manifest, options: Options) -> Manifest:
    """The manifest with its verdict; raises VerifyError where a value is wrong."""
    started = time.monotonic()
    if reason := _cannot_run_here(manifest):
        manifest = _with_note(manifest, f"not run on its target: {reason}; `tvmflow verify` does it there")
        verdict = _verdict_of_twin(cfg, options)
    else:
        verdict = _verdict(cfg, folder, manifest, options.on_event)
    if not verdict.ok:
        raise wrong_values(verdict)
    stages = (*manifest.stages, Stage(name="verify", seconds=time.monotonic() - started))
    return manifest.model_copy(update={"verdict": verdict, "stages": stages})


def wrong_values(verdict: Verdict) -> VerifyError:
    """The error for a verdict that is not ok: which outputs of which runs, and how far off."""
    wrong = [(run.inputs, output) for run in verdict.runs for output in run.outputs if not output.ok]
    lines = [f"\n  {inputs}, output `{output.name}`: {output.reason}" for inputs, output in wrong]
    more = f"\n  and {len(lines) - 6} more" if len(lines) > 6 else ""
    return VerifyError(
        f"the library's values are not those of {verdict.reference}:" + "".join(lines[:6]) + more,
        "if the difference is acceptable, state it: [verify] rtol, atol or [verify.outputs.NAME]; "
        "verify.enabled = false (--no-verify) skips the check",
    )


def _verdict_of_twin(cfg: Config, options: Options) -> Verdict:
    """Builds the same model for this CPU and verifies that: it proves the import, not the kernels of the target."""
    section = config.TargetSection()
    twin = cfg.model_copy(update={"target": section, "numerics": config.NumericsSection()})
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as name:
        manifest = _build(twin, Path(name), Options(on_event=options.on_event))
        verdict = _verdict(twin, Path(name), manifest, options.on_event)
    note = "the import and graph were verified with a build for this CPU; the target's own kernels were not run"
    return verdict.model_copy(update={"notes": (*verdict.notes, note)})


def _cannot_run_here(manifest: Manifest) -> str:
    from tvmflow import target

    if manifest.target.kind == "cuda":
        from tvmflow.build import cuda

        return "" if cuda.detect_arch() else "no GPU is here"
    try:
        artifact.check_machine(manifest, target.host_features(), {})
    except ArtifactError as exc:
        return exc.message
    return ""


def _verdict(cfg: Config, folder: Path, manifest: Manifest, on_event: OnEvent) -> Verdict:
    on_event("running the reference")
    feeds, reference, want = _reference(cfg, manifest)
    on_event("running the library")
    got = _run(folder, manifest, [f.inputs for f in feeds], None, VerifyError)
    runs = tuple(_compared(cfg, manifest, f, g, w) for f, g, w in zip(feeds, got, want, strict=True))
    ok = all(output.ok for run in runs for output in run.outputs)
    notes = _weaknesses(feeds)
    return Verdict(ok=ok, reference=reference, notes=notes, runs=runs)


def _compared(cfg: Config, manifest: Manifest, feeds: verify.Feeds, got: list[np.ndarray], want: list[np.ndarray]
              ) -> RunVerdict:  # fmt: skip
    """Holds all outputs of one run against the reference's, in the signature's order."""
    tolerances = [
        verify.tolerance(spec.name, w, cfg.verify, manifest.narrowest_float)
        for spec, w in zip(manifest.signature.outputs, want, strict=True)
    ]
    outputs = tuple(
        verify.compare_output(spec.name, g, w, tolerance)
        for spec, g, w, tolerance in zip(manifest.signature.outputs, got, want, tolerances, strict=True)
    )
    return RunVerdict(inputs=feeds.origin, dims=feeds.dims, outputs=outputs)


def _weaknesses(feeds: Sequence[verify.Feeds]) -> tuple[str, ...]:
    sizes = [f.dims for f in feeds if f.dims]
    if sizes and all(size == 1 for dims in sizes for size in dims.values()):
        return ("symbolic dimensions were only tried with size 1; [verify.dims] gives better ones",)
    return ()


def _reference(cfg: Config, manifest: Manifest) -> tuple[list[verify.Feeds], str, list[list[np.ndarray]]]:
    """Inputs that the reference accepts, its name, and its outputs per input.

    All candidates go to one process. Where one of them brings that down, each gets a process of its own.
    """
    rows = list(_feeds(cfg, manifest))
    inputs = [[feeds.inputs for feeds in row] for row in rows]
    errors: list[ReferenceRunError] = []
    for start, batch in [(0, inputs), *((index, [row]) for index, row in enumerate(inputs))]:
        try:
            (index, name, outputs), _ = process.call(
                "tvmflow.frontend:first_accepted", cfg, batch, what="the reference", error=ReferenceRunError
            )
            return rows[start + index], name, outputs
        except ReferenceRunError as exc:
            errors.append(exc)
        if not errors[0].crashed:
            break
    raise ReferenceRunError(
        f"the reference accepts none of the inputs tried, so nothing can be verified. {errors[0].message}",
        "give inputs that the model accepts: [verify] inputs = \"x.npz\" (--verify-inputs), ranges or dims",
        errors[0].details,
    )


def _feeds(cfg: Config, manifest: Manifest) -> Iterator[list[verify.Feeds]]:
    """Inputs to try, the most telling first: one list, with one entry per seed, after another."""
    if cfg.verify.inputs is not None:
        yield [verify.Feeds(read_npz(cfg.verify.inputs), {}, cfg.verify.inputs.name)]
        return
    per_seed = (verify.candidates(manifest.signature, cfg.verify, seed) for seed in cfg.verify.seeds)
    examples = _examples(cfg)
    yield from ([*examples, *row] for row in zip(*per_seed, strict=True))
    if examples:
        yield examples


def _examples(cfg: Config) -> list[verify.Feeds]:
    """The inputs that the model brings along, if any."""
    if not frontend.is_torch(cfg):
        return []
    inputs, _ = process.call("tvmflow.frontend:examples", cfg, what="the reference", error=ReferenceRunError)
    return [verify.Feeds(inputs, {}, "example")]


def _drawn(manifest: Manifest, seed: int) -> verify.Feeds:
    cfg = Config.model_validate_json(_canonical(manifest.config))
    return next(verify.candidates(manifest.signature, cfg.verify, seed))


def _config_of(manifest: Manifest, model: Path | None, overrides: config.Overrides) -> Config:
    """The config an artifact was built with; its model must be the very file it was built from."""
    extra = [{"model": {"path": str(model.resolve())}}] if model is not None else []
    cfg = config.from_dict(manifest.config, [*extra, *overrides], source=f"config of {manifest.name}")
    if manifest.source and cfg.model.path and artifact.file_entry(cfg.model.path) != manifest.source:
        raise ArtifactError(f"{cfg.model.path}: not the file that {manifest.name} was compiled from",
                            "name the right one with --model, or compile again")  # fmt: skip
    return cfg


def _with_note(manifest: Manifest, note: str) -> Manifest:
    return manifest.model_copy(update={"notes": (*manifest.notes, note)})


def _canonical(values: Mapping[str, Any]) -> str:
    import json

    return json.dumps(values, sort_keys=True)
