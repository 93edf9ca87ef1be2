"""The machine code inside a built CUDA library: which cubins it holds, and that it holds nothing else."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from elftools.elf.elffile import ELFFile

from tvmflow.errors import CompileError

# An ELF image for NVIDIA GPUs: 64 bits, little-endian, and e_machine EM_CUDA (190) at offset 18.
_CUBIN = re.compile(rb"\x7fELF\x02\x01.{12}\xbe\x00", re.DOTALL)
_PTX = re.compile(rb"\.version\s+\d+\.\d+\s+\.target\s+sm_\d+")
_SOURCE = b"__global__"
_KERNEL_PREFIX = ".text."


@dataclass(frozen=True)
class Cubin:
    """One image of machine code."""

    arch: str
    """As given to the assembler, e.g. "sm_90a"."""
    kernels: tuple[str, ...]
    size_bytes: int
    sha256: str


def cubins(library: Path) -> tuple[Cubin, ...]:
    """The cubins embedded in a shared library, in their order in the file."""
    return tuple(_read(image) for image in images(library))


def images(library: Path) -> Iterator[bytes]:
    """The bytes of each cubin embedded in a shared library."""
    data = library.read_bytes()
    for match in _CUBIN.finditer(data):
        yield data[match.start() : match.start() + _size(data[match.start() :])]


def assert_machine_code(library: Path, arch: str) -> tuple[Cubin, ...]:
    """The library's cubins, every one of them for `arch`.

    Raises CompileError where the library holds CUDA source, PTX, no cubin at all, or one for another
    architecture. Source and PTX would be compiled on the machine that loads them, by that machine's rules.
    """
    data = library.read_bytes()
    hint = "this is a fault of the build, not of the model; please report it"
    if _SOURCE in data:
        raise CompileError(f"{library}: holds CUDA source instead of machine code", hint)
    if _PTX.search(data):
        raise CompileError(f"{library}: holds PTX instead of machine code", hint)
    found = cubins(library)
    if not found:
        raise CompileError(f"{library}: holds no machine code for a GPU", hint)
    others = sorted({cubin.arch for cubin in found} - {arch})
    if others:
        raise CompileError(f"{library}: holds machine code for {', '.join(others)} instead of {arch}", hint)
    return found


def _read(image: bytes) -> Cubin:
    elf = ELFFile(io.BytesIO(image))
    names = [section.name for section in elf.iter_sections()]
    kernels = sorted(name.removeprefix(_KERNEL_PREFIX) for name in names if name.startswith(_KERNEL_PREFIX))
    return Cubin(_arch(elf), tuple(kernels), len(image), hashlib.sha256(image).hexdigest())


def _arch(elf: ELFFile) -> str:
    """From the assembler's note of its own command line; the ELF flags do not tell sm_90 from sm_90a."""
    note = elf.get_section_by_name(".note.nv.tkinfo")
    found = re.search(rb"-arch (sm_\d+[af]?)", note.data()) if note else None
    if found is None:
        raise CompileError("a cubin does not say its architecture", "it was not made by ptxas of CUDA 13")
    return found[1].decode()


def _size(data: bytes) -> int:
    """Where the ELF image that `data` starts with ends: after its last table or section."""
    elf = ELFFile(io.BytesIO(data))
    header = elf.header
    sections = [s["sh_offset"] + s["sh_size"] for s in elf.iter_sections() if s["sh_type"] != "SHT_NOBITS"]
    return int(
        max(
            header["e_shoff"] + header["e_shnum"] * header["e_shentsize"],
            header["e_phoff"] + header["e_phnum"] * header["e_phentsize"],
            *sections,
        )
    )
