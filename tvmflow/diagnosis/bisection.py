"""Finds what makes a model wrong: the first bad step of its build, then the first bad kernel, and writes it down.

Libraries are built with the first n steps and the plainest rest; a binary search finds the first n whose values are
wrong. Where the build before it has the same kernels, they are run side by side, fused as they are, on the arguments
that they have in the model. What is built or run is in a process of its own, so that nothing here crashes with it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvmflow import frontend
from tvmflow.diagnosis import child, import_fault, reproduction
from tvmflow.diagnosis.child import ARGUMENTS, Running
from tvmflow.diagnosis.findings import Bisection, Culprit, KernelError
from tvmflow.diagnosis.step_search import IMPORT, Search, Subject, wrong
from tvmflow.errors import ArtifactError, CompileError, TvmflowError
from tvmflow.frozen import evolve
from tvmflow.manifest import Kernel, Manifest
from tvmflow.pipeline.partial import RECORDS, REPLACEMENT, Part
from tvmflow.process import Child
from tvmflow.verification import judgement, reference, running
from tvmflow.verification.reference import Truth
from tvmflow.verification.running import OnEvent


def bisect(subject: Subject, out: Path, on_event: OnEvent) -> Bisection:
    """Holds the whole build against the reference and, where that is wrong, finds out why; `out` gets a reproducer.

    Raises what the reference and the frontend raise, never what a part of the build does, ArtifactError where the
    whole build cannot be run on this machine, and OutputError where `out` holds something else than a reproducer.
    """
    running.check_runs_here(subject.manifest)
    reproduction.clear(out)
    on_event("running the reference")
    truth = reference.run_reference(subject.cfg, subject.manifest)
    on_event("running the library")
    reason, truth = _first_wrong(subject, truth)
    names: tuple[str, ...] = ()
    unusable: tuple[str, ...] = ()
    checks, culprit = [], None
    if reason or subject.cfg.tuning.database is not None:
        on_event("listing the steps")
        whole = Part(subject.cfg, subject.manifest.layout.choice)
        with _compiler(whole) as compiler:
            names, unusable = compiler.call(child.overview, whole)
    if reason:
        with tempfile.TemporaryDirectory(prefix="tvmflow-") as work:
            search = Search(subject, reason, truth, names, Path(work), on_event)
            culprit = _Inquiry(search, out).culprit()
            checks = search.checks
    return Bisection(
        reference=truth.name,
        steps=names,
        checks=tuple(checks),
        culprit=culprit,
        unusable_records=unusable,
        reproducer=str(out) if culprit and out.exists() else None,
    )


def _first_wrong(subject: Subject, truth: Truth) -> tuple[str, Truth]:
    """What is wrong with the whole build ("" if nothing), and the one run that shows it."""
    if subject.failure:
        return subject.failure, _run_of(truth, 0)
    for index in range(len(truth.feeds)):
        one = _run_of(truth, index)
        reason = wrong(subject.cfg, subject.folder, subject.manifest, one)
        if reason:
            return reason, one
    return "", truth


def _run_of(truth: Truth, index: int) -> Truth:
    return Truth([truth.feeds[index]], truth.name, [truth.want[index]])


@dataclass(frozen=True)
class _Inquiry:
    """What is behind the first bad step that a search finds; `out` gets a reproducer."""

    search: Search
    out: Path

    def culprit(self) -> Culprit:
        """What is at fault; the whole build is known to be wrong."""
        search = self.search
        low, high = search.first_bad()
        if high > len(search.names):
            return self._not_reproduced()
        if high == 0:
            return self._of_import()
        if low < high - 1:
            return self._of_step(low, high)
        if search.names[low] == RECORDS and search.outcome(high).outcome == "not built":
            return self._of_unbuildable(high)
        if search.names[low] == REPLACEMENT:
            return self._of_user_kernel(high)
        return self._of_kernel(high) if search.same_kernels(low, high) else self._of_step(low, high)

    def _of_kernel(self, count: int) -> Culprit:
        """A step after which a kernel is wrong that was right before."""
        search = self.search
        self.out.mkdir(parents=True, exist_ok=True)
        found = self._compared(count)
        faulty = [one for one in found if not one.ok]
        if not faulty:
            return self._of_step(count - 1, count, sorted(found, key=lambda one: -one.share)[:3])
        kernel = next(one for one in search.built[count].kernels if one.name == faulty[0].kernel)
        summary = f"{_described(kernel, search.names[count - 1])}: {faulty[0].reason}"
        search.on_event(f"writing {self.out}")
        self._write_kernel(count, faulty[0], summary)
        return Culprit(
            step=search.names[count - 1],
            count=count,
            summary=summary,
            kernel=kernel.name,
            origin=kernel.rule,
            kernels=tuple(faulty),
        )

    def _compared(self, count: int) -> list[KernelError]:
        """The kernels of the builds before and after a step; where one ends the process, that one alone."""
        search, running = self.search, list[Running]()
        manifest, good, feeds = search.built[count], search.folder(count - 1), search.truth.feeds[0].inputs
        calls = sum(kernel.calls for kernel in manifest.kernels)

        def heard(event: Running) -> None:
            running.append(event)
            search.on_event(f"kernel call {event.number} of {calls}: {event.kernel}")

        kept = self.out / ARGUMENTS
        try:
            with _runner(manifest, heard) as runner:
                return runner.call(
                    child.compare_kernels, good, search.folder(count), feeds, manifest.narrowest_float, kept
                )
        except ArtifactError as exc:
            if not exc.crashed or not running:
                raise
            last = running[-1]
            with _runner(manifest) as runner:
                runner.call(child.keep_arguments, good, feeds, last.number, kept)
            return [_fatal(last.kernel, last.number, "it ends the process")]

    def _of_unbuildable(self, count: int) -> Culprit:
        """Records whose schedules do not become code."""
        search, running = self.search, list[Running]()

        def heard(event: Running) -> None:
            running.append(event)
            search.on_event(f"building kernel {event.number} that has a record: {event.kernel}")

        part = search.part(count)
        try:
            with _compiler(part, heard) as compiler:
                found = compiler.call(child.first_unbuildable, part)
        except CompileError as exc:
            found = (running[-1].kernel, "a record", exc.message) if running else None
        if found is None:
            return self._of_step(count - 1, count)
        kernel, rule, reason = found
        summary = f"the kernel {kernel} cannot be built with {rule}: {reason}"
        self.out.mkdir(parents=True, exist_ok=True)
        self._write_kernel(count, _fatal(kernel, 0, reason), summary)
        return Culprit(step=RECORDS, count=count, kernel=kernel, origin=rule, summary=summary)

    def _of_user_kernel(self, count: int) -> Culprit:
        """A kernel of the user's that does not compute what the operators do that it replaces."""
        search, running = self.search, list[Running]()
        found = self._of_step(count - 1, count)
        search.on_event("holding the user's kernels against what they replace")
        narrowest, feeds = search.subject.manifest.narrowest_float, search.truth.feeds[0].inputs
        part = search.part(count)
        try:
            with _compiler(part, running.append) as compiler:
                faulty = compiler.call(child.wrong_user_kernels, part, search.folder(count), feeds, narrowest)
        except CompileError as exc:
            if not exc.crashed or not running:
                raise
            faulty = [_fatal(running[-1].kernel, running[-1].number, "it ends the process")]
        if not faulty:
            return found
        summary = f"{faulty[0].kernel} does not compute what it replaces: {faulty[0].reason}"
        return evolve(found, summary=summary, kernel=faulty[0].kernel, kernels=tuple(faulty))

    def _of_import(self) -> Culprit:
        """The import, or the plainest way from it to a library."""
        search, found, unknown = self.search, None, ""
        search.on_event("looking between the model's nodes")
        try:
            found = import_fault.locate(search.subject.cfg, search.subject.manifest, search.truth, self.out)
        except TvmflowError as exc:
            unknown = f"; the node is not known: {exc.on_one_line()}"
        if found is not None:
            summary = f"the import of {found[0]} is wrong: {found[1]}"
            return Culprit(step=IMPORT, count=0, kernel=found[0], summary=summary)
        summary = f"it is wrong as imported, before any pass: {search.outcome(0).reason}{unknown}"
        return Culprit(step=IMPORT, count=0, summary=summary)

    def _of_step(self, low: int, high: int, kernels: Sequence[KernelError] = ()) -> Culprit:
        """A step, or several, without a single kernel to blame."""
        search = self.search
        taken = search.names[max(low, 0) : high]
        steps = f"step {taken[-1]}" if len(taken) == 1 else f"steps {', '.join(taken)}"
        summary = f"before the {steps} the values are right, after it wrong: {search.outcome(high).reason}"
        if kernels:
            summary += "; no kernel alone is wrong beyond its tolerance"
        if low in search.built and high in search.built:
            self._write_step(search.folder(low), search.folder(high), summary)
        return Culprit(step=taken[-1], count=high, summary=summary, kernels=tuple(kernels))

    def _not_reproduced(self) -> Culprit:
        """The artifact is wrong, and what its config builds now is right, or cannot be built."""
        search = self.search
        count = len(search.names)
        if count not in search.built:
            raise CompileError(
                f"the artifact is wrong, but it cannot be built again: {search.outcome(count).reason}",
                "`tvmflow bisect CONFIG` looks into that",
            )
        now = {kernel.name: kernel.rule for kernel in search.built[count].kernels}
        changed = [
            f"{k.name} ({k.rule}, now {now.get(k.name, 'gone')})"
            for k in search.subject.manifest.kernels
            if now.get(k.name) != k.rule
        ]
        summary = "the artifact is wrong, a build from its config and database as they are now is right"
        if changed:
            summary += f"; kernels that differ: {', '.join(changed[:5])}"
        self._write_step(search.folder(count), search.subject.folder, summary)
        return Culprit(step="artifact", count=count, summary=summary)

    def _write_kernel(self, count: int, error: KernelError, summary: str) -> None:
        part = self.search.part(count)
        with _compiler(part) as compiler:
            compiler.call(reproduction.write_kernel, part, error, summary, self.out)

    def _write_step(self, before: Path, after: Path, summary: str) -> None:
        subject, truth = self.search.subject, self.search.truth
        self.search.on_event(f"writing {self.out}")
        run = judgement.judge(subject.cfg, subject.manifest, truth, truth.want).runs[0]  # for its tolerances
        libraries = {"before": before, "after": after}
        reproduction.write_step(libraries, subject.cfg, run, truth.feeds[0].inputs, summary, self.out)


def _fatal(kernel: str, call: int, reason: str) -> KernelError:
    return KernelError(kernel=kernel, call=call, ok=False, reason=reason, max_error=None, share=1.0, rtol=0.0, atol=0.0)


@contextmanager
def _compiler(part: Part, on_event: Callable[[Any], None] | None = None) -> Iterator[Child]:
    """Runs functions that build a part."""
    with running.cuda_env(part.cfg.target.kind) as env:
        yield Child("bisecting", env=env, torch=frontend.needs_torch(part.cfg), on_event=on_event)


@contextmanager
def _runner(manifest: Manifest, on_event: Callable[[Any], None] | None = None) -> Iterator[Child]:
    """Runs functions that only run libraries; raises ArtifactError where one of them crashes."""
    with running.cuda_env(manifest.target.kind) as env:
        yield Child("running the kernels", ArtifactError, running.RUN_ENV | env, on_event=on_event)


def _described(kernel: Kernel, step: str) -> str:
    if kernel.rule.startswith("record "):
        key = kernel.rule.removeprefix("record ").partition(",")[0]
        return f"the tuning record {key} makes the kernel {kernel.name} wrong"
    return f"the kernel {kernel.name} ({kernel.rule}) is wrong after the step {step}"
