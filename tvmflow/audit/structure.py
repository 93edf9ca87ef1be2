"""What a library is made of: code that runs unasked, code that no kernel reaches, kernels without code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tvmflow.audit import startup
from tvmflow.audit.library import Library
from tvmflow.audit.listing import Listing
from tvmflow.audit.machine import MachineCode
from tvmflow.audit.sass import KernelCode
from tvmflow.manifest import Finding, Manifest

SECTIONS = frozenset({".init", ".fini", ".text", ".plt", ".plt.got", ".plt.sec"})
# Conversions of 16-bit numbers, which TVM's LLVM code generator puts into every library.
SUPPORT = re.compile(r"__(?:trunc|extend)[a-z]+2|__gnu_(?:h2f|f2h)_ieee")
ENTRY = "main"  # by which TVM offers the only kernel of a library once more
HINT = "do not load the library; compile the model again, from tuning records and kernels that you know"
READ_HINT = "audit it with a newer objdump (binutils), or compile the model again"


def findings(built: Library, code: Listing, machine: MachineCode, manifest: Manifest) -> Iterator[Finding]:
    """A fault for each thing that no compiler of TVM's makes."""
    if built.machine != manifest.target.machine:
        yield _fault(built.path.name, f"made for {built.machine}, the manifest says {manifest.target.machine}")
    if not machine.found:
        yield Finding(
            check="library",
            level="warning",
            place=built.path.name,
            action="read its code yourself",
            what=f"which instructions of {built.machine} stand out is not known here",
        )
    for place, what in built.image.oddities:
        yield _fault(place, what)
    for section in built.executable:
        if section not in SECTIONS:
            yield _fault(f"section {section}", "code in a section that no linker of TVM's makes")
    for place, what in startup.foreign(built.image, code, built.machine):
        yield _fault(place, what)
    if built.asked is not None:
        yield from _loose(built, code, machine)
    for kernel, counts in machine.found.get("system", {}).items():
        yield _fault(
            kernel or "code outside all kernels",
            "asks the operating system for something itself: "
            + ", ".join(f"{n} x {name}" for name, n in counts.items()),
        )
    for kernel, counts in machine.found.get("unreadable", {}).items():
        yield _fault(
            kernel or "code outside all kernels",
            f"{sum(counts.values())} places hold no instruction that objdump knows",
            READ_HINT,
        )


def kernel_findings(
    built: Library, machine: MachineCode, device: Sequence[KernelCode], manifest: Manifest
) -> Iterator[Finding]:
    """A fault for each kernel without code, and for each function that nothing names."""
    for name in sorted(built.defined):
        if not machine.sizes.get(name):
            yield _fault(name, "no instruction of this kernel could be read", READ_HINT)
    for code in device:
        if not sum(code.instructions.values()):
            yield _fault(code.name, "no instruction of this CUDA kernel could be read", "compile the model again")
    shapes = manifest.evidence.shape_functions if manifest.evidence else ()
    stated = {kernel.name for kernel in manifest.kernels} | set(shapes)
    for kernel in manifest.kernels:
        if kernel.origin != "external" and kernel.calls and kernel.name not in built.defined:
            yield _fault(kernel.name, "the manifest names this kernel, and the library has none of that name")
    for name in sorted(built.defined - stated - {ENTRY}):
        yield _fault(name, "a function that the manifest does not name")


def _loose(built: Library, code: Listing, machine: MachineCode) -> Iterator[Finding]:
    started = startup.reached(built.image, code)
    for function in code.functions:
        name = function.name
        if name in machine.loose and name != ".plt" and function.address not in started and not SUPPORT.fullmatch(name):
            yield _fault(name, f"code that no kernel reaches: {len(function.instructions):,} instructions")


def _fault(place: str, what: str, action: str = HINT) -> Finding:
    return Finding(check="library", level="fault", place=place, what=what, action=action)
