"""Whether the tests that compile CUDA code can run here."""

from __future__ import annotations

import pytest

from tvmflow.codegen import cuda
from tvmflow.errors import SetupError


def has_compiler() -> bool:
    try:
        cuda.compiler()
    except SetupError:
        return False
    return True


needed = pytest.mark.skipif(not has_compiler(), reason="neither NVRTC nor nvcc is installed")
