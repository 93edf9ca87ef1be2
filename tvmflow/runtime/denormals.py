"""Denormal numbers in threads that flush them to zero.

Whether the CPU does so is in a register of each thread. PyTorch's set_flush_denormal and libraries that were built with
-ffast-math set it, and threads inherit it. A library keeps denormals: the register is cleared around a call.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import platform
import sys
from collections.abc import Iterator

from tvmflow.errors import SetupError

# By machine: where the register is in C's fenv_t, and its bits that flush results or operands to zero.
REGISTERS = {"x86_64": (28, 0x8040), "AMD64": (28, 0x8040), "aarch64": (0, 0x1080000)}
FENV_BYTES = 256  # more than any fenv_t has
_smallest, _half = sys.float_info.min, 0.5


def are_flushed() -> bool:
    """Whether this thread takes denormal numbers for zero, or makes zeros of them; a tenth of a microsecond."""
    return not _smallest * _half > 0.0


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Denormals are numbers inside, in this thread and in those that it starts; the register is put back behind.

    Raises SetupError on a machine whose register is not known here.
    """
    if not are_flushed():
        yield
        return
    before, without = (ctypes.create_string_buffer(FENV_BYTES) for _ in range(2))
    library = _library()
    library.fegetenv(before)
    ctypes.memmove(without, before, FENV_BYTES)
    place, bits = REGISTERS[platform.machine()]
    register = ctypes.c_uint32.from_buffer(without, place)
    register.value &= ~bits
    library.fesetenv(without)
    try:
        yield
    finally:
        library.fesetenv(before)


@functools.cache
def _library() -> ctypes.CDLL:
    if platform.machine() in REGISTERS:
        for name in ("libm.so.6", None):
            with contextlib.suppress(OSError, AttributeError):
                library = ctypes.CDLL(name)
                _ = library.fegetenv, library.fesetenv
                return library
    raise SetupError(
        "this thread flushes denormal numbers to zero, which the library keeps (numerics.denormals)",
        "switch that off in the thread, e.g. by torch.set_flush_denormal(False)",
    )
