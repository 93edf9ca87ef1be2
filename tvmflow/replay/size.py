"""How large a schedule makes a kernel: its code once loops are unrolled, vectors, buffers, and how often it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tvm.s_tir import SBlock, SBlockRealize
from tvm.tirx import For, ForKind, IfThenElse, IntImm, PrimFunc, SeqStmt, Var, While

from tvmflow.database.grammar.annotations import MAX_LANES

MAX_CODE = 1024  # statements when all is unrolled that a schedule unrolls; real ones: 481
MAX_STATEMENTS = 1000  # real ones: 22
REPEATS, MORE_RUNS = 64, 1 << 20  # times as many runs of statements as before, and some more; real ones: 1.7 times
GROWTH, MORE_ELEMENTS = 64, 1 << 24  # times as many elements in buffers, and some more; real ones: 15 times


class SizeError(ValueError):
    """Which bound a scheduled kernel breaks."""


@dataclass
class Size:
    """What is counted. Loops of unknown extent count once, as what they are in front of a schedule."""

    statements: int = 0
    code: int = 0
    runs: int = 0
    lanes: int = 1
    elements: int = 0


@dataclass(frozen=True)
class Around:
    """The loops around a statement: how often it runs, how often it is written down, and in vectors how wide."""

    runs: int = 1
    copies: int = 1
    lanes: int = 1


def check(before: PrimFunc, after: PrimFunc) -> None:
    """Raises SizeError where a schedule makes a kernel larger than schedules do."""
    was, now = of(before), of(after)
    for what, found, most in (
        ("statements", now.statements, max(MAX_STATEMENTS, 8 * was.statements)),
        ("statements, unrolled", now.code, max(MAX_CODE, 2 * was.code)),
        ("lanes in a vector", now.lanes, max(MAX_LANES, was.lanes)),
        ("runs of statements", now.runs, REPEATS * was.runs + MORE_RUNS),
        ("elements in buffers", now.elements, GROWTH * was.elements + MORE_ELEMENTS),
    ):
        if found > most:
            raise SizeError(f"it has {found} {what}, more than {most}")


def of(function: PrimFunc) -> Size:
    """The size of a kernel."""
    size = Size(elements=sum(map(_elements, function.params)))
    _count(function.body, Around(), size)
    return size


def _count(statement: Any, around: Around, size: Size) -> None:
    if isinstance(statement, For):
        _count(statement.body, _inside(statement, around), size)
    elif isinstance(statement, SeqStmt):
        for part in statement.seq:
            _count(part, around, size)
    elif isinstance(statement, IfThenElse):
        _count(statement.then_case, around, size)
        if statement.else_case is not None:
            _count(statement.else_case, around, size)
    elif isinstance(statement, SBlockRealize):
        _count_block(statement.block, around, size)
    elif isinstance(statement, While):
        _count(statement.body, around, size)
    else:
        size.statements += 1
        size.code += around.copies
        size.runs += around.runs
        size.lanes = max(size.lanes, around.lanes)


def _count_block(block: SBlock, around: Around, size: Size) -> None:
    size.elements += sum(map(_elements, block.alloc_buffers))
    if block.init is not None:
        _count(block.init, around, size)
    _count(block.body, around, size)


def _inside(loop: For, around: Around) -> Around:
    extent = int(loop.extent) if isinstance(loop.extent, IntImm) else 1
    unrolled, vector = loop.kind == ForKind.UNROLLED, loop.kind == ForKind.VECTORIZED
    return Around(
        around.runs * extent, around.copies * (extent if unrolled else 1), around.lanes * (extent if vector else 1)
    )


def _elements(buffer: Var) -> int:
    return math.prod(int(extent) if isinstance(extent, IntImm) else 1 for extent in getattr(buffer.ty, "shape", ()))
