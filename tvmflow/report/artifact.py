"""What a manifest says of an artifact with one library, as tables."""

from __future__ import annotations

from collections import Counter

from tvmflow import config
from tvmflow.manifest import Bundle, Described, Manifest, Signature, TargetInfo, TensorSpec
from tvmflow.report import audit, bundle, tables
from tvmflow.report.figures import size
from tvmflow.report.tables import Column, Shown
from tvmflow.report.verdict import notes, verdict


def compiled(manifest: Manifest | Bundle) -> Shown:
    """What `compile` ends with: what was built, how long each stage took, what is left to know."""
    if isinstance(manifest, Bundle):
        own = [bundle.overview(manifest, _target(manifest.target)), bundle.buckets(manifest), bundle.padding(manifest)]
        said = notes((*manifest.notes, *manifest.timing))
        return tables.stack(*own, _stages(manifest), *bundle.worst(manifest), *said)
    return tables.stack(_overview(manifest), *_made(manifest))


def inspected(manifest: Manifest | Bundle) -> Shown:
    """Everything a manifest holds."""
    if isinstance(manifest, Bundle):
        return tables.stack(signature(manifest.signature), compiled(manifest))
    inside = (signature(manifest.signature), _kernels(manifest), _transforms(manifest))
    return tables.stack(_overview(manifest), *inside, *_made(manifest))


def signature(noun: Signature) -> Shown:
    """Inputs and outputs: name, dtype, shape."""
    rows = [
        (kind, spec.name, spec.dtype, _shape(spec), f"{spec.range[0]:g} .. {spec.range[1]:g}" if spec.range else "")
        for kind, specs in (("input", noun.inputs), ("output", noun.outputs))
        for spec in specs
    ]
    return tables.table(("", "name", "dtype", "shape", "range"), rows)


def _made(manifest: Manifest) -> list[Shown]:
    """How it was made, whether it is right, and what is left to know."""
    found = audit.first_findings(manifest.audit) if manifest.audit else []
    return [_stages(manifest), verdict(manifest.verdict), *found, *notes((*manifest.notes, *manifest.timing))]


def _target(target: TargetInfo) -> str:
    where = f"{target.mcpu}, {target.mtriple}" + (f", {target.arch}" if target.arch else "")
    return f"{target.kind} ({where}), {target.threads} threads"


def _overview(manifest: Manifest) -> Shown:
    origins = Counter(kernel.origin for kernel in manifest.kernels)
    layout, planned = manifest.layout, manifest.planned_bytes
    left = f"{len(layout.transforms)} transposes left, {size(sum(t.size_bytes for t in layout.transforms))}"
    files = ", ".join(f"{name} {size(file.size_bytes)}" for name, file in manifest.files.items())
    kernels = ", ".join(f"{count} {origin}" for origin, count in origins.items())
    return tables.pairs(
        {
            "library": f"{manifest.name}: {files}",
            "target": _target(manifest.target),
            "numerics": config.stated(manifest.config.get("numerics", {})),
            "kernels": f"{len(manifest.kernels)}: {kernels}",
            "layout": f"{layout.choice} ({layout.reason}); {left}",
            "buffers": "sizes follow the inputs" if planned is None else f"{size(planned)} planned",
            **bundle.peak_memory(manifest),
            "audit": audit.line(manifest, manifest.audit) if manifest.audit else "none",
        }
    )


def _stages(manifest: Described) -> Shown:
    rows = (
        (stage.name, f"{stage.seconds:.1f}")
        for stage in manifest.stages
        if stage.seconds is not None and not stage.name.startswith("graph: ")
    )
    return tables.table(("stage", Column("seconds", right=True)), rows)


def _kernels(manifest: Manifest) -> Shown:
    rows = ((kernel.name, str(kernel.calls), kernel.origin, kernel.rule) for kernel in manifest.kernels)
    return tables.table(("kernel", Column("calls", right=True), "origin", "rule"), rows)


def _transforms(manifest: Manifest) -> Shown:
    columns = ("transpose left in the graph", "writes", Column("bytes", right=True))
    rows = ((t.place, "x".join(map(str, t.shape)), f"{t.size_bytes:,}") for t in manifest.layout.transforms)
    return tables.table(columns, rows)


def _shape(spec: TensorSpec) -> str:
    return " x ".join(map(str, spec.shape)) if spec.shape else "scalar"
