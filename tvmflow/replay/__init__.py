"""Records' traces on kernels: only what the grammar allows is replayed, and what comes of it is looked at once more."""

from __future__ import annotations

import tvm
from pydantic import JsonValue
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ScheduleError, Trace

from tvmflow.database.grammar import GrammarError, Where, check_trace, check_workload
from tvmflow.database.record import Record, unpack
from tvmflow.errors import last_line
from tvmflow.kernels import tvm_intrinsics
from tvmflow.kernels.schedules import repacking
from tvmflow.kernels.tf32 import intrinsics
from tvmflow.replay import contents, layouts

__all__ = ["REPLAY_ERRORS", "ReplayError", "apply", "check_made", "load_workload", "replay"]

# What TVM raises for a trace that does not fit a kernel.
REPLAY_ERRORS = (ScheduleError, RuntimeError, ValueError, TypeError, IndexError, KeyError)


class ReplayError(ValueError):
    """Why a trace cannot be used: it is outside the grammar, does not fit the kernel, or makes what it must not."""


def replay(mod: tvm.IRModule, trace: JsonValue, where: Where) -> Schedule:
    """The schedule that a trace makes of `main` of a module, for a target and numerics. Raises ReplayError.

    What it makes calls nothing that the kernel does not call, carries no note that steers TVM elsewhere, computes in no
    other types, and stays within bounds: see `contents.check`.
    """
    try:
        check_trace(trace, where)
    except GrammarError as exc:
        raise ReplayError(str(exc)) from None
    schedule = apply(mod, trace, where)
    _check(mod, schedule, where)
    return schedule


def apply(mod: tvm.IRModule, trace: JsonValue, where: Where) -> Schedule:
    """What a trace that is of the grammar makes of a module; nobody has looked at it yet. Raises ReplayError."""
    _register_intrinsics(trace, where)
    try:
        schedule = Schedule(mod, debug_mask="none")
        Trace.apply_json_to_schedule(trace, schedule)
    except REPLAY_ERRORS as exc:
        raise ReplayError(f"its trace does not apply to its workload: {last_line(exc)[:200]}") from None
    return schedule


def check_made(mod: tvm.IRModule, schedule: Schedule, trace: JsonValue, where: Where) -> None:
    """Raises ReplayError where a schedule of `main` of a module, with its trace, could not be had from a record."""
    try:
        check_trace(trace, where)
    except GrammarError as exc:
        raise ReplayError(str(exc)) from None
    _check(mod, schedule, where)


def _check(mod: tvm.IRModule, schedule: Schedule, where: Where) -> None:
    try:
        layouts.check(schedule, mod)
        contents.check(mod["main"], schedule.mod["main"], where)
    except REPLAY_ERRORS as exc:
        raise ReplayError(f"its trace makes what no record may: {last_line(exc)[:200]}") from None
    if not repacking.is_whole(schedule.mod["main"]):
        raise ReplayError("its layout of the weights loses some")


def load_workload(record: Record) -> tvm.IRModule:
    """The module of a record's workload. Raises ReplayError where it is none."""
    text = unpack(record.workload_json)
    try:
        check_workload(text)
    except GrammarError as exc:
        raise ReplayError(f"its workload: {exc}") from None
    try:
        mod = tvm.ir.load_json(text)
    except REPLAY_ERRORS as exc:
        raise ReplayError(f"its workload does not load: {last_line(exc)[:200]}") from None
    if [var.name_hint for var in mod.functions] != ["main"]:
        raise ReplayError("its workload is not one function `main`")
    return mod


def _register_intrinsics(trace: JsonValue, where: Where) -> None:
    """Makes TVM know the intrinsics that a trace may name."""
    if "Tensorize" not in str(trace):
        return
    if where.kind == "cuda":
        intrinsics.register()
    else:
        tvm_intrinsics.load_of_cpu(where.machine)
