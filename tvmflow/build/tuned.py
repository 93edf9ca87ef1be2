"""Schedules from the tuning database onto the kernels of a prepared module."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import tvm
from tvm.tirx import PrimFunc

from tvmflow import tasks
from tvmflow.config import NumericsSection
from tvmflow.database import Match, Reading
from tvmflow.kernels import default, repacking, tf32
from tvmflow.kernels.blocking import SHARED_ATTR
from tvmflow.kernels.default import GFLOPS_ATTR, KEY_ATTR, RULE_ATTR
from tvmflow.kernels.user import USER_ATTR
from tvmflow.target import Target


@dataclass(frozen=True)
class Applied:
    """The module with every kernel scheduled that has a record, and what could not be used."""

    mod: tvm.IRModule
    notes: tuple[str, ...]


def apply(prepared: tvm.IRModule, reading: Reading, target: Target, numerics: NumericsSection,
          cpu_features: Collection[str], shared_layouts: bool = False) -> Applied:  # fmt: skip
    """Replays the record of each kernel that has one. A record that no longer applies costs itself alone.

    With `shared_layouts` a record is left aside if it wants weights in another layout than the default schedule.
    """
    functions = dict(prepared.functions.items())
    notes = [str(fault) for fault in reading.faults]
    set_aside = 0
    for var, function in prepared.functions.items():
        if not tasks.is_tunable(function):
            continue
        mod, workload = tasks.canonical(function)
        parts = tasks.key_parts(workload, target, numerics)
        functions[var] = function = function.with_attr(KEY_ATTR, parts.key)
        found = reading.lookup(parts, cpu_features)
        if not isinstance(found, Match):
            continue
        uses_tf32 = tf32.is_used(found.record.trace)
        if uses_tf32 and not numerics.tf32:
            notes.append(f"{var.name_hint}: record {found.record.key[:12]} uses TF32 against its key and was skipped")
            continue
        schedule = tasks.replay(mod, found.record.trace)
        if schedule is None:
            notes.append(f"{var.name_hint}: record {found.record.key[:12]} no longer applies and was skipped")
            continue
        if shared_layouts and repacking.layouts(schedule.mod["main"]) != _default_layouts(mod):
            set_aside += 1
            continue
        if not tasks.kept_its_tiles(schedule, found.record.trace):
            notes.append(f"{var.name_hint}: record {found.record.key[:12]} was made for another shape, its tiles were "
                         "changed to fit")  # fmt: skip
        rule = f"record {found.record.key[:12]}, {found.record.gflops:.0f} GFLOP/s when tuned"
        if not found.exact:
            rule += f", for {found.record.parts.target['mcpu']}"
        if uses_tf32:
            rule += ", tf32"
        attrs = {RULE_ATTR: rule, KEY_ATTR: parts.key, GFLOPS_ATTR: found.record.gflops, "tirx.is_scheduled": True}
        if USER_ATTR in function.attrs:
            attrs[USER_ATTR] = function.attrs[USER_ATTR]
        functions[var] = schedule.mod["main"].without_attr("global_symbol").with_attrs(attrs)
    if set_aside:
        notes.append(f"{set_aside} records want weights in another layout than the other buckets and were left aside; "
                     "shapes.one_layout = false uses them, with copies of those weights")  # fmt: skip
    return Applied(tvm.IRModule(functions, attrs=prepared.attrs), tuple(notes))


def with_shared_layouts(mod: tvm.IRModule) -> tvm.IRModule:
    """The module, in which default schedules want weights in a layout that does not depend on the other sizes."""
    functions = {var: f.with_attr(SHARED_ATTR, True) if isinstance(f, PrimFunc) else f
                 for var, f in mod.functions.items()}  # fmt: skip
    return tvm.IRModule(functions, attrs=mod.attrs)


def _default_layouts(mod: tvm.IRModule) -> frozenset[tuple[int, int]]:
    schedule, _ = default.schedule_of(with_shared_layouts(mod))
    return repacking.layouts(schedule.mod["main"])
