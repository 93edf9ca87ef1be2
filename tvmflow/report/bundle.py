"""What a manifest says of an artifact with buckets, as tables."""

from __future__ import annotations

from collections.abc import Iterator

from tvmflow import config
from tvmflow.artifact import CONSTANTS
from tvmflow.manifest import Bucket, Bundle, Described, Padding
from tvmflow.report import tables
from tvmflow.report.figures import scientific, size
from tvmflow.report.tables import Cell, Column, Shown
from tvmflow.report.verdict import UNVERIFIED, notes

BUCKET_COLUMNS: tuple[str | Column, ...] = (
    "bucket",
    "kernels",
    *(
        Column(name, right=True)
        for name in (
            "transposes",
            "library",
            "weights read",
            "buffers planned",
            "kernels of a run",
            "largest error",
        )
    ),
)


def peak_memory(manifest: Described) -> dict[str, str]:
    """The row on the memory that compiling took, where the artifact's build log is there to say it."""
    peak = manifest.peak_rss_bytes
    return {} if peak is None else {"peak memory": f"{size(peak)} while compiling"}


def overview(bundle: Bundle, target: str) -> Shown:
    """The whole artifact: its sizes, and the target in words."""
    read = sum(bucket.weight_bytes for bucket in bundle.buckets)
    libraries = sum(bucket.library_bytes for bucket in bundle.buckets)
    weights = bundle.files[CONSTANTS].size_bytes
    return tables.pairs(
        {
            "artifact": f"{bundle.name}: {len(bundle.buckets)} buckets, libraries {size(libraries)}",
            "weights": f"{size(weights)} for all buckets together, which read {size(read)} of them",
            "target": target,
            "numerics": config.stated(bundle.config.get("numerics", {})),
            **peak_memory(bundle),
        }
    )


def buckets(bundle: Bundle) -> Shown:
    """One row per bucket."""
    rows = (
        (
            bucket.folder,
            ", ".join(f"{count} {origin}" for origin, count in bucket.kernels.items()),
            str(bucket.transposes),
            size(bucket.library_bytes),
            size(bucket.weight_bytes),
            size(bucket.planned_bytes),
            "" if bucket.kernel_seconds is None else f"{bucket.kernel_seconds * 1e3:.3f} ms",
            scientific(max(_errors(bundle, bucket), default=None)),
        )
        for bucket in bundle.buckets
    )
    return tables.table(BUCKET_COLUMNS, rows)


def padding(bundle: Bundle) -> Shown:
    """One row per dimension: what is done with it, and why."""
    rows = [[dim, _treatment(one), one.reason, str(one.runs)] for dim, one in bundle.padding.items()]
    return tables.table(("dimension", "", "why", Column("runs", right=True)), rows)


def worst(bundle: Bundle) -> list[Shown]:
    """One line per verdict: how many runs, how many of them wrong, the largest error."""
    if bundle.verdict is None:
        return [tables.line(UNVERIFIED)]
    lines: list[Shown] = []
    for noun in filter(None, (bundle.verdict, bundle.agreement)):
        outputs = [out for run in noun.runs for out in run.outputs]
        wrong = sum(not out.ok for out in outputs)
        state = (f"{wrong} WRONG", "red") if wrong else ("ok", "green")
        error = scientific(max((out.max_error for out in outputs if out.max_error is not None), default=None))
        lines.append(tables.line(state, f" {len(noun.runs)} runs against {noun.reference}, largest error {error}"))
        lines += notes(noun.notes)
    return lines


def _errors(bundle: Bundle, bucket: Bucket) -> Iterator[float]:
    for run in bundle.verdict.runs if bundle.verdict else ():
        if run.dims == bucket.dims:
            yield from (out.max_error for out in run.outputs if out.max_error is not None)


def _treatment(one: Padding) -> Cell:
    match one.kind:
        case "independent":
            return ("padded, split", "green")
        case "masked":
            return ("padded", "green")
        case _:
            return ("padded, as allowed" if one.allowed else "only the buckets' sizes", "yellow")
