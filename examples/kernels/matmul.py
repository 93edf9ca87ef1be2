"""A matmul scheduled by hand for CPUs with AVX2 or AVX-512: panels, packing, double buffering, a register tile.

Each thread takes some panels of w's columns. It packs a panel into a buffer that stays in cache (Goto & van de Geijn
2008), the next one while this one is in use, and multiplies all rows by it in tiles that LLVM keeps in registers.
"""

from __future__ import annotations

from tvm import te
from tvm.s_tir import Schedule
from tvm.target import Target, codegen
from tvm.tirx import PrimFunc

from tvmflow.kernels.user import Call

VECTORS = 2  # registers of a tile's row
PANELS = 4  # that a thread takes at once; with fewer there is nothing to pack ahead


def scheduled(call: Call) -> Schedule | None:
    """x[m, k] @ w[k, n] in float32; None where the tiles do not divide the sizes."""
    if len(call.args) != 2 or {len(t.shape) for t in call.args} != {2} or call.output.dtype != "float32":
        return None
    (m, k), (_, n) = call.args[0].shape, call.args[1].shape
    lanes = codegen.llvm_get_vector_width(Target.current()) // 32
    rows, columns = (8 if lanes == 16 else 4), VECTORS * lanes
    if m % rows or n % (columns * PANELS):
        return None
    schedule = Schedule(matmul(m, n, k))
    tile(schedule, rows, columns)
    return schedule


def matmul(m: int, n: int, k: int) -> PrimFunc:
    """What is to be computed, without a word about how."""
    x, w = te.placeholder((m, k), "float32", "x"), te.placeholder((k, n), "float32", "w")
    r = te.reduce_axis((0, k), "r")
    return te.create_prim_func([x, w, te.compute((m, n), lambda i, j: te.sum(x[i, r] * w[r, j], axis=r), "y")])


def tile(schedule: Schedule, rows: int, columns: int) -> None:
    """Transforms `matmul`: y in tiles of rows x columns, w in packed panels of that many columns."""
    y = schedule.get_sblock("y")
    i, j, r = schedule.get_loops(y)
    i_tile, row = schedule.split(i, [None, rows])
    group, panel, column = schedule.split(j, [None, PANELS, columns])
    schedule.reorder(group, panel, i_tile, r, row, column)
    schedule.parallel(group)
    schedule.unroll(row)
    schedule.vectorize(column)

    packed = schedule.cache_read(y, 1, "global")
    schedule.compute_at(packed, panel)
    schedule.vectorize(schedule.get_loops(packed)[-1])
    schedule.annotate(packed, "double_buffer_scope", 0)
    schedule.annotate(panel, "software_pipeline_stage", [0, 1])  # pack, and one panel later multiply
    schedule.annotate(panel, "software_pipeline_order", [0, 1])

    written = schedule.cache_write(y, 0, "global")
    schedule.reverse_compute_at(written, i_tile)
    schedule.vectorize(schedule.get_loops(written)[-1])
    schedule.decompose_reduction(y, r)
