"""Loads a library by its content: what was hashed is what runs, whatever stands at the file's path meanwhile.

The system's loader knows open libraries by path, device and inode. A library that replaces another at its path, or is
written over it, would be taken for the one that is open. So the checked bytes get a file of their own in memory, which
nobody can change, under a path that was never used before. Equal bytes are one library for the whole process.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import struct
import tempfile
import threading
from pathlib import Path
from typing import Any

import tvm_ffi

from tvmflow.errors import ArtifactError, first_line

ELF_HEADER, PROGRAM_HEADER = struct.Struct("<4s5B7x2HI3QI6H"), struct.Struct("<2I6Q")
ELF64, LITTLE_ENDIAN, SHARED_OBJECT, LOADED, DYNAMIC = 2, 1, 3, 1, 2
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
MFD_EXEC = 0x10  # linux/memfd.h, since Linux 6.3
_loaded: dict[str, Any] = {}
_lock = threading.Lock()
_numbers = itertools.count(1)


def load(content: bytes, sha256: str, shown: Path) -> Any:
    """The library that `content` is, as a module of tvm-ffi; `sha256` is that of `content`.

    It stays mapped until the process ends: what it made (tensors, functions) may outlive every session. Raises
    ArtifactError for what cannot be loaded.
    """
    with _lock:
        if sha256 not in _loaded:
            _check(content, shown)
            try:
                _loaded[sha256] = _open(content, sha256)
            except (RuntimeError, OSError) as exc:
                raise ArtifactError(
                    f"{shown}: cannot be loaded: {first_line(exc)[:300]}", "compile the model again"
                ) from None
        return _loaded[sha256]


def _open(content: bytes, sha256: str) -> Any:
    try:
        return _open_in_memory(content, sha256)
    except (RuntimeError, OSError):  # where files in memory cannot be had or must not be run
        with tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
            file = Path(folder) / f"{sha256}.so"
            file.write_bytes(content)
            return _module(str(file))


def _open_in_memory(content: bytes, sha256: str) -> Any:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        descriptor = os.memfd_create(f"tvmflow-{sha256[:16]}", flags | MFD_EXEC)
    except OSError:
        descriptor = os.memfd_create(f"tvmflow-{sha256[:16]}", flags)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)
        stream.flush()
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        # Descriptors' numbers come again. The loader compares texts, so that each load gets one of its own.
        spelling = "".join("./" if bit == "1" else "/" for bit in f"{next(_numbers):b}")
        return _module(f"/proc/self/fd/{spelling}{descriptor}")


def _module(path: str) -> Any:
    """As `tvm_ffi.load_module`, which goes by the file's ending; what is loaded stays so."""
    module = tvm_ffi.get_global_func("ffi.Module.load_from_file.so")(path, "so")
    tvm_ffi.get_global_func("ffi.ModuleGlobalsAdd")(module)
    return module


def _check(content: bytes, shown: Path) -> None:
    """Raises ArtifactError for what is no whole library: the loader would map it and die where it ends too early."""
    try:
        whole = _is_whole(content)
    except struct.error:
        whole = False
    if not whole:
        raise ArtifactError(f"{shown}: is not a whole library of this kind of machine", "compile the model again")


def _is_whole(content: bytes) -> bool:
    magic, bits, order, *_, kind, _, _, _, programs, sections, _, _, size, count, section_size, section_count, _ = (
        ELF_HEADER.unpack_from(content)
    )
    if (magic, bits, order, kind, size) != (b"\x7fELF", ELF64, LITTLE_ENDIAN, SHARED_OBJECT, PROGRAM_HEADER.size):
        return False
    headers = [PROGRAM_HEADER.unpack_from(content, programs + index * size) for index in range(count)]
    ends = [header[2] + header[5] for header in headers]
    kinds = {header[0] for header in headers}
    return {LOADED, DYNAMIC} <= kinds and max(*ends, sections + section_count * section_size) <= len(content)
