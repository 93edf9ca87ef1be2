"""Kernels: where each one's schedule comes from, and its share of a run where that was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tvmflow.manifest import Finding, Kernel, Manifest, Noun


class KernelUse(Noun):
    """One kernel and the share of a run's time that its calls take together; None where that was not measured."""

    kernel: Kernel
    share: float | None


def kernels(manifest: Manifest, seconds: Mapping[str, float] | None) -> tuple[KernelUse, ...]:
    """The kernels, the costliest first where `seconds` of one run are given by name, else in the manifest's order."""
    if seconds is None:
        return tuple(KernelUse(kernel=kernel, share=None) for kernel in manifest.kernels)
    total = sum(seconds.get(kernel.name, 0.0) for kernel in manifest.kernels)
    uses = [KernelUse(kernel=k, share=seconds.get(k.name, 0.0) / total if total else 0.0) for k in manifest.kernels]
    return tuple(sorted(uses, key=lambda use: -(use.share or 0.0)))


def findings(uses: tuple[KernelUse, ...]) -> Iterator[Finding]:
    """A fault for each kernel that is called and whose loops were compiled as they were written."""
    for use in uses:
        kernel = use.kernel
        if kernel.origin == "unscheduled" and kernel.calls:
            computes = " + ".join(kernel.operators) or "an operator that is not recorded"
            yield Finding(
                check="kernels",
                level="fault",
                place=kernel.name,
                what=f"no schedule: {computes} runs on one thread, without vectors, in {kernel.calls} "
                f"place{'' if kernel.calls == 1 else 's'}",
                action="`tvmflow tune` may find a schedule; or give the operator a kernel of your own in [kernels]",
            )
