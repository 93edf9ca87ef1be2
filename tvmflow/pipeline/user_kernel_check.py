"""Runs the user's kernels beside the operators that they replace, on the same inputs, before a library is kept."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tvmflow.config import Config, VerifySection
from tvmflow.errors import CompileError, VerifyError, last_line
from tvmflow.manifest import Signature, TensorSpec
from tvmflow.process import emit
from tvmflow.verification import compare

if TYPE_CHECKING:
    import tvm

    from tvmflow.graph.passes.replace_operators import Replacement
    from tvmflow.kernels.user import Call
    from tvmflow.pipeline.prepare import Setting

INDEX_DTYPES = ("int32", "int64", "uint32", "uint64")


def notes(cfg: Config, replaced: Sequence[Replacement], setting: Setting) -> tuple[str, ...]:
    """Checks each distinct replacement and says what was replaced, where, and how far off it is.

    `replaced` holds one entry per place. Call it inside `Setting.entered`. Raises VerifyError where a value is wrong.
    """
    from tvmflow.kernels import user

    lines = [user.source_note(name, section) for name, section in cfg.kernels.items()]
    places = Counter(id(replacement) for replacement in replaced)
    obstacle = _obstacle(cfg, setting)
    for replacement in {id(replacement): replacement for replacement in replaced}.values():
        count = places[id(replacement)]
        where = f"in {count} places" if count > 1 else "in one place"
        outcome = f"not verified: {obstacle}"
        if not obstacle:
            error = _largest_error(replacement, setting.tvm_target, cfg.verify)
            outcome = f"verified, max error {error:.2g}"
        lines.append(f"{replacement.kernel} replaces {replacement.call} {where}: {outcome}")
    return tuple(lines)


def _obstacle(cfg: Config, setting: Setting) -> str:
    """Why kernels cannot be run here; empty where they can."""
    from tvmflow.host import host_features

    target = setting.target
    if not cfg.verify.enabled:
        return "verify.enabled = false"
    if target.kind == "cuda":
        from tvmflow.codegen import cuda

        return "" if cuda.detect_arch() else "no GPU is here"
    if target.machine != platform.machine():
        return f"it is built for {target.machine}"
    missing = sorted(set(target.features) - host_features())
    return f"this CPU lacks {', '.join(missing)}" if missing else ""


def _largest_error(replacement: Replacement, target: tvm.target.Target, section: VerifySection) -> float:
    """The largest absolute error over the config's seeds; raises VerifyError, which names kernel, place and error."""
    import tvm

    from tvmflow.frontend.model import narrowest_float

    emit(f"{replacement.kernel}: checking it for {replacement.call}")
    device = tvm.cuda() if str(target.kind) == "cuda" else tvm.cpu()
    machine = machine_of(replacement, target)
    narrowest = narrowest_float(tvm.IRModule({"reference": replacement.reference}))
    worst = 0.0
    for seed in section.seeds:
        arrays = [tvm.runtime.tensor(array, device) for array in _inputs(replacement.call, section, seed)]
        want, got = (machine[name](*arrays).numpy() for name in ("reference", "kernel"))
        tolerances = compare.tolerance(str(replacement.kernel), want, section, narrowest)
        verdict = compare.compare_output(str(replacement.kernel), got, want, tolerances)
        if not verdict.ok:
            raise VerifyError(
                f"{replacement.kernel} is wrong for {replacement.call}, seed {seed}: {verdict.reason}; "
                f"max error {verdict.max_error:.3g}, allowed {tolerances[1]:.3g} + {tolerances[0]:.3g} of the value",
                "mend the kernel, or let its function return None for this call",
            )
        worst = max(worst, verdict.max_error or 0.0)
    return worst


def machine_of(replacement: Replacement, target: tvm.target.Target) -> tvm.runtime.vm.VirtualMachine:
    """What runs a kernel as `kernel` and the operators that it replaces as `reference`; raises CompileError."""
    import tvm
    from tvm import relax

    try:
        executable = relax.vm_build.build(_lowered(replacement, str(target.kind)), target, relax_pipeline=None)
        return relax.VirtualMachine(executable, tvm.cuda() if str(target.kind) == "cuda" else tvm.cpu())
    except Exception as exc:
        raise CompileError(
            f"{replacement.kernel}: TVM cannot build it for {replacement.call}: {last_line(exc)[:300]}",
            "mend the kernel; --debug shows TVM's whole trace",
        ) from exc


def _lowered(replacement: Replacement, kind: str) -> tvm.IRModule:
    """A module that runs the kernel as `kernel` and the operators that it replaces as `reference`."""
    from tvm import relax

    from tvmflow.pipeline import plan
    from tvmflow.pipeline.context import Context

    builder = relax.BlockBuilder()
    prim_func = builder.add_func(replacement.function, f"user_{replacement.kernel.name}")
    params = [relax.Var(param.name, param.ty) for param in replacement.reference.params]
    with builder.function("kernel", params):
        result = builder.emit(relax.call_tir(prim_func, params, replacement.reference.ret_ty))
        builder.emit_func_output(result)
    mod = builder.get()
    mod["reference"] = replacement.reference.with_attr("global_symbol", "reference")
    return plan.run(mod, plan.steps_of(Context(kind), "fuse", "schedule", "rewrite", "lower"))


def _inputs(call: Call, section: VerifySection, seed: int) -> list[np.ndarray]:
    """Drawn as for a model; wide integers beside floats are taken for indices into the smallest axis."""
    floats = [size for tensor in call.args if tensor.dtype.startswith(("float", "bfloat")) for size in tensor.shape]
    index_range = (0.0, float(max(min(floats) - 1, 0))) if floats else None
    specs = tuple(
        TensorSpec(
            name=f"a{position}",
            dtype=tensor.dtype,
            shape=tensor.shape,
            range=index_range if tensor.dtype in INDEX_DTYPES else None,
        )
        for position, tensor in enumerate(call.args)
    )
    plain = VerifySection(seeds=section.seeds)
    feeds = next(compare.candidates(Signature(inputs=specs, outputs=()), plain, seed))
    return [feeds.inputs[spec.name] for spec in specs]
