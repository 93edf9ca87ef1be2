"""Proposed buckets as tables of a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tvmflow.bucket_search.choice import axes_of
from tvmflow.bucket_search.proposal import Found, toml

BAR = 24  # characters of the longest bar


def rendered(found: Found) -> RenderableType:
    """The buckets, what they save, how the time falls with their number, and what to paste into a config file."""
    return Group(_buckets(found), Text(), _totals(found), Text(), _curve(found), Text(), Text(toml(found.proposal)))


def _buckets(found: Found) -> Table:
    proposal = found.proposal
    table = _table(*proposal.dims, "requests", "", "padding", "cost per call")
    largest = max(bucket.share for bucket in proposal.buckets)
    for bucket in proposal.buckets:
        table.add_row(
            *map(str, bucket.sizes),
            f"{bucket.share:.1%}",
            _bar(bucket.share / largest),
            f"{bucket.waste:.0%}",
            _ms(bucket.seconds),
        )
    return table


def _totals(found: Found) -> Table:
    proposal, count = found.proposal, len(found.proposal.buckets)
    table = Table(show_header=False, box=None, padding=(0, 1))
    rows = {
        "requests": f"{found.observed.counts.sum():,} of {len(found.observed.counts):,} different sizes",
        "time per request": f"{_ms(proposal.seconds)} with {_count(count)}",
        "with one bucket": f"{_ms(proposal.single_s)}, {proposal.single_s / proposal.seconds:.2f} times as long",
        "with exact sizes": f"{_ms(proposal.exact_s)}, {proposal.exact_s / proposal.seconds:.2f} times as long: "
        "the least that buckets can reach",
        "padding": f"{proposal.waste:.0%} of the elements computed",
        "costs": found.basis + _checked(found),
    }
    if axes_of(tuple(bucket.sizes for bucket in proposal.buckets)) is None:
        axes = axes_of(proposal.product.buckets) or ()
        lists = ", ".join(f"{name} = {list(sizes)}" for name, sizes in zip(proposal.dims, axes, strict=True))
        rows["as all combinations"] = f"{_ms(proposal.product.seconds)} with {lists}"
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table


def _curve(found: Found) -> Table:
    proposal = found.proposal
    table = _table("buckets", "time per request", "", "less than before")
    before = proposal.single_s
    for choice in proposal.curve:
        gain = f"{1 - choice.seconds / before:.1%}" if len(choice.buckets) > 1 else ""
        table.add_row(str(len(choice.buckets)), _ms(choice.seconds), _bar(choice.seconds / proposal.single_s), gain)
        before = choice.seconds
        if len(choice.buckets) == len(proposal.buckets):
            break
    return table


def _checked(found: Found) -> str:
    if found.check is None:
        return "; no size lies between them"
    place = " x ".join(map(str, found.check.sizes))
    return f"; between them interpolated, {found.check.error:+.1%} at {place}"


def _count(count: int) -> str:
    return f"{count} bucket{'s' if count > 1 else ''}"


def _bar(share: float) -> str:
    eighths = round(share * BAR * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1))
    for name in columns:
        table.add_column(name, justify="right" if name else "left", overflow="fold")
    return table
