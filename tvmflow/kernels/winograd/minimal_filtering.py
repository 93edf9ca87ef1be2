"""Winograd's minimal filtering for 3 x 3 convolutions of stride 1: what is computed, in which sizes, when it pays.

F(m x m, 3 x 3) makes m x m outputs from (m + 2) x (m + 2) inputs with (m + 2)^2 multiplications per pair of channels
instead of 9 m^2 (Winograd 1980; Lavin & Gray 2016): 4 times fewer for m = 4, 2.25 times for m = 2. Input tiles, filters
and products go through linear transforms in front of and behind one matrix product per position of the tile; those of
the filters are done at compile time.

The transforms evaluate polynomials at 0, at pairs +p, -p, and at infinity. For m = 4 the points 2^-1/2 and 2^1/2, whose
squares and product are exact, halve the error of the usual 1 and 2; it is then twice that of a direct sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import tvm

from tvmflow.kernels.schedules.axes import Registers

POINTS = {2: (1.0,), 4: (2**-0.5, 2**0.5)}  # outputs along a tile's edge -> p of the pairs +p, -p
DIRECT = 1  # the edge of the direct convolution, which is F(1 x 1, 3 x 3)
LARGE_WEIGHTS = 4 << 20  # bytes of filters that a thread should not read as a whole for
FEW_TILES = 12  # tiles or less
WORKING_SET = 5 << 18  # bytes that the tiles of a block take in a thread's second-level cache
# Multiplications in whose time a weight comes from memory, and an element goes through a transform, as measured.
WEIGHT, TRANSFORM = 24, 8
GAIN, SMALLEST = 0.9, 1 << 20  # of the direct time at most; multiplications of the direct convolution at least


@dataclass(frozen=True)
class Shape:
    """A convolution of float32[batch, height, width, channels], padded (top, left, bottom, right), to `filters`."""

    batch: int
    height: int
    width: int
    channels: int
    filters: int
    padding: tuple[int, int, int, int]

    @property
    def out_height(self) -> int:
        return self.height + self.padding[0] + self.padding[2] - 2

    @property
    def out_width(self) -> int:
        return self.width + self.padding[1] + self.padding[3] - 2

    def tiles(self, edge: int) -> int:
        return self.batch * -(-self.out_height // edge) * -(-self.out_width // edge)

    def __str__(self) -> str:
        """Names a shape: no other has the same."""
        padding = "" if self.padding == (1, 1, 1, 1) else f", padding {' '.join(map(str, self.padding))}"
        return f"{self.batch}x{self.height}x{self.width}x{self.channels} -> {self.filters}{padding}"


Measured: TypeAlias = Callable[[Shape], int | None]
"""The edge of the method that was measured to be fastest for a convolution, DIRECT included; None: not measured."""


def unmeasured(_shape: Shape) -> None:
    """A `Measured` that knows nothing."""


@dataclass(frozen=True)
class Plan:
    """How a convolution is computed: m = `edge`, and the sizes of what stays in registers and caches.

    A product has `rows` tiles times `columns` filters in registers. Threads share blocks of `block` tiles, or, where
    `by_filters`, panels of `columns` filters.
    """

    edge: int
    rows: int
    columns: int
    block: int
    by_filters: bool
    measured: bool = False
    """Whether the method was chosen by measurement, not by rule."""

    @property
    def positions(self) -> int:
        return (self.edge + 2) ** 2

    def __str__(self) -> str:
        return f"winograd F({self.edge}x{self.edge}, 3x3)"


def rule(chosen: Plan, shape: Shape) -> str:
    """What a kernel's schedule is called in a manifest."""
    return f"{chosen}, {shape}, {'measured' if chosen.measured else 'by rule'}"


def best_plan(shape: Shape, target: tvm.target.Target, measured: Measured = unmeasured) -> Plan | None:
    """The plan that was measured to take the least time, or, unmeasured, is estimated to; None where the direct
    convolution does, or vectors do not fit."""
    if not fits(shape):
        return None
    edge = measured(shape)
    if edge is not None:
        return replace(plan(shape, edge, target), measured=True) if edge != DIRECT else None
    edge = min(POINTS, key=lambda edge: cost(shape, edge))
    return plan(shape, edge, target) if pays(shape, edge) else None


def fits(shape: Shape) -> bool:
    """Whether there are kernels for a shape: it has outputs, and its channels and filters make vectors."""
    return not (shape.channels % 4 or shape.filters % 4 or min(shape.out_height, shape.out_width) < 1)


def pays(shape: Shape, edge: int) -> bool:
    """Whether F(edge x edge, 3 x 3) is worth it: clearly faster by estimate, and enough work for that to matter."""
    multiplications = 9 * shape.batch * shape.out_height * shape.out_width * shape.channels * shape.filters
    return multiplications >= SMALLEST and cost(shape, edge) < GAIN * cost(shape, None)


def cost(shape: Shape, edge: int | None) -> float:
    """Estimated time in multiplications: the products, the filters' way from memory, and the transforms.

    `edge` is None for the direct convolution. Winograd's products hide half of the filters' way, for they ask for them
    ahead of their use, and no more than all of it.
    """
    pairs = shape.channels * shape.filters
    if edge is None:
        return 9 * pairs * (shape.tiles(1) + WEIGHT)
    positions, tiles = (edge + 2) ** 2, shape.tiles(edge)
    transforms = positions * tiles * (shape.channels + shape.filters) * TRANSFORM
    return positions * pairs * max(tiles + WEIGHT / 2, WEIGHT) + transforms


def plan(shape: Shape, edge: int, target: tvm.target.Target) -> Plan:
    """Sizes for F(edge x edge, 3 x 3) by rule: register tiles, and blocks that share the work out evenly."""
    registers = Registers.of(target)
    lanes = registers.lanes
    threads = int(target.attrs.get("num-cores", 1))
    # Two vectors of filters need fewer loads per multiplication, which is worth 15 % more filters.
    vectors = 2 if -(-shape.filters // (2 * lanes)) * 2 * lanes <= 1.15 * -(-shape.filters // lanes) * lanes else 1
    positions, tiles = (edge + 2) ** 2, shape.tiles(edge)
    weight_bytes = 4 * positions * shape.channels * shape.filters
    most_rows = min(14, (registers.count - 4) // vectors)
    columns = vectors * lanes
    is_small = weight_bytes < LARGE_WEIGHTS or tiles > FEW_TILES * threads
    if not is_small and -(-shape.filters // columns) >= threads:
        rows = min(range(1, most_rows + 1), key=lambda rows: -(-tiles // rows) * (rows + 2))
        blocks = -(-tiles // _most_tiles(rows, shape, edge, columns))
        return Plan(edge, rows, columns, -(-tiles // blocks // rows) * rows, True)
    reload = 4 if weight_bytes > WORKING_SET else 0  # what fetching filters from afar costs a block, in tiles

    def span(choice: tuple[int, int]) -> tuple[float, int]:
        rows, block = choice
        each = -(-tiles // block // threads) * block  # of the thread that has the most to do
        return each * (1 + 2 / rows + reload / block), block

    rows, block = min(
        (
            (rows, block)
            for rows in range(1, most_rows + 1)
            for block in range(rows, _most_tiles(rows, shape, edge, columns) + 1, rows)
        ),
        key=span,
    )
    return Plan(edge, rows, columns, block, False)


def _most_tiles(rows: int, shape: Shape, edge: int, columns: int) -> int:
    """The most tiles, in whole rows, whose inputs and products stay in cache."""
    tile_bytes = 4 * (edge + 2) ** 2 * (shape.channels + columns)
    return max(1, WORKING_SET // tile_bytes // rows) * rows


def even_polynomial(points: tuple[float, ...]) -> list[float]:
    """Coefficients of prod(x^2 - p^2) in x^2, the constant term first; exact where the squares' sums are."""
    coefficients = np.array([1.0])
    for point in points:
        coefficients = np.convolve(coefficients, [1.0, -round(point * point, 9)])
    return [float(c) for c in coefficients[::-1]]


def filter_matrix(edge: int) -> np.ndarray:
    """float64[edge + 2, 3]: evaluates a filter's polynomial at 0, the pairs +p, -p, and infinity, scaled.

    The scale is 1 / prod(x - other points), Lagrange's denominator.
    """
    points = POINTS[edge]
    rows = [[1 / even_polynomial(points)[0], 0.0, 0.0]]
    for point in points:
        others = [round(point * point - other * other, 9) for other in points if other != point]
        scale = 1 / (2 * round(point * point, 9) * math.prod(others))
        rows += [[scale, sign * point * scale, round(point * point, 9) * scale] for sign in (1, -1)]
    return np.array([*rows, [0.0, 0.0, 1.0]])


def transformed(weights: np.ndarray, chosen: Plan) -> np.ndarray:
    """float32[3, 3, channels, filters] as [panels of `columns` filters, positions, channels, columns], computed in
    float64; what the last panel lacks is zero."""
    matrix = filter_matrix(chosen.edge)
    channels, filters = weights.shape[2:]
    panels = -(-filters // chosen.columns)
    whole = np.zeros((chosen.positions, channels, panels * chosen.columns), np.float32)
    product = np.einsum("ia,abco,jb->ijco", matrix, weights.astype(np.float64), matrix, optimize=True)
    whole[..., :filters] = product.reshape(chosen.positions, channels, filters)
    packed = whole.reshape(chosen.positions, channels, panels, chosen.columns).transpose(2, 0, 1, 3)
    return np.ascontiguousarray(packed)
