"""Runs libraries in processes of their own, and says where they cannot be run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np

from tvmflow import host
from tvmflow.errors import ArtifactError, TvmflowError
from tvmflow.manifest import Described
from tvmflow.process import Child
from tvmflow.verification import child

OnEvent = Callable[[str], None]
RUN_ENV = {"TVM_USE_RUNTIME_LIB": "1"}  # a process that only runs a library needs no compiler


@contextmanager
def cuda_env(kind: str) -> Iterator[dict[str, str]]:
    """The variables with which TVM's CUDA run time loads in a child, with or without a driver."""
    if kind != "cuda":
        yield {}
        return
    from tvmflow.codegen import cuda

    with tempfile.TemporaryDirectory(prefix="tvmflow-") as stub:
        yield cuda.loader_env(Path(stub))


class BuiltFor(Protocol):
    """What a target asks of the machine that runs it: a manifest's target, or a config's resolved one."""

    @property
    def kind(self) -> str: ...
    @property
    def machine(self) -> str: ...
    @property
    def features(self) -> tuple[str, ...]: ...


def find_obstacle(target: BuiltFor) -> str:
    """Why code for such a target cannot be run on this machine; empty where it can."""
    if target.kind == "cuda":
        from tvmflow.codegen import cuda

        if not cuda.detect_arch():
            return "no GPU is here"
    return host.find_obstacle(target.machine, target.features, host.host_features())


def check_runs_here(manifest: Described) -> None:
    """Raises ArtifactError where the library cannot be run on this machine, before anything is built for that."""
    if reason := find_obstacle(manifest.target):
        raise ArtifactError(
            f"{manifest.name} was built for {manifest.target.arch or manifest.target.mcpu} and cannot be run here, so "
            f"its values cannot be looked into: {reason}",
            "do it on a machine that can run it; a build for this CPU (--target llvm) shows what is wrong with the "
            "import and the graph",
        )


def run(
    folder: Path,
    manifest: Described,
    feeds: Sequence[Mapping[str, np.ndarray]],
    threads: int | None,
    error: type[TvmflowError],
) -> list[list[np.ndarray]]:
    with cuda_env(manifest.target.kind) as env:
        return Child("running the library", error, RUN_ENV | env).call(child.run, folder, feeds, threads)
