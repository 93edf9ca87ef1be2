"""The blocks by which a schedule asks for its constant weights in another layout."""

from __future__ import annotations

import math

import tvm_ffi
from tvm.s_tir import SBlock
from tvm.tirx import PrimFunc

REPACKING = "meta_schedule.layout_rewrite_preproc"  # annotates a block that repacks a weight before the kernel proper


def blocks(function: PrimFunc) -> list[SBlock]:
    """The repacking blocks of a scheduled function."""
    found: list[SBlock] = []

    def visit(block: SBlock) -> None:
        if REPACKING in block.annotations:
            found.append(block)

    tvm_ffi.structural_walk(function.body, (SBlock, visit))
    return found


def is_whole(function: PrimFunc) -> bool:
    """Whether every repacked weight keeps all of its elements.

    The layouts that TVM suggests for indices that run backwards (transposed convolutions) do not: kernels with them
    would read what is not there.
    """
    return all(
        math.prod(int(d) for d in block.reads[0].source.ty.shape)
        == math.prod(int(d) for d in block.writes[0].source.ty.shape)
        for block in blocks(function)
    )
