"""The numerics that a config states, held against the code that was built.

| layer                        | read from                     | fast_math = false forbids                            |
|------------------------------|-------------------------------|------------------------------------------------------|
| LLVM's IR                    | the build, kept in the manifest | every fast-math flag and attribute                 |
| the CPU's machine code       | the library                   | approximate reciprocals, writes of the float control |
| the same                     | the library                   | (always) arithmetic narrower than the model's        |
| PTX and CUDA source          | the build, kept in the manifest | what no precise function of the source needs       |
| the GPU's machine code       | the library                   | what no precise code holds (sass.py)                 |

fast_math = true allows all of these but LLVM's flags that assume values away: NaN and infinity stay values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from tvmflow.audit.machine import MachineCode
from tvmflow.audit.sass import KernelCode
from tvmflow.config import NumericsSection
from tvmflow.manifest import Evidence, Finding, Manifest, Noun

FAST_FLAGS = frozenset({"arcp", "contract", "nsz", "reassoc"})  # what build/numerics.py asks LLVM for
HINT = "fast_math = true under [numerics] allows it; else find what asks for it: a kernel of [kernels], a flag"
NARROW_HINT = "take the kernel or tuning record out that computes in fewer bits than the model"
FLUSHING = frozenset({"ldmxcsr", "vldmxcsr", "msr"})  # what fast_math = true may do to the float control register
# C's functions that set it (C17, 7.6).
SET_CONTROL = re.compile(r"fesetround|fesetenv|feupdateenv|feholdexcept|fesetmode|fedisableexcept|feenableexcept")
NARROW = {
    "half": "computes in float16",
    "to half": "rounds to float16",
    "bfloat16": "computes in or rounds to bfloat16",
    "other": "multiplies in 8-bit floats or TF32",
}
TF32_HINT = "tf32 = true under [numerics] allows it; else take the kernel or record out that asks for TF32"


class NumericsAudit(Noun):
    """What was stated, and what the code holds, by kernel ("" is code that belongs to none).

    `llvm_flags` is None for a library whose build was not watched. `approximate`, `float_control` and `narrow` count
    instructions, the latter by kind and for a CPU; `float_control` calls, too. `tensor_core` names instructions of
    tensor cores.
    """

    contract: dict[str, bool | str]
    llvm_flags: dict[str, int] | None
    approximate: dict[str, dict[str, int]]
    float_control: dict[str, dict[str, int]]
    narrow: dict[str, dict[str, dict[str, int]]]
    tensor_core: dict[str, tuple[str, ...]]
    tf32_kernels: tuple[str, ...]
    read: tuple[str, ...]
    """What was read, in words."""


def numerics(
    stated: NumericsSection,
    evidence: Evidence | None,
    machine: MachineCode,
    codes: Sequence[KernelCode],
    undefined: Sequence[str],
) -> NumericsAudit:
    """What the code of a library does to numbers; `undefined` are the symbols that it looks for elsewhere."""
    approximate: dict[str, dict[str, int]] = {}
    on_gpu = {code.name: code.approximate for code in codes if code.approximate}
    for found in (machine.approximate, evidence.approximations if evidence else {}, on_gpu):
        for kernel, counts in found.items():
            approximate[kernel] = approximate.get(kernel, {}) | dict(counts)
    control = {kernel: dict(counts) for kernel, counts in machine.control.items()}
    for name in filter(SET_CONTROL.fullmatch, undefined):
        for kernel in machine.callers.get(name, ("",)):
            control.setdefault(kernel, {})[f"{name}()"] = 1
    return NumericsAudit(
        contract=stated.model_dump(),
        llvm_flags=evidence.llvm_flags if evidence else None,
        approximate=approximate,
        float_control=control,
        narrow={
            kind: {kernel: dict(counts) for kernel, counts in machine.found[kind].items()}
            for kind in NARROW
            if machine.found.get(kind)
        },
        tensor_core={code.name: code.products for code in codes if code.products},
        tf32_kernels=tuple(code.name for code in codes if code.uses_tf32),
        read=tuple(_read(evidence, codes)),
    )


def findings(
    audit: NumericsAudit, stated: NumericsSection, codes: Sequence[KernelCode], manifest: Manifest
) -> Iterator[Finding]:
    """A fault for each breach of what is stated, and a warning where something could not be read."""
    yield from _of_the_cpu(audit, stated, manifest.narrowest_float)
    on_gpu = manifest.target.kind == "cuda"
    flags = audit.llvm_flags or {}
    forbidden = {name: n for name, n in flags.items() if not stated.fast_math or name not in FAST_FLAGS}
    if forbidden:
        yield _fault("LLVM's IR", f"instructions with fast-math flags: {_listed(forbidden)}", HINT)
    if not stated.fast_math:
        for kernel, counts in audit.approximate.items():
            yield _fault(_name(kernel), f"approximate or flushing instructions: {_listed(counts)}", HINT)
    for code in codes:
        yield from _product_findings(code, stated)
    if on_gpu and not codes:
        yield _fault(
            "CUDA kernels",
            "no machine code could be read: the library holds source, PTX or a packed image, "
            "which the machine that loads it compiles by its own rules",
            "compile the model with tvmflow",
        )
    if stated.tf32 and codes and not audit.tf32_kernels:
        yield Finding(
            check="numerics",
            level="warning",
            place="CUDA kernels",
            what="tf32 = true, but no kernel multiplies in TF32",
            action="the manifest's notes say which products stay in float32",
        )
    if audit.llvm_flags is None:
        yield Finding(
            check="numerics",
            level="warning",
            place="LLVM's IR",
            what="this library's build was not watched, so its fast-math flags are not known",
            action="compile the model with tvmflow",
        )


def _product_findings(code: KernelCode, stated: NumericsSection) -> Iterator[Finding]:
    """A fault where a GPU kernel multiplies or sums in a precision that is not allowed."""
    if code.uses_tf32 and not stated.tf32:
        yield _fault(code.name, f"multiplies in TF32: {', '.join(code.products)}", TF32_HINT)
    if code.fp16_sums and not stated.fp16_accumulate:
        yield _fault(
            code.name,
            f"adds up products in float16: {', '.join(code.fp16_sums)}",
            "let the kernel accumulate in float32",
        )


def _of_the_cpu(audit: NumericsAudit, stated: NumericsSection, narrowest: str) -> Iterator[Finding]:
    for kernel, counts in audit.float_control.items():
        forbidden = {name: n for name, n in counts.items() if not stated.fast_math or name not in FLUSHING}
        if forbidden:
            yield _fault(
                _name(kernel),
                "sets the CPU's float control register, which may flush denormals or round "
                f"otherwise: {_listed(forbidden)}",
                HINT,
            )
    # bfloat16 is the narrower one, beside which a model may hold float16 too.
    halves = {"to half", *(() if stated.widen_half else ("half",))} if narrowest in ("float16", "bfloat16") else set()
    allowed = halves | ({"bfloat16"} if narrowest == "bfloat16" else set())
    for kind, by_kernel in audit.narrow.items():
        for kernel, counts in by_kernel.items():
            if kind not in allowed:
                what = f"{NARROW[kind]}, the model has {narrowest}: {_listed(counts)}"
                yield _fault(_name(kernel), what, NARROW_HINT)


def _read(evidence: Evidence | None, codes: Sequence[KernelCode]) -> Iterator[str]:
    if evidence is not None:
        yield "LLVM's IR, at the build"
    if evidence is not None and evidence.cubins:
        yield f"PTX and source of {len(evidence.cubins)} cubin{'s' if len(evidence.cubins) > 1 else ''}, at the build"
    yield "the CPU's machine code"
    if codes:
        yield f"the GPU's machine code, {len(codes)} kernels"


def _fault(place: str, what: str, action: str) -> Finding:
    return Finding(check="numerics", level="fault", place=place, what=what, action=action)


def _name(kernel: str) -> str:
    return kernel or "code outside all kernels"


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))
