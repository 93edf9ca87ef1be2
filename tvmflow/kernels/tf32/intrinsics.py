"""TF32 tensor cores as tensor intrinsics: a product of 16 x 8 by 8 x 16 float32 elements by the 32 lanes of a warp.

Operands are rounded to TF32 (8 bits of exponent, 10 of mantissa) to the nearest when they are read from shared memory;
sums are float32. TVM knows neither the type nor the instruction, so the intrinsics call CUDA functions that its code
generator takes over as text.

Each lane holds 4 elements of either operand and 8 of the result, as the PTX ISA lays them out for
mma.sync.aligned.m16n8k8 with .tf32 (two such instructions, for the left and right 8 columns, are one intrinsic):

    operands   element i of lane n is row n / 4 + 8 (i mod 2), k = n mod 4 + 4 (i / 2); B's rows are columns of C
    result     element i of lane n is row n / 4 + 8 (i / 2 mod 2), column 8 (i / 4) + 2 (n mod 4) + i mod 2

A lane's elements stand at the start of the place that a whole tile would take in a local array. All that is used of
such an array has constant indices and becomes registers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import tvm
from tvm.s_tir import TensorIntrin

M, N, K, WARP = 16, 16, 8, 32
SHARED = "shared.dyn"

LOAD = """
__device__ __forceinline__ void tf32_load(float* fragment, const float* source, int row_stride, int k_stride) {
  int row = threadIdx.x / 4, k = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float element = source[(row + 8 * (i % 2)) * row_stride + (k + 4 * (i / 2)) * k_stride];
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(*(unsigned*)(fragment + i)) : "f"(element));
  }
}
"""
MULTIPLY = """
__device__ __forceinline__ void tf32_multiply(float* c, const float* a, const float* b) {
  const unsigned* x = (const unsigned*)a;
  const unsigned* y = (const unsigned*)b;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float* z = c + 4 * half;
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(z[0]), "+f"(z[1]), "+f"(z[2]), "+f"(z[3])
        : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[half]), "r"(y[half + 2]));
  }
}
"""
CLEAR = """
__device__ __forceinline__ void tf32_clear(float* c) {
#pragma unroll
  for (int i = 0; i < 8; ++i) c[i] = 0.0f;
}
"""
STORE = """
__device__ __forceinline__ void tf32_store(float* target, const float* c, int stride) {
  int row = threadIdx.x / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < 8; ++i) target[(row + 8 * (i / 2 % 2)) * stride + 8 * (i / 4) + column + i % 2] = c[i];
}
"""

FUNCTIONS = {"tf32_load": LOAD, "tf32_multiply": MULTIPLY, "tf32_clear": CLEAR, "tf32_store": STORE}


def group(a_by_k: bool, b_by_k: bool) -> dict[str, str]:
    """The intrinsics for operands whose tiles in shared memory have k first (`..._by_k`) or last, registered.

    In the terms of MetaSchedule's tensor core rule: A is rows x k, or k x rows; B is columns x k, or k x columns.
    """
    register()
    return {
        "init": "tf32_clear",
        "load_a": "tf32_load_8x16" if a_by_k else "tf32_load_16x8",
        "load_b": "tf32_load_8x16" if b_by_k else "tf32_load_16x8",
        "compute": f"tf32_multiply{'_ka' if a_by_k else ''}{'_kb' if b_by_k else ''}",
        "store": "tf32_store",
    }


def is_used(trace: object) -> bool:
    """Whether a schedule's trace, as JSON values, puts a product on tensor cores."""
    return "tf32_multiply" in str(trace)


def alignment(by_k: bool) -> tuple[int, int]:
    """(factor, offset) of the length of rows of a tile in shared memory: a multiple of `factor`, and `offset` more.

    So no two lanes of a load, which are 8 rows x 4 of k, meet in one of the 32 banks.
    """
    return (16, 8) if by_k else (8, 4)


@functools.cache
def register() -> None:
    """Makes TVM know the intrinsics, which the traces of records may name."""
    c = Tile("c", (M, N), "local")
    target = Tile("t", (M, N), SHARED)
    _add("tf32_clear", "ij", (c,), "c[i, j] = T.float32(0)", ("c.access_ptr('w')",))
    _add("tf32_store", "ij", (c, target), "t[i, j] = c[i, j]", ("t.access_ptr('w')", "c.access_ptr('r')", "t0"))
    for by_k in (False, True):
        _add_load(by_k)
        for b_by_k in (False, True):
            _add_multiply(by_k, b_by_k)


def _add_load(by_k: bool) -> None:
    shape = (K, M) if by_k else (M, K)
    tiles = Tile("s", shape, SHARED), Tile("f", shape, "local")
    arguments = ("f.access_ptr('w')", "s.access_ptr('r')", *(("s1", "s0") if by_k else ("s0", "s1")))
    _add(f"tf32_load_{shape[0]}x{shape[1]}", "ij", tiles, "f[i, j] = s[i, j]", arguments)


def _add_multiply(a_by_k: bool, b_by_k: bool) -> None:
    a = Tile("a", (K, M) if a_by_k else (M, K), "local")
    b = Tile("b", (K, N) if b_by_k else (N, K), "local")
    statement = f"c[i, j] = c[i, j] + a[{'k, i' if a_by_k else 'i, k'}] * b[{'k, j' if b_by_k else 'j, k'}]"
    arguments = ("c.access_ptr('rw')", "a.access_ptr('r')", "b.access_ptr('r')")
    tiles = a, b, Tile("c", (M, N), "local")
    _add(f"tf32_multiply{'_ka' * a_by_k}{'_kb' * b_by_k}", "ijk", tiles, statement, arguments)


@dataclass(frozen=True)
class Tile:
    """A parameter of an intrinsic: a tile anywhere in a buffer, whose strides are NAME0 and NAME1."""

    name: str
    shape: tuple[int, int]
    scope: str

    @property
    def region(self) -> str:
        return f"{self.name}[0:{self.shape[0]}, 0:{self.shape[1]}]"

    def match(self, strided: bool) -> list[str]:
        names = [f"{self.name}{axis}" for axis in (0, 1)] if strided else []
        place = f'align=64, offset_factor=1, scope="{self.scope}"' + f", strides=[{', '.join(names)}]" * strided
        return [
            *(f"{name} = T.int32()" for name in names),
            f'{self.name} = T.match_buffer({self.name}_, {self.shape}, "float32", {place})',
        ]


def _add(name: str, axes: str, tiles: tuple[Tile, ...], statement: str, arguments: tuple[str, ...]) -> None:
    """Registers the loop nest of `statement` over `axes`, in place of which a CUDA function is called.

    The last tile is written, and where there is an axis k it is read before.
    """
    extents = dict(zip("ijk", (*tiles[-1].shape, K), strict=True))
    loops = ", ".join(f"{axis}_" for axis in axes)
    nest = f"""for {loops} in T.grid({", ".join(str(extents[axis]) for axis in axes)}):
            with T.sblock("tile"):
                {", ".join(axes)} = T.axis.remap("{"SSR"[: len(axes)]}", [{loops}])
                {statement}"""
    function, source = next(item for item in FUNCTIONS.items() if name.startswith(item[0]))
    call = f'T.evaluate(T.cuda.func_call("{function}", {", ".join(arguments)}, source_code={source!r}))'
    read = (*tiles[-1:], *tiles[:-1]) if "k" in axes else tiles[:-1]
    TensorIntrin.register(name, *(_function(tiles, read, body, body is call) for body in (nest, call)))


def _function(tiles: tuple[Tile, ...], read: tuple[Tile, ...], body: str, strided: bool) -> tvm.tirx.PrimFunc:
    """A PrimFunc over `tiles` whose one block holds `body`, in which the tiles' strides have names or are not known."""
    matches = "\n    ".join(line for tile in tiles for line in tile.match(strided))
    return tvm.script.from_source(f"""
@T.prim_func(s_tir=True)
def main({", ".join(f"{tile.name}_: T.handle" for tile in tiles)}):
    {matches}
    with T.sblock("root"):
        T.reads({", ".join(tile.region for tile in read)})
        T.writes({tiles[-1].region})
        {body}
""")
