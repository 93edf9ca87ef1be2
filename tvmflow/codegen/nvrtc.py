"""NVRTC, NVIDIA's CUDA compiler in a library, called through its C interface (nvrtc.h, CUDA 13)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tvmflow.errors import CompileError


@dataclass(frozen=True)
class Compiled:
    """What a CUDA compiler made of one source: machine code (an ELF image), and the PTX it came from."""

    cubin: bytes
    ptx: str


def version(library: Path) -> str:
    """The library's CUDA version, e.g. "13.5"."""
    nvrtc = ctypes.CDLL(str(library))
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(nvrtc, nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return f"{major.value}.{minor.value}"


def architectures(library: Path) -> tuple[int, ...]:
    """The real architectures that the library generates code for, as numbers: 80 for sm_80."""
    nvrtc = ctypes.CDLL(str(library))
    count = ctypes.c_int()
    _check(nvrtc, nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
    numbers = (ctypes.c_int * count.value)()
    _check(nvrtc, nvrtc.nvrtcGetSupportedArchs(numbers))
    return tuple(numbers)


def compile_source(library: Path, source: str, options: Sequence[str]) -> Compiled:
    """Compiles CUDA C++ with exactly `options`. Raises CompileError, the compiler's log in its details."""
    nvrtc = ctypes.CDLL(str(library))
    program = ctypes.c_void_p()
    encoded = [option.encode() for option in options]
    # The name appears in messages only; a fixed one keeps the output the same everywhere.
    created = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None)
    _check(nvrtc, created)
    try:
        failed = nvrtc.nvrtcCompileProgram(program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded))
        if failed:
            raise CompileError("NVRTC rejects the source", details=_text(nvrtc, program, "ProgramLog"))
        return Compiled(_bytes(nvrtc, program, "CUBIN"), _text(nvrtc, program, "PTX"))
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _bytes(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(nvrtc, nvrtc[f"nvrtcGet{what}Size"](program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(nvrtc, nvrtc[f"nvrtcGet{what}"](program, buffer))
    return buffer.raw


def _text(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> str:
    return _bytes(nvrtc, program, what).rstrip(b"\0").decode(errors="replace")


def _check(nvrtc: ctypes.CDLL, status: int) -> None:
    if status:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        reason = nvrtc.nvrtcGetErrorString(status).decode()
        raise CompileError(f"NVRTC failed: {reason}", "reinstall nvidia-cuda-nvrtc")
