"""Maximum and minimum that keep NaN in CUDA code, as in NumPy, PyTorch and ONNX.

TVM prints both as CUDA's `max` and `min`, which return the operand that is a number; its own `max` of halves
keeps a NaN on one side only. So Relu, Clip, MaxPool and ReduceMax would turn NaN into a number.

The change is made to the generated text, not to the PrimFunc: TVM recognises max reductions by their Max
node, and a call in its place could neither be reduced across threads nor vectorised. It costs nothing from
sm_80 on, where the instruction has a NaN form (PTX ISA, `max`); float64 and older architectures compare once
more.
"""

from __future__ import annotations

_FIRST_KERNEL = 'extern "C" __global__'

_OVERLOADS = r"""
template <typename A, typename B> __device__ __forceinline__ auto nan_{op}(A a, B b) {{ return {op}(a, b); }}
__device__ __forceinline__ double nan_{op}(double a, double b) {{ return a {sign} b || a != a ? a : b; }}
#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ float nan_{op}(float a, float b) {{
  float c;
  asm("{op}.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}}
#else
__device__ __forceinline__ float nan_{op}(float a, float b) {{ return a {sign} b || a != a ? a : b; }}
#endif
#ifdef __CUDA_FP16_H__
__device__ __forceinline__ half nan_{op}(half a, half b) {{ return __h{op}_nan(a, b); }}
#endif
#ifdef __CUDA_BF16_H__
__device__ __forceinline__ nv_bfloat16 nan_{op}(nv_bfloat16 a, nv_bfloat16 b) {{ return __h{op}_nan(a, b); }}
#endif
"""
_PRELUDE = (
    _OVERLOADS.format(op="max", sign=">")
    + _OVERLOADS.format(op="min", sign="<")
    + "#define max nan_max\n#define min nan_min\n"
)


def propagate(source: str) -> str:
    """TVM's CUDA source with maxima and minima that are NaN where an operand is."""
    headers, kernel, kernels = source.partition(_FIRST_KERNEL)
    return headers + (_PRELUDE if kernel else "") + kernel + kernels
