"""Looks at this installation and says what cannot work, with the fix for each."""

from __future__ import annotations

import os
import platform
import re
import shutil
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Literal

from packaging.requirements import Requirement

from tvmflow import host, process
from tvmflow.errors import TvmflowError


@dataclass(frozen=True)
class Finding:
    """One thing looked at: what was found and, where it is a fault, how to mend it."""

    name: str
    state: Literal["ok", "info", "fault"]
    found: str
    fix: str = ""


def examine() -> list[Finding]:
    """All findings: packages, CPU and threads, the environment, CUDA tools."""
    return [*_packages(), _python(), _cpu(), _threads(), *_environment(), _linker(), *_cuda()]


def _packages() -> list[Finding]:
    findings = []
    for text in requires("tvmflow") or []:
        requirement = Requirement(text)
        optional = requirement.marker is not None
        if optional and requirement.name != "torch":
            continue
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            fix = f'pip install "{requirement.name}{requirement.specifier}"'
            state: Literal["info", "fault"] = "info" if optional else "fault"
            findings.append(Finding(requirement.name, state, "not installed", fix))
            continue
        if found in requirement.specifier or requirement.specifier.contains(found.partition("+")[0]):
            findings.append(Finding(requirement.name, "ok", found))
        else:
            fix = f'pip install "{requirement.name}{requirement.specifier}"'
            findings.append(Finding(requirement.name, "fault", f"{found}, needs {requirement.specifier}", fix))
    return findings


def _python() -> Finding:
    shadows = [name for name in ("tvm", "onnx", "torch") if _is_local(name)]
    if shadows:
        return Finding("imports", "fault", f"a local folder hides: {', '.join(shadows)}", "run from another folder")
    return Finding("python", "ok", f"{platform.python_version()} on {platform.machine()}")


def _is_local(name: str) -> bool:
    spec = PathFinder.find_spec(name)
    return spec is not None and (spec.origin is None or not re.search(r"(site|dist)-packages", spec.origin))


def _cpu() -> Finding:
    features = host.host_features()
    avx512 = {f"avx512{part}" for part in ("f", "bw", "cd", "dq", "vl")}
    levels = {"x86-64-v4": avx512, "x86-64-v3": {"avx2", "fma", "bmi2"}}
    level = next((name for name, needed in levels.items() if needed <= features), "baseline")
    return Finding("cpu", "ok", f"{level}; {len(features)} extensions known to LLVM")


def _threads() -> Finding:
    usable, present = host.cores(), os.cpu_count() or 1
    return Finding("threads", "ok", f"{usable} usable of {present}; libraries use what their manifest states")


def _environment() -> list[Finding]:
    ignored = sorted(name for name in os.environ if name.startswith(process.IGNORED_PREFIXES))
    if not ignored:
        return [Finding("environment", "ok", "nothing set that could change a build")]
    return [Finding("environment", "info", f"ignored while compiling: {', '.join(ignored)}", "put it into the config")]


def _linker() -> Finding:
    compiler = shutil.which("g++") or shutil.which("gcc") or shutil.which("clang++")
    if compiler is None:
        return Finding("C compiler", "fault", "none, and TVM links libraries with one", "apt-get install g++")
    return Finding("C compiler", "ok", compiler)


def _cuda() -> list[Finding]:
    from tvmflow.codegen import cuda

    try:
        found = cuda.compiler()
    except TvmflowError as exc:
        return [Finding("CUDA compiler", "info", exc.message, exc.hint)]
    archs = cuda.supported_archs()
    gpu = cuda.detect_arch()
    return [
        Finding("CUDA compiler", "ok", f"{found.kind} {found.version}, {archs[0]} to {archs[-1]}"),
        Finding("GPU", "ok" if gpu else "info", gpu or "none: CUDA libraries can be built here, not run"),
    ]
