"""The axes of a kernel's blocks: which one makes vectors, which ones share what is loaded, how wide vectors get."""

from __future__ import annotations

import math
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm.s_tir import Schedule
from tvm.tirx import IntImm, IterVar, Var

LANES = 16  # elements of a vector: one AVX-512 or two AVX2 registers of float32


@dataclass(frozen=True)
class Registers:
    """The vector registers of a CPU: how many float32 lanes one has, and how many there are."""

    lanes: int
    count: int

    @staticmethod
    def of(target: tvm.target.Target) -> Registers:
        """By the instruction set extensions of an `llvm` target."""
        features = {str(name) for name in tvm.target.codegen.llvm_get_cpu_features(target)}
        if "avx512f" in features:
            return Registers(16, 32)
        if "avx" in features:
            return Registers(8, 16)
        return Registers(4, 32 if "neon" in features else 16)

    def width(self, extent: int) -> int:
        """The lanes of a vector along an axis: a whole register or a power of two of it, else the most that divide."""
        whole = math.gcd(extent, self.lanes)
        return whole if whole >= 4 else divisor(extent, self.lanes)


def blocks_of(schedule: Schedule) -> list[tvm.s_tir.schedule.SBlockRV]:
    return list(schedule.get_child_blocks(schedule.get_sblock("root")))


def axis_kinds(schedule: Schedule, block: tvm.s_tir.schedule.SBlockRV) -> set[int]:
    """The kinds of a block's axes; none for a scalar, or for loops that are no plain iteration over the axes."""
    axes = schedule.get(block).iter_vars
    return {axis.iter_type for axis in axes} if len(schedule.get_loops(block)) == len(axes) else set()


def lone_reduction(schedule: Schedule, blocks: list[tvm.s_tir.schedule.SBlockRV]) -> int | None:
    """The place of the only block that reduces, all others being elementwise; None for any other function."""
    kinds = [axis_kinds(schedule, block) for block in blocks]
    reducing = [place for place, kind in enumerate(kinds) if kind == {IterVar.DataPar, IterVar.CommReduce}]
    plain = [kind for kind in kinds if kind == {IterVar.DataPar}]
    return reducing[0] if len(reducing) == 1 and len(plain) == len(blocks) - 1 else None


def axes_of(schedule: Schedule, block: tvm.s_tir.schedule.SBlockRV) -> list[Axis]:
    """The axes of a block whose loops are a plain iteration over them, outermost first."""
    pairs = zip(schedule.get_loops(block), schedule.get(block).iter_vars, strict=True)
    return [Axis.of(schedule, loop, iter_var) for loop, iter_var in pairs]


@dataclass(frozen=True)
class Axis:
    """One loop of a reduction: its block variable, its extent (1 where symbolic), and whether it is reduced."""

    loop: tvm.s_tir.schedule.LoopRV
    var: Var
    extent: int
    is_reduction: bool

    @staticmethod
    def of(schedule: Schedule, loop: tvm.s_tir.schedule.LoopRV, iter_var: IterVar) -> Axis:
        return Axis(loop, iter_var.var, extent_of(schedule, loop), iter_var.iter_type == IterVar.CommReduce)


def vector_axis(schedule: Schedule, block: tvm.s_tir.schedule.SBlockRV, spatial: list[Axis]) -> Axis | None:
    """The axis whose neighbours lie next to each other in the output and in all that is read; None without one."""
    statement = schedule.get(block)
    for axis in reversed(spatial):
        if width(axis.extent) < 4:
            continue
        written_last = _position(statement.writes[0], axis.var) == "last"
        read_well = all(_position(region, axis.var) != "earlier" for region in statement.reads)
        if written_last and read_well:
            return axis
    return None


def is_outer_product(schedule: Schedule, block: tvm.s_tir.schedule.SBlockRV, row: Axis, vector: Axis) -> bool:
    """Whether rows and vectors are read from different buffers, so that each load serves a whole row or column."""
    reads = schedule.get(block).reads
    return not any(_position(r, row.var) != "nowhere" and _position(r, vector.var) != "nowhere" for r in reads)


def is_shared(schedule: Schedule, block: tvm.s_tir.schedule.SBlockRV, axis: Axis, vector: Axis) -> bool:
    """Whether something is read along an axis that is the same for all elements of a vector, as in a product."""
    reads = schedule.get(block).reads
    return any(_position(r, axis.var) != "nowhere" and _position(r, vector.var) == "nowhere" for r in reads)


def reads_last(schedule: Schedule, block: tvm.s_tir.schedule.SBlockRV, axis: Axis) -> bool:
    """Whether neighbours along an axis lie next to each other in something that is read."""
    return any(_position(region, axis.var) == "last" for region in schedule.get(block).reads)


def reads_along(schedule: Schedule, block: tvm.s_tir.schedule.SBlockRV, axis: Axis, beside: list[Axis]) -> bool:
    """Whether an axis runs along the memory of everything that has it, with none but those in `beside`."""
    regions = [r for r in schedule.get(block).reads if _position(r, axis.var) != "nowhere"]
    if not regions or any(_position(region, axis.var) != "last" for region in regions):
        return False
    own = [other.var for other in beside]
    return all(
        any(var.same_as(other) for other in own)
        for region in regions
        for var in tvm.tirx.analysis.undefined_vars(_wide(region)[-1].min)
    )


def _position(region: tvm.s_tir.BufferRegion, var: Var) -> str:
    """Where a buffer's indices use a variable: in the "last" axis, in an "earlier" one, or "nowhere".

    Axes of size 1 do not count: 1x64x512x1 is as good as 64x512.
    """
    wide = _wide(region)
    holds = [any(v.same_as(var) for v in tvm.tirx.analysis.undefined_vars(index.min)) for index in wide]
    if any(holds[:-1]):
        return "earlier"
    return "last" if holds and holds[-1] else "nowhere"


def _wide(region: tvm.s_tir.BufferRegion) -> list[tvm.ir.Range]:
    """What a region holds of the buffer's axes that are no single element."""
    return [
        index
        for index, size in zip(region.region, region.source.ty.shape, strict=True)
        if not (isinstance(size, IntImm) and int(size) == 1)
    ]


def extent_of(schedule: Schedule, loop: tvm.s_tir.schedule.LoopRV) -> int:
    extent = schedule.get(loop).extent
    return int(extent) if isinstance(extent, IntImm) else 1


def is_static(schedule: Schedule, loops: list[tvm.s_tir.schedule.LoopRV]) -> bool:
    return all(isinstance(schedule.get(loop).extent, IntImm) for loop in loops)


def width(extent: int) -> int:
    """The vector width for an axis: 4, 2 or 1 whole registers where they divide it, else the most of one register.

    Three registers as one vector cost LLVM a factor of ten: it knows powers of two.
    """
    whole = next((LANES * n for n in (4, 2, 1) if extent % (LANES * n) == 0), math.gcd(extent, LANES))
    return whole if whole >= 4 else divisor(extent, LANES)


def divisor(extent: int, limit: int) -> int:
    return max(d for d in range(1, limit + 1) if extent % d == 0)


def is_copy(schedule: Schedule, block: tvm.s_tir.schedule.SBlockRV) -> bool:
    """Whether a block only moves what it reads."""
    return isinstance(getattr(schedule.get(block).body, "value", None), tvm.ir.TensorLoad)


def is_cheap(schedule: Schedule, block: tvm.s_tir.schedule.SBlockRV) -> bool:
    """Whether a block computes nothing that should not be done twice: no function call but a condition's choice."""
    return calls_of(schedule, block) <= {"prim.if_then_else"}


def calls_of(schedule: Schedule, block: tvm.s_tir.schedule.SBlockRV) -> set[str]:
    """The names of the functions that a block calls; a choice by a condition is one."""
    calls: set[str] = set()
    tvm_ffi.structural_walk(schedule.get(block).body, (tvm.ir.Call, lambda call: calls.add(str(call.op.name))))
    return calls
