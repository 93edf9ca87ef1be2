"""Code that runs when a library is loaded or unloaded: the C compiler's own, instruction by instruction, and no other.

The C compiler links a few functions into every library, which call `__gmon_start__`, `__cxa_finalize` and the like
where there are any. A library without code of its own, linked here, shows what they look like.
"""

from __future__ import annotations

import functools
import platform
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from elftools.elf.elffile import ELFFile

from tvmflow.audit import image, listing
from tvmflow.audit.image import Image
from tvmflow.audit.listing import Listing
from tvmflow.errors import SetupError

Body = tuple[object, ...]
MOST = 200  # instructions of one function
DEPTH = 4
FILLING = re.compile(r"(?:nop\w*|endbr\d+|bti|hint|xchg\s+%ax,%ax)\b")
ENDS = re.compile(r"(?:ret\w*|jmp\w*|br?)(?![\w.])")
CONDITIONAL = re.compile(r"(?:j(?!mp)\w+|b\.\w+|cbn?z|tbn?z)\b")
DIRECT = re.compile(r"(?:call\w*|j\w+|bl?|b\.\w+|cbn?z|tbn?z)\s+(?:.*,\s*)?([0-9a-f]+)\s*<")
MENTIONED = re.compile(r"#\s*([0-9a-f]+)\b.*|<[^>]*>")
PAGE = re.compile(r"adrp\s+(x\d+), ([0-9a-f]+)")
ON_PAGE = re.compile(r"(?:ldr\s+\w+, \[(x\d+)(?:, #(\d+))?\]|add\s+\w+, (x\d+), #0x([0-9a-f]+))")


def foreign(found: Image, code: Listing, machine: str) -> Iterator[tuple[str, str]]:
    """What runs at loading or unloading and is not the C compiler's, by what names it."""
    known = of_the_compiler(machine) if found.starts else frozenset()
    for name, address in found.starts.items():
        if address not in code.instructions:
            yield name, f"runs when the library is loaded or unloaded; no code can be read at {address:#x}"
        elif body(address, code, found.slots) not in known:
            function = next((f.name for f in code.functions if f.address == address), f"{address:#x}")
            yield name, f"`{function}` runs when the library is loaded or unloaded, and is not the C compiler's"


def reached(found: Image, code: Listing) -> frozenset[int]:
    """The addresses of all functions that start-up code is made of."""
    seen: set[int] = set()
    for address in found.starts.values():
        body(address, code, found.slots, seen)
    return frozenset(seen)


@functools.cache
def of_the_compiler(machine: str) -> frozenset[Body]:
    """The start-up functions that the C compiler for `machine` links into a library."""
    compiler = listing.tool_for("g++" if machine == platform.machine() else "gcc", machine)
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
        library = Path(folder) / "empty.so"
        command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
        done = subprocess.run(command, input="void empty(void) {}\n", capture_output=True, text=True, check=False)
        if done.returncode:
            raise SetupError(
                f"{compiler} cannot link a library: {done.stderr.strip()[:200]}",
                "audits compare a library's start-up code with the C compiler's",
            )
        code = listing.read(library, machine)
        with library.open("rb") as stream:
            found = image.read(ELFFile(stream))
    return frozenset(body(address, code, found.slots) for address in found.starts.values())


def body(address: int, code: Listing, slots: Mapping[int, str], seen: set[int] | None = None, depth: int = 0) -> Body:
    """A function without what linking decides: addresses are names of symbols, and other functions' bodies."""
    if seen is not None:
        seen.add(address)
    instructions = dict(_extent(address, code))
    pages: dict[str, int] = {}
    parts: list[object] = []
    for text in instructions.values():
        if FILLING.match(text):
            continue
        place = _place(text, pages)
        parts.append(_plain(text) if place is None else (_plain(text), slots.get(place, "data")))
        target = DIRECT.match(text)
        if target and int(target[1], 16) not in instructions:
            there = int(target[1], 16)
            parts.append(body(there, code, slots, seen, depth + 1) if depth < DEPTH else "too deep")
    return tuple(parts)


def _extent(address: int, code: Listing) -> Iterator[tuple[int, str]]:
    """The instructions of a function: up to one that does not go on, and that no jump before it passes."""
    furthest, count, place = address, 0, address
    following = code.following
    while (text := code.instructions.get(place)) is not None and count < MOST:
        yield place, text
        count += 1
        if CONDITIONAL.match(text) and (target := DIRECT.match(text)):
            furthest = max(furthest, int(target[1], 16))
        if ENDS.match(text) and place >= furthest:
            return
        place = following.get(place, -1)


def _place(text: str, pages: dict[str, int]) -> int | None:
    """The address of the data that an instruction names; Arm's take two, of which the first names its page."""
    if match := PAGE.match(text):
        pages[match[1]] = int(match[2], 16)
        return None
    if match := ON_PAGE.match(text):
        register, offset = (match[1], int(match[2] or "0")) if match[1] else (match[3], int(match[4], 16))
        return pages[register] + offset if register in pages else None
    mentioned = re.search(r"#\s*([0-9a-f]+) ", text)
    return int(mentioned[1], 16) if mentioned else None


def _plain(text: str) -> str:
    """An instruction without addresses: of data, of code, and relative to the next one."""
    if DIRECT.match(text):
        return text.split()[0]
    if PAGE.match(text) or ON_PAGE.match(text):
        return re.sub(r", (?:[0-9a-f]+ <.*|#\w+)", "", text)
    return re.sub(r"\s+", " ", re.sub(r"-?0x[0-9a-f]+\(%rip\)", "(%rip)", MENTIONED.sub("", text))).strip()
