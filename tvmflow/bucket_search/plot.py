"""Observed sizes with the proposed buckets, and time against the number of buckets, as one SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import TypeAlias

import numpy as np

from tvmflow.bucket_search.proposal import Found
from tvmflow.text import cell

WIDTH, HEIGHT, LEFT, TOP, GAP = 360, 260, 70, 50, 90  # of one panel, and around it, in pixels
BINS = 48
Draw: TypeAlias = Callable[[Found, float], Iterator[str]]  # the panel whose left edge is there
SEEN, BUCKET, FRAME = "#7a9cc6", "#c0392b", "#555555"


@dataclass(frozen=True)
class _Panel:
    """A rectangle at (`x`, TOP) whose axes go from 0 to `right` and from 0 to `top`."""

    x: float
    right: float
    top: float

    def at(self, x: float, y: float) -> tuple[float, float]:
        return self.x + x / self.right * WIDTH, TOP + HEIGHT - y / self.top * HEIGHT


def svg(found: Found) -> str:
    """Two dimensions as a map of requests, others as a histogram each; buckets are red."""
    dims = found.proposal.dims
    sizes = [_map] if len(dims) == 2 else [partial(_histogram, axis) for axis in range(len(dims))]
    panels: list[Draw] = [*sizes, _curve]
    width, height = LEFT + len(panels) * (WIDTH + GAP), TOP + HEIGHT + 60
    parts = [part for index, draw in enumerate(panels) for part in draw(found, LEFT + index * (WIDTH + GAP))]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _histogram(axis: int, found: Found, x: float) -> Iterator[str]:
    sizes, counts, name = found.observed.sizes[:, axis], found.observed.counts, found.proposal.dims[axis]
    ends = sorted({bucket.sizes[axis] for bucket in found.proposal.buckets})
    edges = _edges(ends[-1])
    shares = np.histogram(sizes - 0.5, edges, weights=counts)[0] / counts.sum() * 100
    panel = _Panel(x, ends[-1] * 1.02, float(shares.max()) * 1.1)
    for low, high, share in zip(edges[:-1], edges[1:], shares, strict=True):
        yield _rect(panel, (low, 0), (min(high, panel.right), share), f'fill="{SEEN}"')
    for end in ends:
        yield _line(panel, (end, 0), (end, panel.top), f'stroke="{BUCKET}"')
    yield from _labels(panel, ends)
    yield from _frame(panel, f"requests by {name}", name, "% of requests")


def _map(found: Found, x: float) -> Iterator[str]:
    """The share of requests at each pair of sizes, and each bucket as the rectangle of what fits into it."""
    observed, names = found.observed, found.proposal.dims
    buckets = [bucket.sizes for bucket in found.proposal.buckets]
    across, up = (max(sizes) for sizes in zip(*buckets, strict=True))
    edges = [_edges(across), _edges(up)]
    first, second = (observed.sizes - 0.5).T
    shares = np.histogram2d(first, second, bins=edges, weights=observed.counts)[0]
    panel = _Panel(x, across * 1.05, up * 1.05)
    for i, j in zip(*np.nonzero(shares), strict=True):
        shade = 0.15 + 0.85 * float(np.sqrt(shares[i, j] / shares.max()))
        corners = (edges[0][i], edges[1][j]), (min(edges[0][i + 1], panel.right), min(edges[1][j + 1], panel.top))
        yield _rect(panel, *corners, f'fill="{SEEN}" fill-opacity="{shade:.2f}"')
    for sizes in buckets:
        yield _rect(panel, (0, 0), sizes, f'fill="none" stroke="{BUCKET}" stroke-opacity="0.6"')
        place = panel.at(*sizes)
        yield f'<circle cx="{place[0]:.1f}" cy="{place[1]:.1f}" r="3.5" fill="{BUCKET}"/>'
        yield _text(place[0] - 5, place[1] - 5, "x".join(map(str, sizes)), f'text-anchor="end" fill="{BUCKET}"')
    yield from _frame(panel, "requests (blue) and buckets (red)", names[0], names[1], whole=True)


def _curve(found: Found, x: float) -> Iterator[str]:
    proposal = found.proposal
    points = [(len(choice.buckets), choice.seconds * 1e3) for choice in proposal.curve]
    panel = _Panel(x, points[-1][0] * 1.05, points[0][1] * 1.1)
    exact = proposal.exact_s * 1e3
    yield _line(panel, (0, exact), (panel.right, exact), f'stroke="{FRAME}" stroke-dasharray="5 4"')
    place = panel.at(panel.right, exact)
    yield _text(place[0] - 4, place[1] - 5, "exact sizes", f'text-anchor="end" fill="{FRAME}"')
    line = " ".join("{:.1f},{:.1f}".format(*panel.at(*point)) for point in points)
    yield f'<polyline points="{line}" fill="none" stroke="{SEEN}" stroke-width="2"/>'
    for count, milliseconds in points:
        place, colour = panel.at(count, milliseconds), BUCKET if count == len(proposal.buckets) else SEEN
        yield f'<circle cx="{place[0]:.1f}" cy="{place[1]:.1f}" r="4" fill="{colour}"/>'
    yield from _frame(panel, "time per request", "buckets", "ms")


def _edges(largest: int) -> np.ndarray:
    """Edges of bins for the sizes from 1 to `largest`; a bin holds the sizes above its lower edge up to its upper."""
    width = -(-largest // BINS)
    return np.arange(0, largest + width, width)


def _labels(panel: _Panel, ends: Sequence[int]) -> Iterator[str]:
    """The buckets' sizes above their lines, where there is room."""
    free = -np.inf
    for end in ends:
        place = panel.at(end, panel.top)
        if place[0] >= free:
            yield _text(place[0], place[1] - 4, str(end), f'text-anchor="middle" fill="{BUCKET}"')
            free = place[0] + 7 * len(str(end)) + 8


def _frame(panel: _Panel, title: str, across: str, up: str, whole: bool = False) -> Iterator[str]:
    """The panel's axes with round numbers, upwards too where they are `whole` ones, and what they show."""
    yield _line(panel, (0, 0), (panel.right, 0), f'stroke="{FRAME}"')
    yield _line(panel, (0, 0), (0, panel.top), f'stroke="{FRAME}"')
    for value in _round_numbers(panel.right, 1):
        place = panel.at(value, 0)
        yield _text(place[0], place[1] + 16, f"{value:g}", 'text-anchor="middle"')
    for value in _round_numbers(panel.top, 1 if whole else 0):
        place = panel.at(0, value)
        yield _text(place[0] - 6, place[1] + 4, f"{value:g}", 'text-anchor="end"')
    middle = TOP + HEIGHT / 2
    yield _text(panel.x + WIDTH / 2, TOP - 26, title, 'text-anchor="middle" font-weight="bold"')
    yield _text(panel.x + WIDTH / 2, TOP + HEIGHT + 36, across, 'text-anchor="middle"')
    yield _text(panel.x - 48, middle, up, f'text-anchor="middle" transform="rotate(-90 {panel.x - 48:g} {middle:g})"')


def _round_numbers(largest: float, least: float) -> Iterator[float]:
    """Multiples of a round step, which is no smaller than `least`."""
    step = 10 ** np.floor(np.log10(largest))
    while largest / step < 4:
        step /= 2
    step = max(step, least)
    for index in range(int(largest / step) + 1):
        yield index * step


def _rect(panel: _Panel, low: Sequence[float], high: Sequence[float], style: str) -> str:
    (left, bottom), (right, top) = panel.at(*low), panel.at(*high)
    return f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}" {style}/>'


def _line(panel: _Panel, start: Sequence[float], end: Sequence[float], style: str) -> str:
    (x1, y1), (x2, y2) = panel.at(*start), panel.at(*end)
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>'


def _text(x: float, y: float, content: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(cell(content))}</text>'
