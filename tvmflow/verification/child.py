"""Runs, times and audits libraries."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tvmflow import audit, bench, frontend
from tvmflow.config import Config
from tvmflow.manifest import Manifest

if TYPE_CHECKING:
    from tvmflow.runtime.session import Session


def run(folder: Path, feeds: Sequence[Mapping[str, np.ndarray]], threads: int | None) -> list[list[np.ndarray]]:
    """Loads the artifact in `folder` and runs it on each of `feeds`; the outputs in the signature's order."""
    from tvmflow import runtime

    session = runtime.load(folder, threads)
    return [session.run_list(f) for f in feeds]


def time_beside_peer(
    cfg: Config, folder: Path, feeds: Mapping[str, np.ndarray], threads: int | None, budget_s: float
) -> tuple[bench.Samples, ...]:
    """Times the artifact and what ran the model before in turns, with the same inputs and threads."""
    from tvmflow import runtime

    session = runtime.load_one(folder, threads)
    name, peer = frontend.peer(cfg, session.threads)
    return bench.interleave({"tvmflow": lambda: session.run_list(feeds), name: lambda: peer(dict(feeds))}, budget_s)


def kernel_times(libraries: Sequence[tuple[Path, Mapping[str, np.ndarray]]]) -> list[dict[str, float]]:
    """Seconds of one run per kernel of each artifact, given by folder and inputs, over runs of about a second."""
    from tvmflow import runtime

    return [_kernel_times(runtime.load_one(folder), feeds) for folder, feeds in libraries]


def _kernel_times(session: Session, feeds: Mapping[str, np.ndarray]) -> dict[str, float]:
    session.run_list(feeds)
    started = time.perf_counter()
    session.run_list(feeds)
    runs = min(50, max(5, int(1 / (time.perf_counter() - started))))
    return session.time_kernels(feeds, runs)


def audit_libraries(
    libraries: Sequence[tuple[Path, Manifest]],
    seconds: Sequence[Mapping[str, float]] | None,
    given: Config | None = None,
) -> list[audit.Audit]:
    """Audits artifacts, given by folder and manifest; `seconds` are those of one run by kernel, if measured.

    `given` is the config that says what is allowed; without one, each artifact's own does.
    """
    return [
        audit.examine(folder, manifest, seconds[index] if seconds else None, given)
        for index, (folder, manifest) in enumerate(libraries)
    ]
