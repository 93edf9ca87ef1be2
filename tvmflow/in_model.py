"""What kernels take inside the whole model, and what follows from it.

Alone on the machine a kernel finds its input warm and the memory to itself. In a model it runs between others, where
another schedule may be ahead. So `settle` builds the model once per rank: with every task's best record, with every
task's second, ..., with the default schedules; each task keeps the record with which its kernels were fastest there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tvmflow import process, proof
from tvmflow.config import Config
from tvmflow.database import Record, Store
from tvmflow.errors import ArtifactError, BudgetError
from tvmflow.manifest import Manifest

WORTH = 0.98  # another record takes a task's place if its kernels take at most this share of the time
Build = Callable[[Config, Path], Manifest]


@dataclass(frozen=True)
class Settled:
    """Seconds of all kernels of one run: with default schedules, and with what was kept; how many records changed."""

    default_s: float
    kept_s: float
    changed: int


def can_settle(cfg: Config) -> bool:
    """Whether whole models of this config run here, and their kernels can be timed: on this machine's CPU."""
    return cfg.tuning.measure == "local" and cfg.target.kind == "llvm"


def settle(cfg: Config, found: Mapping[str, Sequence[Record]], build: Build) -> Settled:
    """Lets each task in `found` keep the record that is fastest inside the model of `cfg`.

    `found` holds records by key: the best first, the default schedule's last. `build` builds a config in a folder.
    """
    assert cfg.tuning.database is not None
    store = Store(cfg.tuning.database)
    others = [record for record in store.read().records if record.key not in found]
    ranks = max(len(records) for records in found.values())
    times = []
    for rank in range(ranks):
        chosen = [records[min(rank, len(records) - 1)] for records in found.values()]
        times.append(_times(cfg, [*others, *chosen], build))
    kept_s, changed = sum(times[0].values()), 0
    for key, records in found.items():
        seconds = [times[rank].get(key, 0.0) for rank in range(len(records))]
        best = min(range(len(records)), key=seconds.__getitem__)
        if seconds[best] < WORTH * seconds[0]:
            store.replace(_chosen_here(records[best]), records[0])
            kept_s += seconds[best] - seconds[0]
            changed += 1
    return Settled(sum(times[-1].values()), kept_s, changed)


def kernel_seconds(cfg: Config, folder: Path, manifest: Manifest) -> dict[str, float]:
    """Seconds of one run per kernel of the library in `folder`, all its calls together, measured in the model."""
    feeds = proof.reference(cfg, manifest)[0][0].inputs
    seconds, _ = process.call(
        "tvmflow.children:kernel_times", folder, feeds, what="timing the kernels", error=ArtifactError,
        env=proof.RUN_ENV,
    )  # fmt: skip
    return {kernel.name: seconds.get(kernel.name, 0.0) for kernel in manifest.kernels}


def check_tuned(cfg: Config, folder: Path, manifest: Manifest, source: str) -> None:
    """Raises BudgetError where kernels from tuning records take a smaller share of the time than the config requires.

    `source` is what the user calls the model, for the command that would help.
    """
    assert cfg.tuning.require_tuned is not None
    seconds = kernel_seconds(cfg, folder, manifest)
    total = sum(seconds.values())
    rest = sorted((k for k in manifest.kernels if k.origin != "tuned"), key=lambda k: -seconds[k.name])
    share = 1 - sum(seconds[kernel.name] for kernel in rest) / total if total else 1.0
    if share >= cfg.tuning.require_tuned:
        return
    costly = ", ".join(f"{kernel.name} ({seconds[kernel.name] / total:.0%}, {kernel.origin})" for kernel in rest[:5])
    database = cfg.tuning.database or "tuning_db"
    raise BudgetError(
        f"tuned kernels take {share:.1%} of the time, tuning.require_tuned is {cfg.tuning.require_tuned:.1%}; "
        f"the others are led by {costly}",
        f"tvmflow tune {source} --set tuning.database={database}",
    )


def _times(cfg: Config, records: Sequence[Record], build: Build) -> dict[str, float]:
    """Seconds per key of the model built from these records; what has no key goes by its name."""
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as name:
        database, folder = Path(name) / "db", Path(name) / "library"
        folder.mkdir()
        Store(database).add(records)
        tuning = cfg.tuning.model_copy(update={"database": database})
        manifest = build(cfg.model_copy(update={"tuning": tuning}), folder)
        seconds = kernel_seconds(cfg, folder, manifest)
    total: dict[str, float] = {}
    for kernel in manifest.kernels:
        label = kernel.key or kernel.name
        total[label] = total.get(label, 0.0) + seconds[kernel.name]
    return total


def _chosen_here(record: Record) -> Record:
    protocol = f"{record.provenance.protocol}; chosen in the whole model"
    return record.model_copy(update={"provenance": record.provenance.model_copy(update={"protocol": protocol})})
