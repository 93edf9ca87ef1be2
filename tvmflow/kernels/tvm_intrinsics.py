"""The tensor intrinsics that schedules may name, made known to TVM without those of every other target."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys

PACKAGE = "tvm.s_tir.tensor_intrin"


@functools.cache
def load_of_cpu(machine: str) -> None:
    """Registers TVM's intrinsics of a CPU architecture, as `uname -m` calls it.

    TVM's own package registers those of every GPU too, and the 496 for CUDA alone take over 20 s to parse. So the
    package is put in place without running it, and the module that is needed is imported from it.
    """
    hide_others()
    if importlib.util.find_spec(PACKAGE) is not None:
        importlib.import_module(f"{PACKAGE}.arm_cpu" if machine == "aarch64" else f"{PACKAGE}.x86")


@functools.cache
def hide_others() -> None:
    """Puts TVM's package of intrinsics in place without running it."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is not None and PACKAGE not in sys.modules:
        sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
