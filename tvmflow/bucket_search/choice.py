"""Chooses shape buckets: the few sizes for which requests of observed sizes, padded to them, take the least time.

A request goes to the smallest bucket that it fits into: the one with the fewest elements. One bucket always is the
largest observed size of every dimension, so that whatever combines observed sizes can be run. With one dimension the
choice is exact; with several it is exact where few combinations exist, else found by local search. No TVM in here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tvmflow.bucket_search import search
from tvmflow.bucket_search.observed import Observed
from tvmflow.bucket_search.search import Grid, SizeFunction, elements_of, ranks


@dataclass(frozen=True)
class Choice:
    """Some buckets, each a size per dimension, the smallest first, and the seconds that a request should take."""

    buckets: tuple[tuple[int, ...], ...]
    seconds: float


@dataclass(frozen=True)
class Bucket:
    """One bucket: its sizes, the share of requests that it serves, how much of their elements is padding, its cost."""

    sizes: tuple[int, ...]
    share: float
    waste: float
    seconds: float


@dataclass(frozen=True)
class Proposal:
    """The buckets proposed and what they cost; all seconds are those that a request is expected to take.

    `single_s` is with one bucket of the largest sizes, `exact_s` with one for every size tried. `curve` holds the best
    choices with 1, 2, ... buckets, `product` the best one that combines all of some sizes per dimension. `waste` is the
    share of all computed elements that are padding.
    """

    dims: tuple[str, ...]
    buckets: tuple[Bucket, ...]
    seconds: float
    single_s: float
    exact_s: float
    waste: float
    curve: tuple[Choice, ...]
    product: Choice


def propose(observed: Observed, align: tuple[int, ...], cost: SizeFunction, most: int) -> Proposal:
    """At most `most` buckets whose sizes are multiples of `align`, per dimension.

    `cost` gives seconds of a call by its sizes and must not fall where a size grows.
    """
    padded = aligned(observed.sizes, align)
    grid = search.grid_of(padded, observed.counts, cost)
    products = search.products(grid, most)
    sets = search.searched(grid, products) if len(align) > 1 else products
    curve = [_choice(grid, chosen) for chosen in sets]
    best = next(choice for choice in curve if choice.seconds <= curve[-1].seconds * (1 + 1e-9))
    buckets, waste = _filled(observed, best, cost)
    return Proposal(
        dims=observed.dims,
        buckets=buckets,
        seconds=best.seconds,
        single_s=curve[0].seconds,
        exact_s=float(grid.weight @ grid.cost),
        waste=waste,
        curve=tuple(curve),
        product=_choice(grid, products[len(best.buckets) - 1]),
    )


def aligned(sizes: np.ndarray, align: tuple[int, ...]) -> np.ndarray:
    """Sizes rounded up to multiples."""
    steps = np.asarray(align, np.int64)
    return -(-sizes // steps) * steps


def axes_of(buckets: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...] | None:
    """The sizes per dimension of which the buckets are all combinations; None where they are not."""
    axes = tuple(tuple(sorted(set(sizes))) for sizes in zip(*buckets, strict=True))
    return axes if math.prod(map(len, axes)) == len(set(buckets)) else None


def served_by(sizes: np.ndarray, buckets: np.ndarray) -> np.ndarray:
    """Per size, int (n, dims), the index of the smallest bucket, int (buckets, dims), that it fits into."""
    order = np.argsort(ranks(buckets))
    fits = np.all(sizes[:, None, :] <= buckets[order][None, :, :], axis=2)
    return np.asarray(order[fits.argmax(axis=1)])


def _choice(grid: Grid, chosen: np.ndarray) -> Choice:
    order = chosen[np.argsort(grid.rank[chosen])]
    buckets = tuple(tuple(int(size) for size in grid.sizes[index]) for index in order)
    return Choice(buckets, search.expected(grid, chosen))


def _filled(observed: Observed, choice: Choice, cost: SizeFunction) -> tuple[tuple[Bucket, ...], float]:
    """The buckets with what goes into each, and the share of padding in all that is computed."""
    buckets = np.array(choice.buckets)
    served = served_by(observed.sizes, buckets)
    seconds, computed = cost(buckets), elements_of(buckets)
    requests = np.bincount(served, observed.counts, len(buckets))
    needed = np.bincount(served, observed.counts * elements_of(observed.sizes), len(buckets))
    waste = 1 - needed / np.maximum(requests * computed, 1)
    found = tuple(
        Bucket(sizes, float(count / observed.counts.sum()), float(share) if count else 0.0, float(each))
        for sizes, count, share, each in zip(choice.buckets, requests, waste, seconds, strict=True)
    )
    return found, float(1 - needed.sum() / (requests * computed).sum())
