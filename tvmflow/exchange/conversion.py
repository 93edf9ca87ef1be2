"""What `tvmflow db` does with TVM: replay records, hand them to MetaSchedule, take them from it.

Every record is handled in a child process. One that the child dies of costs itself alone: a new child goes on behind
it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from tvmflow.database import Added, Fault, Record, Store, better, metaschedule
from tvmflow.database.store import examined, folder_name
from tvmflow.errors import DatabaseError, UsageError
from tvmflow.exchange import child
from tvmflow.exchange.child import Begun, Done, Foreign, Item, Refused
from tvmflow.process import Child

MAX_DEATHS = 20
Argument = TypeVar("Argument")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Imported:
    """The records that were made; how many of them the database took; how many lines hold a candidate that could not
    be measured; and what was refused."""

    records: tuple[Record, ...]
    taken: int
    unmeasured: int
    faults: tuple[Fault, ...]


@dataclass(frozen=True)
class Merged:
    """How many records a database held that was merged into another, what they changed there, and its faults."""

    records: int
    added: Added
    faults: tuple[Fault, ...]


def replay(records: Sequence[Record]) -> dict[str, str]:
    """What is wrong with each record, by key, where its trace does not apply to its workload or that is another's."""
    _, refused = _each(child.check, [Item(record.key, record) for record in records], "replaying it")
    return {records[index].key: why for index, why in refused.items()}


def merge(into: Store, source: Store, replayed: bool) -> Merged:
    """Puts what one database holds into another; of each key the better entry stays.

    A record that would be new there is looked at first: replayed, or only its workload where `replayed` is False. One
    that cannot be used is left out and named.
    """
    reading, accused = source.read(), source.accused()
    known = into.read().by_key if into.path.exists() else {}
    new = [one for one in reading.records if one.key not in known or better(one, known[one.key]) != known[one.key]]
    wrong = replay(new) if replayed else examined(new)
    added = into.add(one for one in reading.records if one.key not in wrong)
    into.add_comparisons(reading.comparisons)
    into.add_accused(accused.by_folder)
    return Merged(len(reading.records), added, reading.faults + accused.faults + source.located(wrong))


def export_files(store: Store, folder: Path, chosen: Callable[[Record], bool]) -> tuple[int, tuple[Fault, ...]]:
    """Writes the chosen records as MetaSchedule's two files; returns how many, and the faults of what was left out.

    Raises UsageError where there are none, or of several targets, which those files could not tell apart.
    """
    reading = store.read()
    records = [record for record in reading.records if chosen(record)]
    found = sorted({folder_name(record.parts) for record in records})
    if not records:
        raise UsageError(f"{store.path}: holds no record that was asked for", "`tvmflow db show` lists them all")
    if len(found) > 1:
        raise UsageError(
            f"records of {len(found)} targets: {', '.join(found)}",
            "MetaSchedule's files do not tell targets apart: choose one with --target",
        )
    done, refused = _each(child.exported, [Item(record.key, record) for record in records], "exporting it")
    entries = [(records[index].parts.workload, *lines) for index, lines in sorted(done.items())]
    count = metaschedule.write(folder, entries)
    faults = tuple(
        Fault(store.path, 0, records[index].key, why, "tune it again; `tvmflow db verify` checks them all")
        for index, why in sorted(refused.items())
    )
    return count, reading.faults + faults


def import_files(store: Store, folder: Path, stated: metaschedule.Stated) -> Imported:
    """Takes the fastest candidate of each workload and target from MetaSchedule's two files into the database.

    Where one is refused the next fastest is tried; where the database has one as fast, that stays, because it knows
    where it comes from. Raises DatabaseError where the files cannot be read.
    """
    known = store.read().by_key if store.path.exists() else {}
    reading = metaschedule.read(folder)
    groups = [(one.workload_line, one.target) for one in reading.candidates]
    trials = Counter(groups)
    items = [
        Item(group, Foreign(one, stated, trials[group])) for group, one in zip(groups, reading.candidates, strict=True)
    ]
    done, refused = _each(child.imported, items, "importing it")
    records = tuple(done.values())
    better = [one for one in records if one.key not in known or one.median_s < known[one.key].median_s]
    if better:
        store.add(better)
    faults: dict[object, list[int]] = {}
    for index, why in sorted(refused.items()):
        faults.setdefault((groups[index], why), []).append(index)
    path = folder / metaschedule.TUNING_RECORDS
    named = tuple(
        _refusal(path, [reading.candidates[i].line for i in indices], refused[indices[0]])
        for indices in faults.values()
    )
    return Imported(records, len(better), reading.unmeasured, reading.faults + named)


def _refusal(path: Path, lines: list[int], why: str) -> Fault:
    more = f" (and so {len(lines) - 1} more of its workload)" if len(lines) > 1 else ""
    return Fault(path, min(lines), None, why + more, "the next fastest of its workload is taken, where there is one")


@dataclass(frozen=True)
class _Said(Generic[Value]):
    """What became of items, by index: values, and why others were refused."""

    done: dict[int, Value]
    refused: dict[int, str]


def _each(
    function: Callable[[Argument], Value], items: Sequence[Item[Argument]], what: str
) -> tuple[dict[int, Value], dict[int, str]]:
    """What `child.each` says of the items, by index: the values, and why others were refused."""
    done: dict[int, Value] = {}
    refused: dict[int, str] = {}
    left = list(range(len(items)))
    for _ in range(MAX_DEATHS):
        if not left:
            break
        said, culprit = _until_death(function, [items[index] for index in left], what)
        done |= {left[place]: value for place, value in said.done.items()}
        refused |= {left[place]: why for place, why in said.refused.items()}
        finished = {items[index].group for index in done}
        left = [index for index in left[culprit + 1 :] if items[index].group not in finished]
    return done, refused | dict.fromkeys(left, f"not looked at: {MAX_DEATHS} before it ended their process")


def _until_death(
    function: Callable[[Argument], Value], items: Sequence[Item[Argument]], what: str
) -> tuple[_Said[Value], int]:
    """What one child says of `items`; and the index of the item that it died of, or of the last one."""
    said = _Said[Value]({}, {})
    begun: list[int] = []

    def heard(event: Begun | Done[Value] | Refused) -> None:
        match event:
            case Begun(index):
                begun.append(index)
            case Done(index, value):
                said.done[index] = value
            case Refused(index, why):
                said.refused[index] = why

    try:
        Child(what, DatabaseError, on_event=heard).call(child.each, function, items)
    except DatabaseError as exc:
        if not exc.crashed or not begun:
            raise
        said.refused[begun[-1]] = "it takes too long" if "SIGALRM" in exc.message else exc.message
        return said, begun[-1]
    return said, len(items) - 1
