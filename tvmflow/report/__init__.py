"""Turns manifests, verdicts and samples into what a terminal shows. Their JSON form is the nouns' own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table

from tvmflow import bench, config
from tvmflow.artifact import CONSTANTS
from tvmflow.diagnosis.findings import Attribution, Bisection
from tvmflow.manifest import Bundle, Described, Manifest, Signature, TargetInfo, TensorSpec, Verdict
from tvmflow.report import audit
from tvmflow.report.printable import printable


def compiled(manifest: Manifest | Bundle) -> RenderableType:
    """What `compile` ends with: what was built, how long each stage took, what is left to know."""
    return _compiled(printable(manifest))


def _compiled(manifest: Manifest | Bundle) -> RenderableType:
    if isinstance(manifest, Bundle):
        return Group(
            _bundle_overview(manifest),
            _buckets(manifest),
            _padding(manifest),
            _stages(manifest),
            *_worst(manifest),
            *_notes(manifest),
        )
    return Group(
        _overview(manifest), _stages(manifest), _verdict(manifest.verdict), *_findings(manifest), *_notes(manifest)
    )


def inspected(manifest: Manifest | Bundle) -> RenderableType:
    """Everything a manifest holds."""
    manifest = printable(manifest)
    if isinstance(manifest, Bundle):
        return Group(_signature(manifest.signature), _compiled(manifest))
    return Group(
        _overview(manifest),
        _signature(manifest.signature),
        _kernels(manifest),
        _transforms(manifest),
        _stages(manifest),
        _verdict(manifest.verdict),
        *_findings(manifest),
        *_notes(manifest),
    )


def signature(noun: Signature) -> Table:
    """Inputs and outputs: name, dtype, shape."""
    return _signature(printable(noun))


def _signature(noun: Signature) -> Table:
    table = _table("", "name", "dtype", "shape", "range")
    for kind, specs in (("input", noun.inputs), ("output", noun.outputs)):
        for spec in specs:
            limits = f"{spec.range[0]:g} .. {spec.range[1]:g}" if spec.range else ""
            table.add_row(kind, spec.name, spec.dtype, _shape(spec), limits)
    return table


def verdict(noun: Verdict | None) -> RenderableType:
    """One row per output of each run."""
    return _verdict(printable(noun) if noun else None)


def _verdict(noun: Verdict | None) -> RenderableType:
    if noun is None:
        return "[yellow]not verified[/]"
    table = _table("inputs", "output", "", "max error", "mean error", "max relative", "tolerance", "top-1", "top-5")
    table.title = f"against {noun.reference}"
    for run in noun.runs:
        sizes = "".join(f" {name}={size}" for name, size in run.dims.items())
        for out in run.outputs:
            table.add_row(
                run.inputs + sizes,
                out.name,
                "[green]ok[/]" if out.ok else f"[red]WRONG[/] {out.reason}",
                _figure(out.max_error),
                _figure(out.mean_error),
                _figure(out.max_relative_error),
                f"{out.atol:.1e} + {out.rtol:g}|x|",
                _share(out.top1_agreement),
                _share(out.top5_agreement),
            )
    return Group(table, *(f"[yellow]note[/] {note}" for note in noun.notes))


def attribution(noun: Attribution) -> RenderableType:
    """The verdict, then one row per output and stage."""
    noun = printable(noun)
    table = _table("output", "stage", "", "max error", "max relative", "mismatched", "change by this stage")
    table.title = "whose the difference is, the worst of all runs"
    for output in dict.fromkeys(row.output for row in noun.rows):
        for row in (row for row in noun.rows if row.output == output):
            table.add_row(
                row.output,
                row.stage,
                "[green]ok[/]" if row.ok else "[red]WRONG[/]",
                _figure(row.max_error),
                _figure(row.max_relative_error),
                f"{row.mismatched} of {row.total}",
                _figure(row.change),
            )
    stages = (f"{name}: {why}" for name, why in noun.stages.items())
    return Group(_verdict(noun.verdict), table, *stages)


def bisection(noun: Bisection) -> RenderableType:
    """The builds that were made, and what is at fault."""
    noun = printable(noun)
    checks = _table("steps", "the last of them", "values")
    checks.title = f"{len(noun.steps)} steps, against {noun.reference}"
    for check in sorted(noun.checks, key=lambda check: check.count):
        colour = {"right": "green", "wrong": "red", "not built": "yellow"}[check.outcome]
        checks.add_row(str(check.count), check.step, f"[{colour}]{check.outcome}[/] {check.reason}")
    kernels = _table("kernel", "call", "", "max error", "of the largest value")
    for one in noun.culprit.kernels if noun.culprit else ():
        kernels.add_row(
            one.kernel,
            str(one.call),
            "[green]ok[/]" if one.ok else f"[red]WRONG[/] {one.reason}",
            _figure(one.max_error),
            _figure(one.share),
        )
    notes = [f"[yellow]note[/] {note}" for note in noun.unusable_records]
    verdict_ = "nothing is wrong" if noun.culprit is None else f"first bad step: {noun.culprit.step}"
    return Group(*([checks] if noun.checks else []), *([kernels] if kernels.row_count else []), verdict_, *notes)


def samples(measured: Mapping[str, Sequence[bench.Samples]], threads: int) -> RenderableType:
    """Medians and how they compare with the last one, which is the baseline; by bucket, or under an empty name."""
    last = next(iter(measured.values()))[-1].name
    table = _table("bucket", "", "median", "samples", f"against {last}")
    table.title = f"{threads} threads each, in turns"
    warnings = []
    for bucket, items in measured.items():
        for item in items:
            table.add_row(
                bucket,
                item.name,
                f"{item.median_s * 1e3:.3f} ms",
                str(len(item.seconds)),
                f"{bench.ratio(item, items[-1]):.2f} x its time",
            )
            warnings += [f"[yellow]may be unstable[/] {bucket} {item.name}: {text}" for text in item.warnings]
    return Group(table, *warnings)


def pipeline(phases: dict[str, list[tuple[str, str]]]) -> RenderableType:
    """The named passes, phase by phase."""
    table = _table("phase", "pass", "why")
    for phase, steps in phases.items():
        for index, (name, why) in enumerate(steps):
            table.add_row("" if index else phase, name, why)
    return table


def _bundle_overview(bundle: Bundle) -> Table:
    read = sum(bucket.weight_bytes for bucket in bundle.buckets)
    libraries = sum(bucket.library_bytes for bucket in bundle.buckets)
    weights = bundle.files[CONSTANTS].size_bytes
    return _pairs(
        {
            "artifact": f"{bundle.name}: {len(bundle.buckets)} buckets, libraries {_bytes(libraries)}",
            "weights": f"{_bytes(weights)} for all buckets together, which read {_bytes(read)} of them",
            "target": _target(bundle.target),
            "numerics": config.stated(bundle.config.get("numerics", {})),
            **_peak(bundle),
        }
    )


def _buckets(bundle: Bundle) -> Table:
    table = _table(
        "bucket",
        "kernels",
        "transposes",
        "library",
        "weights read",
        "buffers planned",
        "kernels of a run",
        "largest error",
    )
    for bucket in bundle.buckets:
        origins = ", ".join(f"{count} {origin}" for origin, count in bucket.kernels.items())
        taken = "" if bucket.kernel_seconds is None else f"{bucket.kernel_seconds * 1e3:.3f} ms"
        runs = [run for run in bundle.verdict.runs if run.dims == bucket.dims] if bundle.verdict else []
        errors = [out.max_error for run in runs for out in run.outputs if out.max_error is not None]
        table.add_row(
            bucket.folder,
            origins,
            str(bucket.transposes),
            _bytes(bucket.library_bytes),
            _bytes(bucket.weight_bytes),
            _bytes(bucket.planned_bytes),
            taken,
            _figure(max(errors, default=None)),
        )
    return table


def _padding(bundle: Bundle) -> Table:
    table = _table("dimension", "", "why", "runs")
    for dim, one in bundle.padding.items():
        does = {"independent": "[green]padded, split[/]", "masked": "[green]padded[/]"}.get(one.kind)
        if does is None:
            does = "[yellow]padded, as allowed[/]" if one.allowed else "[yellow]only the buckets' sizes[/]"
        table.add_row(dim, does, one.reason, str(one.runs))
    return table


def _worst(bundle: Bundle) -> list[str]:
    """One line per verdict: how many runs, how many of them wrong, the largest error."""
    if bundle.verdict is None:
        return ["[yellow]not verified[/]"]
    lines = []
    for noun in filter(None, (bundle.verdict, bundle.agreement)):
        outputs = [out for run in noun.runs for out in run.outputs]
        wrong = sum(not out.ok for out in outputs)
        state = f"[red]{wrong} WRONG[/]" if wrong else "[green]ok[/]"
        error = _figure(max((out.max_error for out in outputs if out.max_error is not None), default=None))
        lines.append(f"{state} {len(noun.runs)} runs against {noun.reference}, largest error {error}")
        lines += [f"[yellow]note[/] {note}" for note in noun.notes]
    return lines


def _target(target: TargetInfo) -> str:
    where = f"{target.mcpu}, {target.mtriple}" + (f", {target.arch}" if target.arch else "")
    return f"{target.kind} ({where}), {target.threads} threads"


def _peak(manifest: Described) -> dict[str, str]:
    size_bytes = manifest.peak_rss_bytes
    return {} if size_bytes is None else {"peak memory": f"{_bytes(size_bytes)} while compiling"}


def _pairs(rows: Mapping[str, str]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 1))
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _overview(manifest: Manifest) -> Table:
    origins = Counter(kernel.origin for kernel in manifest.kernels)
    transforms = manifest.layout.transforms
    return _pairs(
        {
            "library": f"{manifest.name}: "
            + ", ".join(f"{n} {_bytes(f.size_bytes)}" for n, f in manifest.files.items()),
            "target": _target(manifest.target),
            "numerics": config.stated(manifest.config.get("numerics", {})),
            "kernels": f"{len(manifest.kernels)}: "
            + ", ".join(f"{count} {origin}" for origin, count in origins.items()),
            "layout": f"{manifest.layout.choice} ({manifest.layout.reason}); {len(transforms)} transposes left, "
            f"{_bytes(sum(t.size_bytes for t in transforms))}",
            "buffers": "sizes follow the inputs"
            if manifest.planned_bytes is None
            else f"{_bytes(manifest.planned_bytes)} planned",
            **_peak(manifest),
            "audit": audit.line(manifest, manifest.audit) if manifest.audit else "none",
        }
    )


def _stages(manifest: Described) -> Table:
    table = _table("stage", "seconds")
    for stage in manifest.stages:
        if stage.seconds is not None and not stage.name.startswith("graph: "):
            table.add_row(stage.name, f"{stage.seconds:.1f}")
    return table


def _kernels(manifest: Manifest) -> Table:
    table = _table("kernel", "calls", "origin", "rule")
    for kernel in manifest.kernels:
        table.add_row(kernel.name, str(kernel.calls), kernel.origin, kernel.rule)
    return table


def _transforms(manifest: Manifest) -> Table:
    table = _table("transpose left in the graph", "writes", "bytes")
    for transform in manifest.layout.transforms:
        shape = "x".join(map(str, transform.shape))
        table.add_row(transform.place, shape, f"{transform.size_bytes:,}")
    return table


def _findings(manifest: Manifest) -> list[RenderableType]:
    return audit.first_findings(manifest.audit) if manifest.audit else []


def _notes(manifest: Described) -> list[str]:
    return [f"[yellow]note[/] {note}" for note in (*manifest.notes, *manifest.timing)]


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1), title_justify="left")
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def _shape(spec: TensorSpec) -> str:
    return " x ".join(map(str, spec.shape)) if spec.shape else "scalar"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.2e}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _bytes(size: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024  # type: ignore[assignment]
    return f"{size:.4g} GiB"
