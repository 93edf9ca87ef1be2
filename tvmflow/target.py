"""From [target] of a config to a resolved target: what "native" means here, and what a library will need to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvmflow.config import TargetSection
from tvmflow.errors import TargetError, did_you_mean
from tvmflow.host import CPU_FEATURES, cores, host_features

# What every NVIDIA GPU that CUDA 13 knows offers one thread block, without asking for more; TVM would ask the GPU.
CUDA_LIMITS = {"max_threads_per_block": 1024, "max_shared_memory_per_block": 48 << 10, "thread_warp_size": 32}
# About what tuned kernels reach: on a CPU per thread, with AVX-512. Estimates rest on it, never more than a comparison.
FLOP_PER_S = {"llvm": 100e9, "cuda": 20e12}
ARCH_ALIASES = {"amd64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True)
class Target:
    """A target with nothing left open. `features` are what the library needs from a CPU, in LLVM's names."""

    kind: str
    mcpu: str
    mattr: tuple[str, ...]
    mtriple: str
    arch: str | None
    threads: int
    features: tuple[str, ...]

    @property
    def machine(self) -> str:
        """The CPU architecture as `uname -m` calls it."""
        return machine_of(self.mtriple)


def resolve(section: TargetSection, detected_arch: str | None = None) -> Target:
    """Resolves "native" values on this machine; `detected_arch` is the GPU that is there, if any.

    Raises TargetError for a triple or CPU that LLVM does not know, and for CUDA without an architecture.
    """
    from tvm.target import codegen

    mtriple = section.mtriple or codegen.llvm_get_system_triple()
    _check_triple(mtriple)
    native = section.mcpu == "native"
    mcpu = str(codegen.llvm_get_system_cpu()) if native else section.mcpu
    _check_cpu(mcpu, mtriple)
    wanted = _llvm_features(mcpu, mtriple)
    mattr = tuple(f"-{name}" for name in wanted if name not in host_features()) if native else ()
    return Target(
        kind=section.kind,
        mcpu=mcpu,
        mattr=mattr,
        mtriple=str(mtriple),
        arch=_cuda_arch(section, detected_arch),
        threads=cores() if section.threads == "native" else section.threads,
        features=tuple(name for name in wanted if f"-{name}" not in mattr),
    )


def to_tvm(target: Target, llvm_attributes: Mapping[str, object]) -> Any:
    """The tvm.target.Target; `llvm_attributes` are the numerics of the LLVM code generator, always stated."""
    from tvm.target import Target as TvmTarget

    cpu: dict[str, object] = {
        "kind": "llvm",
        "mcpu": target.mcpu,
        "mtriple": target.mtriple,
        "num-cores": target.threads,
        **llvm_attributes,
    }
    if target.mattr:
        cpu["mattr"] = list(target.mattr)
    if target.kind == "llvm":
        return TvmTarget(cpu)
    return TvmTarget({"kind": "cuda", "arch": target.arch, "host": cpu, **CUDA_LIMITS})


def machine_of(mtriple: str) -> str:
    first = mtriple.split("-")[0].lower()
    return ARCH_ALIASES.get(first, first)


def _llvm_features(mcpu: str, mtriple: str) -> tuple[str, ...]:
    from tvm.target import Target as TvmTarget
    from tvm.target import codegen

    known = CPU_FEATURES.get(machine_of(mtriple), {})
    features = codegen.llvm_get_cpu_features(TvmTarget({"kind": "llvm", "mcpu": mcpu, "mtriple": mtriple}))
    return tuple(sorted(str(name) for name in features if str(name) in known))


def _check_triple(mtriple: str) -> None:
    from tvm.target import codegen

    known = [str(name) for name in codegen.llvm_get_targets()]
    machine = machine_of(mtriple)
    if machine not in known:
        raise TargetError(
            f"target.mtriple: LLVM has no architecture `{machine}` (from {mtriple})",
            did_you_mean(machine, known) or "e.g. aarch64-linux-gnu, x86_64-linux-gnu, riscv64-linux-gnu",
        )


def _check_cpu(mcpu: str, mtriple: str) -> None:
    from tvm.target import Target as TvmTarget
    from tvm.target import codegen

    known = [str(n) for n in codegen.llvm_get_cpu_archlist(TvmTarget({"kind": "llvm", "mtriple": mtriple}))]
    if mcpu not in known:
        raise TargetError(
            f"target.mcpu: LLVM knows no CPU `{mcpu}` for {mtriple}",
            did_you_mean(mcpu, known, most=3, cutoff=0.4) or f"it knows: {', '.join(known)}",
        )


def _cuda_arch(section: TargetSection, detected_arch: str | None) -> str | None:
    if section.kind != "cuda":
        return None
    arch = section.arch or detected_arch
    if arch is None:
        raise TargetError(
            "target.arch: no GPU is here to take the CUDA architecture from",
            'state it: --arch sm_90 on the command line, arch = "sm_90" under [target] in a config',
        )
    return arch
