"""From [target] of a config to a resolved target: what "native" means here, and what a library will need to run."""

from __future__ import annotations

import difflib
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvmflow.config import TargetSection
from tvmflow.errors import TargetError

# Instruction set extensions that LLVM's code generator may use, and what Linux calls them in /proc/cpuinfo.
# Extensions that only hand-written code reaches (AMX, AES, ...) are left out: a library does not depend on them.
CPU_FEATURES = {
    "x86_64": {
        "sse3": "pni", "ssse3": "ssse3", "sse4.1": "sse4_1", "sse4.2": "sse4_2", "popcnt": "popcnt", "lzcnt": "abm",
        "movbe": "movbe", "avx": "avx", "avx2": "avx2", "f16c": "f16c", "fma": "fma", "bmi": "bmi1", "bmi2": "bmi2",
        "avx512f": "avx512f", "avx512bw": "avx512bw", "avx512cd": "avx512cd", "avx512dq": "avx512dq",
        "avx512vl": "avx512vl", "avx512vbmi": "avx512vbmi", "avx512vbmi2": "avx512_vbmi2",
        "avx512ifma": "avx512ifma", "avx512vnni": "avx512_vnni", "avx512bitalg": "avx512_bitalg",
        "avx512vpopcntdq": "avx512_vpopcntdq", "avx512bf16": "avx512_bf16", "avx512fp16": "avx512_fp16",
        "avxvnni": "avx_vnni", "gfni": "gfni", "fma4": "fma4", "xop": "xop", "sse4a": "sse4a", "tbm": "tbm",
        "avx512vp2intersect": "avx512_vp2intersect",
    },
    "aarch64": {
        "neon": "asimd", "lse": "atomics", "rdm": "asimdrdm", "dotprod": "asimddp", "fullfp16": "asimdhp",
        "fp16fml": "asimdfhm", "sve": "sve", "sve2": "sve2", "bf16": "bf16", "i8mm": "i8mm", "rcpc": "lrcpc",
        "jsconv": "jscvt", "complxnum": "fcma",
    },
}  # fmt: skip
# How TVM's thread pool is to behave, where the environment does not say otherwise.
THREADING = {
    # TVM binds its threads to cores, but not the thread that calls: where that runs on one of their cores, they take
    # turns, and a kernel takes twice its time until the system moves it. Left to the system, threads find free cores.
    "TVM_BIND_THREADS": "0",
    # Threads look for work this often before they sleep: about 5 ms. TVM's own 300,000 take 90 ms from other processes.
    "TVM_THREAD_POOL_SPIN_COUNT": "20000",
}
SPIN_S = 0.01  # after this long without work they are asleep
# What every NVIDIA GPU that CUDA 13 knows offers one thread block, without asking for more; TVM would ask the GPU.
CUDA_LIMITS = {"max_threads_per_block": 1024, "max_shared_memory_per_block": 48 << 10, "thread_warp_size": 32}
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
        "kind": "llvm", "mcpu": target.mcpu, "mtriple": target.mtriple, "num-cores": target.threads, **llvm_attributes,
    }  # fmt: skip
    if target.mattr:
        cpu["mattr"] = list(target.mattr)
    if target.kind == "llvm":
        return TvmTarget(cpu)
    return TvmTarget({"kind": "cuda", "arch": target.arch, "host": cpu, **CUDA_LIMITS})


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def cpu_name() -> str:
    """What this machine's CPU calls itself."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def machine_of(mtriple: str) -> str:
    first = mtriple.split("-")[0].lower()
    return ARCH_ALIASES.get(first, first)


def host_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """This machine's instruction set extensions in LLVM's names, as the operating system reports them."""
    names = CPU_FEATURES.get(platform.machine(), {})
    for line in cpuinfo.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            reported = set(value.split())
            return frozenset(llvm for llvm, linux in names.items() if linux in reported)
    return frozenset()


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
        near = difflib.get_close_matches(machine, known, n=1)
        raise TargetError(
            f"target.mtriple: LLVM has no architecture `{machine}` (from {mtriple})",
            f"did you mean `{near[0]}`?" if near else "e.g. aarch64-linux-gnu, x86_64-linux-gnu, riscv64-linux-gnu",
        )


def _check_cpu(mcpu: str, mtriple: str) -> None:
    from tvm.target import Target as TvmTarget
    from tvm.target import codegen

    known = [str(n) for n in codegen.llvm_get_cpu_archlist(TvmTarget({"kind": "llvm", "mtriple": mtriple}))]
    if mcpu not in known:
        near = difflib.get_close_matches(mcpu, known, n=3, cutoff=0.4)
        raise TargetError(
            f"target.mcpu: LLVM knows no CPU `{mcpu}` for {mtriple}",
            f"did you mean {' or '.join(f'`{n}`' for n in near)}?" if near else f"it knows: {', '.join(known)}",
        )


def _cuda_arch(section: TargetSection, detected_arch: str | None) -> str | None:
    if section.kind != "cuda":
        return None
    arch = section.arch or detected_arch
    if arch is None:
        raise TargetError(
            "target.arch: no GPU is here to take the CUDA architecture from",
            "state it: --arch sm_90 on the command line, arch = \"sm_90\" under [target] in a config",
        )
    return arch
