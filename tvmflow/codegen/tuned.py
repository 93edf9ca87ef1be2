"""Schedules from the tuning database onto the kernels of a prepared module."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import tvm

from tvmflow import tasks
from tvmflow.config import NumericsSection
from tvmflow.database import Match, Reading
from tvmflow.database.grammar import Where
from tvmflow.kernels.schedules import share_layouts
from tvmflow.kernels.schedules.default_schedule import GFLOPS_ATTR, KEY_ATTR, RULE_ATTR
from tvmflow.kernels.tf32 import intrinsics
from tvmflow.kernels.user import OPERATORS_ATTR, USER_ATTR
from tvmflow.replay import ReplayError, replay
from tvmflow.target import Target


@dataclass(frozen=True)
class Applied:
    """The module with every kernel scheduled that has a record, and what could not be used."""

    mod: tvm.IRModule
    notes: tuple[str, ...]


def apply(
    prepared: tvm.IRModule, reading: Reading, target: Target, numerics: NumericsSection, cpu_features: Collection[str]
) -> Applied:
    """Replays the record of each kernel that has one. A record that no longer applies costs itself alone."""
    functions = dict(prepared.functions.items())
    notes = [str(fault) for fault in reading.faults]
    for var, function in prepared.functions.items():
        if not tasks.is_tunable(function):
            continue
        mod, workload = tasks.canonical(function)
        parts = tasks.key_parts(workload, target, numerics)
        found = reading.lookup(parts, cpu_features)
        borrowed = not isinstance(found, Match) and share_layouts.are_wanted(function)
        if borrowed:  # a record of the kernel that has its weights for itself may want the same layout
            mod, workload = tasks.canonical(share_layouts.alone(function))
            found = reading.lookup(tasks.key_parts(workload, target, numerics), cpu_features)
        functions[var] = function = function.with_attr(KEY_ATTR, parts.key)
        if not isinstance(found, Match):
            continue
        uses_tf32 = intrinsics.is_used(found.record.trace)
        if uses_tf32 and not numerics.tf32:
            notes.append(f"{var.name_hint}: record {found.record.key[:12]} uses TF32 against its key and was skipped")
            continue
        try:
            schedule = replay(mod, found.record.trace, Where.of(parts))
        except ReplayError as exc:
            notes.append(f"{var.name_hint}: record {found.record.key[:12]} was skipped: {exc}")
            continue
        if borrowed and share_layouts.of(schedule.mod["main"]) != share_layouts.of_default(function):
            continue
        if not tasks.kept_its_tiles(schedule, found.record.trace):
            notes.append(
                f"{var.name_hint}: record {found.record.key[:12]} was made for another shape, its tiles were "
                "changed to fit"
            )
        attrs = {
            RULE_ATTR: _rule(found, uses_tf32),
            KEY_ATTR: parts.key,
            GFLOPS_ATTR: found.record.gflops,
            "tirx.is_scheduled": True,
        }
        attrs |= {name: function.attrs[name] for name in (USER_ATTR, OPERATORS_ATTR) if name in function.attrs}
        functions[var] = schedule.mod["main"].without_attr("global_symbol").with_attrs(attrs)
    return Applied(tvm.IRModule(functions, attrs=prepared.attrs), tuple(notes))


def _rule(found: Match, uses_tf32: bool) -> str:
    """What a manifest says of a kernel with this record's schedule."""
    rule = f"record {found.record.key[:12]}, {found.record.gflops:.0f} GFLOP/s when tuned"
    if not found.exact:
        rule += f", for {found.record.parts.target['mcpu']}"
    return rule + ", tf32" if uses_tf32 else rule
