"""What the machine can do at best: a kernel of nothing but independent multiply-adds in registers."""

from __future__ import annotations

import tvm

from tvmflow.tuning.measure import Measurer
from tvmflow.tuning.search import job_of

# A multiply-add takes 4 cycles and two start in each, on x86 and Arm cores of today; more chains than that product
# would not fit the stack space that TVM gives a kernel, and go through memory.
CHAINS, STEPS = 8, 1 << 15


def fma_gflops(target: tvm.target.Target, threads: int, measurer: Measurer) -> float | None:
    """10^9 float32 operations per second (an FMA is two) with `threads` threads; None where it cannot be measured."""
    lanes = int(tvm.get_global_func("target.llvm_get_vector_width")(target)) // 32
    function = _kernel(threads, lanes)
    (result,) = measurer.measure([job_of(tvm.IRModule({"main": function}))], None)
    return threads * CHAINS * lanes * STEPS * 2 / min(result.samples_s) / 1e9 if result.samples_s else None


def _kernel(threads: int, lanes: int) -> tvm.tirx.PrimFunc:
    return tvm.script.from_source(f"""
@T.prim_func(s_tir=True)
def main(x: T.Buffer((2, {lanes}), "float32"), out: T.Buffer(({threads}, {CHAINS}, {lanes}), "float32")):
    for thread in T.parallel({threads}):
        with T.sblock("chains"):
            worker = T.axis.spatial({threads}, thread)
            sums = T.sblock_alloc_buffer(({CHAINS}, {lanes}), "float32")
            for chain in T.unroll({CHAINS}):
                for lane in T.vectorized({lanes}):
                    sums[chain, lane] = T.float32(0)
            for step in range({STEPS}):
                for chain in T.unroll({CHAINS}):
                    for lane in T.vectorized({lanes}):
                        sums[chain, lane] = sums[chain, lane] * x[0, lane] + x[1, lane]
            for chain in T.unroll({CHAINS}):
                for lane in T.vectorized({lanes}):
                    out[worker, chain, lane] = sums[chain, lane]
""")
