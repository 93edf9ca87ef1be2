"""Imports damaged ONNX files, compiles some of them, and says where tvmflow does anything but answer in words.

    python scripts/fuzz_onnx.py --seconds 1800 --seed 7 [--compile-share 0.1] [--keep DIR]
    python scripts/fuzz_onnx.py --files 500 --seed 7        the same files each time

A finding is a signal, an exception that is no error of tvmflow, more CPU time or memory than SECONDS_EACH and
MEMORY_GIB. Its file is kept; the exit code is then 1. Many files go through one process, replaced when it ends.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import onnx_mutations  # noqa: E402 # it lies beside this script

from tvmflow import process  # noqa: E402
from tvmflow.errors import TvmflowError, first_line  # noqa: E402
from tvmflow.process import Child  # noqa: E402

SECONDS_EACH = 60  # of CPU time; several times as long on the clock ends a file that waits for something
MEMORY_GIB = 3.0
BATCH = 100  # files per process: what TVM does not give back would else add up


@dataclass(frozen=True)
class Finding:
    index: int
    what: str
    details: str


@dataclass
class Tally:
    """How many files ended how, and those that should not have."""

    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)

    def __str__(self) -> str:
        counts = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(self.outcomes.items()))
        return f"{self.outcomes.total():,} files: {counts}; {len(self.findings)} findings"


def try_files(files: Sequence[tuple[int, bytes, bool]]) -> None:
    """In a process of its own: emits the index of each file, and then what becomes of it."""
    with tempfile.TemporaryDirectory(prefix="tvmflow-fuzz-") as name:
        folder = Path(name)
        (folder / "w.bin").write_bytes(bytes(64))
        for index, data, is_compiled in files:
            process.emit(index)
            (folder / "m.onnx").write_bytes(data)
            with _time_limit():
                outcome = _outcome(folder, is_compiled)
            process.emit((index, outcome))


class _time_limit:  # noqa: N801 # it is used like a function
    """Ends this process by a signal where the work inside takes too long, also in native code."""

    def __enter__(self) -> None:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, SECONDS_EACH)
        signal.setitimer(signal.ITIMER_REAL, 10 * SECONDS_EACH)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _outcome(folder: Path, is_compiled: bool) -> tuple[str, str]:
    from tvmflow import config, frontend
    from tvmflow.pipeline import building

    try:
        cfg = config.from_dict({"model": {"path": str(folder / "m.onnx")}, "target": {"threads": 1}})
        if is_compiled:
            with tempfile.TemporaryDirectory(dir=folder) as out:
                building.build(cfg, Path(out), None)
            return "compiled", ""
        frontend.load(cfg)
    except TvmflowError as exc:
        return ("refused", "") if exc.hint else ("finding", f"no hint: {exc.message}")
    except Exception as exc:
        return "finding", f"{type(exc).__name__}: {first_line(exc)[:200]}\n{traceback.format_exc()}"
    return "imported", ""


def _is_compiled(index: int, share: float) -> bool:
    return int(index * share) != int((index + 1) * share)


def _batches(files: int | None, seconds: float) -> Iterator[range]:
    """Ranges of indices: `files` altogether, or as many as `seconds` suffice for."""
    started, start = time.monotonic(), 0
    while (start < files) if files is not None else (time.monotonic() - started < seconds):
        yield range(start, start + BATCH if files is None else min(start + BATCH, files))
        start += BATCH


def run(seed: int, files: int | None, seconds: float, compile_share: float) -> Tally:
    """Tries the files of a seed, in batches."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    process.limit(MEMORY_GIB, 60)
    tally = Tally()
    for batch in _batches(files, seconds):
        left = list(batch)
        while left:
            left = _tried(tally, seed, left, compile_share)
        print(f"\r{tally}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return tally


def _tried(tally: Tally, seed: int, indices: list[int], compile_share: float) -> list[int]:
    """Tries files in one process until it ends; those that are left."""
    files = [(index, onnx_mutations.mutated(seed, index), _is_compiled(index, compile_share)) for index in indices]
    done: dict[int, tuple[str, str]] = {}
    last = indices[0]

    def heard(event: Any) -> None:
        nonlocal last
        if isinstance(event, int):
            last = event
        elif isinstance(event, tuple):  # texts are the names of stages
            done[event[0]] = event[1]

    import fuzz_onnx  # the importable twin of __main__, where another process finds the function

    try:
        Child("a file", on_event=heard).call(fuzz_onnx.try_files, files)
    except TvmflowError as exc:
        done[last] = ("finding", f"{exc.message}\n{exc.details}")
    for index, (outcome, details) in done.items():
        tally.outcomes[outcome] += 1
        if outcome == "finding":
            tally.findings.append(Finding(index, details.splitlines()[0], details))
    return [index for index in indices if index > max(done, default=last)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to go on")
    parser.add_argument("--files", type=int, help="how many files, in place of --seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile-share", type=float, default=0.1, help="the part of the files that is compiled")
    parser.add_argument("--keep", type=Path, default=Path("fuzz_findings"), help="folder for files with findings")
    options = parser.parse_args()
    tally = run(options.seed, options.files, options.seconds, options.compile_share)
    for finding in tally.findings:
        options.keep.mkdir(parents=True, exist_ok=True)
        file = options.keep / f"{options.seed}_{finding.index}.onnx"
        file.write_bytes(onnx_mutations.mutated(options.seed, finding.index))
        file.with_suffix(".txt").write_text(finding.details)
        print(f"{file}: {finding.what}")
    print(tally)
    sys.exit(1 if tally.findings else 0)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
