"""Runs a generated CUDA kernel on a CPU: its text as C++, each thread of a block a thread, blocks one after the other.

__syncthreads is a barrier, the tensor core an exchange among 32 threads as the PTX ISA's fragments have it. Built with
ThreadSanitizer, which reports every access to shared memory that no barrier puts in order.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PRELUDE = """
#include <barrier>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>
#define __device__
#define __forceinline__ inline
#define __global__
#define __shared__
#define __launch_bounds__(n)
#define __restrict__
#define __align__(n)
typedef unsigned char uchar;
struct float2 { float x, y; };
struct int2 { int x, y; };
struct float4 { float x, y, z, w; };
struct int4 { int x, y, z, w; };
static float2 make_float2(float x, float y) { return {x, y}; }
static int2 make_int2(int x, int y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
struct Place { int x, y; };
static thread_local Place threadIdx, blockIdx;
alignas(64) uchar buf_dyn_shmem_ptr[1 << 16];
static std::barrier<>* block_barrier;
static std::vector<std::barrier<>*> warp_barriers;
static float a_tiles[32][16][8], b_tiles[32][8][8];
static void __syncthreads() { block_barrier->arrive_and_wait(); }
static float max(float a, float b) { return a > b ? a : b; }
static void rounded(unsigned& to, float from) { memcpy(&to, &from, 4); }
static float value(unsigned bits) { float to; memcpy(&to, &bits, 4); return to; }
// The PTX ISA, "Matrix Fragments for mma.m16n8k8", .tf32: where the registers of a lane stand in A, B and C.
static void tensor_core(float& c0, float& c1, float& c2, float& c3, unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                        unsigned b0, unsigned b1) {
  int group = threadIdx.x >> 2, thread = threadIdx.x % 4;
  auto a = a_tiles[threadIdx.y];
  auto b = b_tiles[threadIdx.y];
  a[group][thread] = value(a0), a[group + 8][thread] = value(a1);
  a[group][thread + 4] = value(a2), a[group + 8][thread + 4] = value(a3);
  b[thread][group] = value(b0), b[thread + 4][group] = value(b1);
  warp_barriers[threadIdx.y]->arrive_and_wait();
  for (int k = 0; k < 8; ++k) {
    c0 += a[group][k] * b[k][thread * 2], c1 += a[group][k] * b[k][thread * 2 + 1];
    c2 += a[group + 8][k] * b[k][thread * 2], c3 += a[group + 8][k] * b[k][thread * 2 + 1];
  }
  warp_barriers[threadIdx.y]->arrive_and_wait();
}
"""
MAIN = """
static std::vector<float> read(const char* path, size_t size) {
  std::vector<float> values(size + 16);
  FILE* file = fopen(path, "rb");
  if (fread(values.data(), 4, size, file) != size) abort();
  fclose(file);
  return values;
}
int main() {
  %(reads)s
  std::barrier<> barrier(32 * %(warps)d);
  block_barrier = &barrier;
  for (int w = 0; w < %(warps)d; ++w) warp_barriers.push_back(new std::barrier<>(32));
  for (int block : {%(blocks)s}) {
    std::vector<std::thread> threads;
    for (int t = 0; t < 32 * %(warps)d; ++t)
      threads.emplace_back([&, t] {
        threadIdx = {t %% 32, t / 32}, blockIdx = {block %% %(grid_x)d, block / %(grid_x)d};
        main_kernel(%(arguments)s);
      });
    for (auto& thread : threads) thread.join();
  }
  FILE* file = fopen("%(output)s", "wb");
  fwrite(%(output)s.data(), 4, %(size)d, file);
  fclose(file);
}
"""


def on_host(asm: re.Match[str]) -> str:
    """A call of `rounded` or `tensor_core` with the operands of an asm statement."""
    operands = re.findall(r'"[=+]?[rf]"\((.*?)\)(?=,| *:|\n|$)', asm[1], re.MULTILINE)
    return f"{'tensor_core' if 'mma.sync' in asm[1] else 'rounded'}({', '.join(operands)});\n"


@dataclass(frozen=True)
class Launch:
    """Blocks in x and y, warps of a block, and the blocks that are run, counted along x first."""

    x: int
    y: int
    warps: int
    blocks: tuple[int, ...]


def run(
    source: str, arrays: dict[str, np.ndarray], output: tuple[str, tuple[int, ...]], launch: Launch, folder: Path
) -> np.ndarray:
    """The array that the kernel in `source` writes to its parameter OUTPUT_ptr; the others are named likewise.

    It holds NaN where no block that is run writes. Raises CalledProcessError where threads race.
    """
    kernel = source[source.index("__device__ __forceinline__ void tf32_") :]
    parameters = re.findall(r"(\w+)_ptr[,)]", kernel[kernel.index("main_kernel(") :].partition(";")[0])
    name, shape = output
    values = {**arrays, name: np.full(shape, np.nan, "f4")}
    reads = []
    for parameter in parameters:
        values[parameter].tofile(folder / parameter)
        reads.append(f'std::vector<float> {parameter} = read("{parameter}", {values[parameter].size});')
    program = (
        PRELUDE
        + re.sub(r"asm(?: volatile)?\((.*?)\);\n", on_host, kernel, flags=re.DOTALL)
        + MAIN
        % {
            "reads": "\n  ".join(reads),
            "arguments": ", ".join(f"{parameter}.data()" for parameter in parameters),
            "grid_x": launch.x,
            "warps": launch.warps,
            "blocks": ", ".join(map(str, launch.blocks)),
            "output": name,
            "size": int(np.prod(shape)),
        }
    )
    (folder / "kernel.cpp").write_text(program)
    command = ["g++", "-std=c++20", "-O1", "-fsanitize=thread", "-Wno-unknown-pragmas", "-o", "kernel", "kernel.cpp"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    subprocess.run(["./kernel"], cwd=folder, check=True, capture_output=True)
    return np.fromfile(folder / name, "f4").reshape(shape)
