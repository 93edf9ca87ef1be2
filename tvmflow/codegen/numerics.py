"""What `[numerics]` means on every layer: TVM's passes, LLVM's code generator, the CUDA compilers.

Each function states every switch of its layer, also those at their default, so that nothing is inherited.

| layer                | fast_math = false                       | fast_math = true             |
|----------------------|-----------------------------------------|------------------------------|
| TVM's CUDA functions | expf, tanhf, powf, ...                  | __expf, __tanhf, __powf, ... |
| LLVM's instructions  | no fast-math flag                       | arcp, contract, nsz, reassoc |
| functions on a CPU   | vector_math.py, within 4 ulp            | the same, signs of 0 aside   |
| NVRTC, nvcc          | IEEE division and roots, denormals kept | the whole of --use_fast_math |

Fused multiply-add is allowed in both modes and on both targets: it rounds once where two instructions round
twice, and TVM's LLVM code generator has no switch against it (it sets FPOpFusion::Fast).

NaN and infinity stay values in both modes: masks of -inf are ordinary in models, so LLVM's nnan and ninf are
never set, and --use_fast_math does not assume their absence. (TVM sets LLVM's NoNaNsFPMath target option
regardless, and its simplifier takes x - x and x * 0 for 0 and x != x for false, without a switch for either:
kernels/rewrites/compute_exactly.py and kernels/rewrites/compare_exactly.py keep both from data.)
LLVM's afn cannot be set: TVM's target has no attribute for it.

TF32 has no switch in any of these layers, because none of them makes use of it unasked: a float32 product
stays one unless a kernel asks for TF32 by name. So `tf32` decides which schedules are allowed (kernels/tf32),
nothing here.
"""

from __future__ import annotations

from tvmflow.config import NumericsSection


def pass_config(numerics: NumericsSection) -> dict[str, bool]:
    """The options of tvm.transform.PassContext by which precision is decided; one exists in TVM 0.27."""
    return {"tirx.enable_fast_math": numerics.fast_math}


def llvm_attributes(numerics: NumericsSection) -> dict[str, bool]:
    """The attributes of a `{"kind": "llvm", ...}` target by which precision is decided.

    `fast-math` itself is never set: it would imply nnan and ninf.
    """
    return {
        "fast-math": False,
        "fast-math-nnan": False,
        "fast-math-ninf": False,
        "fast-math-nsz": numerics.fast_math,
        "fast-math-arcp": numerics.fast_math,
        "fast-math-contract": numerics.fast_math,
        "fast-math-reassoc": numerics.fast_math,
    }


def cuda_options(numerics: NumericsSection) -> tuple[str, ...]:
    """The options of a CUDA compiler by which precision is decided; NVRTC and nvcc spell them alike.

    --use_fast_math also replaces sinf by __sinf and so on, which no other option does.
    """
    if numerics.fast_math:
        return ("--use_fast_math", "--fmad=true", "--ftz=true", "--prec-div=false", "--prec-sqrt=false")
    return ("--fmad=true", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
