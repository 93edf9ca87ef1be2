"""What is read while a library is built, because the library itself no longer shows it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm.tirx import IntImm, PrimFunc

from tvmflow.codegen import ptx
from tvmflow.manifest import Evidence, Launch

# A floating-point instruction of LLVM's IR with its flags (LLVM Language Reference, "Fast-Math Flags").
_FLAGGED = re.compile(
    r"= (?:(?:must|no)?tail )?(?:fadd|fsub|fmul|fdiv|frem|fneg|fcmp|fptrunc|fpext|select|phi|call) "
    r"((?:(?:fast|nnan|ninf|nsz|arcp|contract|afn|reassoc) )+)"
)
# Attributes that say the same of a whole function.
_ATTRIBUTE = re.compile(
    r'"(?:unsafe-fp-math|no-nans-fp-math|no-infs-fp-math|no-signed-zeros-fp-math|approx-func-fp-math)"="true"'
    r'|"denormal-fp-math(?:-f32)?"="(?!ieee)[^"]*"|\bdenormal_fpenv\((?!ieee)[^)]*\)'
)
_THREADS = ("threadIdx.x", "threadIdx.y", "threadIdx.z")
_DYNAMIC = "tirx.use_dyn_shared_memory"


def llvm_flags(ir: str) -> dict[str, int]:
    """How often each fast-math flag or attribute stands in the text of LLVM's IR."""
    flags = Counter(flag for match in _FLAGGED.finditer(ir) for flag in match[1].split())
    return dict(sorted((flags + Counter(_ATTRIBUTE.findall(ir))).items()))


@contextmanager
def launches() -> Iterator[dict[str, Launch]]:
    """Within it, what is built under the current PassContext tells how each CUDA kernel is launched."""
    found: dict[str, Launch] = {}

    @tvm.instrument.pass_instrument
    class Watcher:
        def run_after_pass(self, mod: tvm.IRModule, info: Any) -> None:
            if str(info.name) == "tirx.SplitHostDevice":
                found.update(_launches(mod))

    context = tvm.transform.PassContext.current()
    context.override_instruments([Watcher()])
    try:
        yield found
    finally:
        context.override_instruments([])


def of_build(executable: Any, started: dict[str, Launch], kept: Path) -> Evidence:
    """The evidence of one build; `kept` is the folder in which the CUDA compile step left sources and PTX."""
    flags: Counter[str] = Counter()
    for module in _modules(executable):
        if module.kind == "llvm":
            flags += Counter(llvm_flags(str(module.inspect_source("ll"))))
    approximations: dict[str, dict[str, int]] = {}
    for file in sorted(kept.glob("*.ptx")):
        approximations |= ptx.approximations(file.with_suffix(".cu").read_text(), file.read_text())
    cubins = tuple(sorted(file.stem for file in kept.glob("*.ptx")))
    return Evidence(llvm_flags=dict(flags), approximations=approximations, launches=started, cubins=cubins)


def _modules(executable: Any) -> Iterator[Any]:
    open_ = [executable.mod]
    while open_:
        module = open_.pop()
        yield module
        open_ += list(module.imports)


def _launches(mod: tvm.IRModule) -> Iterator[tuple[str, Launch]]:
    calls: list[Any] = []
    for function in mod.functions.values():
        if isinstance(function, PrimFunc):
            tvm_ffi.structural_walk(function.body, (tvm.ir.Call, calls.append))
    for call in calls:
        if getattr(call.op, "name", "") != "tirx.call_ffi_kernel":
            continue
        tags = [str(tag) for tag in call.attrs["launch_params"]]
        values = dict(zip(tags, call.args[len(call.args) - len(tags) :], strict=True))
        threads = [_constant(values[tag]) for tag in _THREADS if tag in values]
        block = math.prod(count or 0 for count in threads)  # 0 where a number is symbolic
        dynamic = _constant(values[_DYNAMIC]) if _DYNAMIC in values else 0
        yield str(call.args[0].value), Launch(threads=block or None, dynamic_shared_bytes=dynamic)


def _constant(value: Any) -> int | None:
    return int(value) if isinstance(value, IntImm) else None
