"""TF32 in MetaSchedule's search: its rule for tensor cores with our intrinsics, and how its candidates are finished."""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm.ir.utils import derived_object
from tvm.s_tir import SBlock, Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.schedule_rule import ReuseType
from tvm.s_tir.schedule import ScheduleError

from tvmflow.kernels.tf32 import intrinsics
from tvmflow.kernels.tf32.schedule_tf32 import Product

PLACE = "meta_schedule.auto_tensorize"  # where MetaSchedule's rules say which intrinsic a block shall become


def rules(product: Product) -> list[ms.ScheduleRule]:
    """MetaSchedule's rules for a GPU, with the one that puts `product` on tensor cores before its tiling."""
    first, *others = ms.ScheduleRule.create("cuda")
    tensor_cores = ms.schedule_rule.MultiLevelTilingTensorCore(
        [intrinsics.group(product.a_by_k, product.b_by_k)],
        "SSSRRSRS",
        ["blockIdx.y", "blockIdx.x", "threadIdx.y"],
        max_innermost_factor=4,
        vector_load_lens=[1, 2, 4],
        reuse_read=ReuseType("must", [4], intrinsics.SHARED),
        reuse_write=ReuseType("must", [2], intrinsics.SHARED),
    )
    return [first, tensor_cores, *others]


def postprocs() -> list[ms.Postproc]:
    """MetaSchedule's for a GPU, with ours before the last, which checks the code against the GPU's limits."""
    *others, verify = ms.Postproc.create("cuda")
    return [*others, Tensorise(), verify]


@derived_object
class Tensorise(ms.postproc.PyPostproc):  # type: ignore[misc]  # TVM's modules have no types
    """Puts fragments into registers, operands' tiles where banks do not conflict, and our intrinsics in their places.

    MetaSchedule's own, RewriteTensorize, knows fragments of CUDA's wmma interface alone, which has no code for TF32 in
    TVM, and keeps a candidate of which only parts have become intrinsics. Here that is no candidate.
    """

    def _initialize_with_tune_context(self, context: ms.TuneContext) -> None:
        """It needs nothing to know."""

    def apply(self, schedule: Schedule) -> bool:
        try:
            places = _places(schedule)
            for block, intrinsic in places:
                if intrinsic.startswith(("tf32_load", "tf32_multiply")):
                    schedule.set_scope(block, 0, "local")
                if intrinsic.startswith("tf32_load"):
                    align = intrinsics.alignment(by_k=intrinsic == "tf32_load_8x16")
                    schedule.storage_align(schedule.get_producers(block)[0], 0, -2, *align)
            for block, intrinsic in places:
                schedule.unannotate(block, PLACE)
                schedule.tensorize(block, intrinsic)
        except ScheduleError:
            return False
        return True

    def clone(self) -> ms.Postproc:
        return Tensorise()


def _places(schedule: Schedule) -> list[tuple[Any, str]]:
    """The blocks that shall become intrinsics, and which."""
    found: list[tuple[Any, str]] = []

    def visit(block: SBlock) -> None:
        if (name := block.annotations.get(PLACE)) is not None:
            found.append((schedule.get_sblock(block.name_hint), str(name)))

    tvm_ffi.structural_walk(schedule.mod["main"].body, (SBlock, visit))
    return found
