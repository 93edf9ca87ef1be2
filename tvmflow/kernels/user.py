"""Kernels that a config names: Python functions that return TensorIR in place of operators of the graph.

A function is asked once for each distinct call of what it replaces:

    def kernel(call: Call) -> PrimFunc | Schedule | None

A PrimFunc is a kernel like any other: tuned if there is a record, else under the default rules. A Schedule is final.
None leaves that call as it is.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm.s_tir import Schedule
from tvm.tirx import IntImm, PrimFunc

from tvmflow.artifact import file_entry
from tvmflow.config import KernelSection
from tvmflow.errors import ConfigError, did_you_mean, first_line
from tvmflow.kernels.schedules.default_schedule import RULE_ATTR

USER_ATTR = "tvmflow.user_kernel"  # on a function of the user's: the name it has in the config
OPERATORS_ATTR = "tvmflow.operators"  # on a function of several operators: their names in order, joined by commas
OPAQUE = 8  # OpPatternKind.kOpaque of include/tvm/relax/op_attr_types.h: nothing is fused into it
OWN_SCHEDULE = "schedule of its own"


@dataclass(frozen=True)
class Pattern:
    """Operators in the order in which they run; `scalars` are the constants that must be among them, if stated."""

    operators: tuple[str, ...]
    scalars: tuple[float, ...] | None = None


# Names for what exporters write in several ways. The scalars are in ascending order.
COMPOSITES = {
    "gelu": (
        Pattern(("relax.nn.gelu",)),
        Pattern(("relax.divide", "relax.erf", "relax.add", "relax.multiply", "relax.multiply"), (0.5, 1.0, 2**0.5)),
        Pattern(("relax.multiply", "relax.erf", "relax.add", "relax.multiply", "relax.multiply"), (0.5, 0.5**0.5, 1.0)),
    )
}


@dataclass(frozen=True)
class Tensor:
    """A tensor that goes into or comes out of a kernel."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Call:
    """What a kernel is asked to compute.

    `args` are the distinct tensors that the operators take from outside, in order of first use; the PrimFunc takes
    them in this order and `output` behind them. Constants of one element are no arguments but `scalars`.
    `attributes` are Relax's, one entry per operator, e.g. `attributes[0].strides` of relax.nn.conv2d.
    """

    operators: tuple[str, ...]
    args: tuple[Tensor, ...]
    output: Tensor
    attributes: tuple[Any, ...]
    scalars: tuple[float, ...]

    def __str__(self) -> str:
        operators = " + ".join(name.removeprefix("relax.") for name in self.operators)
        return f"{operators} ({', '.join(map(str, self.args))} -> {self.output})"


@dataclass(frozen=True)
class UserKernel:
    """A function of the user's, and the operators it may stand for, in all the ways in which they may be written."""

    name: str
    function: Callable[[Call], object]
    patterns: tuple[Pattern, ...]

    def __str__(self) -> str:
        return f"user kernel {self.name}"


def load(name: str, section: KernelSection) -> UserKernel:
    """The kernel that `[kernels.NAME]` names; raises ConfigError where it is not there or fails on import."""
    return UserKernel(name, _function(f"kernels.{name}", section), _patterns(f"kernels.{name}", section.replaces))


def source_note(name: str, section: KernelSection) -> str:
    """What the manifest says of a kernel's source: the sha256 of the file that defines the function."""
    file = inspect.getsourcefile(inspect.unwrap(_function(f"kernels.{name}", section)))
    digest = file_entry(Path(file)).sha256 if file else "no file"
    return f"user kernel {name}: {section.entry}, source sha256 {digest}"


def function_for(kernel: UserKernel, call: Call) -> PrimFunc | None:
    """Asks the user's function for a call and checks what it returns; None where it declines.

    Raises ConfigError where it fails, returns something else, or the parameters do not fit the call.
    """
    try:
        made = kernel.function(call)
    except Exception as exc:
        exc.add_note(f"asked for {call}")
        raise ConfigError(
            f"{kernel}: failed for {call}: {type(exc).__name__}: {first_line(exc)[:300]}{_place(exc)}",
            "mend the function, or let it return None for what it cannot do",
        ) from exc
    if made is None:
        return None
    function = _prim_func(kernel, made)
    _check_signature(kernel, function, call)
    replaced = ",".join(name.rpartition(".")[2] for name in call.operators)
    attrs: dict[str, object] = {USER_ATTR: kernel.name, OPERATORS_ATTR: replaced, "op_pattern": OPAQUE}
    if isinstance(made, Schedule):
        attrs |= {RULE_ATTR: OWN_SCHEDULE, "tirx.is_scheduled": True}
    return function.without_attr("global_symbol").with_attrs(attrs)


def tensor_of(value: tvm.ir.Expr) -> Tensor | None:
    """Shape and dtype of a value of the graph or a parameter; None where it is no tensor or has open dimensions."""
    shape = getattr(value.ty, "shape", None)
    sizes = list(getattr(shape, "values", shape) or []) if shape is not None else None
    if sizes is None or not all(isinstance(size, IntImm) for size in sizes):
        return None
    return Tensor(tuple(int(size) for size in sizes), str(value.ty.dtype))


def _function(place: str, section: KernelSection) -> Callable[[Call], object]:
    module_name, _, function_name = section.entry.partition(":")
    if str(section.folder.resolve()) not in sys.path:
        sys.path.insert(0, str(section.folder.resolve()))
    try:
        module = importlib.import_module(module_name)
    except Exception as exc:
        if isinstance(exc, ModuleNotFoundError) and f"{module_name}.".startswith(f"{exc.name}."):
            raise ConfigError(
                f"{place}.entry: no module `{exc.name}` in {section.folder} or on the Python path",
                f"give the module as seen from {place}.folder",
            ) from None
        raise ConfigError(
            f"{place}.entry: importing `{module_name}` failed: {type(exc).__name__}: "
            f"{first_line(exc)[:300]}{_place(exc)}",
            "mend the module; it must import on its own",
        ) from exc
    function = getattr(module, function_name, None)
    if not callable(function) or isinstance(function, PrimFunc):
        functions = [n for n, v in vars(module).items() if inspect.isfunction(v)]
        raise ConfigError(
            f"{place}.entry: {module.__file__} has no function `{function_name}`",
            did_you_mean(function_name, functions)
            or "name a function that takes a Call and returns a PrimFunc or a Schedule",
        )
    return function  # type: ignore[no-any-return] # a user's function has no types of ours


def _patterns(place: str, names: tuple[str, ...]) -> tuple[Pattern, ...]:
    """Every way in which a chain may be written: the composites in it multiply."""
    found = [Pattern(())]
    for name in names:
        found = [_joined(before, more) for before in found for more in _meanings(place, name)]
    return tuple(found)


def _meanings(place: str, name: str) -> tuple[Pattern, ...]:
    if name in COMPOSITES:
        return COMPOSITES[name]
    full = name if name.startswith("relax.") else f"relax.{name}"
    known = [str(op) for op in tvm.ir.Op.list_op_names() if str(op).startswith("relax.")]
    if full not in known:
        meant = did_you_mean(full, [*known, *(f"relax.{c}" for c in COMPOSITES)], most=3).replace("`relax.", "`")
        raise ConfigError(
            f"{place}.replaces: Relax has no operator `{name}`",
            meant or "`tvmflow compile --dump-ir` shows the operators",
        )
    return (Pattern((full,)),)


def _joined(one: Pattern, other: Pattern) -> Pattern:
    scalars = [s for s in (one.scalars, other.scalars) if s is not None]
    return Pattern(one.operators + other.operators, tuple(sorted(sum(scalars, ()))) if scalars else None)


def _prim_func(kernel: UserKernel, made: object) -> PrimFunc:
    if isinstance(made, PrimFunc):
        return made
    hint = "return a tvm.tirx.PrimFunc, a tvm.s_tir.Schedule on one, or None"
    if not isinstance(made, Schedule):
        raise ConfigError(f"{kernel}: its function returned a {type(made).__name__}", hint)
    functions = [function for function in made.mod.functions.values() if isinstance(function, PrimFunc)]
    if len(functions) != 1:
        raise ConfigError(f"{kernel}: its schedule is on a module of {len(functions)} functions", hint)
    return functions[0]


def _check_signature(kernel: UserKernel, function: PrimFunc, call: Call) -> None:
    wanted = [*call.args, call.output]
    given = [tensor_of(param) for param in function.params]
    if len(given) != len(wanted):
        raise ConfigError(
            f"{kernel}: has {len(given)} parameters, {call} needs {len(wanted)}",
            "it takes the arguments in this order and the output behind them",
        )
    for index, (got, want) in enumerate(zip(given, wanted, strict=True)):
        if got != want:
            role = "the output" if index == len(call.args) else f"argument {index}"
            shown = got if got is not None else "no buffer of fixed shape"
            raise ConfigError(
                f"{kernel}: {role} is {shown}, {call} needs {want}",
                "take shapes and dtypes from the Call, or return None for what does not fit",
            )


def _place(exc: BaseException) -> str:
    """The innermost line of code that is neither TVM's nor ours."""
    ours = (str(Path(__file__).parents[1]), str(Path(tvm.__file__).parent), "<frozen")
    trace, found = exc.__traceback__, ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(ours):
            found = f" ({Path(file).name}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return found
