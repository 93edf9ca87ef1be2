"""What a CUDA compiler made of each kernel, held against what the functions in the kernel's source need.

Precise functions hold approximate instructions themselves: expf is a polynomial around ex2.approx.ftz, tanhf divides by
rcp.approx.ftz. So each kernel may hold those of the functions that it calls, and no others.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

# The approximate and flushing instructions of precise functions, as nvcc 13 and NVRTC compile them for sm_80 and sm_90.
# A function that is not here needs none, or is not precise.
NEEDED = {
    "expf": {"ex2.approx.ftz.f32"},
    "exp2f": {"ex2.approx.f32"},
    "exp10f": {"ex2.approx.ftz.f32"},
    "expm1f": {"ex2.approx.f32"},
    "tanhf": {"ex2.approx.ftz.f32", "rcp.approx.ftz.f32"},
    "sinhf": {"ex2.approx.ftz.f32", "div.approx.ftz.f32"},
    "coshf": {"ex2.approx.ftz.f32", "div.approx.ftz.f32"},
    "tanf": {"rcp.approx.ftz.f32"},
    "asinf": {"rsqrt.approx.ftz.f32"},
    "acosf": {"rsqrt.approx.ftz.f32"},
    "atanf": {"rcp.approx.ftz.f32"},
    "asinhf": {"rsqrt.approx.ftz.f32", "rcp.approx.ftz.f32"},
    "acoshf": {"rsqrt.approx.ftz.f32"},
    "atanhf": {"rcp.approx.ftz.f32"},
    "erff": {"ex2.approx.ftz.f32"},
    "erfcf": {"ex2.approx.ftz.f32", "rcp.approx.ftz.f32"},
    "rsqrtf": {"rsqrt.approx.f32"},
    "__frsqrt_rn": {"rsqrt.approx.ftz.f32"},
    "cbrtf": {"lg2.approx.f32", "ex2.approx.ftz.f32"},
    "powf": {"rcp.approx.ftz.f32"},
    "fmodf": {"rcp.approx.ftz.f32", "div.approx.f32"},
    "remainderf": {"rcp.approx.ftz.f32", "div.approx.f32"},
    "lgammaf": {"rcp.approx.ftz.f32"},
    "tgammaf": {"rcp.approx.ftz.f32", "div.approx.f32"},
    "erfinvf": {"lg2.approx.ftz.f32", "rsqrt.approx.ftz.f32"},
    "erf": {"ex2.approx.ftz.f32"},
    "tanh": {"ex2.approx.ftz.f32"},
    "cbrt": {"ex2.approx.ftz.f32", "lg2.approx.ftz.f32"},
}
# float16's functions compute in float32, and are exact after rounding; "half" also stands for its division.
HALF = {"ex2.approx.ftz.f32", "lg2.approx.ftz.f32", "rcp.approx.ftz.f32", "rsqrt.approx.ftz.f32", "sqrt.approx.ftz.f32"}
_HALF_USE = re.compile(r"\b(?:(?:__)?(?:half2?|nv_bfloat162?)|h(?:exp2?|exp10|log2?|log10|r?sqrt|rcp|tanh))\b")
_ENTRY = re.compile(r"\.entry\s+([\w$]+)")
_KERNEL = re.compile(r"__global__[^(;{]*?(?:__launch_bounds__\([^)]*\)\s*)?\b(\w+)\s*\(", re.DOTALL)
_INSTRUCTION = re.compile(r"\b[a-z][a-z0-9]*(?:\.[A-Za-z0-9_]+)+")
_CALLED = re.compile(r"\b([A-Za-z_]\w*)\s*\(")
_ASSEMBLY = re.compile(r"\basm\b.*?\)\s*;", re.DOTALL)
_INTRINSIC = re.compile(r"__(?:expf|exp10f|logf|log2f|log10f|sinf|cosf|tanf|sincosf|powf|fdividef|tanhf)")
_INEXACT = {"approx", "ftz", "full"}


def approximations(source: str, ptx: str) -> dict[str, dict[str, int]]:
    """By kernel, what approximates or flushes denormals beyond what its source's functions need.

    That is: PTX instructions by full name, intrinsic functions of CUDA that approximate, and such instructions in
    assembly of the source's own. Kernels without any are left out.
    """
    sources = dict(_sources(source))
    found = {}
    for kernel, body in _entries(ptx):
        text = sources.get(kernel, "")
        allowed = _allowed(text)
        counts = {name: n for name, n in _inexact(body).items() if name not in allowed}
        if excess := counts | _by_hand(text):
            found[kernel] = excess
    return found


def _inexact(text: str) -> Counter[str]:
    """Those of float64 aside: CUDA has no approximate functions of it, and precise ones refine such instructions."""
    names = (name for name in _INSTRUCTION.findall(text) if not name.endswith(".f64"))
    return Counter(name for name in names if _INEXACT & {*name.split(".")})


def _by_hand(source: str) -> dict[str, int]:
    """Approximate intrinsics, and approximate instructions in the source's own assembly."""
    called = Counter(name for name in _CALLED.findall(source) if _INTRINSIC.fullmatch(name))
    assembly = Counter(f"asm {name}" for part in _ASSEMBLY.findall(source) for name in _inexact(part))
    return dict(called + assembly)


def _allowed(source: str) -> set[str]:
    called = set(_CALLED.findall(source))
    allowed = set().union(*(NEEDED[name] for name in called & NEEDED.keys()))
    return allowed | (HALF if _HALF_USE.search(source) else set())


def _entries(ptx: str) -> Iterator[tuple[str, str]]:
    places = [(match[1], match.start()) for match in _ENTRY.finditer(ptx)]
    ends = [start for _, start in places[1:]] + [len(ptx)]
    for (name, start), end in zip(places, ends, strict=True):
        yield name, ptx[start:end]


def _sources(source: str) -> Iterator[tuple[str, str]]:
    """Each kernel's own text; what stands before the first kernel, which all may call, is left out."""
    places = [(match[1], match.start()) for match in _KERNEL.finditer(source)]
    ends = [start for _, start in places[1:]] + [len(source)]
    seen: dict[str, str] = {}
    for (name, start), end in zip(places, ends, strict=True):
        seen[name] = seen.get(name, "") + source[start:end]  # first declared, then defined
    yield from seen.items()
