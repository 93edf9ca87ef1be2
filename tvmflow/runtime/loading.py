"""From an artifact on disk to what runs it. TVM's run time is imported at the first artifact."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from tvmflow import artifact, host
from tvmflow.artifact import CONSTANTS
from tvmflow.errors import ArtifactError, SetupError, UsageError
from tvmflow.manifest import Bundle, Described, Manifest

if TYPE_CHECKING:
    from tvmflow.runtime.bucket_session import BucketSession
    from tvmflow.runtime.session import Session

# A library only loads into the run time whose structures it was compiled against.
ABI_PACKAGES = ("apache-tvm", "apache-tvm-ffi")
ATTEMPTS = 5  # to load what is replaced meanwhile


def load(path: str | Path, threads: int | None = None) -> Session | BucketSession:
    """Checks and loads an artifact folder or zip; `threads` overrides the manifest's CPU threads.

    What is loaded is one version of the artifact, whatever replaces it meanwhile or later. Raises ArtifactError for a
    damaged artifact or one that cannot run on this machine, SetupError where a part of the run time is not installed,
    or in a process forked from one that had loaded an artifact.
    """
    if threads is not None and threads < 1:
        raise UsageError(f"threads = {threads}", "give at least 1, or leave it out")
    path = Path(path)
    for attempt in range(ATTEMPTS):
        with artifact.opened_unchecked(path) as (folder, manifest):
            try:
                return _loaded(path, folder, manifest, threads)
            except ArtifactError:
                # Without locks, a writer may remove the files of a version that was replaced.
                if attempt + 1 == ATTEMPTS or not path.is_dir() or not artifact.was_replaced(path, folder):
                    raise
    raise AssertionError


def _loaded(path: Path, folder: Path, manifest: Manifest | Bundle, threads: int | None) -> Session | BucketSession:
    from tvmflow.runtime import fork, vm
    from tvmflow.runtime.bucket_session import BucketSession
    from tvmflow.runtime.session import Session

    fork.check()
    _check(manifest)
    count = threads or min(manifest.target.threads, host.cores())
    libraries = artifact.libraries(folder, manifest, path)
    place, first = libraries[0]
    on_gpu = manifest.target.kind == "cuda"
    weights = vm.Weights(place / first.weights, first.files[first.weights], on_gpu, path / CONSTANTS)
    sessions = [Session(place, one, count, weights) for place, one in libraries]
    return sessions[0] if isinstance(manifest, Manifest) else BucketSession(manifest, sessions)


def load_one(path: Path, threads: int | None = None) -> Session:
    """Like `load`, for an artifact with one library."""
    from tvmflow.runtime.session import Session

    session = load(path, threads)
    assert isinstance(session, Session)
    return session


def _check(manifest: Described) -> None:
    artifact.check_machine(manifest, host.host_features(), {name: _installed(name) for name in ABI_PACKAGES})


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        raise SetupError(
            f"{package} is not installed", "install it, or what `python scripts/make_runtime.py` writes"
        ) from None
