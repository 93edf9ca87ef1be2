"""Winograd convolutions as TensorIR, scheduled by hand: nothing but input, filters and output goes through memory.

    for blocks of tiles                                  in parallel; or, for large filters, see below
      transform     each tile of the block, a vector of channels at a time, in registers
      for panels of filters
        product     per position of the tile: rows x columns, in registers
        inverse     each tile, a vector of filters at a time, and what follows the convolution

What is transformed and multiplied stays in the thread's second-level cache. Where the filters are larger than that,
each thread takes panels of filters instead, and the transform of all tiles is a loop of its own in front.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ScheduleError
from tvm.script.ir_builder import IRBuilder
from tvm.tirx import Broadcast, PrimFunc, Ramp, address_of, call_intrin, const
from tvm.tirx.script.builder import ir as tir

from tvmflow.kernels.schedules.axes import blocks_of
from tvmflow.kernels.schedules.default_schedule import RULE_ATTR
from tvmflow.kernels.schedules.elementwise import schedule_elementwise
from tvmflow.kernels.winograd.minimal_filtering import POINTS, Plan, Shape, even_polynomial, rule

PLAN_ATTR = "tvmflow.winograd"  # on the block that ends such a convolution: what its rule says of it
OUT_ELEMENTWISE_FUSABLE = 4  # OpPatternKind.kOutEWiseFusable: what follows elementwise is fused into it
STEPS = 8  # channels of a product that are unrolled
AHEAD = 64  # channels; processors fetch ahead only to the end of a page, which costs a quarter where filters are cold
LINE = 16  # float32 values that are fetched together
Expr = Any  # a tvm PrimExpr
Block: TypeAlias = tvm.s_tir.schedule.SBlockRV


def function(shape: Shape, chosen: Plan, lanes: int) -> PrimFunc:
    """(float32[batch, height, width, channels], transformed filters, float32[batch, out_h, out_w, filters]) in NHWC."""
    with IRBuilder() as builder, tir.prim_func(s_tir=True, is_private=True):
        tir.func_name("winograd")
        tir.func_attr({"op_pattern": OUT_ELEMENTWISE_FUSABLE})
        _Kernel(shape, chosen, lanes).emit()
    return builder.get()


def schedule(function: PrimFunc) -> PrimFunc:
    """Schedules what was fused in front of such a convolution and behind it; that behind goes into its last stage.

    Any other function comes back as it is.
    """
    if PLAN_ATTR not in function.script():
        return function
    made = Schedule(tvm.IRModule({"main": function}), debug_mask="none")
    blocks = blocks_of(made)
    names = [str(made.get(block).name_hint) for block in blocks]
    for block in blocks[: names.index("transform")]:
        schedule_elementwise(made, block)
    inverse, *tail = blocks[names.index("inverse") :]
    fused = _with_tail(made.copy(), inverse, tail)
    if fused is None:
        for block in tail:
            schedule_elementwise(made, block)
    stated = str(made.get(inverse).annotations[PLAN_ATTR])
    return (fused or made).mod["main"].with_attrs({RULE_ATTR: stated, "tirx.is_scheduled": True})


def _with_tail(made: Schedule, inverse: Block, tail: Sequence[Block]) -> Schedule | None:
    """Elementwise blocks `tail` as one, done for each vector of a tile; None where they are none that can be."""
    try:
        for block in tail[:-1]:
            made.compute_inline(block)
        made.reverse_compute_at(tail[-1], made.get_loops(inverse)[-1], preserve_unit_loops=True)
        made.vectorize(made.get_loops(tail[-1])[-1])
    except ScheduleError:
        return None
    return made


class _Kernel:
    """The function under construction: its sizes, buffers and stages."""

    def __init__(self, shape: Shape, chosen: Plan, lanes: int) -> None:
        self.shape, self.plan = shape, chosen
        self.edge, self.taps = chosen.edge, chosen.edge + 2
        self.down, self.across = (-(-size // self.edge) for size in (shape.out_height, shape.out_width))
        self.blocks = -(-shape.tiles(self.edge) // chosen.block)
        self.row_blocks = chosen.block // chosen.rows * (self.blocks if chosen.by_filters else 1)  # of `inputs`
        self.panels = -(-shape.filters // chosen.columns)
        self.in_lanes, self.out_lanes = math.gcd(shape.channels, lanes), math.gcd(shape.filters, lanes)
        self.depth = shape.channels // self.in_lanes

    def emit(self) -> None:
        s, plan = self.shape, self.plan
        self.x = _parameter("x", (s.batch, s.height, s.width, s.channels))
        self.filters = _parameter("filters", (self.panels, plan.positions, s.channels, plan.columns))
        out = _parameter("out", (s.batch, s.out_height, s.out_width, s.filters))
        with tir.sblock("root"):
            self.inputs = _buffer((plan.positions, self.row_blocks, self.depth, plan.rows, self.in_lanes))
            self.products = _buffer((plan.block, plan.positions, plan.columns))
            self.whole = _buffer((s.batch, self.down * self.edge, self.across * self.edge, s.filters))
            self._all_filters() if plan.by_filters else self._all_tiles()
            _copy(self.whole, out)

    def _all_tiles(self) -> None:
        block = self.plan.block
        with tir.parallel(_int(self.blocks)) as number:
            with tir.serial(_int(block)) as slot, tir.serial(_int(self.depth)) as vector:
                self._transform(number * block + slot, slot, vector)
            with tir.serial(_int(self.panels)) as panel:
                self._panel(number, panel, _int(0))

    def _all_filters(self) -> None:
        row_blocks = self.plan.block // self.plan.rows
        with tir.parallel(_int(self.blocks * self.plan.block * self.depth)) as index:
            tile = tir.bind(index // self.depth)
            self._transform(tile, tile, index % self.depth)
        with tir.parallel(_int(self.panels)) as panel, tir.serial(_int(self.blocks)) as number:
            self._panel(number, panel, number * row_blocks)

    def _panel(self, number: Expr, panel: Expr, first: Expr) -> None:
        """One block of tiles for one panel of filters."""
        block, vectors = self.plan.block, self.plan.columns // self.out_lanes
        with tir.grid(_int(self.plan.positions), _int(block // self.plan.rows)) as (position, row_block):
            self._product(position, (row_block, first + row_block), panel)
        with tir.serial(_int(block)) as slot, tir.serial(_int(vectors)) as vector:
            self._inverse(number * block + slot, slot, panel * vectors + vector)

    def _transform(self, tile: Expr, slot: Expr, vector: Expr) -> None:
        """One vector of channels of one tile, from the image to `inputs`."""
        s, rows, lanes = self.shape, self.plan.rows, self.in_lanes
        with tir.sblock("transform"):
            # The last block may be larger than what is left: it does the last tile again.
            t = _axis(self.blocks * self.plan.block, tile)
            at = _axis(self.row_blocks * rows, slot)
            v = _axis(self.depth, vector)
            tir.reads(self.x[0 : s.batch, 0 : s.height, 0 : s.width, v * lanes : v * lanes + lanes])
            tir.writes(self.inputs[0 : self.plan.positions, at // rows, v, at % rows, 0:lanes])
            image, top, left = self._place(tir.bind(tvm.tirx.min(t, _int(s.tiles(self.edge) - 1))))
            y, x = tir.bind(top - s.padding[0]), tir.bind(left - s.padding[1])

            def load(i: int, j: int) -> Expr:
                return self.x[image, y + i, x + j, Ramp(v * lanes, _int(1), lanes)]

            def load_padded(i: int, j: int) -> Expr:
                inside = tvm.tirx.all(y + i >= 0, y + i < s.height, x + j >= 0, x + j < s.width)
                return tvm.tirx.if_then_else(inside, load(i, j), _like(0.0, lanes))

            def store(i: int, j: int, value: Expr) -> None:
                index = [_int(i * self.taps + j), at // rows, v, at % rows, Ramp(_int(0), _int(1), lanes)]
                tir.buffer_store(self.inputs, value, index)

            with tir.If(tvm.tirx.all(y >= 0, y + self.taps <= s.height, x >= 0, x + self.taps <= s.width)):
                with tir.Then():
                    _both_ways(load, store, self.taps, self._evaluated)
                with tir.Else():
                    _both_ways(load_padded, store, self.taps, self._evaluated)

    def _product(self, position: Expr, row_blocks: tuple[Expr, Expr], panel: Expr) -> None:
        """rows x columns of one position, accumulated over all channels; row blocks of `products` and `inputs`."""
        rows, lanes, columns = self.plan.rows, self.in_lanes, self.plan.columns
        with tir.sblock("product"):
            p = _axis(self.plan.positions, position)
            to = _axis(self.plan.block // rows, row_blocks[0])
            of = _axis(self.row_blocks, row_blocks[1])
            f = _axis(self.panels, panel)
            tir.reads(
                self.inputs[p, of, 0 : self.depth, 0:rows, 0:lanes],
                self.filters[f, p, 0 : self.shape.channels, 0:columns],
            )
            tir.writes(self.products[to * rows : to * rows + rows, p, 0:columns])
            every, steps = Ramp(_int(0), _int(1), columns), math.gcd(lanes, STEPS)
            sums = [_buffer((columns,)) for _ in range(rows)]  # apart, so that each fits what TVM puts on the stack
            for total in sums:
                tir.buffer_store(total, _like(0.0, columns), [every])
            with tir.serial(_int(self.depth)) as vector, tir.serial(_int(lanes // steps)) as part:
                for step in range(steps):
                    c = part * steps + step
                    weights = tir.bind(self.filters[f, p, vector * lanes + c, every])
                    self._prefetch(f, p, vector * lanes + c, step)
                    for row, total in enumerate(sums):
                        value = Broadcast(self.inputs[p, of, vector, row, c], columns)
                        tir.buffer_store(total, total[every] + value * weights, [every])
            for row, total in enumerate(sums):
                tir.buffer_store(self.products, total[every], [to * rows + row, p, every])

    def _prefetch(self, panel: Expr, position: Expr, channel: Expr, step: int) -> None:
        """Asks for the second-level cache to hold the filters of AHEAD channels later, across panels and positions."""
        columns = self.plan.columns
        for first in range(-step * columns % LINE, columns, LINE):
            place = address_of(self.filters[panel, position, channel + AHEAD, first])
            read, second_level, data = (const(value, "int32") for value in (0, 2, 1))
            tir.evaluate(call_intrin("void", "tirx.prefetch", place, read, second_level, data))

    def _inverse(self, tile: Expr, slot: Expr, vector: Expr) -> None:
        """One vector of filters of one tile, from `products` to the output, rounded up to whole tiles."""
        tiles, lanes, vectors = self.shape.tiles(self.edge), self.out_lanes, self.shape.filters // self.out_lanes
        with tir.sblock("inverse"):
            t, at = _axis(tiles, tile), _axis(self.plan.block, slot)
            v = _axis(vectors, vector)
            tir.sblock_attr({PLAN_ATTR: rule(self.plan, self.shape)})
            tir.where(tvm.tirx.all(tile < tiles, vector < vectors))
            image, top, left = self._place(t)
            first = v * lanes % self.plan.columns
            tir.reads(self.products[at, 0 : self.plan.positions, first : first + lanes])
            tir.writes(self.whole[image, top : top + self.edge, left : left + self.edge, v * lanes : v * lanes + lanes])

            def load(i: int, j: int) -> Expr:
                return self.products[at, _int(i * self.taps + j), Ramp(first, _int(1), lanes)]

            def store(i: int, j: int, value: Expr) -> None:
                tir.buffer_store(self.whole, value, [image, top + i, left + j, Ramp(v * lanes, _int(1), lanes)])

            _both_ways(load, store, self.taps, self._interpolated)

    def _place(self, tile: Expr) -> tuple[Expr, Expr, Expr]:
        """A tile's image, and the row and column of its first output."""
        return (
            tile // (self.down * self.across),
            tile // self.across % self.down * self.edge,
            tile % self.across * self.edge,
        )

    def _evaluated(self, taps: Sequence[Expr]) -> list[Expr]:
        """edge + 2 inputs -> the values of their polynomials at 0, the pairs +p, -p, and infinity.

        The sums over even and over odd taps are shared by the points of a pair.
        """
        points = POINTS[self.edge]
        whole = even_polynomial(points)
        found = [_sum(whole, taps[0::2])]
        for point in points:
            rest = even_polynomial(tuple(other for other in points if other != point))
            even, odd = _sum(rest, taps[2::2]), _sum([point * c for c in rest], taps[1::2])
            found += [tir.bind(even + odd), tir.bind(even - odd)]
        return [*found, _sum(whole, taps[1::2])]

    def _interpolated(self, values: Sequence[Expr]) -> list[Expr]:
        """edge + 2 values of a product -> the edge outputs, with sums and differences of each pair shared."""
        points = POINTS[self.edge]
        pairs = [(values[1 + 2 * i], values[2 + 2 * i]) for i in range(len(points))]
        halves = [tir.bind(plus + minus) for plus, minus in pairs], [tir.bind(plus - minus) for plus, minus in pairs]
        found = []
        for power in range(self.edge):
            factors = [round(p**power, 9) if power % 2 == 0 else p**power for p in points]
            extra = ([values[0]] if power == 0 else []) + ([values[-1]] if power == self.edge - 1 else [])
            found.append(_sum([*([1.0] * len(extra)), *factors], [*extra, *halves[power % 2]]))
        return found


def _both_ways(
    load: Callable[[int, int], Expr],
    store: Callable[[int, int, Expr], None],
    taps: int,
    transform: Callable[[Sequence[Expr]], list[Expr]],
) -> None:
    """A transform of a tile's columns and then of its rows."""
    columns = [transform([tir.bind(load(i, j)) for i in range(taps)]) for j in range(taps)]
    for i in range(len(columns[0])):
        for j, value in enumerate(transform([column[i] for column in columns])):
            store(i, j, value)


def _sum(factors: Sequence[float], values: Sequence[Expr]) -> Expr:
    """The sum of factor * value, those of factor 1 first, so that each of the others can be one multiply-add."""
    terms = sorted(zip(factors, values, strict=False), key=lambda term: abs(term[0] - 1))
    lanes = int(terms[0][1].ty.dtype.lanes)
    total = None
    for factor, value in terms:
        size = value if abs(factor) == 1 else value * _like(abs(factor), lanes)
        if total is None:
            total = size if factor > 0 else _like(0.0, lanes) - size
        else:
            total = total + size if factor > 0 else total - size
    return tir.bind(total)


def _copy(whole: Expr, out: Expr) -> None:
    """The output without what was rounded up: elementwise, and scheduled with what follows."""
    shape = [int(size) for size in out.ty.shape]
    with tir.grid(*map(_int, shape)) as loops, tir.sblock("output"):
        axes = [_axis(size, loop) for size, loop in zip(shape, loops, strict=True)]
        tir.buffer_store(out, whole[tuple(axes)], axes)


def _parameter(name: str, shape: tuple[int, ...]) -> Expr:
    return tir.arg(name, tir.buffer([_int(size) for size in shape], "float32", layout=None))


def _buffer(shape: tuple[int, ...]) -> Expr:
    return tir.sblock_alloc_buffer([_int(size) for size in shape], "float32", layout=None)


def _axis(extent: int, value: Expr) -> Expr:
    return tir.axis.spatial(_int(extent), value)


def _int(value: int) -> Expr:
    return const(value, "int64")


def _like(value: float, lanes: int) -> Expr:
    return Broadcast(const(value, "float32"), lanes)
