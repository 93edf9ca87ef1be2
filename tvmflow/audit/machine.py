"""The CPU's machine code of a library, read with binutils' objdump: which kernel approximates, and what it calls.

objdump comes with the C compiler that links every library, and knows each instruction that its assembler knows.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tvmflow.audit.library import ASKED_FOR, OWN_KERNEL
from tvmflow.errors import SetupError

# Reciprocals, their roots and powers of two that are right to 8 to 28 bits, by `uname -m`.
# Intel, Software Developer's Manual, volume 2; Arm, A64 instruction set.
APPROXIMATE = {
    "x86_64": re.compile(r"v?(?:rcp|rsqrt)(?:14|28)?[ps][sdh]|vexp2p[sd]|vrcpp[hs]|vrsqrtp[hs]"),
    "aarch64": re.compile(r"frecpe|frecpx|frsqrte|urecpe|ursqrte"),
}
# What writes the register that holds "flush denormals to zero" and the rounding mode.
FLOAT_CONTROL = {"x86_64": re.compile(r"v?ldmxcsr\b|fldcw\b"), "aarch64": re.compile(r"msr\s+fpcr\b")}
_HEADER = re.compile(r"^[0-9a-f]+ <(.+)>:$")
_TARGET = re.compile(r"<([^>+]+)(?:\+0x[0-9a-f]+)?>")
_INSTRUCTION = re.compile(r"^\s*[0-9a-f]+:\t(\S+.*)$")


@dataclass(frozen=True)
class MachineCode:
    """What stands out in a library's code, by kernel ("" is code that belongs to none).

    `approximate` and `control` count instructions by name. `callers` names the kernels by what they call outside.
    """

    approximate: Mapping[str, Mapping[str, int]]
    control: Mapping[str, Mapping[str, int]]
    callers: Mapping[str, tuple[str, ...]]


def read(library: Path, machine: str) -> MachineCode:
    """Disassembles a library built for `machine`; raises SetupError without an objdump that can."""
    return parse(_disassembled(library, machine), machine)


def parse(listing: str, machine: str) -> MachineCode:
    """What stands out in a listing of `objdump -d`."""
    approximate, control = APPROXIMATE.get(machine), FLOAT_CONTROL.get(machine)
    inexact: dict[str, Counter[str]] = defaultdict(Counter)
    settings: dict[str, Counter[str]] = defaultdict(Counter)
    mentions: dict[str, set[str]] = defaultdict(set)
    function = ""
    for line in listing.splitlines():
        if match := _HEADER.match(line):
            function = match[1]
        elif match := _INSTRUCTION.match(line):
            mentions[function].update(_TARGET.findall(match[1]))
            name = match[1].split()[0]
            if approximate and approximate.fullmatch(name):
                inexact[function][name] += 1
            if control and control.match(match[1]):
                settings[function][name] += 1
    owners = _owners(mentions)
    return MachineCode(_by_kernel(inexact, owners), _by_kernel(settings, owners), _callers(mentions, owners))


def _disassembled(library: Path, machine: str) -> str:
    name = "objdump" if machine == platform.machine() else f"{machine}-linux-gnu-objdump"
    tool = shutil.which(name)
    if tool is None:
        package = f"binutils-{machine.replace('_', '-')}-linux-gnu"
        raise SetupError(
            f"reading machine code for {machine} needs {name}, which is not installed",
            f"it belongs to binutils, e.g. apt-get install {package}",
        )
    command = [tool, "--disassemble", "--no-show-raw-insn", "--wide", str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _owners(mentions: Mapping[str, set[str]]) -> dict[str, str]:
    """The kernel to which each function belongs: the one from whose entry it can be reached."""
    owners: dict[str, str] = {}
    for entry in mentions:
        if not entry.startswith(OWN_KERNEL) or "@" in entry:
            continue
        kernel, open_ = entry.removeprefix(OWN_KERNEL), [entry]
        while open_:
            function = open_.pop()
            if function not in owners:
                owners[function] = kernel
                open_ += [name for name in mentions.get(function, ()) if name in mentions and "@" not in name]
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
