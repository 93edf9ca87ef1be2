"""Reads a built shared library without loading it: what it links to, what it asks for, the modules packed into it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.constants import SH_FLAGS
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from tvmflow.audit import image
from tvmflow.audit.image import Image
from tvmflow.errors import ArtifactError

MODULES = "__tvm_ffi__library_bin"  # the symbol under which TVM packs the modules that are no object code
VIRTUAL_MACHINE = "relax.VMExecutable"
IN_OBJECT_CODE = "_lib"  # a module's kind where it is the library's own machine code: nothing is packed for it
ASKED_FOR = ".tvm_func."  # LLVM's code keeps a function that it asked TVM's run time for in a variable of this name
OWN_KERNEL = "__tvm_ffi_"  # what TVM puts before the name of each function that its run time can look up
UNREADABLE = (
    ELFError,
    OSError,
    struct.error,
    AttributeError,
    IndexError,
    KeyError,
    ValueError,
    AssertionError,
)
DATA = {"_library_bin", "_library_ctx"}  # what is offered in the same way and is no function
MACHINES = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}  # as `uname -m` has them


@dataclass(frozen=True)
class Library:
    """One shared library.

    `machine` is what its code is for. `needed` are its DT_NEEDED entries. `image` says what the loader does with it,
    and which symbols it lacks. `asked` are the names that its code asks TVM's run time for; None where the symbol
    table was stripped. `defined` are the functions that it offers to TVM's run time. `executable` are the names of
    sections with code. `modules` are the (kind, bytes) packed into it.
    """

    path: Path
    machine: str
    needed: tuple[str, ...]
    image: Image
    asked: tuple[str, ...] | None
    defined: frozenset[str]
    executable: tuple[str, ...]
    modules: tuple[tuple[str, bytes], ...]

    @cached_property
    def bytecode(self) -> bytes:
        """The virtual machine's executable; raises ArtifactError where there is none."""
        for kind, data in self.modules:
            if kind == VIRTUAL_MACHINE:
                return data
        raise ArtifactError(f"{self.path}: holds no executable of TVM's virtual machine", "compile the model again")

    @property
    def foreign_modules(self) -> tuple[str, ...]:
        """Kinds of packed modules that are neither the virtual machine, nor machine code, nor CUDA kernels."""
        return tuple(kind for kind, _ in self.modules if kind not in (VIRTUAL_MACHINE, IN_OBJECT_CODE, "cuda"))


def read(path: Path) -> Library:
    """Raises ArtifactError for what is no shared library of TVM's."""
    try:
        with path.open("rb") as stream:
            elf = ELFFile(stream)
            names = None if elf.get_section_by_name(".symtab") is None else list(_names(elf, ".symtab"))
            return Library(
                path=path,
                machine=MACHINES.get(elf["e_machine"], str(elf["e_machine"]).removeprefix("EM_").lower()),
                needed=tuple(_needed(elf)),
                image=image.read(elf),
                asked=None
                if names is None
                else tuple(sorted({name.removeprefix(ASKED_FOR) for name in names if name.startswith(ASKED_FOR)})),
                defined=frozenset(_names(elf, ".dynsym", OWN_KERNEL)) - DATA,
                executable=tuple(s.name for s in elf.iter_sections() if s["sh_flags"] & SH_FLAGS.SHF_EXECINSTR),
                modules=tuple(_modules(elf)),
            )
    except UNREADABLE as exc:
        raise ArtifactError(f"{path}: not a shared library of TVM's: {exc}", "compile the model again") from None


def _needed(elf: ELFFile) -> Iterator[str]:
    for section in elf.iter_sections():
        if isinstance(section, DynamicSection):
            yield from (str(vars(tag)["needed"]) for tag in section.iter_tags("DT_NEEDED"))


def _names(elf: ELFFile, table: str, prefix: str = "") -> Iterator[str]:
    section = elf.get_section_by_name(table)
    if isinstance(section, SymbolTableSection):
        for symbol in section.iter_symbols():
            if symbol.name.startswith(prefix) and symbol["st_shndx"] != "SHN_UNDEF":
                yield symbol.name.removeprefix(prefix)


def _modules(elf: ELFFile) -> Iterator[tuple[str, bytes]]:
    """TVM's own format: bytes in all, the tree of imports in two lists of numbers, then kind and bytes per module."""
    data = _packed(elf)
    place = 8
    for _ in range(2):
        (count,) = struct.unpack_from("<Q", data, place)
        place += 8 * (count + 1)
    while place < len(data):
        kind, place = _text(data, place)
        body, place = (b"", place) if kind == IN_OBJECT_CODE.encode() else _text(data, place)
        yield kind.decode(), body


def _packed(elf: ELFFile) -> bytes:
    symbols = elf.get_section_by_name(".dynsym")
    found = symbols.get_symbol_by_name(MODULES) if isinstance(symbols, SymbolTableSection) else None
    if not found:
        raise ELFError(f"it has no symbol {MODULES}")
    symbol = found[0]
    section = elf.get_section(symbol["st_shndx"])
    start = symbol["st_value"] - section["sh_addr"]
    return bytes(section.data()[start : start + symbol["st_size"]])


def _text(data: bytes, place: int) -> tuple[bytes, int]:
    (size,) = struct.unpack_from("<Q", data, place)
    return data[place + 8 : place + 8 + size], place + 8 + size
