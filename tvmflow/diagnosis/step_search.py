"""Builds a model up to some of its steps and looks for the smallest number of them that makes its values wrong.

What is looked at first is what is wrong most often: a kernel of the user's, a tuning record, a schedule, the import.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from tvmflow.config import Config
from tvmflow.diagnosis import parts
from tvmflow.diagnosis.findings import StepCheck
from tvmflow.errors import CompileError, InputError, TvmflowError
from tvmflow.manifest import Manifest
from tvmflow.pipeline.partial import RECORDS, REPLACEMENT, SCHEDULES, Part
from tvmflow.verification import judgement, running
from tvmflow.verification.reference import Truth
from tvmflow.verification.running import OnEvent

IMPORT = "import"


@dataclass(frozen=True)
class Subject:
    """A whole build: its library in `folder`; or, where it cannot be built, why, and another's manifest."""

    cfg: Config
    folder: Path
    manifest: Manifest
    failure: str = ""
    fresh: bool = False
    """Whether it was built just now, so that building all steps once more would tell nothing."""


@dataclass
class Search:
    """The builds made so far, by the number of their steps, in folders of `work`."""

    subject: Subject
    reason: str
    """What is wrong with the whole build."""
    truth: Truth
    names: tuple[str, ...]
    work: Path
    on_event: OnEvent
    checks: list[StepCheck] = field(default_factory=list)
    built: dict[int, Manifest] = field(default_factory=dict)

    def first_bad(self) -> tuple[int, int]:
        """The largest number of steps known to be right (-1: none), and the smallest known to be wrong.

        That of all steps and one more where even all of them are right.
        """
        count = len(self.names)
        if not self._is_bad(count):
            return count, count + 1
        low, high = -1, count
        while high - low > 1:
            middle = next((count for count in self._suspects() if low < count < high), (low + high) // 2)
            nearest = sorted(range(low + 1, high), key=lambda n: abs(n - middle))
            decided = next((n for n in nearest if self._is_bad(n) is not None), None)
            if decided is None:
                break
            low, high = (low, decided) if self._is_bad(decided) else (decided, high)
        return low, high

    def _suspects(self) -> list[int]:
        """The numbers of steps without and with each of those that are wrong most often; then 0, the import."""
        found = [self.names.index(name) for name in (REPLACEMENT, RECORDS, SCHEDULES) if name in self.names]
        return [*(count for index in found for count in (index, index + 1)), 0]

    def _is_bad(self, count: int) -> bool | None:
        """None where that cannot be said: the part is not built, though the whole is."""
        outcome = self.outcome(count).outcome
        if outcome == "not built":
            return True if self.subject.failure else None
        return outcome == "wrong"

    def outcome(self, count: int) -> StepCheck:
        """Whether the first `count` steps make right values; built and run at the first question."""
        known = next((check for check in self.checks if check.count == count), None)
        if known is not None:
            return known
        step = self.names[count - 1] if count else IMPORT
        most = 2 + math.ceil(math.log2(len(self.names))) + len(self._suspects())
        self.on_event(f"{step}: step {count} of {len(self.names)}, check {len(self.checks) + 1} of {most} at most")
        try:
            reason = self._built_wrong(count)
            check = StepCheck(count=count, step=step, outcome="wrong" if reason else "right", reason=reason)
        except TvmflowError as exc:
            check = StepCheck(count=count, step=step, outcome="not built", reason=exc.on_one_line())
        self.checks.append(check)
        return check

    def _built_wrong(self, count: int) -> str:
        if count == len(self.names) and self.subject.fresh:
            self.built[count] = self.subject.manifest
            return self.reason
        folder = self.folder(count)
        folder.mkdir()
        self.built[count] = parts.build_part(self.part(count), folder, self.subject.manifest)
        return wrong(self.subject.cfg, folder, self.built[count], self.truth)

    def part(self, count: int) -> Part:
        return Part(self.subject.cfg, self.subject.manifest.layout.choice, count)

    def folder(self, count: int) -> Path:
        """Where the library of the first `count` steps is."""
        is_whole = count == len(self.names) and self.subject.fresh
        return self.subject.folder if is_whole else self.work / str(count)

    def same_kernels(self, a: int, b: int) -> bool:
        """Whether two builds were made and hold kernels of the same names."""
        names = [{kernel.name for kernel in self.built[n].kernels} for n in (a, b) if n in self.built]
        return len(names) == 2 and names[0] == names[1]


def wrong(cfg: Config, folder: Path, manifest: Manifest, truth: Truth) -> str:
    """What is wrong with a library's values; "" if nothing. A crash is as wrong as a value."""
    try:
        got = running.run(folder, manifest, [feeds.inputs for feeds in truth.feeds], None, CompileError)
    except (CompileError, InputError) as exc:
        return exc.on_one_line()
    outputs = judgement.judge(cfg, manifest, truth, got).runs[0].outputs
    return "; ".join(f"`{output.name}`: {output.reason}" for output in outputs if not output.ok)
