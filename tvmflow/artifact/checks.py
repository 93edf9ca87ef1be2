"""Whether an artifact can run here, and whether a model is the one that it was compiled from."""

from __future__ import annotations

from pathlib import Path

from tvmflow import host
from tvmflow.artifact.layout import file_entry
from tvmflow.errors import ArtifactError
from tvmflow.manifest import Described


def check_source(model: Path, manifest: Described) -> None:
    """Raises ArtifactError where `model`, or a file beside it that holds weights, is not what was compiled."""
    beside = {model.parent / name: entry for name, entry in manifest.source_data.items()}
    for file, entry in ({model: manifest.source} | beside).items():
        if entry and (not file.is_file() or file_entry(file) != entry):
            raise ArtifactError(
                f"{file}: not the file that {manifest.name} was compiled from",
                "name the right one with --model, or compile again",
            )


def check_machine(manifest: Described, features: frozenset[str], versions: dict[str, str]) -> None:
    """Raises ArtifactError where the library cannot run here: architecture, CPU extensions, run-time version."""
    target = manifest.target
    if obstacle := host.find_obstacle(target.machine, target.features, features):
        hint = "compile it for this machine, perhaps with a lower target.mcpu, e.g. x86-64-v3"
        raise ArtifactError(f"{manifest.name}: {obstacle}", hint)
    for package, version in versions.items():
        built = manifest.versions.get(package)
        if built != version:
            raise ArtifactError(
                f"{manifest.name}: built with {package} {built}, here is {version}",
                f"install {package}=={built}, or compile it again",
            )
