"""An audit as tables: one list of sections, for a terminal and for Markdown. Its JSON form is the noun's own."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tvmflow import config, text
from tvmflow.audit import Audit
from tvmflow.audit.symbols import External
from tvmflow.manifest import AuditSummary, Finding, LayoutTransform, Manifest
from tvmflow.report import tables
from tvmflow.report.tables import Cell, Shown

STYLES = {"fault": "red", "warning": "yellow"}
# What Markdown, and GitHub's tables and mathematics, would read as more than itself; an underscore only around words.
_MARKDOWN = re.compile(r"[\\`|*~$<\[&]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")


@dataclass(frozen=True)
class Section:
    """A titled table of plain texts."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def sections(audit: Audit) -> tuple[Section, ...]:
    """All that an audit holds; sections without rows are left out."""
    found = (
        _findings(audit.findings),
        _numerics(audit),
        _kernels(audit),
        _resources(audit),
        _layouts(audit),
        _external(audit),
    )
    return tuple(section for section in found if section.rows)


def rendered(audit: Audit) -> Shown:
    """The sections as tables of a terminal."""
    found = (tables.table(one.columns, map(_styled, one.rows), one.title) for one in sections(audit))
    return tables.stack(tables.line((_title(audit), "bold")), *found)


def markdown(audit: Audit) -> str:
    """The sections as a Markdown document."""
    parts = [f"# {escaped(_title(audit))}"]
    for section in sections(audit):
        lines = [section.columns, tuple("---" for _ in section.columns), *section.rows]
        table = "\n".join(f"| {' | '.join(escaped(content) for content in line)} |" for line in lines)
        parts.append(f"## {escaped(section.title)}\n\n{table}")
    return "\n\n".join(parts) + "\n"


def line(manifest: Manifest, summary: AuditSummary) -> str:
    """An audit's summary in one line."""
    levels: Counter[str] = Counter(finding.level for finding in summary.findings)
    counts = [f"{levels[level]} {level}{'s' if levels[level] != 1 else ''}" for level in STYLES]
    outside = f"calls {', '.join(summary.external)}" if summary.external else "calls nothing outside"
    parts = [", ".join(counts), outside, _fast(manifest)]
    if manifest.target.kind == "cuda":
        parts.append(f"TF32 in {len(summary.tf32_kernels)} kernels")
    if summary.lowest_occupancy is not None:
        parts.append(f"lowest occupancy {summary.lowest_occupancy:.0%}")
    return "; ".join(parts)


def first_findings(summary: AuditSummary, most: int = 5) -> list[Shown]:
    """The first findings of a summary, one line each."""
    shown = [tables.line((f"{f.level} ", STYLES[f.level]), f"{f.place}: {f.what}") for f in summary.findings[:most]]
    more = len(summary.findings) - most
    return [*shown, *([tables.line(f"and {more} more: `tvmflow audit`")] if more > 0 else [])]


def _title(audit: Audit) -> str:
    target = audit.target
    where = f"{target.mcpu}, {target.arch}" if target.arch else target.mcpu
    verdict = f"{len(audit.faults)} faults" if audit.faults else "no fault"
    warnings = len(audit.findings) - len(audit.faults)
    return f"Audit of {audit.name} for {target.kind} ({where}): {verdict}, {warnings} warnings"


def _fast(manifest: Manifest) -> str:
    return "arithmetic may be fast" if manifest.config["numerics"]["fast_math"] else "arithmetic is precise"


def _findings(found: Sequence[Finding]) -> Section:
    rows = tuple((f.level, f.check, f.place, f.what, f.action) for f in found)
    return Section("Findings", ("", "check", "place", "found", "next"), rows)


def _numerics(audit: Audit) -> Section:
    numbers = audit.numerics
    flags = "not known" if numbers.llvm_flags is None else _counts(numbers.llvm_flags) or "none"
    rows = [
        ("stated", config.stated(numbers.contract)),
        ("read", "; ".join(numbers.read)),
        ("LLVM's fast-math flags", flags),
        ("approximate instructions", _by_kernel(numbers.approximate)),
        ("float control", _by_kernel(numbers.float_control)),
        *((kind, _by_kernel(found)) for kind, found in numbers.narrow.items()),
    ]
    if audit.target.kind == "cuda":
        rows.append(("TF32", ", ".join(numbers.tf32_kernels) or "in no kernel"))
        products = (f"{kernel}: {', '.join(names)}" for kernel, names in numbers.tensor_core.items())
        rows.append(("tensor cores", "; ".join(products) or "in no kernel"))
    return Section("Numerics", ("", ""), tuple(rows))


def _kernels(audit: Audit) -> Section:
    rows = tuple(
        (
            use.kernel.name,
            " + ".join(use.kernel.operators),
            use.kernel.origin,
            use.kernel.rule,
            str(use.kernel.calls),
            (use.kernel.key or "")[:12],
            "" if use.share is None else f"{use.share:.1%}",
        )
        for use in audit.kernels
    )
    return Section("Kernels", ("kernel", "computes", "origin", "rule", "calls", "key", "time"), rows)


def _resources(audit: Audit) -> Section:
    columns = (
        "kernel",
        "threads",
        "registers",
        "shared",
        "dynamic",
        "stack",
        "local",
        "loads, stores",
        "blocks",
        "occupancy",
        "limit",
    )
    rows = tuple(
        (
            r.kernel,
            _known(r.threads),
            str(r.registers),
            str(r.static_shared_bytes),
            _known(r.dynamic_shared_bytes),
            str(r.stack_bytes),
            str(r.local_bytes),
            f"{r.local_loads}, {r.local_stores}",
            _known(r.blocks),
            "?" if r.occupancy is None else f"{r.occupancy:.0%}",
            r.limiter or "?",
        )
        for r in audit.resources
    )
    return Section("CUDA resources (bytes; of one multiprocessor)", columns, rows)


def _layouts(audit: Audit) -> Section:
    rows = [*_transforms("before", audit.layout.before), *_transforms("after", audit.layout.transforms)]
    return Section(
        f"Transposes before and after the graph passes; layout {audit.layout.choice}",
        ("", "place", "writes", "count", "bytes", "needless"),
        tuple(rows),
    )


def _transforms(when: str, transforms: Sequence[LayoutTransform]) -> Iterator[tuple[str, ...]]:
    """Equal ones once."""
    for transform, count in Counter(transforms).items():
        shape = "x".join(map(str, transform.shape))
        yield (
            when,
            transform.place,
            shape,
            str(count),
            f"{count * transform.size_bytes:,}",
            transform.needless or transform.avoidable,
        )
    yield when, "all", "", str(len(transforms)), f"{sum(t.size_bytes for t in transforms):,}", ""


def _external(audit: Audit) -> Section:
    """One row per reason, what is not allowed first; where from is said of that alone."""
    groups: dict[tuple[str, str], list[External]] = {}
    for external in sorted(audit.external, key=lambda external: external.reason is not None):
        groups.setdefault((external.kind, external.reason or "NOT ALLOWED"), []).append(external)
    rows = tuple(
        (
            ", ".join(e.name for e in members),
            kind,
            reason,
            "; ".join(place for e in members for place in e.places[:2] if e.reason is None),
        )
        for (kind, reason), members in groups.items()
    )
    return Section("External calls", ("name", "what it is", "why it may be there", "called from"), rows)


def _by_kernel(found: dict[str, dict[str, int]]) -> str:
    return "; ".join(f"{kernel or 'outside kernels'}: {_counts(counts)}" for kernel, counts in found.items()) or "none"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in counts.items())


def _known(value: int | None) -> str:
    return "?" if value is None else str(value)


def _styled(row: tuple[str, ...]) -> list[Cell]:
    """A row whose first cell, where it is the level of a finding, has the level's colour."""
    return [(row[0], STYLES.get(row[0], "")), *row[1:]]


def escaped(content: str) -> str:
    """A text as it is in Markdown, where it stands in a cell of a table or in a heading."""
    return _MARKDOWN.sub(r"\\\g<0>", text.cell(content))
