"""The search behind `choice`: sets of sizes among all combinations of some sizes per dimension. No TVM in here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

CANDIDATES = 2048  # sizes tried with one dimension: exact programming takes their square
CORNERS = 4096  # combinations of sizes tried with several dimensions
EXHAUSTIVE = 2000  # as many sets of buckets are simply all tried
STARTS = 16  # random ones of the local search, at most,
EFFORT = 1 << 15  # and those times buckets times combinations: what there is time for
EXCHANGE = 1e-6  # of the time: what an exchange must save
SizeFunction: TypeAlias = Callable[[np.ndarray], np.ndarray]  # int (n, dims) -> float64 (n,)


@dataclass(frozen=True)
class Grid:
    """All combinations of the sizes that are tried, in C order of `shape`, the last one the largest of all.

    `rank` orders them from the smallest; `weight` is the share of requests that they are the nearest size to.
    """

    shape: tuple[int, ...]
    sizes: np.ndarray
    cost: np.ndarray
    rank: np.ndarray
    weight: np.ndarray


def grid_of(padded: np.ndarray, counts: np.ndarray, cost: SizeFunction) -> Grid:
    """The grid for sizes, int (n, dims), that were seen `counts` times, int (n,)."""
    axes = _thinned([np.unique(column) for column in padded.T])
    shape = tuple(map(len, axes))
    places = tuple(np.searchsorted(axis, column) for axis, column in zip(axes, padded.T, strict=True))
    sizes = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(axes))
    weight = np.bincount(np.ravel_multi_index(places, shape), counts / counts.sum(), len(sizes))
    return Grid(shape, sizes, cost(sizes), ranks(sizes), weight)


def elements_of(sizes: np.ndarray) -> np.ndarray:
    """The product of each row, as the run time counts elements."""
    return np.asarray(np.prod(sizes.astype(np.float64), axis=1))


def ranks(sizes: np.ndarray) -> np.ndarray:
    """The place of each of the sizes, int (n, dims), from the fewest elements to the most, then by their values."""
    ranks = np.empty(len(sizes), np.int64)
    ranks[np.lexsort((*sizes.T[::-1], elements_of(sizes)))] = np.arange(len(sizes))
    return ranks


def _thinned(axes: list[np.ndarray]) -> list[np.ndarray]:
    """The sizes per dimension, fewer of the longest lists where there are too many; the largest stay."""
    most = CANDIDATES if len(axes) == 1 else CORNERS
    while math.prod(map(len, axes)) > most:
        longest = max(range(len(axes)), key=lambda index: len(axes[index]))
        rest = math.prod(map(len, axes)) // len(axes[longest])
        kept = max(most // rest, len(axes[longest]) * 3 // 4)
        axes[longest] = axes[longest][np.linspace(0, len(axes[longest]) - 1, kept).round().astype(int)]
    return axes


def expected(grid: Grid, chosen: np.ndarray) -> float:
    """Seconds that a request is expected to take with the combinations `chosen` for buckets."""
    return float(grid.weight @ grid.cost[chosen[_serving(grid, chosen)]])


def _serving(grid: Grid, chosen: np.ndarray) -> np.ndarray:
    """For each of all combinations, which of `chosen` serves requests of that size."""
    order = np.argsort(grid.rank[chosen])
    fits = np.ones((len(chosen), len(grid.sizes)), bool)
    for column in grid.sizes.T:
        fits &= column[chosen[order], None] >= column[None, :]
    return np.asarray(order[fits.argmax(axis=0)])


# --- sizes per dimension: exact for one dimension with those of the others given --------------------------------------


def products(grid: Grid, most: int) -> list[np.ndarray]:
    """The best combinations found of sizes per dimension with at most 1, 2, ... buckets."""
    if len(grid.shape) == 1:
        return _partitions(_segments(grid, [], 0), most)
    sets = [[_product(grid, counts) for counts in _factors(count, grid.shape)] for count in range(1, most + 1)]
    return [min(some, key=lambda one: expected(grid, one)) for some in sets]


def _factors(most: int, shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """How many sizes each dimension may have, so that none can have one more."""
    if len(shape) == 1:
        yield (min(most, shape[0]),)
        return
    for count in range(1, min(most, shape[0]) + 1):
        for rest in _factors(most // count, shape[1:]):
            if count == shape[0] or (count + 1) * math.prod(rest) > most:
                yield (count, *rest)


def _product(grid: Grid, counts: tuple[int, ...]) -> np.ndarray:
    """Sizes per dimension, as many as `counts`, from evenly spread ones, each dimension settled in turn."""
    chosen = [
        np.linspace(0, size, count + 1).astype(int)[1:] - 1 for size, count in zip(grid.shape, counts, strict=True)
    ]
    before: list[list[int]] = []
    while before != (now := [ends.tolist() for ends in chosen]):
        before = now
        for axis, count in enumerate(counts):
            chosen[axis] = _partitions(_segments(grid, chosen, axis), count)[-1]
    return np.ravel_multi_index(np.meshgrid(*chosen, indexing="ij"), grid.shape).ravel()


def _segments(grid: Grid, chosen: list[np.ndarray], axis: int) -> np.ndarray:
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


def searched(grid: Grid, products: list[np.ndarray]) -> list[np.ndarray]:
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
            random = [
                rng.choice(len(grid.sizes) - 1, count - 1, replace=False)
                for _ in range(min(STARTS, EFFORT // (count * len(grid.sizes))))
            ]
            starts = [
                grown,
                _grown(grid, products[count - 1], count),
                *(np.append(one, len(grid.sizes) - 1) for one in random),
            ]
            found.append(min((_swapped(grid, one) for one in starts), key=lambda one: expected(grid, one)))
    return found


def _exhausted(grid: Grid, count: int) -> np.ndarray:
    last = len(grid.sizes) - 1
    sets = (np.array([*others, last]) for others in itertools.combinations(range(last), count - 1))
    return min(sets, key=lambda one: expected(grid, one))


def _grown(grid: Grid, chosen: np.ndarray, count: int) -> np.ndarray:
    """The set with the combinations that help most added, one by one, until it has `count`."""
    while len(chosen) < count:
        changes = _changes(grid, chosen)
        changes[chosen] = np.inf
        chosen = np.append(chosen, changes.argmin())
    return chosen


def _swapped(grid: Grid, chosen: np.ndarray) -> np.ndarray:
    """The set after each of its combinations in turn was exchanged for the best other one, until none helps."""
    last, seconds, kept = len(grid.sizes) - 1, expected(grid, chosen), 0
    queue = [int(one) for one in chosen if one != last]
    while kept < len(queue):
        out = queue.pop(0)
        rest = np.array([*queue, last])
        changes = _changes(grid, rest)
        taken, before = int(changes.argmin()), seconds
        found = expected(grid, rest) + float(changes[taken])
        is_better = found < before * (1 - EXCHANGE)
        queue.append(taken if is_better else out)
        seconds, kept = (found, 0) if is_better else (before, kept + 1)
    return np.array([*queue, last])


def _changes(grid: Grid, chosen: np.ndarray) -> np.ndarray:
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
