"""From configs to their tasks, and from tasks to records in the tuning database."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvmflow import config, frontend
from tvmflow.buckets import bundling
from tvmflow.config import Config
from tvmflow.flow import compiling
from tvmflow.process import Child
from tvmflow.tuning import child, in_model
from tvmflow.tuning.child import Compared
from tvmflow.verification import running


@dataclass(frozen=True)
class Selection:
    """Which tasks to tune: those that a pattern names, and of them the i-th of n parts."""

    pattern: str = "*"
    shard: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class Tuned:
    """What a session did: tasks, trials, how many times as fast all kernels together became, and that in each model;
    and what it knows of the methods of each convolution."""

    tasks: int
    trials: int
    gain: float
    settled: dict[str, in_model.Settled]
    compared: list[Compared]


def tasks(cfg: Config) -> list[dict[str, Any]]:
    """The tunable kernels of a config: one row each, with the record that serves it or what differs.

    With buckets, the rows of each bucket, which name it.
    """
    rows: list[dict[str, Any]] = []
    for name, one in bundling.configs_of(cfg).items():
        found = Child("extracting the tasks", torch=frontend.needs_torch(one)).call(child.tasks, one)
        bucket = {"bucket": name} if name else {}
        rows += [bucket | row for row in found]
    return rows


def tune(cfgs: Sequence[Config], what: Selection, on_event: Callable[[Any], None]) -> Tuned:
    """Tunes the tasks of some configs, all into one database, then settles the winners inside the whole models, and
    compares the methods of their convolutions.

    `on_event` gets a line of text, or a tuning.session.Progress after each batch. Only a session that has all tasks of
    its models does the latter two, settling only on this machine's CPU; after a part, `db merge` joins what was found.
    Of a config with buckets, each bucket is a model of its own.
    """
    progress: list[Any] = []

    def heard(event: Any) -> None:
        progress.append(event)
        on_event(event)

    models = per_bucket(cfgs)
    with running.cuda_env(cfgs[0].target.kind) as env:
        tuner = Child("tuning", env=env, torch=frontend.needs_torch(*cfgs), timed=False, on_event=heard)
        found = tuner.call(child.tune, [one for _, one in models], what.pattern, what.shard)
    last = next((event for event in reversed(progress) if not isinstance(event, str)), None)
    settled = {}
    if found and what == Selection() and in_model.can_settle(cfgs[0]):
        for name, cfg in models:
            on_event(f"measuring the winners inside {name}")
            records = {one.key: one.records for one in found}
            settled[name] = in_model.settle(cfg, records, compiling.build)
    compared = compare_methods(cfgs, False, on_event) if what == Selection() else []
    return Tuned(last.tasks if last else 0, last.trials if last else 0, last.gain if last else 1.0, settled, compared)


def compare_methods(cfgs: Sequence[Config], again: bool, on_event: Callable[[Any], None]) -> list[Compared]:
    """Measures by which method the convolutions of some configs are fastest on a CPU, all into one database.

    What is known already stays unless `again`, or the direct kernel has another record now. Returns all of it.
    """
    served = [cfg for cfg in cfgs if cfg.target.kind == "llvm" and cfg.numerics.winograd != "off"]
    if not served:
        return []
    models = [one for _, one in per_bucket(served)]
    comparer = Child("comparing methods", torch=frontend.needs_torch(*served), timed=False, on_event=on_event)
    return comparer.call(child.compare_methods, models, again)


def per_bucket(cfgs: Sequence[Config]) -> list[tuple[str, Config]]:
    """The names and configs of all models: each bucket is one of its own. Two configs may name the same model."""
    return [
        (" ".join(filter(None, (config.name(cfg), bucket))), one)
        for cfg in cfgs
        for bucket, one in bundling.configs_of(cfg).items()
    ]
