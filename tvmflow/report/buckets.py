"""Proposed buckets as tables of a terminal."""

from __future__ import annotations

from tvmflow.bucket_search import Found, toml
from tvmflow.bucket_search.choice import axes_of
from tvmflow.report import tables
from tvmflow.report.figures import count, seconds
from tvmflow.report.tables import Column, Shown

BAR = 24  # characters of the longest bar


def rendered(found: Found) -> Shown:
    """The buckets, what they save, how the time falls with their number, and what to paste into a config file."""
    empty = tables.line("")
    pasted = tables.verbatim(toml(found.proposal))
    return tables.stack(_buckets(found), empty, _totals(found), empty, _curve(found), empty, pasted)


def _buckets(found: Found) -> Shown:
    proposal = found.proposal
    largest = max(bucket.share for bucket in proposal.buckets)
    rows = (
        (
            *map(str, bucket.sizes),
            f"{bucket.share:.1%}",
            _bar(bucket.share / largest),
            f"{bucket.waste:.0%}",
            seconds(bucket.seconds),
        )
        for bucket in proposal.buckets
    )
    return tables.table(_columns(*proposal.dims, "requests", "", "padding", "cost per call"), rows)


def _totals(found: Found) -> Shown:
    proposal, requests = found.proposal, found.observed.counts
    bounds = (proposal.single_s, proposal.exact_s)
    single, exact = (f"{seconds(bound)}, {bound / proposal.seconds:.2f} times as long" for bound in bounds)
    rows = {
        "requests": f"{requests.sum():,} of {len(requests):,} different sizes",
        "time per request": f"{seconds(proposal.seconds)} with {count(len(proposal.buckets), 'bucket')}",
        "with one bucket": single,
        "with exact sizes": f"{exact}: the least that buckets can reach",
        "padding": f"{proposal.waste:.0%} of the elements computed",
        "costs": found.basis + _checked(found),
    }
    if axes_of(tuple(bucket.sizes for bucket in proposal.buckets)) is None:
        axes = axes_of(proposal.product.buckets) or ()
        lists = ", ".join(f"{name} = {list(sizes)}" for name, sizes in zip(proposal.dims, axes, strict=True))
        rows["as all combinations"] = f"{seconds(proposal.product.seconds)} with {lists}"
    return tables.pairs(rows)


def _curve(found: Found) -> Shown:
    proposal = found.proposal
    rows = []
    before = proposal.single_s
    for choice in proposal.curve:
        gain = f"{1 - choice.seconds / before:.1%}" if len(choice.buckets) > 1 else ""
        bar = _bar(choice.seconds / proposal.single_s)
        rows.append((str(len(choice.buckets)), seconds(choice.seconds), bar, gain))
        before = choice.seconds
        if len(choice.buckets) == len(proposal.buckets):
            break
    return tables.table(_columns("buckets", "time per request", "", "less than before"), rows)


def _checked(found: Found) -> str:
    if found.check is None:
        return "; no size lies between them"
    place = " x ".join(map(str, found.check.sizes))
    return f"; between them interpolated, {found.check.error:+.1%} at {place}"


def _bar(share: float) -> str:
    eighths = round(share * BAR * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _columns(*names: str) -> list[Column]:
    """Columns of numbers, and one of bars without a name."""
    return [Column(name, right=bool(name)) for name in names]
