"""From an artifact on disk to what runs it. TVM's run time is imported at the first artifact."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from tvmflow import artifact, host
from tvmflow.errors import SetupError
from tvmflow.manifest import Described, Manifest

if TYPE_CHECKING:
    from tvmflow.runtime.bucket_session import BucketSession
    from tvmflow.runtime.session import Session

# A library only loads into the run time whose structures it was compiled against.
ABI_PACKAGES = ("apache-tvm", "apache-tvm-ffi")


def load(path: str | Path, threads: int | None = None) -> Session | BucketSession:
    """Checks and loads an artifact folder or zip; `threads` overrides the manifest's CPU threads.

    Raises ArtifactError for a damaged artifact or one that cannot run on this machine, SetupError where a part of the
    run time is not installed.
    """
    from tvmflow.runtime import vm
    from tvmflow.runtime.bucket_session import BucketSession
    from tvmflow.runtime.session import Session

    with artifact.opened_any(Path(path)) as (folder, manifest):
        _check(manifest)
        count = threads or min(manifest.target.threads, host.cores())
        libraries = artifact.libraries(folder, manifest)
        weights = vm.Weights(libraries[0][0] / libraries[0][1].weights, manifest.target.kind == "cuda")
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
