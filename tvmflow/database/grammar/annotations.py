"""What a schedule may note on blocks and loops, in a trace and in the kernel that it makes: keys, values, where."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tvmflow.database.keys import KeyParts

MAX_UNROLL = 1024  # MetaSchedule's highest pragma_auto_unroll_max_step, on GPUs; on CPUs we use 64
MAX_LANES = 64  # of a vector: MetaSchedule's own limit
MAX_JOBS = 1 << 16  # MetaSchedule's 16 parallel jobs per core, on 4,096 cores
MAX_THREADS = 1024  # in a block of a GPU
MAX_STAGES = 8  # of a software pipeline

Check = Callable[[Any], bool]


@dataclass(frozen=True)
class Where:
    """What decides which notes and names have a place: the target's kind, its CPU, and whether TF32 is allowed."""

    kind: str
    machine: str
    tf32: bool

    @classmethod
    def of(cls, parts: KeyParts) -> Where:
        """The place of a record, by the parts of its key."""
        return cls(str(parts.target["kind"]), str(parts.target.get("machine")), parts.numerics.get("tf32", False))

    @property
    def intrinsics(self) -> frozenset[str]:
        """The tensor intrinsics that MetaSchedule's and our rules put in for such a target."""
        if self.kind == "cuda":
            return TF32 if self.tf32 else frozenset()
        return CPU_INTRINSICS.get(self.machine, frozenset())

    @property
    def scopes(self) -> frozenset[str]:
        """Where a schedule may keep copies of data."""
        if self.kind != "cuda":
            return frozenset({"global"})
        return GPU_SCOPES | FRAGMENTS if self.tf32 else GPU_SCOPES


TF32 = frozenset(
    {
        "tf32_clear",
        "tf32_store",
        "tf32_load_8x16",
        "tf32_load_16x8",
        *(f"tf32_multiply{a}{b}" for a in ("", "_ka") for b in ("", "_kb")),
    }
)
CPU_INTRINSICS = {
    "x86_64": frozenset({"dot_16x4_vnni", "dot_16x4_avx512"}),
    "aarch64": frozenset(
        {"dot_4x4_i8i8s32_neon", "dot_4x4_i8i8s32_sdot", "dot_4x4_u8u8u32_udot", "dot_4x4_u8u8i32_hdot"}
    ),
}
GPU_SCOPES = frozenset({"global", "shared", "shared.dyn", "local"})
FRAGMENTS = frozenset({"wmma.matrix_a", "wmma.matrix_b", "wmma.accumulator"})  # on the way to TF32's own registers
THREADS = frozenset(f"{name}.{axis}" for name in ("blockIdx", "threadIdx", "vthread") for axis in "xyz")


def number(lowest: int, highest: int) -> Check:
    """Says whether a value is a whole number from `lowest` to `highest`; truth values are 0 and 1."""
    return lambda value: isinstance(value, int) and lowest <= value <= highest


def numbers(lowest: int, highest: int, most: int = 64) -> Check:
    """Says whether a value is a list of at most so many such numbers."""
    check = number(lowest, highest)
    return lambda value: isinstance(value, list) and len(value) <= most and all(map(check, value))


def _structure(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[SR]{1,16}", value) is not None


# Notes that stay in the kernel and steer how it is lowered.
LOOPS: Mapping[str, Check] = {
    "pragma_auto_unroll_max_step": number(0, MAX_UNROLL),
    "pragma_unroll_explicit": number(0, 1),
    "pragma_loop_partition_hint": number(0, 1),
}
GPU_LOOPS: Mapping[str, Check] = {
    "software_pipeline_stage": numbers(0, MAX_STAGES),
    "software_pipeline_order": numbers(0, 63),
    "software_pipeline_async_stages": numbers(0, MAX_STAGES),
}
BLOCKS: Mapping[str, Check] = {
    "meta_schedule.layout_rewrite_preproc": number(1, 1),
    "meta_schedule.tiling_structure": _structure,
    "meta_schedule.parallel": number(0, MAX_JOBS),
    "meta_schedule.vectorize": number(0, MAX_LANES),
    "meta_schedule.unroll_explicit": number(0, MAX_UNROLL),
    "meta_schedule.unroll_implicit": number(0, MAX_UNROLL),
    "meta_schedule.random_compute_producer": number(0, 1),
}
GPU_BLOCKS: Mapping[str, Check] = {
    "meta_schedule.thread_extent_low_inclusive": number(0, MAX_THREADS),
    "meta_schedule.thread_extent_high_inclusive": number(0, MAX_THREADS),
    "meta_schedule.cooperative_fetch": number(0, MAX_LANES),
    "tirx.manifest_shared_memory_local_stage": number(0, 1),
    "double_buffer_scope": number(0, 63),
    "warp_execution": number(0, 1),
}
INTRINSICS = ("meta_schedule.auto_tensorize", "meta_schedule.auto_tensorize_init")
REMOVABLE = frozenset({"schedule_rule"})  # of the workload: what MetaSchedule takes off before it schedules a block


def of_loops(where: Where) -> Mapping[str, Check]:
    """The notes that loops may carry."""
    return {**LOOPS, **GPU_LOOPS} if where.kind == "cuda" else LOOPS


def of_blocks(where: Where) -> Mapping[str, Check]:
    """The notes that blocks may carry."""
    names = where.intrinsics | {""}  # MetaSchedule writes "" where a block shall not become an intrinsic
    own = dict.fromkeys(INTRINSICS, lambda value: isinstance(value, str) and value in names)
    return {**BLOCKS, **own, **(GPU_BLOCKS if where.kind == "cuda" else {})}
