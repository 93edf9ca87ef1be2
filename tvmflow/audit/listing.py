"""A library's machine code as binutils' objdump prints it.

objdump comes with the C compiler that links every library, and knows each instruction that its assembler knows.
"""

from __future__ import annotations

import itertools
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tvmflow.errors import SetupError

_HEADER = re.compile(r"^([0-9a-f]+) <(.+)>:$")
_INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\t(\S.*)$")
_PREFIXES = re.compile(r"(?:(?:\{\w+\}|bnd|notrack|lock|repn?[ez]?|data16|addr32|[cdefgs]s|rex\S*)\s+)+(?=\S)")


@dataclass(frozen=True)
class Function:
    """A stretch of code from one symbol to the next; `instructions` are texts without prefixes, by their addresses."""

    name: str
    address: int
    instructions: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Listing:
    functions: tuple[Function, ...]

    @cached_property
    def instructions(self) -> Mapping[int, str]:
        return {place: text for function in self.functions for place, text in function.instructions.items()}

    @cached_property
    def following(self) -> Mapping[int, int]:
        """The next instruction's address, by address."""
        return dict(itertools.pairwise(self.instructions))


def read(library: Path, machine: str) -> Listing:
    """Disassembles a library built for `machine`; raises SetupError where no objdump is there, or it cannot."""
    tool = tool_for("objdump", machine)
    command = [tool, "--disassemble", "--no-show-raw-insn", "--wide", str(library)]
    plain = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, errors="replace", env=plain)
    listing = parse(done.stdout)
    if done.returncode or not listing.instructions:
        said = next((line for line in done.stderr.splitlines() if line.strip()), "it printed no instruction")
        raise SetupError(
            f"{tool} cannot read the machine code of {library}: {said}",
            f"install binutils for {machine}; what cannot be read cannot be audited",
        )
    return listing


def parse(text: str) -> Listing:
    """The functions in the output of `objdump --disassemble --no-show-raw-insn --wide`."""
    functions: list[Function] = []
    for line in text.splitlines():
        if match := _HEADER.match(line):
            functions.append(Function(match[2], int(match[1], 16)))
        elif functions and (match := _INSTRUCTION.match(line)):
            functions[-1].instructions[int(match[1], 16)] = _PREFIXES.sub("", match[2], count=1)
    return Listing(tuple(functions))


def tool_for(name: str, machine: str) -> str:
    """The path of a tool of binutils or GCC that makes or reads code for `machine`; raises SetupError."""
    wanted = name if machine == platform.machine() else f"{machine}-linux-gnu-{name}"
    tool = shutil.which(wanted)
    if tool is None:
        kind = "binutils" if name == "objdump" else name
        package = kind if machine == platform.machine() else f"{kind}-{machine.replace('_', '-')}-linux-gnu"
        raise SetupError(
            f"reading machine code for {machine} needs {wanted}, which is not installed",
            f"e.g. apt-get install {package}",
        )
    return tool
