"""Seconds of a call by its sizes, from a few sizes for which they are known. No TVM in here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.interpolate import PchipInterpolator

RATIO = 4.0  # known sizes of a dimension lie about this far apart, at most
MOST = 24  # known sizes in all


@dataclass(frozen=True)
class SizeCosts:
    """Seconds at all combinations of some sizes per dimension; between them, monotone cubics along one after another.

    `seconds` is float64 of shape `tuple(map(len, axes))`; they never fall where a size grows.
    """

    axes: tuple[np.ndarray, ...]
    seconds: np.ndarray

    def at(self, sizes: np.ndarray) -> np.ndarray:
        """Seconds for int (n, dims), float64 (n,); sizes outside of the known ones count as the nearest."""
        values, places = self.seconds, []
        for index, (axis, column) in enumerate(zip(self.axes, sizes.T, strict=True)):
            unique, place = np.unique(np.clip(column, axis[0], axis[-1]), return_inverse=True)
            if len(axis) > 1:
                values = PchipInterpolator(axis, values, axis=index)(unique)
            places.append(place)
        return np.asarray(values[tuple(places)])


def of_known(known: Mapping[tuple[int, ...], float]) -> SizeCosts:
    """The costs between sizes whose seconds are known, which must be all combinations of some per dimension.

    Where a larger size was faster, which only a measurement can say, it counts as no faster than the smaller one.
    """
    axes = tuple(np.unique(column) for column in np.array(list(known)).T)
    seconds = np.array([known[tuple(map(int, sizes))] for sizes in itertools.product(*axes)])
    seconds = seconds.reshape(tuple(map(len, axes)))
    for axis in range(len(axes)):
        seconds = np.maximum.accumulate(seconds, axis=axis)
    return SizeCosts(axes, seconds)


def chosen(sizes: np.ndarray) -> tuple[list[tuple[int, ...]], tuple[int, ...] | None]:
    """Which sizes to know for int (n, dims): combinations of the smallest, the largest and some between.

    Also one to check the values between them with: far from its neighbours; None where nothing lies between.
    """
    columns = [np.unique(column) for column in sizes.T]
    counts = [1 if len(c) == 1 else 1 + max(1, math.ceil(math.log(c[-1] / c[0], RATIO))) for c in columns]
    while math.prod(counts) > MOST and max(counts) > 2:
        counts[counts.index(max(counts))] -= 1
    axes = [_spread(column, count) for column, count in zip(columns, counts, strict=True)]
    check = tuple(_between(column, axis) for column, axis in zip(columns, axes, strict=True))
    known = [tuple(map(int, one)) for one in itertools.product(*axes)]
    return known, None if check in known else check


def _spread(column: np.ndarray, count: int) -> np.ndarray:
    """About `count` of the sizes, the first and the last among them, in equal ratios."""
    return np.unique([_nearest(column, target) for target in np.geomspace(column[0], column[-1], count)])


def _between(column: np.ndarray, axis: np.ndarray) -> int:
    """The size that is nearest to the middle of the widest gap between those in `axis`."""
    if len(axis) == 1:
        return int(axis[0])
    widest = int(np.argmax(axis[1:] / axis[:-1]))
    return _nearest(column, math.sqrt(axis[widest] * axis[widest + 1]))


def _nearest(column: np.ndarray, target: float) -> int:
    return int(column[np.argmin(np.abs(np.log(column / target)))])
