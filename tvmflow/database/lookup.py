"""Finds the record for a key, or says why there is none.

An exact key wins. Else a record of a portable CPU level serves a build for a CPU that has all of the level's
features, because a schedule is a plan of loops that any such CPU can run. The reverse is no match.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from tvmflow.database.keys import KeyParts, difference
from tvmflow.database.record import Record

PORTABLE_LEVELS = ("x86-64-v4", "x86-64-v3", "x86-64-v2")
"""Highest first, which is the order in which they are tried."""
CPU_NAMES = ("mcpu", "mattr", "features")  # what a portable record may differ in


@dataclass(frozen=True)
class Match:
    """The record to build with. Not `exact` where it was tuned for the portable level in its target's mcpu."""

    record: Record
    exact: bool


@dataclass(frozen=True)
class Miss:
    """No record applies. The nearest one, of the same workload if there is one, and the parts that differ from it."""

    nearest: Record | None
    difference: tuple[str, ...]


def find(records: Mapping[str, Record], parts: KeyParts, cpu_features: Collection[str]) -> Match | Miss:
    """The record that applies to `parts` among `records` by key.

    `cpu_features` are what the CPU has, in the names of the targets' features. A build that does not use them all
    gets no record that would need more than the build itself uses.
    """
    if parts.key in records:
        return Match(records[parts.key], exact=True)
    usable = parts.features & frozenset(cpu_features)
    candidates = [record for record in records.values() if _serves(record.parts, parts, usable)]
    if candidates:
        best = min(candidates, key=lambda record: PORTABLE_LEVELS.index(str(record.parts.target["mcpu"])))
        return Match(best, exact=False)
    near = nearest(records.values(), parts)
    return Miss(near, difference(parts, near.parts) if near else ())


def nearest(records: Iterable[Record], parts: KeyParts) -> Record | None:
    """The record that differs in the fewest parts, one of the same workload before all others."""
    return min(records, key=lambda record: _distance(parts, record), default=None)


def _serves(tuned: KeyParts, wanted: KeyParts, usable: frozenset[str]) -> bool:
    return (
        tuned.target["mcpu"] in PORTABLE_LEVELS
        and tuned.target["kind"] == wanted.target["kind"] == "llvm"
        and tuned.features <= usable
        and _without_cpu(tuned) == _without_cpu(wanted)
    )


def _without_cpu(parts: KeyParts) -> object:
    target = {name: value for name, value in parts.target.items() if name not in CPU_NAMES}
    return parts.workload, target, parts.numerics, parts.preparation


def _distance(parts: KeyParts, record: Record) -> tuple[bool, int, str]:
    return parts.workload != record.parts.workload, len(difference(parts, record.parts)), record.key
