"""Asks for a product's next weights while it multiplies with these.

A blocked product (blocking.py) goes through its packed weights panel by panel. The first rows of each panel wait for
memory: with weights that are not in the second-level cache, a matmul of 128 x 384 x 1536 spends a sixth of its time so.
Here every tile of rows asks for its share of the next panel, in a few small portions between steps of k: within a
step a request would keep LLVM from holding the tile in registers, and a large portion at once makes loads wait.
AMD's Zen asks by itself early enough; there requests only take time, 1 % of a model's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import sym, tirx
from tvm.ir import TensorLoad
from tvm.s_tir import SBlock, SBlockRealize
from tvm.tirx import For, ForKind, IntImm, PrimFunc

from tvmflow.dtypes import itemsize
from tvmflow.kernels.rewriting import each_kernel

SMALLEST_BYTES = 640 << 10  # of weights; fewer are in the cache already
MAX_LINES = 32  # of one portion: more would keep loads waiting
MIN_STEPS = 4  # between portions: each takes the tile out of the registers and back
LINE_BYTES = 64
READ, SECOND_LEVEL, DATA = 0, 2, 1  # what llvm.prefetch takes


@tvm.transform.module_pass(opt_level=0, name="Prefetch")
class Prefetch:
    """Puts requests for the next weights into products by packed weights."""

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return inserted(mod, tvm.target.Target.current())


def inserted(mod: tvm.IRModule, target: tvm.target.Target) -> tvm.IRModule:
    """What the pass makes of a module for an `llvm` target."""
    if str(target.attrs.get("mcpu", "")).startswith("znver"):
        return mod
    return each_kernel(mod, insert)


def insert(function: PrimFunc) -> PrimFunc:
    """The function with requests for its next weights; itself where it is no such product."""
    for loops, realize in _blocks(function.body, ()):
        panel = _panel_of(function, loops, realize)
        if panel is not None:
            step = panel.step
            changed = _with_requests(panel)
            replace = (For, lambda loop, old=step, new=changed: new if loop.same_as(old) else loop)
            return function.with_body(tvm_ffi.structural_map(function.body, replace, order="pre"))
    return function


@dataclass(frozen=True)
class _Panel:
    """Weights read by panels, which `indices[0]` counts; `step` goes through one of them in each of `tiles`."""

    weights: tvm.ir.Var
    indices: list[tvm.ir.PrimExpr]
    tiles: Sequence[For]
    step: For


def _blocks(node: object, loops: tuple[For, ...]) -> Iterator[tuple[tuple[For, ...], SBlockRealize]]:
    """The innermost blocks of a nest, each with the loops around it, outermost first."""
    if isinstance(node, For):
        yield from _blocks(node.body, (*loops, node))
    elif isinstance(node, tirx.SeqStmt):
        for part in node.seq:
            yield from _blocks(part, loops)
    elif isinstance(node, SBlockRealize):
        inner = list(_blocks(node.block.body, loops))
        yield from inner or [(loops, node)]
    elif isinstance(node, SBlock):
        yield from _blocks(node.body, loops)


def _panel_of(function: PrimFunc, loops: tuple[For, ...], realize: SBlockRealize) -> _Panel | None:
    """The panels of the large packed weights that a block reads; None without, or where they are read otherwise."""
    if not loops or loops[0].kind != ForKind.PARALLEL:
        return None
    analyzer = sym.Analyzer()
    for loop in loops:
        analyzer.bind(loop.loop_var, tvm.ir.Range.from_min_extent(loop.min, loop.extent))
    bound = dict(zip((axis.var for axis in realize.block.iter_vars), realize.iter_values, strict=True))
    loads: list[TensorLoad] = []
    tvm_ffi.structural_walk(realize.block.body, (TensorLoad, loads.append))
    for load in loads:
        if _is_large_weight(function, load.source):
            indices = [analyzer.simplify(_substituted(index, bound)) for index in load.indices]
            serial = [n for n, loop in enumerate(loops) if loop.kind == ForKind.SERIAL and _depends(indices[1:], loop)]
            by_panel = _depends(indices[:1], loops[0]) and not any(_depends(indices[:1], loop) for loop in loops[1:])
            if serial and by_panel and not _depends(indices[1:], loops[0]):
                return _Panel(load.source, indices, loops[: serial[-1]], loops[serial[-1]])
    return None


def _with_requests(panel: _Panel) -> For:
    """The loop over k in portions, each with its requests before it; the loop itself where they would be too many."""
    step, steps = panel.step, int(panel.step.extent)
    shape = [int(size) for size in panel.weights.ty.shape]
    per_line = LINE_BYTES // itemsize(str(panel.weights.ty.dtype))
    number, numbers = _tile_number(panel)
    share = -(-math.prod(shape[1:]) // per_line // numbers)
    portions = next((n for n in range(1, steps + 1) if steps % n == 0 and share <= n * MAX_LINES), steps)
    if numbers == 1 or portions * MIN_STEPS > steps:
        return step
    lines = -(-share // portions)
    count = tirx.Var(f"{step.loop_var.name}_portion", step.loop_var.ty)
    first = ((number * portions + count) * lines) * per_line
    requests = [_request(panel, first + line * per_line) for line in range(lines)]
    size = steps // portions
    inner = tirx.Var(step.loop_var.name, step.loop_var.ty)
    body = _substituted(step.body, {step.loop_var: count * size + inner})
    within = For(inner, step.min, IntImm(str(step.extent.ty.dtype), size), step.kind, body, None, step.annotations)
    return For(
        count, step.min, IntImm(str(step.extent.ty.dtype), portions), ForKind.SERIAL, tirx.SeqStmt([*requests, within])
    )


def _tile_number(panel: _Panel) -> tuple[tvm.ir.PrimExpr, int]:
    """Which of the tiles that share a panel is at work, and how many there are."""
    number, numbers = panel.tiles[0].loop_var * 0, 1
    index = panel.indices[0]
    if isinstance(index, tirx.FloorDiv):  # columns outermost: what is left of the parallel loop are blocks of rows
        number, numbers = tirx.floormod(index.a, index.b), int(index.b)
    for loop in panel.tiles[1:]:
        number, numbers = number * loop.extent + loop.loop_var, numbers * int(loop.extent)
    return number, numbers


def _request(panel: _Panel, offset: tvm.ir.PrimExpr) -> tirx.Stmt:
    """Asks for what stands `offset` elements behind the start of the next panel; beyond the last it asks in vain."""
    start = [panel.indices[0] + 1, *([0] * (len(panel.indices) - 2)), offset]
    address = tirx.address_of(tirx.BufferLoad(panel.weights, start))
    hints = [tirx.const(value, "int32") for value in (READ, SECOND_LEVEL, DATA)]
    return tirx.Evaluate(tirx.call_intrin("void", "tirx.prefetch", address, *hints))


def _is_large_weight(function: PrimFunc, buffer: tvm.ir.Var) -> bool:
    shape = getattr(buffer.ty, "shape", ())
    if len(shape) < 3 or not all(isinstance(size, IntImm) for size in shape):
        return False
    size_bytes = math.prod(int(size) for size in shape) * itemsize(str(buffer.ty.dtype))
    return size_bytes >= SMALLEST_BYTES and any(bool(buffer.same_as(param)) for param in function.params)


def _substituted(node: tvm.ir.PrimExpr, values: dict[tvm.ir.Var, tvm.ir.PrimExpr]) -> tvm.ir.PrimExpr:
    return tvm_ffi.structural_map(node, (tvm.ir.Var, lambda var: values.get(var, var)))


def _depends(indices: Sequence[tvm.ir.PrimExpr], loop: For) -> bool:
    expressions = [index for index in indices if not isinstance(index, IntImm)]
    variables = [var for index in expressions for var in tirx.analysis.undefined_vars(index)]
    return any(bool(var.same_as(loop.loop_var)) for var in variables)
