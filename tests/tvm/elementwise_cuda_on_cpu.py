"""Runs the generated CUDA kernels of a model on a CPU, thread after thread: for kernels whose threads share nothing."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import tvm
import tvm_ffi
from tvm import relax

from tvmflow import frontend
from tvmflow.config import Config
from tvmflow.kernels.rewrites import cuda_nan
from tvmflow.pipeline import plan
from tvmflow.pipeline.context import Context
from tvmflow.pipeline.prepare import prepare, setting

FIRST_KERNEL = 'extern "C" __global__'
PRELUDE = """
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#define __device__
#define __forceinline__ inline
#define __global__
#define __restrict__
#define __launch_bounds__(n)
#define CUDART_INF_F std::numeric_limits<float>::infinity()
#define CUDART_INF std::numeric_limits<double>::infinity()
#define CUDART_NAN_F std::numeric_limits<float>::quiet_NaN()
#define CUDART_NAN std::numeric_limits<double>::quiet_NaN()
typedef unsigned char uchar;
typedef unsigned int uint;
typedef _Float16 half;
struct Place { int x, y, z; };
static Place threadIdx, blockIdx;
static half __float2half_rn(float x) { return x; }
static half __habs(half x) { return fabsf(x); }
static half hsqrt(half x) { return sqrtf(x); }
template <typename A> static A max(A a, A b) { return a > b ? a : b; }
template <typename A> static A min(A a, A b) { return a < b ? a : b; }
"""
MAIN = """
static void file(const char* name, void* data, size_t size, bool read) {
  FILE* stream = fopen(name, read ? "rb" : "wb");
  if ((read ? fread(data, 1, size, stream) : fwrite(data, 1, size, stream)) != size) abort();
  fclose(stream);
}
int main() {
%s
}
"""


def outputs(cfg: Config, feeds: Mapping[str, np.ndarray], folder: Path) -> dict[str, np.ndarray]:
    """What the model's kernels for CUDA compute, in the order of its outputs; written and compiled in `folder`."""
    chosen = setting(cfg)
    model = frontend.load(cfg)
    with chosen.entered():
        prepared, _ = prepare(cfg, model)
        mod = plan.run(prepared, plan.steps_of(Context("cuda"), "schedule", "rewrite"))
        kernels = {
            var.name_hint: _with_names(function)
            for var, function in mod.functions.items()
            if isinstance(function, tvm.tirx.PrimFunc)
        }
        named = {name: function.with_attr("global_symbol", name) for name, function in kernels.items()}
        built = tvm.tirx.build(tvm.IRModule(named), target=chosen.tvm_target)
    source = cuda_nan.propagate(str(built.imports[0].inspect_source()))
    calls = _Calls(kernels, source, dict(feeds))
    names = calls.of(mod["main"])
    for name, array in calls.arrays.items():
        array.tofile(folder / name)
    overloads = source[: source.index(FIRST_KERNEL)].rpartition("template <typename A, typename B> __device__")
    first = source.index("\ntemplate <typename A, typename B>") if overloads[1] else source.index(FIRST_KERNEL)
    program = PRELUDE + source[first:] + MAIN % "\n".join(calls.lines)
    (folder / "kernels.cpp").write_text(program)
    command = ["g++", "-std=c++17", "-O1", "-ffp-contract=off", "-fexcess-precision=16", "-o", "kernels", "kernels.cpp"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    subprocess.run(["./kernels"], cwd=folder, check=True, capture_output=True)
    return {
        spec.name: np.fromfile(folder / name, calls.arrays[name].dtype)
        for spec, name in zip(model.signature.outputs, names, strict=True)
    }


def _with_names(function: tvm.tirx.PrimFunc) -> tvm.tirx.PrimFunc:
    """A kernel whose parameters have names of their own, by which those of the generated code are known."""
    fresh = {param: tvm.ir.Var(f"p{index}", param.ty) for index, param in enumerate(function.params)}
    return tvm_ffi.structural_map(function, [(tvm.ir.Var, lambda var: fresh.get(var, var))])


class _Calls:
    """The calls of a graph as lines of C++; `arrays` are its inputs, constants and results by name."""

    def __init__(self, kernels: Mapping[str, tvm.tirx.PrimFunc], source: str, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays
        self.lines: list[str] = []
        self._kernels = kernels
        found = re.findall(rf"{FIRST_KERNEL} void __launch_bounds__\((\d+)\) (\w+)_kernel\((.*?)\) {{", source)
        self._declared = {name: (int(threads), re.findall(r"(\w+)_ptr", params)) for threads, name, params in found}

    def of(self, main: relax.Function) -> list[str]:
        """Adds the calls; returns the names of the outputs."""
        self.lines += [self._declare(name, read=True) for name in list(self.arrays)]
        bindings = [binding for block in main.body.blocks for binding in block.bindings]
        names: dict[relax.Var, list[str]] = {}
        for binding in bindings:
            value = binding.value
            if isinstance(value, relax.Call):
                names[binding.var] = [self._call(binding.var, value, names)]
            else:
                fields = value.fields if isinstance(value, relax.Tuple) else [value]
                names[binding.var] = [names[field][0] if field in names else str(field.name) for field in fields]
        outputs_ = names[main.body.body]
        self.lines += [f'  file("{name}", {name}, sizeof {name}, false);' for name in outputs_]
        return outputs_

    def _call(self, var: relax.Var, call: relax.Call, names: Mapping[relax.Var, list[str]]) -> str:
        result = f"result{len(self.arrays)}"
        shape = [int(size) for size in call.ty.shape.values]
        self.arrays[result] = np.zeros(shape, str(call.ty.dtype))
        self.lines.append(self._declare(result, read=False))
        kernel = str(call.args[0].name_hint)
        threads, params = self._declared[kernel]
        given = [self._argument(arg, names) for arg in call.args[1].fields] + [result]
        by_name = dict(zip([param.name for param in self._kernels[kernel].params], given, strict=True))
        blocks = -(-max(self.arrays[result].size, 1) // threads)
        arguments = ", ".join(by_name[name] for name in params)
        self.lines += [
            f"  for (int b = 0; b < {blocks}; ++b) for (int t = 0; t < {threads}; ++t) {{",
            f"    blockIdx.x = b, threadIdx.x = t;\n    {kernel}_kernel({arguments});\n  }}",
        ]
        return result

    def _argument(self, arg: relax.Expr, names: Mapping[relax.Var, list[str]]) -> str:
        if isinstance(arg, relax.Var):
            return names[arg][0] if arg in names else str(arg.name)
        name = f"constant{len(self.arrays)}"
        self.arrays[name] = arg.value.numpy()
        self.lines.append(self._declare(name, read=True))
        return name

    def _declare(self, name: str, read: bool) -> str:
        types = {
            "float16": "half",
            "float32": "float",
            "float64": "double",
            "int8": "signed char",
            "uint8": "uchar",
            "bool": "bool",
        }
        array = self.arrays[name]
        kind = types.get(str(array.dtype), f"{array.dtype}_t")
        line = f"  static {kind} {name}[{max(array.size, 1)}];"
        return f'{line} file("{name}", {name}, sizeof {name}, true);' if read else line
