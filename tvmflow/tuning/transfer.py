"""Where the search of a new task may start: the schedules of tuned kernels that differ from it in sizes alone.

A trace names blocks, loops and the factors that were sampled for them. On a kernel of the same blocks it applies as it
is, but for the factors: the inner ones, which fill registers and caches, are kept as far as they divide the new extent,
and the outermost takes what is left.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, TypeAlias

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import Instruction

from tvmflow.database import Record
from tvmflow.database.grammar import Where
from tvmflow.kernels.schedules import repacking
from tvmflow.kernels.schedules.axes import blocks_of
from tvmflow.replay import REPLAY_ERRORS, ReplayError, load_workload, replay

NEAREST = 3

Structure: TypeAlias = tuple[tuple[str, tuple[int, ...], tuple[str, ...]], ...]
Relative: TypeAlias = tuple[tuple[int, ...], tvm.IRModule, Record]


class Experience:
    """The tuned kernels of a database, by the structure of their blocks.

    They are read when the first task without a record asks: that takes about 10 ms each.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        self._records = tuple(records)

    @functools.cached_property
    def _known(self) -> dict[Structure, list[Relative]]:
        known: dict[Structure, list[Relative]] = defaultdict(list)
        for record in self._records:
            try:
                mod = load_workload(record)
                structure, extents = _shape_of(mod)
            except REPLAY_ERRORS:  # `db verify` says what is wrong with it
                continue
            known[structure].append((extents, mod, record))
        return known

    def starts(self, mod: tvm.IRModule, context: ms.TuneContext) -> list[Schedule]:
        """Schedules of `mod` made from those of its nearest relatives, the nearest first; none where it has none.

        Near is what needs the least stretching: the sum over all axes of the logarithms of their sizes' ratios.
        """
        structure, extents = _shape_of(mod)

        def stretch(relative: Relative) -> tuple[float, str]:
            return sum(abs(math.log(a / b)) for a, b in zip(extents, relative[0], strict=True)), relative[2].key

        nearest = sorted(self._known.get(structure, ()), key=stretch)[:NEAREST]
        made = (_carried(mod, other, record, context) for _, other, record in nearest)
        return [schedule for schedule in made if schedule is not None]


def _carried(mod: tvm.IRModule, other: tvm.IRModule, record: Record, context: ms.TuneContext) -> Schedule | None:
    """The schedule of `other` on `mod`; None where it does not apply, or holds no decision that could be carried."""
    try:
        tuned = replay(other, record.trace, Where.of(record.parts))
    except ReplayError:  # `db verify` says why
        return None
    if not tuned.trace.decisions:
        return None
    schedule = Schedule(mod, debug_mask="none")

    def decide(instruction: Instruction, inputs: list[Any], _attrs: list[Any], decision: Any) -> Any:
        if decision is None or instruction.kind.name != "SamplePerfectTile":
            return decision
        return fitted(int(schedule.get(inputs[0]).extent), [int(factor) for factor in decision])

    try:
        tuned.trace.apply_to_schedule(schedule, remove_postproc=True, decision_provider=decide)
        if not all(postproc.apply(schedule) for postproc in context.space_generator.postprocs):
            return None
    except REPLAY_ERRORS:
        return None
    return schedule if repacking.is_whole(schedule.mod["main"]) else None


def fitted(extent: int, factors: list[int]) -> list[int]:
    """Factors of `extent` near the given ones: from the innermost outwards the divisor nearest to each."""
    left, found = extent, []
    for factor in reversed(factors[1:]):
        divisors = [size for size in range(1, left + 1) if left % size == 0]
        found.append(min(divisors, key=lambda size: (abs(math.log(size / factor)), -size)))
        left //= found[-1]
    return [left, *reversed(found)]


def _shape_of(mod: tvm.IRModule) -> tuple[Structure, tuple[int, ...]]:
    """What must be equal for a trace to apply, and the extents of all blocks' axes."""
    schedule = Schedule(mod, debug_mask="none")
    blocks = [schedule.get(block) for block in blocks_of(schedule)]
    kinds = tuple(
        (
            str(block.name_hint),
            tuple(int(axis.iter_type) for axis in block.iter_vars),
            tuple(str(region.source.ty.dtype) for region in block.writes),
        )
        for block in blocks
    )
    return kinds, tuple(int(axis.dom.extent) for block in blocks for axis in block.iter_vars)
