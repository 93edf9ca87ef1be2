"""How many threads of a kernel a multiprocessor can hold at once, and what keeps it from more."""

from __future__ import annotations

import re
from dataclasses import dataclass

WARP = 32
REGISTERS = 64 << 10  # of 32 bits, on a multiprocessor of every architecture below
REGISTER_UNIT = 256  # a warp gets a multiple of this
PARTITIONS = 4  # of a multiprocessor, each with its own registers and warps
FULL_BLOCK = 1024  # threads


@dataclass(frozen=True)
class Limits:
    """What one multiprocessor offers; bytes of shared memory are all that kernels may have of it."""

    threads: int
    blocks: int
    shared_bytes: int
    shared_unit_bytes: int = 128
    reserved_bytes: int = 1024
    """What the system takes of each block's shared memory."""
    counts_reserved: bool = False
    """Whether ptxas counts that into a kernel's static shared memory, where the kernel has any."""


# NVIDIA, CUDA C++ Programming Guide 13, "Compute Capabilities", table "Technical Specifications".
LIMITS = {
    "sm_75": Limits(1024, 16, 64 << 10, shared_unit_bytes=256, reserved_bytes=0),
    "sm_80": Limits(2048, 32, 164 << 10),
    "sm_86": Limits(1536, 16, 100 << 10),
    "sm_87": Limits(1536, 16, 164 << 10),
    "sm_89": Limits(1536, 24, 100 << 10),
    "sm_90": Limits(2048, 32, 228 << 10, counts_reserved=True),
    "sm_100": Limits(2048, 32, 228 << 10, counts_reserved=True),
    "sm_103": Limits(2048, 32, 228 << 10, counts_reserved=True),
    "sm_110": Limits(1536, 24, 228 << 10, counts_reserved=True),
    "sm_120": Limits(1536, 24, 100 << 10, counts_reserved=True),
    "sm_121": Limits(1536, 24, 100 << 10, counts_reserved=True),
}


@dataclass(frozen=True)
class Use:
    """What one block takes: threads, registers of a thread, bytes of static and dynamic shared memory together."""

    threads: int
    registers: int
    shared_bytes: int


@dataclass(frozen=True)
class Occupancy:
    """`share` of a multiprocessor's threads that `blocks` resident blocks are; `limiter` is what admits no more."""

    blocks: int
    share: float
    limiter: str


def limits_of(arch: str) -> Limits | None:
    """The limits of an architecture such as "sm_90a"; None where they are not known here."""
    return LIMITS.get(re.sub(r"[af]$", "", arch))


def occupancy(use: Use, limits: Limits) -> Occupancy:
    """The theoretical occupancy, as NVIDIA's occupancy calculator has it."""
    admitted = admitted_blocks(use, limits)
    limiter = min(admitted, key=admitted.__getitem__)
    blocks = admitted[limiter]
    return Occupancy(blocks, blocks * _warps(use) * WARP / limits.threads, limiter)


def admitted_blocks(use: Use, limits: Limits) -> dict[str, int]:
    """How many blocks each resource has room for."""
    per_warp = _up(use.registers * WARP, REGISTER_UNIT)
    warps_with_registers = REGISTERS // PARTITIONS // per_warp * PARTITIONS if per_warp else limits.threads // WARP
    fits = per_warp * _up(_warps(use), PARTITIONS) <= REGISTERS and use.threads <= FULL_BLOCK
    shared = _up(use.shared_bytes + limits.reserved_bytes, limits.shared_unit_bytes)
    return {
        "threads": limits.threads // WARP // _warps(use),
        "registers": warps_with_registers // _warps(use) if fits else 0,
        "shared memory": limits.shared_bytes // shared if shared else limits.blocks,
        "blocks": limits.blocks,
    }


def _warps(use: Use) -> int:
    return -(-use.threads // WARP)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
