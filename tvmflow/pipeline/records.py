"""The step that puts kernels under the schedules of a tuning database."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvmflow.config import Config

if TYPE_CHECKING:
    import tvm

    from tvmflow.target import Target


class ApplyRecords:
    """Replays the records of the config's database, if it names one; `notes` then says what could not be used."""

    def __init__(self, cfg: Config, target: Target) -> None:
        self._cfg = cfg
        self._target = target
        self.notes: tuple[str, ...] = ()

    def __call__(self, mod: tvm.IRModule) -> tvm.IRModule:
        from tvmflow.codegen import tuned
        from tvmflow.database import Store
        from tvmflow.host import host_features

        if self._cfg.tuning.database is None:
            return mod
        reading = Store(self._cfg.tuning.database).read()
        applied = tuned.apply(mod, reading, self._target, self._cfg.numerics, host_features())
        self.notes = applied.notes
        return applied.mod
