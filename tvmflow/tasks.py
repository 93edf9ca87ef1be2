"""From a prepared module to tuning tasks: kernels in a form that does not depend on names, with stable keys.

A schedule trace names the blocks that it transforms, so two kernels that differ by names alone must be given the same
names before one is tuned and before the other uses its record: `canonical` does that, and the hash of its text is the
workload's part of the key.
"""

from __future__ import annotations

import hashlib
import io
import json
import keyword
import re
import tokenize
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import tvm
from pydantic import JsonValue
from tvm.ir import assert_structural_equal
from tvm.s_tir import Schedule
from tvm.s_tir.analysis import estimate_tir_flops
from tvm.tirx import FloatImm, IntImm, PrimFunc

from tvmflow.config import NumericsSection
from tvmflow.database.comparison import Convolution
from tvmflow.database.grammar import GrammarError, check_workload
from tvmflow.database.keys import KeyParts
from tvmflow.kernels.winograd.minimal_filtering import Shape
from tvmflow.target import Target

PREPARATION = 1  # raised whenever the graph stage or `canonical` changes what reaches tuning
NAME_ATTRS = ("global_symbol", "op_pattern", "tvmflow.rule", "tvmflow.user_kernel", "tvmflow.operators")
STRING = re.compile(r'(T\.sblock\()"([^"]*)"')


@dataclass(frozen=True)
class Task:
    """One kernel to tune: `mod` holds its canonical form as `main`; `weight` is how often the library calls it."""

    name: str
    parts: KeyParts
    mod: tvm.IRModule
    weight: int
    flop: float
    threads: int

    @property
    def key(self) -> str:
        return self.parts.key


def extract(
    prepared: tvm.IRModule, calls: Mapping[str, int], target: Target, numerics: NumericsSection
) -> tuple[Task, ...]:
    """The tunable kernels of a prepared module, equal ones once, the costliest first. `calls` counts by kernel name."""
    found = []
    for var, function in prepared.functions.items():
        if is_tunable(function):
            mod, workload = canonical(function)
            if not can_be_recorded(mod):
                continue
            weight, flop = calls.get(var.name_hint, 1), float(estimate_tir_flops(mod))
            parts = key_parts(workload, target, numerics)
            found.append(Task(var.name_hint, parts, mod, weight, flop, target.threads))
    return joined(found)


def joined(tasks: Iterable[Task]) -> tuple[Task, ...]:
    """The tasks, equal ones once with their calls added up, the costliest first."""
    found: dict[str, Task] = {}
    for task in tasks:
        if (known := found.get(task.key)) is not None:
            task = replace(known, weight=known.weight + task.weight)
        found[task.key] = task
    return tuple(sorted(found.values(), key=lambda task: (-task.flop * task.weight, task.key)))


def key_parts(workload: str, target: Target, numerics: NumericsSection) -> KeyParts:
    """The named parts of a kernel's key on a target under a numerics mode."""
    machine: dict[str, str | int | bool | tuple[str, ...] | None] = {
        "kind": target.kind,
        "mcpu": target.mcpu,
        "machine": target.machine,
        "features": target.features,
        "threads": target.threads,
        **({"arch": target.arch} if target.arch else {}),
    }
    modes = numerics.model_dump(include={"fast_math", "tf32"})  # the others have one value, or choose among kernels
    return KeyParts(workload=workload, target=machine, numerics=modes, preparation=PREPARATION)


def convolution_of(shape: Shape) -> Convolution:
    """A shape as comparisons of its methods name it."""
    return Convolution(
        batch=shape.batch,
        height=shape.height,
        width=shape.width,
        channels=shape.channels,
        filters=shape.filters,
        padding=shape.padding,
    )


def is_tunable(function: tvm.ir.BaseFunc) -> bool:
    """Whether MetaSchedule could search schedules of a function: static loops, no calls to the run time."""
    if not isinstance(function, PrimFunc) or "tirx.is_scheduled" in function.attrs:
        return False
    sizes = [size for param in function.params for size in getattr(param.ty, "shape", ())]
    return all(isinstance(size, IntImm) for size in sizes) and "packed(" not in function.script()


def can_be_recorded(mod: tvm.IRModule) -> bool:
    """Whether a record may hold a kernel: one that calls a C function by its name, as a user's may, is never tuned."""
    try:
        check_workload(tvm.ir.save_json(mod))
    except GrammarError:
        return False
    return True


def canonical(function: PrimFunc) -> tuple[tvm.IRModule, str]:
    """The function as `main` of a module, its variables, buffers and blocks renamed in order, and its text's sha256.

    Keeps the names where the renamed text does not parse back to an equal function.
    """
    plain = function
    for attr in NAME_ATTRS:
        plain = plain.without_attr(attr)
    renamed = tvm.script.from_source(_renamed(plain.script(show_meta=False)))
    assert_structural_equal(renamed, plain, map_free_vars=True)
    text = renamed.script(show_meta=False)
    mod = tvm.IRModule({"main": renamed.with_attr("global_symbol", "main")})
    return mod, hashlib.sha256(text.encode()).hexdigest()


def kept_its_tiles(schedule: Schedule, trace: JsonValue) -> bool:
    """Whether the decisions of a replayed trace stand; TVM changes the factors of a split that do not fit its loop."""
    return isinstance(trace, list) and bool(trace_json(schedule)[1] == trace[1])


def trace_json(schedule: Schedule) -> Any:
    """The schedule's trace as JSON values, as a record holds it."""
    return json.loads(json.dumps(schedule.trace.as_json(), default=_plain))


def _plain(value: Any) -> Any:
    """TVM's numbers and containers as JSON's."""
    if isinstance(value, IntImm):
        return int(value)
    if isinstance(value, FloatImm):
        return float(value)
    if hasattr(value, "items"):
        return {str(key): item for key, item in value.items()}
    return str(value) if isinstance(value, str) else list(value)


def _renamed(script: str) -> str:
    """TVMScript with every name that the kernel itself introduces replaced by a number in order of appearance."""
    names: dict[str, str] = {}
    out: list[tokenize.TokenInfo] = []
    previous = ""
    script = STRING.sub(lambda m: f'{m[1]}"{names.setdefault("block " + m[2], f"b{len(names)}")}"', script)
    for token in tokenize.generate_tokens(io.StringIO(script).readline):
        text = token.string
        own = token.type == tokenize.NAME and previous != "." and not keyword.iskeyword(text)
        if own and text not in ("T", "main", "private", "s_tir", "range", "True", "False", "None"):
            text = names.setdefault(text, f"v{len(names)}")
        out.append(token._replace(string=text))
        previous = token.string
    return tokenize.untokenize((token.type, token.string) for token in out)
