"""What flow runs in a process of its own to list and to tune the tasks of a config."""

from __future__ import annotations

import fnmatch
import functools
import platform
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmflow import frontend
from tvmflow.config import Config
from tvmflow.errors import ConfigError, TargetError
from tvmflow.process import emit

if TYPE_CHECKING:
    from tvmflow.database import Comparison, Match, Miss, Record
    from tvmflow.kernels.winograd.minimal_filtering import Shape
    from tvmflow.pipeline.prepare import Setting
    from tvmflow.tasks import Task
    from tvmflow.tuning.measure import Measurer


@dataclass(frozen=True)
class Found:
    """What a session found for one task: records of its best schedules, the fastest first, and of its default."""

    key: str
    records: tuple[Record, ...]


@dataclass(frozen=True)
class Compared:
    """How long the methods of a convolution take, and the method that is taken where nothing was measured."""

    comparison: Comparison
    by_rule: str


def tasks(cfg: Config) -> list[dict[str, Any]]:
    """One row per task: operator, shapes, calls, FLOP, key, and its record, or what differs from the nearest one."""
    from tvmflow.database import Store
    from tvmflow.host import host_features

    found, _ = extracted(cfg)
    reading = Store(cfg.tuning.database).read() if cfg.tuning.database and cfg.tuning.database.exists() else None
    rows = []
    for task in found:
        answer = reading.lookup(task.parts, host_features()) if reading else None
        rows.append(_row(task, answer))
    return rows


def tune(cfgs: Sequence[Config], pattern: str, shard: tuple[int, int]) -> list[Found]:
    """Tunes the tasks of some configs into their database; emits a Progress after each batch.

    `pattern` chooses tasks by name, `shard` = (i, n) the i-th of n parts of them. Returns what was found for each task
    that was searched.
    """
    from tvmflow.database import Store
    from tvmflow.tuning import peak
    from tvmflow.tuning.session import Limits, Session

    database, tuning = _database(cfgs), cfgs[0].tuning
    _check_device(cfgs[0])
    found, setting = _extracted_all(cfgs)
    chosen = _chosen(found, pattern, shard)
    store = Store(database)
    store.create()
    target, threads = setting.tvm_target, setting.target.threads
    limits = Limits(tuning.trials_per_task, tuning.minutes * 60, tuning.seed)
    with _measurer(cfgs[0], setting) as measurer:
        emit("measuring the machine's peak")
        best = peak.fma_gflops(target, threads, measurer) if setting.target.kind == "llvm" else None
        session = Session(target, limits, measurer, store, emit, best)
        outcomes = session.tune(chosen, store.read().by_key)
    return [Found(one.task.key, one.records) for one in outcomes]


def compare_methods(cfgs: Sequence[Config], again: bool) -> list[Compared]:
    """Measures by which method each convolution of some configs is fastest, and keeps it in their database.

    What is known already stays unless `again`, or its direct kernel has another record now. Returns all of it.
    """
    from tvmflow.database import Store
    from tvmflow.tuning import methods

    database = _database(cfgs)
    _check_device(cfgs[0])
    setting = _one_setting(cfgs)
    store = Store(database)
    store.create()
    found = []
    for cfg in cfgs:
        emit("looking for convolutions")
        found += [(cfg, one) for one in methods.rivals(cfg, frontend.load(cfg), setting)]
    if not found:
        return []
    compared: dict[Shape, Compared] = {}
    with _measurer(cfgs[0], setting) as measurer:
        for number, (cfg, one) in enumerate(found):
            emit(f"comparing methods: {one.shape}, {number + 1} of {len(found)}")
            if one.shape in compared:
                continue
            comparison = methods.compare(one, cfg, setting, measurer, store.read(), again)
            if comparison is not None:
                store.add_comparisons([comparison])
                compared[one.shape] = Compared(comparison, methods.by_rule(one.shape, setting))
    return list(compared.values())


def _database(cfgs: Sequence[Config]) -> Path:
    """The one database of all configs; raises ConfigError."""
    folders = {cfg.tuning.database for cfg in cfgs}
    folder = folders.pop()
    if folders:
        raise ConfigError("tuning.database: the configs name different ones", "tune them one by one")
    if folder is None:
        hint = "name the folder for records, e.g. --set tuning.database=tuning_db"
        raise ConfigError("tuning.database: missing", hint)
    return folder


def _check_device(cfg: Config) -> None:
    """Raises TargetError where candidates would have to run on what is not here."""
    from tvmflow import host
    from tvmflow import target as targets

    if cfg.tuning.measure == "rpc":
        return
    hint = 'tune on such a machine, or on one reached over RPC: tuning.measure = "rpc"'
    if cfg.target.kind == "cuda":
        from tvmflow.codegen import cuda

        found, wanted = cuda.detect_arch(), cfg.target.arch
        if found is None:
            raise TargetError("tune: no GPU is here, and candidates for one are measured on it", hint)
        if wanted is not None and wanted.rstrip("af") != found:
            raise TargetError(f"tune: target.arch is {wanted}, the GPU here is {found}", hint)
        return
    target = targets.resolve(cfg.target)
    if target.machine != platform.machine():
        raise TargetError(f"tune: this machine is {platform.machine()}, the target {target.machine}", hint)
    if missing := set(target.features) - host.host_features():
        raise TargetError(f"tune: this CPU lacks what {target.mcpu} has: {', '.join(sorted(missing))}", hint)


def _measurer(cfg: Config, setting: Setting) -> Measurer:
    """Where the candidates of a config are built and run; raises TargetError where its device cannot be had."""
    from tvmflow.codegen import candidates, library
    from tvmflow.host import cores
    from tvmflow.tuning.measure import Measurer

    target, target_json = setting.target, str(setting.tvm_target)
    building = functools.partial(candidates.cuda_step, target.arch, cfg.numerics) if target.arch else nullcontext
    if cfg.tuning.measure == "rpc":
        from tvmflow.tuning.rpc import Libraries, RpcMeasurer, Tracker

        tracker = Tracker.of(str(cfg.tuning.tracker), str(cfg.tuning.device_key))
        return RpcMeasurer(tracker, Libraries(target_json, target.threads, library.linker(target), building), cores())
    if target.kind == "cuda":
        from tvmflow.tuning.gpu import GpuMeasurer

        return GpuMeasurer(target_json, building, cores())
    return Measurer(target_json, target.threads, cores())


def _extracted_all(cfgs: Sequence[Config]) -> tuple[tuple[Task, ...], Setting]:
    """The tasks of all configs, equal ones once, their calls added up; raises ConfigError for different targets."""
    from tvmflow import tasks

    setting = _one_setting(cfgs)
    return tasks.joined(task for cfg in cfgs for task in extracted(cfg)[0]), setting


def _one_setting(cfgs: Sequence[Config]) -> Setting:
    """The setting of all configs; raises ConfigError where they have different ones."""
    from tvmflow.pipeline.prepare import setting

    settings = [setting(cfg) for cfg in cfgs]
    if len({(one.target, cfg.numerics) for one, cfg in zip(settings, cfgs, strict=True)}) > 1:
        raise ConfigError("the configs have different [target] or [numerics]", "tune them one by one")
    return settings[0]


def _chosen(found: Sequence[Task], pattern: str, shard: tuple[int, int]) -> list[Task]:
    """Every n-th task, so that each part gets costly and cheap ones, of those that `pattern` names."""
    named = [task for task in found if fnmatch.fnmatch(task.name, pattern)]
    if not named:
        raise ConfigError(f"--tasks {pattern}: matches none of {len(found)} tasks", "`tvmflow tasks CONFIG` lists them")
    index, count = shard
    return named[index - 1 :: count]


def extracted(cfg: Config) -> tuple[tuple[Task, ...], Setting]:
    """The tasks of a config's prepared module, and the setting that it was prepared in."""
    emit("import")
    model = frontend.load(cfg)

    from tvmflow import tasks
    from tvmflow.codegen import library
    from tvmflow.pipeline.prepare import prepare, setting

    chosen = setting(cfg)
    emit("graph")
    with chosen.entered():
        prepared, _ = prepare(cfg, model)
        return tasks.extract(prepared, library.calls(prepared), chosen.target, cfg.numerics), chosen


def _row(task: Task, answer: Match | Miss | None) -> dict[str, Any]:
    from tvmflow.database import Match, difference

    shapes = ["x".join(str(int(size)) for size in param.ty.shape) or "scalar" for param in task.mod["main"].params]
    row = {
        "name": task.name,
        "shapes": " ".join(shapes[:-1]) + f" -> {shapes[-1]}",
        "calls": task.weight,
        "gflop": task.flop / 1e9,
        "key": task.key,
    }
    if isinstance(answer, Match):
        record = answer.record
        origin = "exact" if answer.exact else f"of {record.parts.target['mcpu']}"
        return row | {"record": origin, "gflops": record.gflops}
    nearest = answer.nearest if answer is not None else None
    near = "; ".join(difference(task.parts, nearest.parts)) if nearest else ""
    return row | {"record": "none" + (f"; nearest differs in {near}" if near else ""), "gflops": None}
