"""What tuning candidates for a GPU are built inside of: the same as the library that their schedules end up in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tvmflow.codegen import cuda, numerics
from tvmflow.config import NumericsSection


@contextmanager
def cuda_step(arch: str, section: NumericsSection) -> Iterator[None]:
    """TVM's options of a numerics mode and our CUDA compile step; raises what `cuda.compile_step` raises."""
    import tvm

    config = numerics.pass_config(section)
    with tvm.transform.PassContext(opt_level=3, config=config), cuda.compile_step(arch, section):
        yield
