"""What stands out in the CPU's machine code of a library, by kernel: what it approximates, sets, calls."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tvmflow.audit.library import ASKED_FOR, OWN_KERNEL
from tvmflow.audit.listing import Listing

Counts = Mapping[str, Mapping[str, int]]
HALF_REGISTER = r"\s+(?:h\d|v\d+\.[48]h|z\d+\.h)"
# By `uname -m` and kind of instruction; a pattern is matched against the whole text of an instruction.
# Intel, Software Developer's Manual, volume 2, and Architecture Instruction Set Extensions; Arm, A64 instruction set.
KINDS = {
    "x86_64": {
        # Reciprocals, their roots and powers of two that are right to 8 to 28 bits.
        "approximate": r"v?(?:rcp|rsqrt)(?:14|28)?[ps][sdh]\b|vexp2p[sd]\b|v(?:rcp|rsqrt)p(?:h|s|bf16)\b",
        # The register that holds "flush denormals to zero" and the rounding mode.
        "flush": r"v?ldmxcsr\b",
        "control": r"fldcw\b|fldenv\b|frstor\b|fn?init\b|fn?save\b|fxrstor|xrstor",
        "half": r"v(?:add|sub|mul|div|sqrt|scalef|reduce|rndscale)[ps]h\b|vf(?:n?m|c)\w+[ps]h\b"
        r"|tdpfp16ps\b|tcmm\w+ps\b",
        "to half": r"vcvt\w+2(?:ph|sh)\w*",
        "bfloat16": r"\w*bf16\w*",
        "other": r"t\w+(?:f32|f8)ps\b",
        "system": r"syscall\b|sysenter\b|int\s",
        "unreadable": r"\(bad\)|\.byte\b",
    },
    "aarch64": {
        "approximate": r"frecpe|frecpx|frsqrte|urecpe|ursqrte",
        "flush": r"msr\s+fpcr\b",
        "control": r"msr\s+fpmr\b",
        "half": r"(?:fn?m(?:add|sub)|fml[as]|f(?:add|sub|mul|div|sqrt|addp|mulx|recps|rsqrts|cadd|cmla|mla|mls)r?)"
        + HALF_REGISTER,
        "to half": rf"fcvt(?:n2?|x?nt?)?{HALF_REGISTER}|[su]cvtf{HALF_REGISTER}",
        "bfloat16": r"bf(?:dot|mmla|mla\w+|mls\w+|cvt\w*|add|sub|mul|mopa|mops)\b",
        "other": r"fmmla\b|fdot\b|fml[as]l[bt]?\b",
        "system": r"svc\b|hvc\b|smc\b",
        "unreadable": r"\.inst\b|udf\b|\.word\b",
    },
}
_TARGET = re.compile(r"<([^>+]+)(?:\+0x[0-9a-f]+)?>")


@dataclass(frozen=True)
class MachineCode:
    """What stands out in a library's code.

    `found` counts instructions by name, by kernel ("" is code that belongs to none), by kind as in KINDS. `callers`
    names the kernels by what they call outside. `sizes` counts the instructions of each kernel, `loose` those of each
    function that no kernel reaches.
    """

    found: Mapping[str, Counts]
    callers: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, int]
    loose: Mapping[str, int]

    @property
    def approximate(self) -> Counts:
        return self.found.get("approximate", {})

    @property
    def control(self) -> Counts:
        """Writes of the control registers of floating-point arithmetic."""
        flush, control = (self.found.get(kind, {}) for kind in ("flush", "control"))
        return {kernel: {**flush.get(kernel, {}), **control.get(kernel, {})} for kernel in {**flush, **control}}


def parse(listing: Listing, machine: str) -> MachineCode:
    """What stands out in a listing."""
    kinds = {kind: re.compile(pattern) for kind, pattern in KINDS.get(machine, {}).items()}
    any_kind = re.compile("|".join(f"(?:{pattern})" for pattern in KINDS.get(machine, {"": r"(?!)"}).values()))
    counts: dict[str, dict[str, Counter[str]]] = {kind: defaultdict(Counter) for kind in kinds}
    mentions: dict[str, set[str]] = defaultdict(set)
    sizes: Counter[str] = Counter()
    for function in listing.functions:
        sizes[function.name] += len(function.instructions)
        for text in function.instructions.values():
            if "<" in text:
                mentions[function.name].update(_TARGET.findall(text))
            if any_kind.match(text):
                for kind in (kind for kind, pattern in kinds.items() if pattern.match(text)):
                    counts[kind][function.name][text.split()[0]] += 1
    owners = _owners(mentions, sizes)
    return MachineCode(
        {kind: _by_kernel(by_function, owners) for kind, by_function in counts.items()},
        _callers(mentions, owners),
        {name.removeprefix(OWN_KERNEL): size for name, size in sizes.items() if name.startswith(OWN_KERNEL)},
        {name: size for name, size in sizes.items() if name not in owners and "@plt" not in name},
    )


def _owners(mentions: Mapping[str, set[str]], functions: Mapping[str, int]) -> dict[str, str]:
    """The kernel to which each function belongs: the one from whose entry it can be reached."""
    owners: dict[str, str] = {}
    for entry in functions:
        if not entry.startswith(OWN_KERNEL) or "@" in entry:
            continue
        kernel, open_ = entry.removeprefix(OWN_KERNEL), [entry]
        while open_:
            function = open_.pop()
            if function not in owners:
                owners[function] = kernel
                open_ += [name for name in mentions.get(function, ()) if name in functions and "@" not in name]
    return owners


def _by_kernel(counts: Mapping[str, Counter[str]], owners: Mapping[str, str]) -> dict[str, dict[str, int]]:
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for function, counter in counts.items():
        found[owners.get(function, "")] += counter
    return {kernel: dict(counter) for kernel, counter in found.items()}


def _callers(mentions: Mapping[str, set[str]], owners: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    callers: dict[str, dict[str, None]] = defaultdict(dict)
    for function, names in mentions.items():
        for name in _outside(names):
            callers[name][owners.get(function, function)] = None
    return {name: tuple(kernels) for name, kernels in callers.items()}


def _outside(names: set[str]) -> Iterator[str]:
    for name in names:
        if name.endswith("@plt"):
            yield name.removesuffix("@plt")
        elif name.startswith(ASKED_FOR):
            yield name.removeprefix(ASKED_FOR)
