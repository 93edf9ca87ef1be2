"""Maxima and minima of CUDA source keep NaN: seen in the PTX, since not every machine has a GPU."""

import re
from collections import Counter

import pytest

from tvmflow.codegen import cuda
from tvmflow.config import NumericsSection
from tvmflow.errors import SetupError
from tvmflow.kernels.rewrites.cuda_nan import propagate

HEADERS = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n"
SOURCE = """extern "C" __global__ void floats(float* f, double* d) {
  f[0] = max(f[1], 0x0p+0f);
  f[2] = min(max(f[3], f[4]), f[5]);
  d[0] = max(d[1], d[2]);
}
extern "C" __global__ void halves(half* h, nv_bfloat16* b) { h[0] = max(h[1], h[2]); b[0] = min(b[1], b[2]); }
extern "C" __global__ void integers(int* i, long long* l) {
  i[0] = max(i[1], 3);
  l[0] = min(l[1], (long long)i[2]);
  i[4] = max(i[5], 7u);
}"""


def pickers(source: str, arch: str) -> Counter[str]:
    """The max and min instructions that a source becomes."""
    try:
        ptx = cuda.compile_source(source, arch, NumericsSection()).ptx
    except SetupError as exc:
        pytest.skip(exc.message)
    return Counter(re.findall(r"\b(?:max|min)\.[A-Za-z0-9.]+", ptx))


INTEGERS = {"max.s32": 1, "min.s64": 1, "max.u32": 1}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_float_maxima_have_their_nan_form_and_integer_maxima_are_as_before(arch: str) -> None:
    floats = {"max.NaN.f32": 2, "min.NaN.f32": 1, "max.NaN.f16": 1, "min.NaN.bf16": 1}
    assert pickers(HEADERS + propagate(SOURCE), arch) == {**floats, **INTEGERS}


def test_cuda_itself_drops_nan() -> None:
    plain = SOURCE.replace("h[0] = max(h[1], h[2]); b[0] = min(b[1], b[2]);", "")
    assert pickers(HEADERS + plain, "sm_80") == {"max.f32": 2, "min.f32": 1, "max.f64": 1, **INTEGERS}


def test_an_architecture_without_the_nan_form_compiles() -> None:
    assert not any("NaN" in name for name in pickers(HEADERS + propagate(SOURCE), "sm_75"))


def test_source_without_headers_of_half_types_compiles() -> None:
    floats_only = SOURCE[: SOURCE.index('extern "C" __global__ void halves')]
    assert pickers(propagate(floats_only), "sm_80") == {"max.NaN.f32": 2, "min.NaN.f32": 1}


def test_source_without_kernels_is_left_alone() -> None:
    assert propagate("__device__ int f();") == "__device__ int f();"
