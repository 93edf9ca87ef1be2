"""What `tvmflow db` runs in a process of its own, because records are what somebody else wrote and TVM may die of them.

`each` handles items one by one and says which is at hand, so that its parent knows whose fault it was.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from tvmflow.database import Record
from tvmflow.database.files import shown
from tvmflow.database.metaschedule import Candidate, Stated
from tvmflow.errors import last_line
from tvmflow.process import emit

TIMEOUT_S = 60
MEMORY_BYTES = 8 << 30
Argument = TypeVar("Argument")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Item(Generic[Argument]):
    """What a function is called with, and a group, of which one success is enough."""

    group: object
    argument: Argument


@dataclass(frozen=True)
class Begun:
    """The item of this index is at hand now."""

    index: int


@dataclass(frozen=True)
class Done(Generic[Value]):
    index: int
    value: Value


@dataclass(frozen=True)
class Refused:
    index: int
    why: str


@dataclass(frozen=True)
class Foreign:
    """A candidate of MetaSchedule's files, what they do not say of it, and how many they hold of its workload."""

    candidate: Candidate
    stated: Stated
    trials: int


def each(function: Callable[[Argument], object], items: Sequence[Item[Argument]]) -> None:
    """Calls a function of this module for each item until one of its group succeeds.

    Emits Begun, then Done or Refused. An item that takes longer than TIMEOUT_S ends the process with SIGALRM.
    """
    from tvmflow.exchange import records  # noqa: F401 # TVM is imported before any item's time runs

    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    done: set[object] = set()
    for index, item in enumerate(items):
        if item.group in done:
            continue
        emit(Begun(index))
        signal.alarm(TIMEOUT_S)
        try:
            value = function(item.argument)
        except Exception as exc:  # whatever is wrong with a record is what is said of it
            emit(Refused(index, shown(last_line(exc))[:200]))
        else:
            done.add(item.group)
            emit(Done(index, value))
        signal.alarm(0)


def check(record: Record) -> None:
    """Raises ValueError where a record's workload is not that of its key, or its trace cannot be used on it."""
    from tvmflow.exchange import records

    records.check(record)


def exported(record: Record) -> tuple[list[str], list[object]]:
    """A record as MetaSchedule writes it: the values of its workload's line and of its own. Raises like `check`."""
    from tvmflow.exchange import records

    return records.exported(record)


def imported(foreign: Foreign) -> Record:
    """The record that a candidate makes; raises ValueError, TargetError where there is none."""
    from tvmflow.exchange import records

    return records.imported(foreign.candidate.workload, foreign.candidate.text, foreign.stated, foreign.trials)
