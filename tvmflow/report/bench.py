"""Samples of time as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvmflow import bench
from tvmflow.report import tables
from tvmflow.report.tables import Column, Shown


def samples(measured: Mapping[str, Sequence[bench.Samples]], threads: int) -> Shown:
    """Medians and how they compare with the last one, which is the baseline; by bucket, or under an empty name."""
    last = next(iter(measured.values()))[-1].name
    numbers = (Column(name, right=True) for name in ("median", "samples", f"against {last}"))
    rows = [
        [
            bucket,
            item.name,
            f"{item.median_s * 1e3:.3f} ms",
            str(len(item.seconds)),
            f"{bench.ratio(item, items[-1]):.2f} x its time",
        ]
        for bucket, items in measured.items()
        for item in items
    ]
    warnings = [
        tables.line(("may be unstable", "yellow"), f" {bucket} {item.name}: {warning}")
        for bucket, items in measured.items()
        for item in items
        for warning in item.warnings
    ]
    return tables.stack(tables.table(("bucket", "", *numbers), rows, f"{threads} threads each, in turns"), *warnings)
