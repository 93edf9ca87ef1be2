"""This machine: its CPU's extensions and cores, and how TVM's threads are to behave on it."""

from __future__ import annotations

import os
import platform
from collections.abc import Collection
from pathlib import Path

# Instruction set extensions that LLVM's code generator may use, and what Linux calls them in /proc/cpuinfo.
# Extensions that only hand-written code reaches (AMX, AES, ...) are left out: a library does not depend on them.
CPU_FEATURES = {
    "x86_64": {
        "sse3": "pni",
        "ssse3": "ssse3",
        "sse4.1": "sse4_1",
        "sse4.2": "sse4_2",
        "popcnt": "popcnt",
        "lzcnt": "abm",
        "movbe": "movbe",
        "avx": "avx",
        "avx2": "avx2",
        "f16c": "f16c",
        "fma": "fma",
        "bmi": "bmi1",
        "bmi2": "bmi2",
        "avx512f": "avx512f",
        "avx512bw": "avx512bw",
        "avx512cd": "avx512cd",
        "avx512dq": "avx512dq",
        "avx512vl": "avx512vl",
        "avx512vbmi": "avx512vbmi",
        "avx512vbmi2": "avx512_vbmi2",
        "avx512ifma": "avx512ifma",
        "avx512vnni": "avx512_vnni",
        "avx512bitalg": "avx512_bitalg",
        "avx512vpopcntdq": "avx512_vpopcntdq",
        "avx512bf16": "avx512_bf16",
        "avx512fp16": "avx512_fp16",
        "avxvnni": "avx_vnni",
        "gfni": "gfni",
        "fma4": "fma4",
        "xop": "xop",
        "sse4a": "sse4a",
        "tbm": "tbm",
        "avx512vp2intersect": "avx512_vp2intersect",
    },
    "aarch64": {
        "neon": "asimd",
        "lse": "atomics",
        "rdm": "asimdrdm",
        "dotprod": "asimddp",
        "fullfp16": "asimdhp",
        "fp16fml": "asimdfhm",
        "sve": "sve",
        "sve2": "sve2",
        "bf16": "bf16",
        "i8mm": "i8mm",
        "rcpc": "lrcpc",
        "jsconv": "jscvt",
        "complxnum": "fcma",
    },
}
# How TVM's thread pool is to behave, where the environment does not say otherwise.
THREADING = {
    # TVM binds its threads to cores, but not the thread that calls: where that runs on one of their cores, they take
    # turns, and a kernel takes twice its time until the system moves it. Left to the system, threads find free cores.
    "TVM_BIND_THREADS": "0",
    # Threads look for work this often before they sleep: about 5 ms. TVM's own 300,000 take 90 ms from other processes.
    "TVM_THREAD_POOL_SPIN_COUNT": "20000",
}
SPIN_S = 0.01  # after this long without work they are asleep


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def cpu_name() -> str:
    """What this machine's CPU calls itself."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def find_obstacle(machine: str, needed: Collection[str], available: Collection[str]) -> str:
    """Why code for the architecture `machine` that uses the extensions `needed` cannot be run here; empty if it can.

    `available` are this CPU's extensions, as `host_features` gives them.
    """
    if machine != platform.machine():
        return f"built for {machine}, this machine is {platform.machine()}"
    missing = sorted(set(needed) - set(available))
    return f"needs CPU features this machine lacks: {', '.join(missing)}" if missing else ""


def host_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """This machine's instruction set extensions in LLVM's names, as the operating system reports them."""
    names = CPU_FEATURES.get(platform.machine(), {})
    for line in cpuinfo.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            reported = set(value.split())
            return frozenset(llvm for llvm, linux in names.items() if linux in reported)
    return frozenset()
