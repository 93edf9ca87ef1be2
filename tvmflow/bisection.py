"""Finds what makes a model wrong: the first bad step of its build, then the first bad kernel, and writes it down.

Libraries are built with the first n steps and the plainest rest; a binary search finds the first n whose values are
wrong. Where the build before it has the same kernels, they are run side by side, fused as they are, on the arguments
that they have in the model. What is built or run is in a process of its own, so that nothing here crashes with it.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tvmflow import frontend, import_fault, process, proof, reproduction
from tvmflow.bisect_children import ARGUMENTS, Running
from tvmflow.config import Config
from tvmflow.errors import ArtifactError, CompileError, TvmflowError
from tvmflow.findings import Bisection, Culprit, KernelError, StepCheck
from tvmflow.manifest import Kernel, Manifest
from tvmflow.partial_build import RECORDS, SCHEDULES, Part

IMPORT = "import"


@dataclass(frozen=True)
class Subject:
    """A whole build: its library in `folder`, or, where it cannot be built, why, and the manifest of one without
    tuning records."""

    cfg: Config
    folder: Path
    manifest: Manifest
    failure: str = ""


def bisect(subject: Subject, out: Path, on_event: proof.OnEvent) -> Bisection:
    """Holds the whole build against the reference and, where that is wrong, finds out why; `out` gets a reproducer.

    Raises what the reference and the frontend raise, never what a part of the build does.
    """
    on_event("running the reference")
    truth = proof.reference(subject.cfg, subject.manifest)
    on_event("running the library")
    reason, truth = _first_wrong(subject, truth)
    names = _with_compiler("partial_build:steps", subject.cfg, subject.cfg, subject.manifest.layout.choice)
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as work:
        search = _Search(subject, truth, tuple(names), Path(work), on_event)
        unusable = search.unusable_records()
        culprit = search.culprit(out) if reason else None
    return Bisection(
        reference=truth.name, steps=search.names, checks=tuple(search.checks), culprit=culprit,
        unusable_records=unusable, reproducer=str(out) if culprit and out.exists() else None,
    )  # fmt: skip


def _first_wrong(subject: Subject, truth: proof.Truth) -> tuple[str, proof.Truth]:
    """What is wrong with the whole build ("" if nothing), and the one run that shows it."""
    if subject.failure:
        return subject.failure, _run_of(truth, 0)
    for index in range(len(truth.feeds)):
        one = _run_of(truth, index)
        reason = _wrong(subject.cfg, subject.folder, subject.manifest, one)
        if reason:
            return reason, one
    return "", truth


def _run_of(truth: proof.Truth, index: int) -> proof.Truth:
    return proof.Truth([truth.feeds[index]], truth.name, [truth.want[index]])


def _wrong(cfg: Config, folder: Path, manifest: Manifest, truth: proof.Truth) -> str:
    """What is wrong with a library's values; "" if nothing. A crash is as wrong as a value."""
    try:
        got = proof.run(folder, manifest, [feeds.inputs for feeds in truth.feeds], None, CompileError)
    except CompileError as exc:
        return exc.message
    outputs = proof.judged(cfg, manifest, truth, got).runs[0].outputs
    return "; ".join(f"`{output.name}`: {output.reason}" for output in outputs if not output.ok)


def _with_compiler(function: str, cfg: Config, *args: Any, on_event: Callable[[Any], None] | None = None) -> Any:
    """The value of a function that builds parts of a config."""
    with proof.cuda_env(cfg.target.kind) as env:
        return process.call(f"tvmflow.{function}", *args, what="bisecting", env=env, on_event=on_event,
                            torch=frontend.needs_torch(cfg))[0]  # fmt: skip


def _with_libraries(function: str, manifest: Manifest, *args: Any, on_event: Callable[[Any], None] | None = None
                    ) -> Any:  # fmt: skip
    """The value of a function that only runs libraries; raises ArtifactError where one of them crashes."""
    with proof.cuda_env(manifest.target.kind) as env:
        return process.call(f"tvmflow.bisect_children:{function}", *args, what="running the kernels",
                            error=ArtifactError, env=proof.RUN_ENV | env, on_event=on_event)[0]  # fmt: skip


@dataclass
class _Search:
    """The builds made so far, by the number of their steps, in folders of `work`."""

    subject: Subject
    truth: proof.Truth
    names: tuple[str, ...]
    work: Path
    on_event: proof.OnEvent
    checks: list[StepCheck] = field(default_factory=list)
    built: dict[int, Manifest] = field(default_factory=dict)

    def culprit(self, out: Path) -> Culprit:
        low, high = self._first_bad()
        if high > len(self.names):
            return self._not_reproduced(out)
        if high == 0:
            return self._of_import(out)
        if high == 0:
            return self._of_import(out)
        if low == high - 1 and self.names[high - 1] == RECORDS and self._outcome(high).outcome == "not built":
            return self._of_unbuildable(high, out)
        if low == high - 1 and self._kernels(low) == self._kernels(high):
            return self._of_kernel(high, out)
        return self._of_step(low, high, out)

    def unusable_records(self) -> tuple[str, ...]:
        """What the tuning database says of records that were skipped."""
        if self.subject.cfg.tuning.database is None:
            return ()
        self.on_event("reading the tuning database")
        count = self.names.index(SCHEDULES)  # records are for kernels without a schedule
        found = _with_compiler("bisect_children:unusable_records", self.subject.cfg, self._part(count))
        return tuple(found)

    def _first_bad(self) -> tuple[int, int]:
        """The largest number of steps known to be right (-1: none), and the smallest known to be wrong."""
        count = len(self.names)
        low, high = -1, count + (0 if self._is_bad(count) else 1)
        while high - low > 1 and high <= count:
            middle = (low + high) // 2
            between = sorted(range(low + 1, high), key=lambda n: abs(n - middle))
            bad = next(((n, bad) for n in between if (bad := self._is_bad(n)) is not None), None)
            if bad is None:
                break
            low, high = (low, bad[0]) if bad[1] else (bad[0], high)
        return low, high

    def _is_bad(self, count: int) -> bool | None:
        """None where that cannot be said: the part is not built, though the whole is."""
        outcome = self._outcome(count).outcome
        if outcome == "not built":
            return True if self.subject.failure else None
        return outcome == "wrong"

    def _outcome(self, count: int) -> StepCheck:
        known = next((check for check in self.checks if check.count == count), None)
        if known is not None:
            return known
        step = self.names[count - 1] if count else IMPORT
        total = 2 + math.ceil(math.log2(len(self.names)))
        self.on_event(f"{step}: step {count} of {len(self.names)}, check {len(self.checks) + 1} of about {total}")
        try:
            reason = self._built_wrong(count)
            check = StepCheck(count=count, step=step, outcome="wrong" if reason else "right", reason=reason)
        except TvmflowError as exc:
            check = StepCheck(count=count, step=step, outcome="not built", reason=exc.message)
        self.checks.append(check)
        return check

    def _built_wrong(self, count: int) -> str:
        folder = self._folder(count)
        folder.mkdir()
        self.built[count] = proof.build_part(self._part(count), folder, self.subject.manifest)
        return _wrong(self.subject.cfg, folder, self.built[count], self.truth)

    def _part(self, count: int) -> Part:
        return Part(self.subject.cfg, self.subject.manifest.layout.choice, count)

    def _folder(self, count: int) -> Path:
        return self.work / str(count)

    def _kernels(self, count: int) -> frozenset[str]:
        self._outcome(count)
        return frozenset(kernel.name for kernel in self.built[count].kernels)

    # --- what is at fault ---------------------------------------------------------------------------------------------

    def _of_kernel(self, count: int, out: Path) -> Culprit:
        """A step after which a kernel is wrong that was right before."""
        out.mkdir(parents=True, exist_ok=True)
        found = self._compared(count, out)
        wrong = [one for one in found if not one.ok]
        if not wrong:
            furthest = sorted(found, key=lambda one: -one.share)[:3]
            return self._of_step(count - 1, count, out, furthest)
        kernel = next(one for one in self.built[count].kernels if one.name == wrong[0].kernel)
        summary = f"{_described(kernel, self.names[count - 1])}: {wrong[0].reason}"
        self.on_event(f"writing {out}")
        _with_compiler("reproduction:write_kernel", self.subject.cfg, self._part(count), wrong[0], summary, out)
        return Culprit(step=self.names[count - 1], count=count, summary=summary, kernel=kernel.name, origin=kernel.rule,
                       kernels=tuple(wrong))  # fmt: skip

    def _compared(self, count: int, out: Path) -> list[KernelError]:
        """The kernels of the builds before and after a step; where one ends the process, that one alone."""
        manifest, running = self.built[count], list[Running]()

        def heard(event: Running) -> None:
            running.append(event)
            self.on_event(f"kernel call {event.number} of {sum(k.calls for k in manifest.kernels)}: {event.kernel}")

        good, feeds, kept = self._folder(count - 1), self.truth.feeds[0].inputs, out / ARGUMENTS
        try:
            found: list[KernelError] = _with_libraries("compare_kernels", manifest, good, self._folder(count), feeds,
                                                       manifest.narrowest_float, kept, on_event=heard)  # fmt: skip
        except ArtifactError as exc:
            if not exc.crashed or not running:
                raise
            last = running[-1]
            _with_libraries("keep_arguments", manifest, good, feeds, last.number, kept)
            return [KernelError(kernel=last.kernel, call=last.number, ok=False, reason="it ends the process",
                                max_error=None, share=1.0, rtol=0.0, atol=0.0)]  # fmt: skip
        return found

    def _of_unbuildable(self, count: int, out: Path) -> Culprit:
        """Records whose schedules do not become code."""
        running: list[Running] = []

        def heard(event: Running) -> None:
            running.append(event)
            self.on_event(f"kernel {event.number}: {event.kernel}")

        try:
            found = _with_compiler("bisect_children:first_unbuildable", self.subject.cfg, self._part(count),
                                   on_event=heard)  # fmt: skip
        except CompileError as exc:
            found = (running[-1].kernel, "", exc.message) if running else None
        if found is None:
            return self._of_step(count - 1, count, out)
        kernel, rule, reason = found
        return Culprit(step=RECORDS, count=count, kernel=kernel, origin=rule,
                       summary=f"the kernel {kernel} cannot be built with its {rule or 'record'}: {reason}")

    def _of_import(self, out: Path) -> Culprit:
        """The import, or the plainest way from it to a library."""
        cfg, reason = self.subject.cfg, self._outcome(0).reason
        found, unknown = None, "the model is PyTorch's" if frontend.is_torch(cfg) else ""
        if not unknown:
            self.on_event("looking between the model's nodes")
            try:
                found = import_fault.locate(cfg, self.subject.manifest, self.truth, out)
            except TvmflowError as exc:
                unknown = exc.message
        if found is not None:
            summary = f"the import of {found[0]} is wrong: {found[1]}"
            return Culprit(step=IMPORT, count=0, kernel=found[0], summary=summary)
        more = f"; the node is not known: {unknown}" if unknown else ""
        return Culprit(step=IMPORT, count=0, summary=f"it is wrong as imported, before any pass: {reason}{more}")

    def _of_step(self, low: int, high: int, out: Path, kernels: Sequence[KernelError] = ()) -> Culprit:
        """A step, or several, without a single kernel to blame."""
        taken = self.names[max(low, 0) : high]
        reason = self._outcome(high).reason
        steps = taken[-1] if len(taken) == 1 else f"one of {', '.join(taken)}"
        summary = f"after the step {steps} the values are wrong, before it they are right: {reason}"
        if kernels:
            summary += "; no kernel alone is wrong beyond its tolerance"
        if low in self.built and high in self.built:
            self._write_step(self._folder(low), self._folder(high), summary, out)
        return Culprit(step=taken[-1], count=high, summary=summary, kernels=tuple(kernels))

    def _not_reproduced(self, out: Path) -> Culprit:
        """The artifact is wrong, and what its config builds now is right."""
        count = len(self.names)
        now = {kernel.name: kernel.rule for kernel in self.built[count].kernels}
        changed = [f"{k.name} ({k.rule}, now {now.get(k.name, 'gone')})" for k in self.subject.manifest.kernels
                   if now.get(k.name) != k.rule]  # fmt: skip
        summary = "the artifact is wrong, a build from its config and database as they are now is right"
        if changed:
            summary += f"; kernels that differ: {', '.join(changed[:5])}"
        self._write_step(self._folder(count), self.subject.folder, summary, out)
        return Culprit(step="artifact", count=count, summary=summary)

    def _write_step(self, before: Path, after: Path, summary: str, out: Path) -> None:
        self.on_event(f"writing {out}")
        subject, truth = self.subject, self.truth
        run = proof.judged(subject.cfg, subject.manifest, truth, truth.want).runs[0]  # for its tolerances
        libraries = {"before": before, "after": after}
        reproduction.write_step(libraries, subject.cfg, run, truth.feeds[0].inputs, out, summary)


def _described(kernel: Kernel, step: str) -> str:
    if kernel.rule.startswith("record "):
        key = kernel.rule.removeprefix("record ").partition(",")[0]
        return f"the tuning record {key} makes the kernel {kernel.name} wrong"
    return f"the kernel {kernel.name} ({kernel.rule}) is wrong after the step {step}"
