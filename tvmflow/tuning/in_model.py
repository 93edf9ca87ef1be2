"""What kernels take inside the whole model, and what follows from it.

Alone on the machine a kernel finds its input warm and the memory to itself. In a model it runs between others, where
another schedule may be ahead. So `settle` builds the model once per rank: with every task's best record, with every
task's second, ..., with the default schedules; each task keeps the record with which its kernels were fastest there.
"""

from __future__ import annotations

import contextlib
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tvmflow.config import Config
from tvmflow.database import Comparison, Record, Store
from tvmflow.errors import ArtifactError, BudgetError
from tvmflow.frozen import evolve
from tvmflow.manifest import Kernel, Manifest
from tvmflow.process import Child
from tvmflow.verification import child, reference, running

WORTH = 0.98  # a record is kept if its kernels take at most this share of the default schedule's time
TUNED_ENOUGH = 0.95  # of the time: no command is proposed
DOMINANT = 0.5  # of the time: tuning this one kernel is what helps most
Build = Callable[[Config, Path], Manifest]


@dataclass(frozen=True)
class Settled:
    """Seconds of all kernels of one run: with default schedules, and with what is kept; how many records changed."""

    default_s: float
    kept_s: float
    changed: int


def can_settle(cfg: Config) -> bool:
    """Whether whole models of this config run here, and their kernels can be timed: on this machine's CPU."""
    return cfg.tuning.measure == "local" and cfg.target.kind == "llvm"


def settle(cfg: Config, found: Mapping[str, Sequence[Record]], build: Build) -> Settled:
    """Lets each task in `found` keep the record that is fastest inside the model of `cfg`, or the default.

    `found` holds records by key: the best first, the default schedule's last. `build` builds a config in a folder.
    """
    assert cfg.tuning.database is not None
    store = Store(cfg.tuning.database)
    reading = store.read()
    stored, comparisons = reading.by_key, reading.comparisons
    others = [record for key, record in stored.items() if key not in found]
    ranks = max(len(records) for records in found.values())
    times: list[dict[str, float]] = []
    feeds: Mapping[str, np.ndarray] | None = None
    for rank in range(ranks):
        chosen = [records[min(rank, len(records) - 1)] for records in found.values()]
        with _built(cfg, [*others, *chosen], comparisons, build) as (folder, manifest):
            feeds = reference.draw_accepted(cfg, manifest) if feeds is None else feeds
            (taken,) = kernel_seconds((folder, feeds))
            times.append(_by_key(manifest, taken))
    kept_s, changed = sum(times[-1].values()), 0
    for key, records in found.items():
        seconds = [times[rank].get(key, 0.0) for rank in range(len(records))]
        best = min(range(len(records)), key=seconds.__getitem__)
        if seconds[best] > WORTH * seconds[-1]:
            best = len(records) - 1
        if records[best].trace != stored[key].trace:
            store.replace(_chosen_here(records[best]), stored[key])
            changed += 1
        kept_s += seconds[best] - seconds[-1]
    return Settled(sum(times[-1].values()), kept_s, changed)


def kernel_seconds(*libraries: tuple[Path, Mapping[str, np.ndarray]]) -> list[dict[str, float]]:
    """Seconds of one run per kernel of each library, given by folder and inputs: all calls together, in the model."""
    return Child("timing the kernels", ArtifactError, running.RUN_ENV).call(child.kernel_times, libraries)


def shares(cfg: Config, manifest: Manifest, seconds: Mapping[str, float], source: str) -> str:
    """What share of the time is whose, and the command that helps most; `source` is what the user calls the model."""
    times = _kernel_times(manifest, seconds)
    by_origin: dict[str, float] = {}
    for kernel, taken in times.items():
        by_origin[kernel.origin] = by_origin.get(kernel.origin, 0.0) + taken
    whole = f"a run's time: {', '.join(f'{share:.0%} {origin}' for origin, share in _largest(by_origin))}"
    open_ = {kernel.name: taken for kernel, taken in times.items() if kernel.origin != "tuned"}
    led = [(name, share) for name, share in _largest(open_)[:3] if share >= 0.01]
    if not led:
        return whole
    text = f"{whole}; led by {', '.join(f'{name} ({share:.0%})' for name, share in led)}"
    if by_origin.get("tuned", 0.0) >= TUNED_ENOUGH:
        return text
    tasks = f" --tasks '{_task(led[0][0])}'" if led[0][1] >= DOMINANT else ""
    return f"{text}. What helps most: `{_tune_command(cfg, source)}{tasks}`"


def check_tuned(cfg: Config, manifest: Manifest, seconds: Mapping[str, float], source: str) -> None:
    """Raises BudgetError where kernels from tuning records take a smaller share of the time than the config requires.

    `source` is what the user calls the model, for the command that would help.
    """
    times = _kernel_times(manifest, seconds)
    rest = {f"{kernel.name}, {kernel.origin}": taken for kernel, taken in times.items() if kernel.origin != "tuned"}
    share = 1 - sum(rest.values())
    if cfg.tuning.require_tuned is None or share >= cfg.tuning.require_tuned:
        return
    costly = "; ".join(f"{name} ({taken:.0%})" for name, taken in _largest(rest)[:5])
    raise BudgetError(
        f"tuned kernels take {share:.1%} of the time, tuning.require_tuned is {cfg.tuning.require_tuned:.1%}; "
        f"the others are led by {costly}",
        _tune_command(cfg, source),
    )


def _kernel_times(manifest: Manifest, seconds: Mapping[str, float]) -> dict[Kernel, float]:
    """The share of a run that each kernel takes."""
    total = sum(seconds.get(kernel.name, 0.0) for kernel in manifest.kernels)
    return {kernel: seconds.get(kernel.name, 0.0) / total if total else 0.0 for kernel in manifest.kernels}


def _largest(amounts: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(amounts.items(), key=lambda item: -item[1])


def _task(kernel: str) -> str:
    """The name of a kernel's task: the kernel's own, before its weights were packed."""
    return kernel.removesuffix("_prepacked")


def _tune_command(cfg: Config, source: str) -> str:
    database = f"tuning.database={cfg.tuning.database or 'tuning_db'}"
    return shlex.join(["tvmflow", "tune", source, "--set", database])


@contextlib.contextmanager
def _built(
    cfg: Config, records: Sequence[Record], comparisons: Sequence[Comparison], build: Build
) -> Iterator[tuple[Path, Manifest]]:
    """The model built from these records and comparisons alone."""
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as name:
        database, folder = Path(name) / "db", Path(name) / "library"
        folder.mkdir()
        Store(database).add(records)
        Store(database).add_comparisons(comparisons)
        yield folder, build(evolve(cfg, tuning=evolve(cfg.tuning, database=database)), folder)


def _by_key(manifest: Manifest, seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds per key; what has no key goes by its name."""
    total: dict[str, float] = {}
    for kernel in manifest.kernels:
        label = kernel.key or kernel.name
        total[label] = total.get(label, 0.0) + seconds.get(kernel.name, 0.0)
    return total


def _chosen_here(record: Record) -> Record:
    protocol = f"{record.provenance.protocol}; chosen in the whole model"
    return evolve(record, provenance=evolve(record.provenance, protocol=protocol))
