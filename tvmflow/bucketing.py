"""Chooses shape buckets: the few sizes for which requests of observed sizes, padded to them, take the least time.

A request goes to the smallest bucket that it fits into: the one with the fewest elements. One bucket always is the
largest observed size of every dimension, so that whatever combines observed sizes can be run. With one dimension the
choice is exact; with several it is exact where few combinations exist, else found by local search. No TVM in here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from tvmflow.observed import Observed

CANDIDATES = 2048  # sizes tried with one dimension: exact programming takes their square
CORNERS = 4096  # combinations of sizes tried with several dimensions
EXHAUSTIVE = 2000  # as many sets of buckets are simply all tried
STARTS = 1 << 15  # random ones of the local search times buckets times combinations: what there is time for
EXCHANGE = 1e-6  # of the time: what an exchange must save
SizeFunction: TypeAlias = Callable[[np.ndarray], np.ndarray]  # int (n, dims) -> float64 (n,)


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


def propose(
    observed: Observed, align: tuple[int, ...], cost: SizeFunction, elements: SizeFunction, most: int
) -> Proposal:
    """At most `most` buckets whose sizes are multiples of `align`, per dimension.

    `cost` gives seconds of a call by its sizes and must not fall where a size grows; `elements` likewise what sizes are
    ordered by and padding is counted in.
    """
    padded = aligned(observed.sizes, align)
    grid = _grid(padded, observed.counts, cost, elements)
    products = _products(grid, most)
    sets = _searched(grid, products) if len(align) > 1 else products
    curve = [_choice(grid, chosen) for chosen in sets]
    best = next(choice for choice in curve if choice.seconds <= curve[-1].seconds * (1 + 1e-9))
    buckets, waste = _filled(observed, best, cost, elements)
    return Proposal(
        dims=observed.dims, buckets=buckets, seconds=best.seconds, single_s=curve[0].seconds,
        exact_s=float(grid.weight @ grid.cost), waste=waste, curve=tuple(curve),
        product=_choice(grid, products[len(best.buckets) - 1]),
    )  # fmt: skip


def aligned(sizes: np.ndarray, align: tuple[int, ...]) -> np.ndarray:
    """Sizes rounded up to multiples."""
    steps = np.asarray(align, np.int64)
    return -(-sizes // steps) * steps


def axes_of(buckets: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...] | None:
    """The sizes per dimension of which the buckets are all combinations; None where they are not."""
    axes = tuple(tuple(sorted(set(sizes))) for sizes in zip(*buckets, strict=True))
    return axes if math.prod(map(len, axes)) == len(set(buckets)) else None


def served_by(sizes: np.ndarray, buckets: np.ndarray, elements: SizeFunction) -> np.ndarray:
    """Per size, int (n, dims), the index of the smallest bucket, int (buckets, dims), that it fits into."""
    order = np.lexsort((*buckets.T[::-1], elements(buckets)))
    fits = np.all(sizes[:, None, :] <= buckets[order][None, :, :], axis=2)
    return np.asarray(order[fits.argmax(axis=1)])


def _filled(
    observed: Observed, choice: Choice, cost: SizeFunction, elements: SizeFunction
) -> tuple[tuple[Bucket, ...], float]:
    """The buckets with what goes into each, and the share of padding in all that is computed."""
    buckets = np.array(choice.buckets)
    served = served_by(observed.sizes, buckets, elements)
    seconds, computed = cost(buckets), elements(buckets)
    requests = np.bincount(served, observed.counts, len(buckets))
    needed = np.bincount(served, observed.counts * elements(observed.sizes), len(buckets))
    waste = 1 - needed / np.maximum(requests * computed, 1)
    found = tuple(
        Bucket(sizes, float(count / observed.counts.sum()), float(share) if count else 0.0, float(each))
        for sizes, count, share, each in zip(choice.buckets, requests, waste, seconds, strict=True)
    )
    return found, float(1 - needed.sum() / (requests * computed).sum())


# --- the sizes that are tried -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Grid:
    """All combinations of the sizes that are tried, in C order of `shape`, the last one the largest of all.

    `rank` orders them from the smallest; `weight` is the share of requests that they are the nearest size to.
    """

    shape: tuple[int, ...]
    sizes: np.ndarray
    cost: np.ndarray
    rank: np.ndarray
    weight: np.ndarray


def _grid(padded: np.ndarray, counts: np.ndarray, cost: SizeFunction, elements: SizeFunction) -> _Grid:
    axes = _thinned([np.unique(column) for column in padded.T])
    shape = tuple(map(len, axes))
    places = tuple(np.searchsorted(axis, column) for axis, column in zip(axes, padded.T, strict=True))
    sizes = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(axes))
    weight = np.bincount(np.ravel_multi_index(places, shape), counts / counts.sum(), len(sizes))
    rank = np.empty(len(sizes), np.int64)
    rank[np.lexsort((*sizes.T[::-1], elements(sizes)))] = np.arange(len(sizes))
    return _Grid(shape, sizes, cost(sizes), rank, weight)


def _thinned(axes: list[np.ndarray]) -> list[np.ndarray]:
    """The sizes per dimension, fewer of the longest lists where there are too many; the largest stay."""
    most = CANDIDATES if len(axes) == 1 else CORNERS
    while math.prod(map(len, axes)) > most:
        longest = max(range(len(axes)), key=lambda index: len(axes[index]))
        rest = math.prod(map(len, axes)) // len(axes[longest])
        kept = max(most // rest, len(axes[longest]) * 3 // 4)
        axes[longest] = axes[longest][np.linspace(0, len(axes[longest]) - 1, kept).round().astype(int)]
    return axes


def _choice(grid: _Grid, chosen: np.ndarray) -> Choice:
    order = chosen[np.argsort(grid.rank[chosen])]
    buckets = tuple(tuple(int(size) for size in grid.sizes[index]) for index in order)
    return Choice(buckets, _expected(grid, chosen))


def _expected(grid: _Grid, chosen: np.ndarray) -> float:
    """Seconds that a request is expected to take with the combinations `chosen` for buckets."""
    return float(grid.weight @ grid.cost[chosen[_serving(grid, chosen)]])


def _serving(grid: _Grid, chosen: np.ndarray) -> np.ndarray:
    """For each of all combinations, which of `chosen` serves requests of that size."""
    order = np.argsort(grid.rank[chosen])
    fits = np.ones((len(chosen), len(grid.sizes)), bool)
    for column in grid.sizes.T:
        fits &= column[chosen[order], None] >= column[None, :]
    return np.asarray(order[fits.argmax(axis=0)])


# --- sizes per dimension: exact for one dimension with those of the others given --------------------------------------


def _products(grid: _Grid, most: int) -> list[np.ndarray]:
    """The best combinations found of sizes per dimension with at most 1, 2, ... buckets."""
    if len(grid.shape) == 1:
        return _partitions(_segments(grid, [], 0), most)
    sets = [[_product(grid, counts) for counts in _factors(count, grid.shape)] for count in range(1, most + 1)]
    return [min(some, key=lambda one: _expected(grid, one)) for some in sets]


def _factors(most: int, shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """How many sizes each dimension may have, so that none can have one more."""
    if len(shape) == 1:
        yield (min(most, shape[0]),)
        return
    for count in range(1, min(most, shape[0]) + 1):
        for rest in _factors(most // count, shape[1:]):
            if count == shape[0] or (count + 1) * math.prod(rest) > most:
                yield (count, *rest)


def _product(grid: _Grid, counts: tuple[int, ...]) -> np.ndarray:
    """Sizes per dimension, as many as `counts`, from evenly spread ones, each dimension settled in turn."""
    chosen = [np.linspace(0, size, count + 1).astype(int)[1:] - 1
              for size, count in zip(grid.shape, counts, strict=True)]  # fmt: skip
    before: list[list[int]] = []
    while before != (now := [ends.tolist() for ends in chosen]):
        before = now
        for axis, count in enumerate(counts):
            chosen[axis] = _partitions(_segments(grid, chosen, axis), count)[-1]
    return np.ravel_multi_index(np.meshgrid(*chosen, indexing="ij"), grid.shape).ravel()


def _segments(grid: _Grid, chosen: list[np.ndarray], axis: int) -> np.ndarray:
    """[i, j]: the expected seconds of requests whose size along `axis` is the i-th to the j-th, padded to the j-th."""
    weight, cost = (np.moveaxis(values.reshape(grid.shape), axis, 0) for values in (grid.weight, grid.cost))
    for place, ends in enumerate([ends for index, ends in enumerate(chosen) if index != axis], start=1):
        starts = np.concatenate([[0], ends[:-1] + 1])
        weight, cost = np.add.reduceat(weight, starts, axis=place), cost.take(ends, axis=place)
    length = grid.shape[axis]
    flat, each = weight.reshape(length, -1), cost.reshape(length, -1)
    below = np.concatenate([np.zeros((1, flat.shape[1])), np.cumsum(flat, axis=0)])
    seconds = np.sum(each * below[1:], axis=1)[None, :] - below[:-1] @ each.T
    return np.where(np.arange(length)[:, None] <= np.arange(length)[None, :], seconds, np.inf)


def _partitions(segments: np.ndarray, most: int) -> list[np.ndarray]:
    """For 1, 2, ... `most` the ends of as many consecutive segments that cover everything at the least cost.

    By dynamic programming; where there are fewer sizes, no more segments than sizes.
    """
    best, parents, found = segments[0], [], [np.array([len(segments) - 1])]
    for count in range(2, most + 1):
        if count > len(segments):
            found.append(found[-1])
            continue
        joined = np.concatenate([[np.inf], best[:-1]])[:, None] + segments
        parents.append(joined.argmin(axis=0))
        best = joined.min(axis=0)
        ends = [len(segments) - 1]
        for starts in reversed(parents):
            ends.append(int(starts[ends[-1]]) - 1)
        found.append(np.array(ends[::-1]))
    return found


# --- any buckets: local search ----------------------------------------------------------------------------------------


def _searched(grid: _Grid, products: list[np.ndarray]) -> list[np.ndarray]:
    """The best sets found with 1, 2, ... buckets, no worse than the products of as many."""
    rng = np.random.default_rng(0)
    found = [np.array([len(grid.sizes) - 1])]
    for count in range(2, len(products) + 1):
        if count > len(grid.sizes):
            found.append(found[-1])
        elif math.comb(len(grid.sizes) - 1, count - 1) <= EXHAUSTIVE:
            found.append(_exhausted(grid, count))
        else:
            grown = _grown(grid, found[-1], count)
            random = [rng.choice(len(grid.sizes) - 1, count - 1, replace=False)
                      for _ in range(STARTS // (count * len(grid.sizes)))]
            starts = [grown, _grown(grid, products[count - 1], count),
                      *(np.append(one, len(grid.sizes) - 1) for one in random)]
            found.append(min((_swapped(grid, one) for one in starts), key=lambda one: _expected(grid, one)))
    return found


def _exhausted(grid: _Grid, count: int) -> np.ndarray:
    last = len(grid.sizes) - 1
    sets = (np.array([*others, last]) for others in itertools.combinations(range(last), count - 1))
    return min(sets, key=lambda one: _expected(grid, one))


def _grown(grid: _Grid, chosen: np.ndarray, count: int) -> np.ndarray:
    """The set with the combinations that help most added, one by one, until it has `count`."""
    while len(chosen) < count:
        changes = _changes(grid, chosen)
        changes[chosen] = np.inf
        chosen = np.append(chosen, changes.argmin())
    return chosen


def _swapped(grid: _Grid, chosen: np.ndarray) -> np.ndarray:
    """The set after each of its combinations in turn was exchanged for the best other one, until none helps."""
    last, seconds, kept = len(grid.sizes) - 1, _expected(grid, chosen), 0
    queue = [int(one) for one in chosen if one != last]
    while kept < len(queue):
        out = queue.pop(0)
        rest = np.array([*queue, last])
        changes = _changes(grid, rest)
        taken, before = int(changes.argmin()), seconds
        found = _expected(grid, rest) + float(changes[taken])
        is_better = found < before * (1 - EXCHANGE)
        queue.append(taken if is_better else out)
        seconds, kept = (found, 0) if is_better else (before, kept + 1)
    return np.array([*queue, last])


def _changes(grid: _Grid, chosen: np.ndarray) -> np.ndarray:
    """How the expected seconds change if each one of all combinations is added to the set.

    It takes over the requests that fit into it from those of the set that are larger: sums over all smaller sizes.
    """
    serving = _serving(grid, chosen)
    held = np.zeros((2, len(chosen), len(grid.sizes)))
    held[0, serving, np.arange(len(serving))] = grid.weight
    held[1] = held[0] * grid.cost[chosen][:, None]
    below = held.reshape(2, len(chosen), *grid.shape)
    for axis in range(len(grid.shape)):
        below = below.cumsum(axis=axis + 2)
    weight, seconds = below.reshape(held.shape)
    is_smaller = grid.rank[None, :] < grid.rank[chosen][:, None]
    return np.asarray(grid.cost * (weight * is_smaller).sum(axis=0) - (seconds * is_smaller).sum(axis=0))
