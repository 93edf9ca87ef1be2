"""Libraries with something planted in them. Each function here runs in a process of its own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tvmflow.frozen import evolve

FOLDER = Path(__file__).resolve().parent
SIZE = 4096
# Links code that flushes denormals as soon as a library is loaded, as -ffast-math does with older compilers.
FLUSHING = """#include <xmmintrin.h>
static void __attribute__((constructor)) flush(void) { _mm_setcsr(_mm_getcsr() | 0x8040); }
"""
# Code of many kinds that no kernel calls; only what has to run is ever run, and no test loads this library.
FOREIGN = r"""
#include <fenv.h>
#include <stdlib.h>
extern "C" {
void *chosen(void) { return 0; }
void choice(void) __attribute__((ifunc("chosen")));
__attribute__((constructor)) void starting(void) { system("true"); }
__attribute__((destructor)) void ending(void) { fesetround(FE_UPWARD); choice(); }
__attribute__((section(".payload"))) void hidden(void) { __asm__ volatile("syscall"); }
void sets_flush(void) { __asm__ volatile("ldmxcsr (%rax)"); }
void restores(void) { __asm__ volatile("fxrstor (%rax)\n fldcw (%rax)\n xrstor (%rax)"); }
void half(void) { __asm__ volatile("vaddph %zmm0, %zmm1, %zmm2\n vfmadd231ph %zmm0, %zmm1, %zmm2\n"
                                   "vcvtps2ph $0, %zmm0, %ymm1"); }
void narrow(void) { __asm__ volatile("vdpbf16ps %zmm0, %zmm1, %zmm2\n tdpbf16ps %tmm0, %tmm1, %tmm2\n"
                                     "tdpbssd %tmm0, %tmm1, %tmm2"); }
void unreadable(void) { __asm__ volatile(".byte 0x06, 0x06, 0x06"); }
}
"""
LINKED = ["-Wl,-rpath,/tmp/elsewhere", "-Wl,-z,execstack", "-Wl,--auxiliary,libelse.so"]
RECIPROCAL = """
# from tvm.script import tirx as T
@T.prim_func(s_tir=True)
def main(x: T.Buffer((4096,), "float32"), y: T.Buffer((4096,), "float32")):
    for i in range(1024):
        with T.sblock("reciprocal"):
            v = T.axis.spatial(1024, i)
            y[T.Ramp(v * 4, 1, 4)] = T.call_llvm_pure_intrin("float32x4", "llvm.x86.sse.rcp.ps", x[T.Ramp(v * 4, 1, 4)])
"""


def model(
    path: Path, nodes: list[Any], shape: tuple[int | str, ...], weights: dict[str, np.ndarray] | None = None
) -> Path:
    """An ONNX file of `nodes` from x to y, both of `shape`."""
    tensors = [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy")
    graph = helper.make_graph(nodes, "graph", [x], [y], tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def functions(folder: Path) -> Path:
    """exp(x) / (sqrt(x) + tanh(x)): every function that fast math would approximate."""
    make = helper.make_node
    nodes = [
        make("Exp", ["x"], ["a"]),
        make("Sqrt", ["x"], ["b"]),
        make("Tanh", ["x"], ["c"]),
        make("Add", ["b", "c"], ["d"]),
        make("Div", ["a", "d"], ["y"]),
    ]
    return model(folder / "functions.onnx", nodes, (SIZE,))


def transposed(folder: Path) -> Path:
    """Two convolutions with a Relu between them that runs in another order of axes."""
    make = helper.make_node
    nodes = [
        make("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        make("Transpose", ["a"], ["b"], perm=[0, 2, 3, 1]),
        make("Relu", ["b"], ["c"]),
        make("Transpose", ["c"], ["d"], perm=[0, 3, 1, 2]),
        make("Conv", ["d", "w"], ["y"], pads=[1, 1, 1, 1]),
    ]
    weights = np.random.default_rng(0).normal(size=(8, 8, 3, 3)).astype("float32")
    return model(folder / "transposed.onnx", nodes, (1, 8, 16, 16), {"w": weights})


def symbolic(folder: Path) -> Path:
    """A function of a tensor whose first size is open, so that shapes are computed at run time."""
    return model(folder / "symbolic.onnx", [helper.make_node("Exp", ["x"], ["y"])], ("n", 64))


def single(folder: Path) -> Path:
    """A function of one element, in which there is nothing to schedule."""
    return model(folder / "single.onnx", [helper.make_node("Exp", ["x"], ["y"])], ())


def plain(folder: Path) -> Path:
    """A matrix product and a softmax."""
    weights = np.random.default_rng(0).normal(size=(64, 64)).astype("float32")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Softmax", ["a"], ["y"])]
    return model(folder / "plain.onnx", nodes, (64, 64), {"w": weights})


# --- users' kernels ---------------------------------------------------------------------------------------------------


def reciprocal(call: Any) -> object:
    """A kernel of the user's for a CPU: x86's approximate reciprocal, four lanes at a time."""
    import tvm
    from tvm.s_tir import Schedule

    return Schedule(tvm.script.from_source(RECIPROCAL)) if call.args[0].shape == (SIZE,) else None


def calls_out(call: Any) -> object:
    """A kernel of the user's that calls a function of the C library; no test runs it."""
    from tvm import te, tirx

    x = te.placeholder(call.args[0].shape, "float32")
    if not call.args[0].shape:
        return te.create_prim_func([x, te.compute((), lambda: tirx.call_extern("float32", "system", x()))])
    return None


def fast_exp(call: Any) -> object:
    """A kernel of the user's for a GPU: CUDA's approximate exponential."""
    from tvm import te, tirx

    x = te.placeholder(call.args[0].shape, "float32")
    return te.create_prim_func(
        [x, te.compute(call.output.shape, lambda i: tirx.call_pure_extern("float32", "__expf", x[i]))]
    )


def user_kernel(name: str, operator: str) -> dict[str, Any]:
    return {"kernels": {"planted": {"entry": f"audit_builds:{name}", "folder": str(FOLDER), "replaces": operator}}}


# --- what is planted --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def tvms_own_cuda_step(*_args: object) -> Iterator[None]:
    """TVM's CUDA compile step with its defaults and its environment variables, by nvcc."""
    import tvm_ffi
    from tvm.support import nvcc

    from tvmflow.codegen import cuda

    name = "tvm_callback_cuda_compile"
    os.environ["PATH"] = f"{cuda.tool('nvcc').parent}{os.pathsep}{os.environ['PATH']}"
    ours = tvm_ffi.get_global_func(name)
    compiled: Callable[[str], bytes] = lambda code: nvcc.compile_cuda(code, "cubin", compiler="nvcc")  # noqa: E731
    tvm_ffi.register_global_func(name, compiled, override=True)
    try:
        yield
    finally:
        tvm_ffi.register_global_func(name, ours, override=True)


def planted(name: str, folder: Path) -> contextlib.AbstractContextManager[object]:
    """What is changed behind the config's back while a library is built."""
    if name == "TVM's CUDA step":
        return mock.patch("tvmflow.codegen.cuda.compile_step", tvms_own_cuda_step)
    if name == "PassContext":
        return mock.patch("tvmflow.codegen.numerics.pass_config", return_value={"tirx.enable_fast_math": True})
    if name == "target":
        return mock.patch("tvmflow.codegen.numerics.llvm_attributes", return_value={"fast-math": True})
    if name == "linker":
        (folder.parent / "flushing.c").write_text(FLUSHING)
        return mock.patch(
            "tvmflow.codegen.library.linker", return_value={"options": [str(folder.parent / "flushing.c")]}
        )
    if name == "foreign code":
        (folder.parent / "foreign.c").write_text(FOREIGN)
        return mock.patch(
            "tvmflow.codegen.library.linker", return_value={"options": [str(folder.parent / "foreign.c")]}
        )
    if name == "linked elsewhere":
        return mock.patch("tvmflow.codegen.library.linker", return_value={"options": LINKED})
    if name == "no schedules":
        return mock.patch("tvmflow.pipeline.plan._schedule", return_value=())
    return contextlib.nullcontext()


def build(model_file: Path, folder: Path, plant: str, overrides: dict[str, Any], kept: bool = False) -> str:
    """Builds an artifact with something planted; returns what the checks of a build say, if anything.

    `kept` leaves the artifact although it fails them.
    """
    from tvmflow import artifact, config
    from tvmflow.errors import AuditError, NumericsError
    from tvmflow.pipeline import building

    cfg = config.of_model(str(model_file), [{"verify": {"enabled": False}}, overrides])
    folder.mkdir(parents=True, exist_ok=True)
    checks = ("check_numerics", "check_library") if kept else ()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(planted(plant, folder))
            for check in checks:
                stack.enter_context(mock.patch(f"tvmflow.audit.{check}"))
            artifact.write_manifest(folder, building.build(cfg, folder, None))
    except (AuditError, NumericsError) as exc:
        return exc.message
    return ""


def build_all(jobs: list[tuple[Any, ...]]) -> list[str]:
    """Several of `build`, one after another in one process."""
    return [build(*job) for job in jobs]


def partitioned(model_file: Path, folder: Path) -> None:
    """An artifact whose matrix product is another code generator's: the partitioned subgraph of an external one."""
    import tvm
    import tvm_ffi
    from tvm.relax import transform
    from tvm.relax.dpl import is_op, wildcard

    from tvmflow import artifact, config, frontend
    from tvmflow.codegen import library
    from tvmflow.pipeline import plan
    from tvmflow.pipeline.context import Context
    from tvmflow.pipeline.prepare import setting

    build(model_file, folder, "", {})

    def generate(functions: Any, _options: object, _names: object) -> list[Any]:
        x, y = (tvm.te.placeholder((64, 64), name=name) for name in "xy")
        made = tvm.te.create_prim_func([x, y, tvm.te.compute((64, 64), lambda i, j: x[i, j] * y[j, i])])
        return [
            tvm.tirx.build(made.with_attr("global_symbol", str(f.attrs["global_symbol"])), "llvm") for f in functions
        ]

    tvm_ffi.register_global_func("relax.ext.elsewhere", generate)
    cfg = config.of_model(str(model_file))
    chosen = setting(cfg)
    pattern = [("elsewhere.matmul", is_op("relax.matmul")(wildcard(), wildcard()))]
    with chosen.entered(), mock.patch("tvmflow.codegen.library._check_external"):
        mod = frontend.load(cfg).mod
        mod = transform.FuseOpsByPattern(pattern, bind_constants=False, annotate_codegen=True)(mod)
        mod = transform.RunCodegen()(mod)
        scheduled = plan.run(mod, plan.steps_of(Context("llvm"), "fuse", "schedule", "rewrite"))
        lowered = plan.run(scheduled, plan.steps_of(Context("llvm"), "lower"))
        library.write_library(lowered, chosen.tvm_target, {}, folder)
        kernels = library.contents(scheduled, lowered).kernels
    manifest = artifact.read_manifest(folder)
    files = manifest.files | {"library.so": artifact.file_entry(folder / "library.so")}
    artifact.write_manifest(folder, evolve(manifest, files=files, kernels=kernels))
