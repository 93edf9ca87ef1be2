"""The middle of the story: model file -> graph -> library, each stage on its own line."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmflow import artifact, audit, config, frontend
from tvmflow.artifact import CONSTANTS, LIBRARY
from tvmflow.config import Config
from tvmflow.errors import CompileError, ConfigError, OutputError, TvmflowError, last_line
from tvmflow.frozen import evolve
from tvmflow.manifest import Kernel, Layout, Manifest, Signature, Stage, TargetInfo
from tvmflow.pipeline import user_kernel_check
from tvmflow.process import emit

if TYPE_CHECKING:
    import tvm

    from tvmflow.graph.passes.replace_operators import Replacement
    from tvmflow.pipeline.plan import Step
    from tvmflow.target import Target


def build(cfg: Config, folder: Path, dump_ir: Path | None) -> Manifest:
    """Builds library.so and constants.bin in `folder` and returns their manifest, which has no verdict yet."""
    log = StageLog(dump_ir)
    with log.stage("import"):
        model = frontend.load(cfg)
    from tvmflow.codegen import cubin, evidence, library
    from tvmflow.frontend.model import narrowest_float
    from tvmflow.pipeline import plan
    from tvmflow.pipeline.prepare import build_context, prepare, setting
    from tvmflow.pipeline.records import ApplyRecords

    chosen = setting(cfg)
    target = chosen.target
    linker = library.linker(target)
    _check_names(cfg, model.signature)
    replaced: list[Replacement] = []
    weights: list[tvm.runtime.Tensor] = []
    with chosen.entered(), tempfile.TemporaryDirectory(prefix="tvmflow-") as kept, cuda_step(cfg, target, kept) as cuda:
        with log.stage("graph"):
            records = ApplyRecords(cfg, target)
            known = {"records": records} if cfg.tuning.database else {}
            context = build_context(cfg, on_replaced=replaced.append, on_weights=weights.extend, **known)
            prepared, choice = prepare(cfg, model, context, log.after)
            to_packed = plan.steps_of(context, "records", "schedule", "rewrite", "pack", "prefetch")
            packed = plan.run(prepared, to_packed, log.after)
            lowered = plan.run(packed, plan.steps_of(context, "weights", "lower"), log.after)
        with log.stage("user kernels"):
            checked = user_kernel_check.notes(cfg, replaced, chosen)
        with log.stage("code generation"):
            with evidence.launches() as started:
                executable = library.write_library(lowered, chosen.tvm_target, linker, folder)
            seen = evidence.of_build(executable, started, Path(kept))
            if cuda is not None and target.arch is not None:
                found = cubin.assert_machine_code(folder / LIBRARY, target.arch)
                cuda["cubins"] = [dataclasses.asdict(item) for item in found]
            entries = library.write_constants(weights, folder)
    contents = library.contents(packed, lowered)
    narrowest = _precision(narrowest_float(model.mod), contents.kernels)
    manifest = Manifest(
        format_version=artifact.FORMAT_VERSION,
        name=config.name(cfg),
        signature=model.signature,
        narrowest_float=narrowest,
        config=config.to_json(_resolved(cfg, target)),
        source=artifact.file_entry(cfg.model.path) if cfg.model.path else None,
        source_data={name: artifact.file_entry(file) for name, file in frontend.data_files(cfg).items()},
        target=target_info(target),
        versions=library.versions(),
        files={name: artifact.file_entry(folder / name) for name in (LIBRARY, CONSTANTS)},
        constants=entries,
        kernels=contents.kernels,
        layout=Layout(choice=choice.layout, reason=choice.reason, transforms=choice.transforms, before=choice.before),
        planned_bytes=contents.planned_bytes,
        stages=(),
        peak_rss_bytes=0,
        cuda=cuda,
        notes=(
            *model.notes,
            *records.notes,
            *checked,
            *_winograd_notes(contents.kernels),
            *_half_notes(cfg, narrowest),
            *(_tf32_notes(contents.kernels, prepared) if cfg.numerics.tf32 else ()),
        ),
        verdict=None,
        evidence=evolve(seen, shape_functions=contents.shape_functions),
    )
    with log.stage("audit"):
        manifest = _audited(folder, manifest)
    return evolve(manifest, stages=tuple(log.stages))


class StageLog:
    """Times stages and passes, hashes the module after each pass, and writes it where a dump was asked for."""

    def __init__(self, dump_ir: Path | None) -> None:
        self.stages: list[Stage] = []
        self._dump_ir = dump_ir

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Names the stage in progress and in errors: what a stage raises becomes a CompileError that says where."""
        emit(name)
        started = time.monotonic()
        try:
            yield
        except TvmflowError:
            raise
        except OSError as exc:
            raise OutputError(f"{name}: {exc}", "free space or choose another place with -o") from exc
        except Exception as exc:
            if "No space left on device" in str(exc):
                raise OutputError(
                    f"{name}: no space left on the device", "free space or choose another place with -o"
                ) from exc
            place = ", ".join([name, *getattr(exc, "__notes__", [])])
            raise CompileError(
                f"{place}: TVM failed: {last_line(exc)[:300]}",
                "TVM fails most on open dimensions: fix them with --shape or --dim, or state the sizes that are served "
                "in `[shapes] buckets`; --debug shows the whole trace",
            ) from exc
        self.stages.append(Stage(name=name, seconds=time.monotonic() - started))

    def after(self, step: Step, mod: tvm.IRModule, seconds: float) -> None:
        """The hook between passes."""
        import tvm_ffi

        emit(f"graph: {step.name}")
        digest = f"{tvm_ffi.structural_hash(mod, map_free_vars=True, skip_tensor_content=True) % 2**64:016x}"
        self.stages.append(Stage(name=f"graph: {step.name}", seconds=seconds, ir_hash=digest))
        if self._dump_ir is not None:
            number = sum(stage.ir_hash is not None for stage in self.stages)
            (self._dump_ir / f"{number:02d}_{step.name}.py").write_text(f"# {digest}\n{mod.script(show_meta=False)}\n")


def inspect(cfg: Config) -> tuple[Signature, tuple[str, ...]]:
    """Imports the model and returns its signature and what was rewritten."""
    model = frontend.load(cfg)
    return model.signature, model.notes


def passes(cfg: Config) -> dict[str, list[tuple[str, str]]]:
    """The pipeline of a config: per phase the (name, why) of each pass; phases without passes are left out."""
    from tvmflow.pipeline import plan
    from tvmflow.pipeline.context import context_of

    named = context_of(cfg, records=(lambda mod: mod) if cfg.tuning.database else None)
    phases = plan.phases(named)
    return {phase.name: [(step.name, step.why) for step in phase.steps] for phase in phases if phase.steps}


def _resolved(cfg: Config, target: Target) -> Config:
    """The config with what "native" turned out to mean, so that the library can be rebuilt elsewhere."""
    section = evolve(cfg.target, mcpu=target.mcpu, threads=target.threads, arch=target.arch)
    return evolve(cfg, target=section)


def _check_names(cfg: Config, signature: Signature) -> None:
    """Raises ConfigError for names under [verify] that the model does not have."""
    inputs = {spec.name for spec in signature.inputs}
    sizes = {size for spec in signature.inputs for size in spec.shape if isinstance(size, str)}
    known = {"ranges": inputs, "outputs": {spec.name for spec in signature.outputs}, "dims": sizes}
    for key, names in known.items():
        for name in getattr(cfg.verify, key):
            if name not in names:
                hint = f"it has: {', '.join(sorted(names)) or 'none'}"
                raise ConfigError(f"verify.{key}: the model has no `{name}` among its {key}", hint)


def _winograd_notes(kernels: Sequence[Kernel]) -> Iterator[str]:
    """Which convolutions lose precision by numerics.winograd, and by which method."""
    places = Counter[str]()
    for kernel in kernels:
        if kernel.rule.startswith("winograd "):
            places[kernel.rule] += kernel.calls
    for rule, count in places.items():
        yield f"numerics.winograd: {rule}, in {count} place{'s' if count > 1 else ''}"


def _tf32_notes(kernels: Sequence[Kernel], prepared: tvm.IRModule) -> Iterator[str]:
    """How much of a run is computed in TF32, and the products that are not although they are large enough."""
    from tvmflow.codegen import library
    from tvmflow.kernels.tf32 import schedule_tf32

    operations = library.operations(prepared)
    cost = {kernel.name: kernel.calls * operations.get(kernel.name, 0.0) for kernel in kernels}
    chosen = {kernel.name: kernel.calls for kernel in kernels if _is_tf32(kernel)}
    share = sum(cost[name] for name in chosen) / max(sum(cost.values()), 1.0)
    yield (
        f"numerics.tf32: {sum(chosen.values())} products on TF32 tensor cores, {share:.1%} of all "
        "floating-point operations"
    )
    if left := sorted(schedule_tf32.names(prepared) - chosen.keys()):
        yield f"numerics.tf32: products that stay in float32, their schedule does not fit: {', '.join(left)}"


def _is_tf32(kernel: Kernel) -> bool:
    return "tf32" in kernel.rule


def _precision(narrowest: str, kernels: Sequence[Kernel]) -> str:
    """`narrowest`, or "tf32" where that is what limits the precision of a library of `kernels`."""
    return "tf32" if narrowest in ("float32", "float64") and any(map(_is_tf32, kernels)) else narrowest


def _audited(folder: Path, manifest: Manifest) -> Manifest:
    """The manifest with what an audit found.

    Raises NumericsError where the code breaks the config's numerics, AuditError where it is not a compiler's.
    """
    found = audit.examine(folder, manifest)
    audit.check_numerics(found)
    audit.check_library(found)
    return evolve(manifest, audit=audit.summary(found))


def _half_notes(cfg: Config, narrowest: str) -> Iterator[str]:
    from tvmflow.graph.rounding import NARROW

    if cfg.target.kind == "llvm" and cfg.numerics.widen_half and narrowest in NARROW:
        yield f"numerics.widen_half: {narrowest} is computed in float32; inputs and outputs keep their dtypes"


def target_info(target: Target) -> TargetInfo:
    return TargetInfo(
        kind=target.kind,
        machine=target.machine,
        mcpu=target.mcpu,
        mtriple=target.mtriple,
        features=target.features,
        threads=target.threads,
        arch=target.arch,
    )


@contextlib.contextmanager
def cuda_step(cfg: Config, target: Target, keep: str | None = None) -> Iterator[dict[str, Any] | None]:
    """Our CUDA compile step around a build, and what the manifest says of it; nothing for a CPU.

    Sources and PTX are left in the folder `keep`.
    """
    if target.arch is None:
        yield None
        return
    from tvmflow.codegen import cuda, numerics

    found = cuda.compiler()
    with cuda.compile_step(target.arch, cfg.numerics, Path(keep) if keep else None):
        options = list(numerics.cuda_options(cfg.numerics))
        yield {"compiler": found.kind, "version": found.version, "numerics_options": options}
