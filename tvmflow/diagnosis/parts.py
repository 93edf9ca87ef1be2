"""Builds parts of a model's build, each in a process of its own."""

from __future__ import annotations

from pathlib import Path

from tvmflow import frontend
from tvmflow.manifest import Manifest
from tvmflow.pipeline import partial
from tvmflow.pipeline.partial import Part
from tvmflow.process import Child
from tvmflow.verification.running import cuda_env


def build_part(part: Part, folder: Path, whole: Manifest) -> Manifest:
    """Builds a part in a process of its own; `whole` is the manifest of the whole build."""
    with cuda_env(part.cfg.target.kind) as env:
        builder = Child("compiling a part", env=env, torch=frontend.needs_torch(part.cfg))
        return builder.call(partial.build, part, folder, whole)
