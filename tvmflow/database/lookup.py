"""Finds the record for a key, or says why there is none.

An exact key wins. Else a record of a portable CPU level serves a build for a CPU that has all of the level's
features, because a schedule is a plan of loops that any such CPU can run. The reverse is no match.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from tvmflow.database.keys import KeyParts, difference
from tvmflow.database.record import Record

PORTABLE_LEVELS = ("x86-64-v4", "x86-64-v3", "x86-64-v2")
"""Highest first, which is the order in which they are tried."""
CPU_NAMES = ("mcpu", "mattr", "features")  # what a portable record may differ in


class Keyed(Protocol):
    """What a database keeps under a key."""

    @property
    def key(self) -> str: ...

    @property
    def parts(self) -> KeyParts: ...


Kept = TypeVar("Kept", bound=Keyed)


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
    """The record that applies to `parts` among `records` by key, as `serving` finds it."""
    found = serving(records, parts, cpu_features)
    if found is not None:
        return Match(found, exact=found.key == parts.key)
    near = nearest(records.values(), parts)
    return Miss(near, difference(parts, near.parts) if near else ())


def serving(entries: Mapping[str, Kept], parts: KeyParts, cpu_features: Collection[str]) -> Kept | None:
    """The entry that applies to `parts` among `entries` by key, None where none does.

    `cpu_features` are what the CPU has, in the names of the targets' features. A build that does not use them all
    gets no entry that would need more than the build itself uses.
    """
    if parts.key in entries:
        return entries[parts.key]
    usable = parts.features & frozenset(cpu_features)
    candidates = [entry for entry in entries.values() if _serves(entry.parts, parts, usable)]
    return min(candidates, key=lambda entry: PORTABLE_LEVELS.index(str(entry.parts.target["mcpu"])), default=None)


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
