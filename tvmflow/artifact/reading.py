"""Reads artifacts: their manifest alone, or all of one version of them, checked for damage."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from tvmflow.artifact import folder as folders
from tvmflow.artifact import zipped
from tvmflow.artifact.layout import AGAIN, SHARED_CONSTANTS, file_entry
from tvmflow.artifact.parsing import check_buckets, parse, parse_log
from tvmflow.errors import ArtifactError, UsageError
from tvmflow.files import open_regular
from tvmflow.frozen import evolve
from tvmflow.manifest import BuildLog, Bundle, Described, Manifest
from tvmflow.places import with_places

AnyManifest = Manifest | Bundle


def read(path: Path) -> AnyManifest:
    """The manifest of an artifact folder or zip, checked for damage; raises ArtifactError."""
    if not os.path.isdir(path):
        with _zip(path) as stream:
            return parse(zipped.manifest_bytes(stream, path), str(path))
    with folders.held(path) as folder:
        return _read(folder, path)


def read_manifest(path: Path) -> Manifest:
    """The manifest of an artifact with one library; raises ArtifactError, UsageError where it has buckets."""
    return _of_one_library(path, read(path))


@contextmanager
def opened(path: Path) -> Iterator[tuple[Path, Manifest]]:
    """Like `opened_any`, for an artifact with one library; raises UsageError where it has buckets."""
    with opened_any(path) as (folder, manifest):
        yield folder, _of_one_library(path, manifest)


@contextmanager
def opened_any(path: Path) -> Iterator[tuple[Path, AnyManifest]]:
    """A folder with the artifact's files and its manifest, integrity checked; a zip is unpacked while it is open.

    Whatever replaces the artifact meanwhile, it is one version of it, for processes started inside the block too.
    """
    with opened_unchecked(path) as (folder, manifest):
        check_files(folder, manifest, path)
        yield folder, manifest


@contextmanager
def opened_unchecked(path: Path) -> Iterator[tuple[Path, AnyManifest]]:
    """Like `opened_any`, but the caller holds the contents of the files against the manifest."""
    if os.path.isdir(path):
        with folders.held(path) as folder:
            manifest = _read(folder, path)
            folders.check_files(folder, manifest.files, path)
            yield folder, manifest
        return
    with _zip(path) as stream, tempfile.TemporaryDirectory(prefix="tvmflow-") as name:
        manifest = parse(zipped.manifest_bytes(stream, path), str(path))
        zipped.unpack(stream, manifest, Path(name), path)
        yield Path(name), manifest


def libraries(folder: Path, manifest: AnyManifest, shown: Path | None = None) -> list[tuple[Path, Manifest]]:
    """The folder and manifest of every library of an artifact, in the order of its buckets."""
    if isinstance(manifest, Manifest):
        return [(folder, manifest)]
    places = [folder / bucket.folder for bucket in manifest.buckets]
    manifests = [_of_one_library(place, _read(place, (shown or folder) / place.name)) for place in places]
    check_buckets(manifest, manifests, str(shown or folder))
    return list(zip(places, manifests, strict=True))


def check_files(folder: Path, manifest: Described, shown: Path | None = None) -> None:
    """Raises ArtifactError where a file is missing or not what the manifest says it is; `shown` is in messages."""
    where = shown or folder
    folders.check_files(folder, manifest.files, where)
    for name, entry in manifest.files.items():
        if file_entry(folder / name) != entry:
            raise ArtifactError(f"{where / name}: changed or damaged since it was built", AGAIN)


def base_of(path: Path, manifest: Described) -> Path:
    """The folder at which the paths in a manifest's config start: the one that holds the artifact."""
    inside = isinstance(manifest, Manifest) and manifest.weights == SHARED_CONSTANTS  # a bucket of an artifact
    folder = path.resolve().parent
    return folder.parent if inside else folder


def _read(folder: Path, shown: Path) -> AnyManifest:
    manifest = parse(folders.read_manifest_bytes(folder, shown), str(shown))
    log = folders.read_log_bytes(folder, shown)
    return manifest if log is None else _with_log(manifest, parse_log(log, str(shown)), base_of(shown, manifest))


def _with_log(manifest: AnyManifest, log: BuildLog, base: Path) -> AnyManifest:
    """The manifest with what its build log tells of it; without, where the log is of another build."""
    seconds = log.seconds
    if len(seconds) != len(manifest.stages):
        return manifest
    manifest = evolve(
        manifest,
        stages=tuple(evolve(stage, seconds=one) for stage, one in zip(manifest.stages, seconds, strict=True)),
        peak_rss_bytes=log.peak_rss_bytes,
        timing=log.timing,
        config=with_places(manifest.config, log.paths, base),
    )
    if isinstance(manifest, Bundle) and len(log.kernel_seconds) == len(manifest.buckets):
        buckets = tuple(
            evolve(bucket, kernel_seconds=one) for bucket, one in zip(manifest.buckets, log.kernel_seconds, strict=True)
        )
        manifest = evolve(manifest, buckets=buckets)
    return manifest


def _zip(path: Path) -> BinaryIO:
    if not os.path.lexists(path):
        raise ArtifactError(f"{path}: no artifact is there", "`tvmflow compile` makes one")
    return open_regular(path, ArtifactError, place=f"{path}: no artifact: ")


def _of_one_library(path: Path, manifest: AnyManifest) -> Manifest:
    if isinstance(manifest, Manifest):
        return manifest
    names = ", ".join(str(path / bucket.folder) for bucket in manifest.buckets[:3])
    raise UsageError(
        f"{path}: has {len(manifest.buckets)} buckets, and this is done for one library",
        f"name a bucket's folder: {names}, ...",
    )
