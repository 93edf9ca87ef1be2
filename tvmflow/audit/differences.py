"""What an artifact says of itself, held against the config that it should have been built with."""

from __future__ import annotations

from collections.abc import Iterator

from tvmflow import config
from tvmflow.config import Config
from tvmflow.manifest import Finding, Manifest

NATIVE = (None, "native")  # of the machine that builds: any value is right


def findings(manifest: Manifest, given: Config) -> Iterator[Finding]:
    """A fault for each difference in [numerics], [target] and [audit] allow between the manifest and `given`."""
    own = config.from_json(manifest.config)
    for key, value in given.numerics.model_dump().items():
        if getattr(own.numerics, key) != value:
            yield _fault(f"numerics.{key}", value, getattr(own.numerics, key))
    built = {
        "kind": manifest.target.kind,
        "mcpu": manifest.target.mcpu,
        "arch": manifest.target.arch,
        "threads": manifest.target.threads,
        "mtriple": own.target.mtriple,
    }
    for key, was in built.items():
        value = getattr(given.target, key)
        if value not in NATIVE and value != was:
            yield _fault(f"target.{key}", value, was)
    for pattern, reason in own.audit.allow.items():
        if pattern not in given.audit.allow:
            yield _fault(f"audit.allow {pattern}", "nothing", f'"{reason}"')


def _fault(place: str, given: object, own: object) -> Finding:
    return Finding(
        check="config",
        level="fault",
        place=place,
        action="compile the model with this config",
        what=f"the config given says {_shown(given)}, the artifact {_shown(own)}",
    )


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
