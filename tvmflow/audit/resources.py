"""What each CUDA kernel takes of a multiprocessor, and how many of its threads can therefore be resident."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tvmflow.audit import occupancy
from tvmflow.audit.occupancy import Limits, Use
from tvmflow.audit.sass import KernelCode
from tvmflow.frozen import evolve
from tvmflow.manifest import Finding, Manifest, Noun

LOW = 0.5  # below this share of resident threads it is worth saying what takes the room
COSTLY = {
    "shared memory": "double buffering or larger tiles cost occupancy: with half of the {shared_kib:.1f} KiB of shared "
    "memory {twice} blocks would fit instead of {blocks}",
    "registers": "fusion or large register tiles cost occupancy: with half of the {registers} registers {twice} blocks "
    "would fit instead of {blocks}",
}


class Resources(Noun):
    """One CUDA kernel. Threads, dynamic shared memory and what follows are None where a launch decides on them.

    `local_loads` and `local_stores` count instructions: spilled registers, and arrays indexed at run time.
    `occupancy` is the theoretical share of a multiprocessor's threads, `limiter` what admits no more `blocks`.
    """

    kernel: str
    registers: int
    static_shared_bytes: int
    dynamic_shared_bytes: int | None
    stack_bytes: int
    local_bytes: int
    local_loads: int
    local_stores: int
    threads: int | None
    blocks: int | None = None
    occupancy: float | None = None
    limiter: str | None = None


def resources(codes: Sequence[KernelCode], manifest: Manifest) -> tuple[Resources, ...]:
    """The resources of each kernel on the library's architecture."""
    limits = occupancy.limits_of(manifest.target.arch or "")
    return tuple(_of(code, manifest, limits) for code in codes)


def findings(found: Sequence[Resources], manifest: Manifest) -> Iterator[Finding]:
    """A warning for each kernel of low occupancy that half as much of one resource would double, or that spills."""
    limits = occupancy.limits_of(manifest.target.arch or "")
    for kernel in found:
        if kernel.local_stores:
            yield _warning(
                kernel,
                f"{kernel.local_stores} stores to local memory and {kernel.local_loads} loads: "
                f"its {kernel.registers} registers did not suffice, or it indexes an array of its own",
            )
        if limits is not None and (text := _costly(kernel, limits)):
            yield _warning(kernel, f"{kernel.occupancy:.0%} occupancy on {manifest.target.arch}: {text}")


def _of(code: KernelCode, manifest: Manifest, limits: Limits | None) -> Resources:
    launch = manifest.evidence.launches.get(code.name) if manifest.evidence else None
    threads = launch.threads if launch else code.max_threads
    dynamic = launch.dynamic_shared_bytes if launch else None
    static = code.static_shared_bytes
    if static and limits is not None and limits.counts_reserved:
        static -= limits.reserved_bytes
    loads, stores = code.local_accesses
    plain = Resources(
        kernel=code.name,
        registers=code.registers,
        static_shared_bytes=static,
        dynamic_shared_bytes=dynamic,
        stack_bytes=code.stack_bytes,
        local_bytes=code.local_bytes,
        local_loads=loads,
        local_stores=stores,
        threads=threads,
    )
    use = _use(plain)
    if use is None or limits is None:
        return plain
    result = occupancy.occupancy(use, limits)
    return evolve(plain, blocks=result.blocks, occupancy=result.share, limiter=result.limiter)


def _use(kernel: Resources) -> Use | None:
    if kernel.threads is None:
        return None
    return Use(kernel.threads, kernel.registers, kernel.static_shared_bytes + (kernel.dynamic_shared_bytes or 0))


def _costly(kernel: Resources, limits: Limits) -> str:
    """What costs occupancy, where it is low and half as much of that would admit twice the blocks."""
    use = _use(kernel)
    if use is None or kernel.occupancy is None or kernel.occupancy >= LOW or kernel.limiter not in COSTLY:
        return ""
    half = {
        "shared memory": replace(use, shared_bytes=use.shared_bytes // 2),
        "registers": replace(use, registers=use.registers // 2),
    }[kernel.limiter]
    twice = occupancy.occupancy(half, limits).blocks
    if twice < 2 * (kernel.blocks or 0):
        return ""
    return COSTLY[kernel.limiter].format(
        shared_kib=use.shared_bytes / 1024, registers=use.registers, twice=twice, blocks=kernel.blocks
    )


def _warning(kernel: Resources, what: str) -> Finding:
    return Finding(
        check="resources",
        level="warning",
        place=kernel.kernel,
        what=what,
        action="tune the kernel: a measured schedule settles whether it pays",
    )
