"""What flow runs in a process of its own to list and to tune the tasks of a config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvmflow import frontend
from tvmflow.config import Config
from tvmflow.errors import ConfigError
from tvmflow.process import emit

if TYPE_CHECKING:
    from tvmflow.database import Match, Miss
    from tvmflow.prepare import Setting
    from tvmflow.tasks import Task


def tasks(cfg: Config) -> list[dict[str, Any]]:
    """One row per task: operator, calls, FLOP, key, and the record that serves it or what differs from the nearest."""
    from tvmflow.database import Store
    from tvmflow.target import host_features

    found, _ = _extracted(cfg)
    reading = Store(cfg.tuning.database).read() if cfg.tuning.database and cfg.tuning.database.exists() else None
    rows = []
    for task in found:
        answer = reading.lookup(task.parts, host_features()) if reading else None
        rows.append(_row(task, answer))
    return rows


def tune(cfg: Config, pattern: str) -> int:
    """Tunes the tasks whose names match `pattern`; emits a Progress after each batch; returns how many there are."""
    import fnmatch

    from tvmflow.database import Store
    from tvmflow.target import cores
    from tvmflow.tuning import session
    from tvmflow.tuning.measure import Measurer

    if cfg.tuning.database is None:
        hint = "name the folder for records, e.g. --set tuning.database=tuning_db"
        raise ConfigError("tuning.database: missing", hint)
    found, setting = _extracted(cfg)
    chosen = [task for task in found if fnmatch.fnmatch(task.name, pattern)]
    if not chosen:
        raise ConfigError(f"--tasks {pattern}: matches none of {len(found)} tasks", "`tvmflow tasks CONFIG` lists them")
    cfg.tuning.database.mkdir(parents=True, exist_ok=True)
    store = Store(cfg.tuning.database)
    limits = session.Limits(cfg.tuning.trials_per_task, cfg.tuning.minutes * 60, cfg.tuning.seed)
    with Measurer(str(setting.tvm_target), chosen[0].threads, cores()) as measurer:
        session.tune(chosen, store.read().by_key, setting.tvm_target, limits, measurer, keep=store.keep, report=emit)
    return len(chosen)


def _extracted(cfg: Config) -> tuple[tuple[Task, ...], Setting]:
    emit("import")
    model = frontend.load(cfg)

    from tvmflow import tasks
    from tvmflow.build import library
    from tvmflow.prepare import prepare, setting

    chosen = setting(cfg)
    emit("graph")
    with chosen.entered():
        prepared, _ = prepare(cfg, model, chosen.target.kind, lambda *step: None)
        return tasks.extract(prepared, library.calls(prepared), chosen.target, cfg.numerics), chosen


def _row(task: Task, answer: Match | Miss | None) -> dict[str, Any]:
    from tvmflow.database import Match, difference

    row = {"name": task.name, "calls": task.weight, "gflop": task.flop / 1e9, "key": task.key}
    if isinstance(answer, Match):
        record = answer.record
        origin = "exact" if answer.exact else f"of {record.parts.target['mcpu']}"
        return row | {"record": origin, "gflops": record.gflops}
    nearest = answer.nearest if answer is not None else None
    near = "; ".join(difference(task.parts, nearest.parts)) if nearest else ""
    return row | {"record": "none" + (f"; nearest differs in {near}" if near else ""), "gflops": None}
