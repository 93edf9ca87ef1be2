"""How the loader takes a shared library: what runs at once, which memory may be executed, where it looks further."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from elftools.common.exceptions import ELFError
from elftools.elf.constants import P_FLAGS, SH_FLAGS
from elftools.elf.dynamic import DynamicSegment
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import Section, SymbolTableSection
from elftools.elf.segments import Segment

# Functions that the loader calls, one by one and by list.
SINGLE, LISTS = ("DT_INIT", "DT_FINI"), ("DT_PREINIT_ARRAY", "DT_INIT_ARRAY", "DT_FINI_ARRAY")
ELSEWHERE = {
    "DT_RPATH": "libraries are looked for here first",
    "DT_RUNPATH": "libraries are looked for here",
    "DT_AUXILIARY": "a library whose functions go before its own",
    "DT_FILTER": "a library whose functions go before its own",
    "DT_AUDIT": "a library that the loader runs",
    "DT_DEPAUDIT": "a library that the loader runs",
}
WRITTEN_BY_RELATIVE = {"EM_X86_64": (8, 1), "EM_AARCH64": (1027, 257)}  # R_*_RELATIVE, R_*_64 / R_*_ABS64
IFUNC_RELOCATION = {"EM_X86_64": 37, "EM_AARCH64": 1032}  # R_*_IRELATIVE
PADDING = b"\x00\x90\xcc"


@dataclass(frozen=True)
class Image:
    """`starts` are the addresses that the loader calls, by what names them. `slots` are the names of the undefined
    symbols whose addresses the loader writes, by place, `undefined` those of all undefined symbols, without versions.
    `oddities` say what no library of TVM's has, by place.
    """

    starts: Mapping[str, int]
    slots: Mapping[int, str]
    undefined: tuple[str, ...]
    oddities: tuple[tuple[str, str], ...]


def read(elf: ELFFile) -> Image:
    """Reads what the loader does, so by segments: section headers are for other tools, and may differ."""
    dynamic = next((s for s in elf.iter_segments() if isinstance(s, DynamicSegment)), None)
    if dynamic is None:
        raise ELFError("it has no dynamic segment")
    written, slots, undefined, odd = _relocations(elf, dynamic)
    starts: dict[str, int] = {}
    for tag in dynamic.iter_tags():
        if tag.entry.d_tag in SINGLE:
            starts[tag.entry.d_tag] = tag.entry.d_val
        elif tag.entry.d_tag in LISTS:
            starts |= _listed(elf, dynamic, tag, written)
    found = [*odd, *_dynamic_oddities(dynamic), *_segment_oddities(elf), *_section_oddities(elf, dynamic)]
    return Image(starts, slots, tuple(undefined), tuple(found))


def _relocations(
    elf: ELFFile, dynamic: DynamicSegment
) -> tuple[dict[int, int | str], dict[int, str], dict[str, None], list[tuple[str, str]]]:
    """Addresses that are written, by place; undefined symbols by place, and all of them; oddities."""
    relative, absolute = WRITTEN_BY_RELATIVE.get(elf["e_machine"], (-1, -1))
    written: dict[int, int | str] = {}
    slots: dict[int, str] = {}
    odd: list[tuple[str, str]] = []
    undefined = dict.fromkeys(s.name for s in dynamic.iter_symbols() if s["st_shndx"] == "SHN_UNDEF" and s.name)
    tables: Mapping[str, Any] = dynamic.get_relocation_tables()
    for table in tables.values():
        for relocation in table.iter_relocations():
            place = relocation["r_offset"]
            if not relocation.is_RELA():
                written[place] = _word(elf, place)  # packed relative relocations, whose addends are in place
                continue
            kind, addend = relocation["r_info_type"], relocation["r_addend"]
            if kind == IFUNC_RELOCATION.get(elf["e_machine"]):
                odd.append((f"address {addend:#x}", "code that the loader runs to choose a function (IFUNC)"))
            if kind == relative:
                written[place] = addend
            elif relocation["r_info_sym"]:
                symbol = dynamic.get_symbol(relocation["r_info_sym"])
                defined = symbol["st_shndx"] != "SHN_UNDEF"
                if defined:
                    written[place] = symbol["st_value"] + (addend if kind == absolute else 0)
                else:
                    undefined[symbol.name] = None
                    slots[place] = symbol.name
                    written[place] = symbol.name
    for symbol in dynamic.iter_symbols():
        if symbol["st_info"]["type"] in ("STT_GNU_IFUNC", "STT_LOOS"):
            odd.append((symbol.name, "code that the loader runs to choose a function (IFUNC)"))
    return written, slots, undefined, odd


def _listed(elf: ELFFile, dynamic: DynamicSegment, tag: object, written: Mapping[int, int | str]) -> dict[str, int]:
    """The functions of one of the loader's lists; -1 for one that is looked up elsewhere."""
    name, start = tag.entry.d_tag, tag.entry.d_val  # type: ignore[attr-defined] # pyelftools has no type for tags
    size = next((t.entry.d_val for t in dynamic.iter_tags(f"{name}SZ")), 0)
    found: dict[str, int] = {}
    for index in range(size // 8):
        value = written.get(start + 8 * index, _word(elf, start + 8 * index))
        found[f"{name}[{index}]"] = value if isinstance(value, int) else -1
    return found


def _dynamic_oddities(dynamic: DynamicSegment) -> Iterator[tuple[str, str]]:
    for tag in dynamic.iter_tags():
        name, value = tag.entry.d_tag, tag.entry.d_val
        if name in ELSEWHERE:
            attribute = {"DT_RPATH": "rpath", "DT_RUNPATH": "runpath"}.get(name, "")
            yield name.removeprefix("DT_"), f"{ELSEWHERE[name]}: {getattr(tag, attribute, hex(value))}"
        if name == "DT_TEXTREL" or (name == "DT_FLAGS" and value & 4):
            yield "text relocations", "the loader writes into its code"


def _segment_oddities(elf: ELFFile) -> Iterator[tuple[str, str]]:
    stack = [segment for segment in elf.iter_segments() if segment["p_type"] == "PT_GNU_STACK"]
    if not stack or stack[0]["p_flags"] & P_FLAGS.PF_X:
        yield "stack", "the library asks for a stack whose bytes may be executed"
    for segment in elf.iter_segments():
        if segment["p_type"] == "PT_INTERP":
            yield "interpreter", "it is a program as well as a library"
        if segment["p_type"] != "PT_LOAD" or not segment["p_flags"] & P_FLAGS.PF_X:
            continue
        if segment["p_flags"] & P_FLAGS.PF_W:
            yield f"segment at {segment['p_vaddr']:#x}", "memory that may be both written and executed"
        yield from _unseen(elf, segment)


def _unseen(elf: ELFFile, segment: Segment) -> Iterator[tuple[str, str]]:
    """Bytes that may be executed and that no section shows to a disassembler."""
    start, end = segment["p_vaddr"], segment["p_vaddr"] + segment["p_filesz"]
    apart = elf["e_machine"] == "EM_X86_64"  # its linkers keep data out of segments of code
    place = start if start else start + elf["e_ehsize"] + elf["e_phnum"] * elf["e_phentsize"]
    data = segment.data()
    for section in sorted(elf.iter_sections(), key=lambda section: section["sh_addr"]):
        first, last = section["sh_addr"], section["sh_addr"] + section["sh_size"]
        if not section["sh_flags"] & SH_FLAGS.SHF_ALLOC or first < start or last > end or section["sh_size"] == 0:
            continue
        if section["sh_offset"] - segment["p_offset"] != first - start:
            yield section.name, "its section header names other bytes than the loader takes"
        if apart and not section["sh_flags"] & SH_FLAGS.SHF_EXECINSTR:
            yield section.name, "data that may be executed"
        if data[place - start : first - start].strip(PADDING):
            yield f"address {place:#x}", f"{first - place:,} bytes that may be executed and are in no section"
        place = max(place, last)
    if data[place - start :].strip(PADDING):
        yield f"address {place:#x}", f"{end - place:,} bytes that may be executed and are in no section"


def _section_oddities(elf: ELFFile, dynamic: DynamicSegment) -> Iterator[tuple[str, str]]:
    by_name: dict[str, list[Section]] = {}
    for section in elf.iter_sections():
        by_name.setdefault(section.name, []).append(section)
    if any(len(by_name.get(name, [])) != 1 for name in (".dynamic", ".dynsym")):
        yield "section headers", "there is not exactly one .dynamic and one .dynsym"
        return
    table = next((tag.entry.d_val for tag in dynamic.iter_tags("DT_SYMTAB")), None)
    if by_name[".dynamic"][0]["sh_offset"] != dynamic["p_offset"] or by_name[".dynsym"][0]["sh_addr"] != table:
        yield "section headers", "they name other symbols or tags than the loader takes"
    for name in (".ctors", ".dtors", ".preinit_array"):
        for section in by_name.get(name, []):
            yield name, f"functions that run when the library is loaded or unloaded: {section['sh_size']} bytes"
    symbols = by_name.get(".symtab", [None])[0]
    if isinstance(symbols, SymbolTableSection):
        for symbol in symbols.iter_symbols():
            if symbol["st_info"]["type"] in ("STT_GNU_IFUNC", "STT_LOOS") and symbol["st_shndx"] != "SHN_UNDEF":
                yield symbol.name, "code that the loader runs to choose a function (IFUNC)"


def _word(elf: ELFFile, address: int) -> int:
    """The eight bytes at an address."""
    for offset in elf.address_offsets(address, 8):
        elf.stream.seek(offset)
        (value,) = struct.unpack("<Q", elf.stream.read(8))
        return int(value)
    raise ELFError(f"nothing is at {address:#x}")
