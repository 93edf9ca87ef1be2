"""From a prepared module to library.so and constants.bin."""

from __future__ import annotations

import platform
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tvm
import tvm_ffi
from tvm import relax
from tvm.s_tir.analysis import estimate_tir_flops
from tvm.tirx import For, IntImm, PrimFunc

from tvmflow.artifact import ALIGNMENT, CONSTANTS, LIBRARY
from tvmflow.errors import CompileError, UnsupportedError
from tvmflow.graph.passes.fuse_kernels import operators, operators_of_external
from tvmflow.kernels.schedules.default_schedule import GFLOPS_ATTR, KEY_ATTR, RULE_ATTR, UNSCHEDULED
from tvmflow.kernels.user import USER_ATTR
from tvmflow.manifest import Constant, Kernel
from tvmflow.target import Target

# Functions of TVM's run time that a library may call beside its own kernels: compiled code, part of every deployment.
EXTERNAL_CALL = re.compile(r'call_(?:c?packed|extern)\((?:"\w+", )?"([\w.]+)"')
RUNTIME_FUNCTIONS = ("tvm.contrib.sort.", "tvm.contrib.random.", "runtime.", "vm.builtin.")
Origin = Literal["tuned", "default schedule", "unscheduled", "external", "user"]
CROSS_COMPILERS = {"aarch64": "aarch64-linux-gnu-gcc", "x86_64": "x86_64-linux-gnu-gcc"}


@dataclass(frozen=True)
class Contents:
    """What a lowered module holds: its kernels, and the bytes of buffers that one run plans (None if symbolic).

    `shape_functions` are those that lowering adds to compute symbolic shapes.
    """

    kernels: tuple[Kernel, ...]
    planned_bytes: int | None
    shape_functions: tuple[str, ...]


def write_library(mod: tvm.IRModule, target: tvm.target.Target, linker: dict[str, Any], folder: Path) -> Any:
    """Generates code for a lowered module and links it to `folder`/library.so; call it inside its PassContext.

    Returns TVM's executable, whose modules still tell their sources.
    """
    executable = relax.vm_build.build(mod, target=target, relax_pipeline=None)
    executable.export_library(str(folder / LIBRARY), **linker)
    return executable


def write_constants(constants: Sequence[tvm.runtime.Tensor], folder: Path) -> tuple[Constant, ...]:
    """Writes the weights to `folder`/constants.bin and returns where each stands."""
    entries = []
    with (folder / CONSTANTS).open("wb") as stream:
        for tensor in constants:
            stream.write(b"\0" * (-stream.tell() % ALIGNMENT))
            array = np.ascontiguousarray(tensor.numpy())
            entries.append(Constant(offset=stream.tell(), dtype=str(tensor.dtype), shape=tuple(tensor.shape)))
            stream.write(array.tobytes())
    return tuple(entries)


def linker(target: Target) -> dict[str, Any]:
    """TVM's export options that name the linker for a target; raises CompileError where it is not installed."""
    if target.machine == platform.machine():
        return {}
    compiler = CROSS_COMPILERS.get(target.machine, f"{target.machine}-linux-gnu-gcc")
    if shutil.which(compiler) is None:
        raise CompileError(
            f"linking for {target.machine} needs {compiler}, which is not installed",
            f"e.g. apt-get install gcc-{target.machine.replace('_', '-')}-linux-gnu",
        )
    # C compilers do not link libm on their own. TVM names libraries before the objects, where they would be dropped.
    return {"cc": compiler, "options": ["-Wl,--push-state,--no-as-needed", "-lm", "-Wl,--pop-state"]}


def contents(scheduled: tvm.IRModule, lowered: tvm.IRModule) -> Contents:
    """Lists the kernels of a module: origin from the module before lowering, calls from the one after."""
    counts, storage = _calls(lowered)
    lowered_names = {var.name_hint for var in lowered.functions}
    kernels = []
    for var, function in scheduled.functions.items():
        if isinstance(function, PrimFunc):
            origin, rule = _origin(function)
            gflops = function.attrs.get(GFLOPS_ATTR)
            kernels.append(
                Kernel(
                    name=var.name_hint,
                    origin=origin,
                    rule=rule,
                    calls=counts.pop(var.name_hint, 0),
                    key=function.attrs.get(KEY_ATTR),
                    gflops=None if gflops is None else float(gflops),
                    operators=operators(var.name_hint, function),
                )
            )
    kernels += [
        Kernel(name=name, origin="external", rule=name, calls=count, operators=operators_of_external(name))
        for name, count in counts.items()
        if not name.startswith("vm.builtin.") and name not in lowered_names
    ]
    _check_external([kernel.rule for kernel in kernels if kernel.origin == "external"])
    added = {var.name_hint for var, function in lowered.functions.items() if isinstance(function, PrimFunc)}
    shapes = tuple(sorted(added - {kernel.name for kernel in kernels}))
    return Contents(tuple(sorted(kernels, key=lambda k: k.name)), storage, shapes)


def _origin(function: PrimFunc) -> tuple[Origin, str]:
    """Where a kernel's code comes from, and the rule of its schedule or the function that it calls."""
    origin, rule = _schedule_of(function)
    if USER_ATTR not in function.attrs:
        return origin, rule
    return ("tuned" if origin == "tuned" else "user"), f"user kernel {function.attrs[USER_ATTR]}: {rule}"


def _schedule_of(function: PrimFunc) -> tuple[Origin, str]:
    done = "tirx.is_scheduled" in function.attrs and RULE_ATTR not in function.attrs  # by TVM's own rules
    rule = str(function.attrs.get(RULE_ATTR, UNSCHEDULED))
    if rule != UNSCHEDULED:
        return ("tuned" if rule.startswith("record ") else "default schedule"), rule
    if called := EXTERNAL_CALL.findall(function.script()):
        return "external", ", ".join(dict.fromkeys(called))
    if done:
        return "default schedule", "DLight"
    return ("unscheduled", UNSCHEDULED) if _has_loops(function) else ("default schedule", "no loops")


def _has_loops(function: PrimFunc) -> bool:
    """Whether there is anything to schedule: not in a function of a single element."""
    loops: list[For] = []
    tvm_ffi.structural_walk(function.body, (For, loops.append))
    return any(not (isinstance(loop.extent, IntImm) and int(loop.extent) == 1) for loop in loops)


def _check_external(names: list[str]) -> None:
    """Raises UnsupportedError for functions that a library would look for in vain when it is deployed."""
    unknown = [name for name in names if not name.startswith(RUNTIME_FUNCTIONS)]
    if unknown:
        raise UnsupportedError(
            f"the library would call what only TVM's Python has: {', '.join(unknown)}",
            "change the model so that no size depends on values (NonZero, Unique, Compress, ...)",
        )


def versions() -> dict[str, str]:
    """What the build's bytes depend on, beside the config."""
    return {name: version(name) for name in ("tvmflow", "apache-tvm", "apache-tvm-ffi", "onnx", "onnxscript", "numpy")}


def operations(prepared: tvm.IRModule) -> dict[str, float]:
    """The floating-point operations of one run of each kernel, as far as TVM can tell from loops of known length."""
    return {
        var.name_hint: float(estimate_tir_flops(tvm.IRModule({"main": function})))
        for var, function in prepared.functions.items()
        if isinstance(function, PrimFunc) and "packed(" not in function.script()
    }


def calls(prepared: tvm.IRModule) -> Counter[str]:
    """In how many places the graph calls each kernel."""
    counts: Counter[str] = Counter()

    def visit(node: object) -> None:
        if isinstance(node, tvm.ir.Call) and getattr(node.op, "name", "") == "relax.call_tir":
            counts[str(node.args[0].name_hint)] += 1

    for function in prepared.functions.values():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, visit)
    return counts


def _calls(lowered: tvm.IRModule) -> tuple[Counter[str], int | None]:
    """How often the graph's functions call each function, and the bytes of storage that they allocate."""
    counts: Counter[str] = Counter()
    sizes: list[int | None] = []

    def visit(node: object) -> None:
        if not isinstance(node, tvm.ir.Call):
            return
        name = getattr(node.op, "name_hint", None) or getattr(node.op, "global_symbol", None)
        if name is not None:
            counts[str(name)] += 1
        if getattr(node.op, "name", "") == "relax.vm.alloc_storage":
            size = node.args[0].values[0] if isinstance(node.args[0], relax.ShapeExpr) else None
            sizes.append(int(size) if isinstance(size, IntImm) else None)

    for function in lowered.functions.values():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, visit)
    known = [size for size in sizes if size is not None]
    return counts, sum(known) if len(known) == len(sizes) else None
