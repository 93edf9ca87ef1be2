"""Whether the layouts that a trace asks for keep every element where its readers look for it.

An index map may state its own inverse, and TVM writes a buffer by one and reads it by the other. MetaSchedule's maps
state theirs, because TVM cannot find the inverse of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm.ir import Range
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import Instruction
from tvm.sym import Analyzer
from tvm.tirx import IndexMap, IntImm, Var


class LayoutError(ValueError):
    """Which layout does not keep its elements."""


def check(schedule: Schedule, mod: tvm.IRModule) -> None:
    """Raises LayoutError where an index map in the schedule's trace states an inverse that is none.

    The trace is applied to `mod` once more, to see each buffer as it is when its layout changes.
    """
    if not any(_states_inverse(instruction) for instruction in schedule.trace.insts):
        return
    again = Schedule(mod, debug_mask="none")

    def look(instruction: Instruction, inputs: list[Any], attributes: list[Any], decision: Any) -> Any:
        if _states_inverse(instruction):
            block = again.get(inputs[0])
            region = (block.writes if int(attributes[1]) else block.reads)[int(attributes[0])]
            _check_inverse(inputs[1], [int(size) for size in region.source.ty.shape])
        return decision

    schedule.trace.apply_to_schedule(again, remove_postproc=False, decision_provider=look)


def _states_inverse(instruction: Instruction) -> bool:
    return instruction.kind.name == "TransformLayout" and instruction.inputs[1].inverse_index_map is not None


def _check_inverse(index_map: IndexMap, shape: Sequence[int]) -> None:
    """Raises LayoutError unless the inverse leads every element of a buffer of this shape back to its place."""
    analyzer = Analyzer()
    places = [Var(f"x{axis}", "int64") for axis in range(len(shape))]
    for place, size in zip(places, shape, strict=True):
        analyzer.bind(place, Range.from_min_extent(IntImm("int64", 0), IntImm("int64", size)))
    back = index_map.inverse_index_map.map_indices(list(index_map.map_indices(places)))
    if len(back) != len(places) or not all(map(analyzer.can_prove_equal, back, places)):
        raise LayoutError(f"an index map whose inverse does not lead back, for a buffer of {list(shape)}")
