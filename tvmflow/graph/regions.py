"""Which parts of its buffers a block reads, where TVM's FuseTIR says too little.

An operator that takes one tensor twice, Concat(x, x), reads it in two places; of a fused kernel's block FuseTIR keeps
one of the two, and a schedule that moves the producer to the block then computes too little.
"""

from __future__ import annotations

import tvm_ffi
from tvm import relax
from tvm.ir import Var
from tvm.s_tir import SBlock
from tvm.s_tir.analysis import get_sblock_access_region
from tvm.tirx import PrimFunc


def takes_one_twice(group: relax.Function) -> bool:
    """Whether an operator in a group of operators takes a tensor more than once."""
    found: list[bool] = []

    def visit(node: object) -> None:
        if isinstance(node, relax.Call) and getattr(node.op, "name", "").startswith("relax.call_tir"):
            args = [arg for arg in node.args[1] if isinstance(arg, relax.Var)]
            found.append(len(set(args)) < len(args))

    relax.analysis.post_order_visit(group, visit)
    return any(found)


def restated(function: PrimFunc) -> PrimFunc:
    """The function, each of its blocks saying all that it reads of a buffer that it reads more than once."""
    buffers = list(function.params)
    tvm_ffi.structural_walk(function.body, (SBlock, lambda block: buffers.extend(block.alloc_buffers)))
    places = {buffer: buffer for buffer in buffers}
    replace = (SBlock, lambda block: _restated(block, places))
    return function.with_body(tvm_ffi.structural_map(function.body, replace))


def _restated(block: SBlock, places: dict[Var, Var]) -> SBlock:
    reads, _, _ = get_sblock_access_region(block, places)
    found = [next((now for now in reads if now.source.same_as(said.source)), said) for said in block.reads]
    if all(tvm_ffi.structural_equal(now, said) for now, said in zip(found, block.reads, strict=True)):
        return block
    return SBlock(
        block.iter_vars,
        found,
        block.writes,
        block.name_hint,
        block.body,
        block.init,
        block.alloc_buffers,
        block.match_buffers,
        block.annotations,
    )
