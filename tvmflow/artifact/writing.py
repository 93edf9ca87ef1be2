"""Writes manifests, and at the end of a build takes out of them what only holds for the machine that built."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TypeVar

from tvmflow.artifact.layout import LOG, MANIFEST, file_entry
from tvmflow.artifact.parsing import digest
from tvmflow.artifact.reading import read_manifest
from tvmflow.frozen import evolve
from tvmflow.manifest import BuildLog, Bundle, Described, Manifest
from tvmflow.places import without_places

AnyManifest = TypeVar("AnyManifest", Manifest, Bundle)


def write_manifest(folder: Path, manifest: Described) -> None:
    """Writes manifest.json, with a digest of itself so that a damaged one is seen."""
    body = _plain(manifest.model_dump(mode="json"))
    text = json.dumps({**body, "manifest_sha256": digest(body)}, indent=1, sort_keys=True, allow_nan=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def finish(folder: Path, manifest: AnyManifest, base: Path) -> AnyManifest:
    """Writes the manifests of a finished build, all of whose files are in `folder`; returns the artifact's.

    Times, memory and paths of this machine go to the build log: two builds of one config differ in nothing else.
    Other paths become relative to `base`, the folder that will hold the artifact.
    """
    if isinstance(manifest, Bundle):
        for bucket in manifest.buckets:
            _write_parted(folder / bucket.folder, read_manifest(folder / bucket.folder), base)
    files = {name: file_entry(folder / name) for name in manifest.files}
    manifest = evolve(manifest, files=files)
    _write_parted(folder, manifest, base)
    return manifest


def _write_parted(folder: Path, manifest: Described, base: Path) -> None:
    """Writes what two builds share to the manifest, and the rest to the build log."""
    config, paths = without_places(manifest.config, base)
    stages = tuple(evolve(stage, seconds=None) for stage in manifest.stages)
    shared: dict[str, Any] = {"config": config, "stages": stages, "peak_rss_bytes": None, "timing": ()}
    buckets = manifest.buckets if isinstance(manifest, Bundle) else ()
    if isinstance(manifest, Bundle):
        shared["buckets"] = tuple(evolve(one, kernel_seconds=None) for one in buckets)
    write_manifest(folder, evolve(manifest, **shared))
    log = BuildLog(
        seconds=tuple(stage.seconds for stage in manifest.stages),
        peak_rss_bytes=manifest.peak_rss_bytes,
        timing=manifest.timing,
        kernel_seconds=tuple(bucket.kernel_seconds for bucket in buckets),
        paths=paths,
    )
    (folder / LOG).write_text(log.model_dump_json(indent=1) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    """The same values as JSON can hold them: a figure that is infinite or NaN is none."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
