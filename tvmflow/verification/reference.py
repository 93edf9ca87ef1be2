"""What the reference gives on inputs that it accepts. The reference runs in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tvmflow import frontend, npz
from tvmflow.config import Config
from tvmflow.errors import ReferenceRunError
from tvmflow.manifest import Manifest
from tvmflow.process import Child
from tvmflow.runtime import inputs
from tvmflow.verification import compare


@dataclass(frozen=True)
class Truth:
    """Inputs that the reference accepts, its name, and per input its outputs in the signature's order."""

    feeds: Sequence[compare.Feeds]
    name: str
    want: Sequence[list[np.ndarray]]


def run_reference(cfg: Config, manifest: Manifest) -> Truth:
    """What the reference gives on inputs that it accepts."""
    return run_first_accepted(cfg, list(_feeds(cfg, manifest)))


def run_first_accepted(cfg: Config, rows: Sequence[Sequence[compare.Feeds]]) -> Truth:
    """What the reference gives on the first of `rows` that it accepts as a whole.

    All rows go to one process. Where one of them brings that down, each gets a process of its own.
    """
    inputs = [[feeds.inputs for feeds in row] for row in rows]
    errors: list[ReferenceRunError] = []
    for start, batch in [(0, inputs), *((index, [row]) for index, row in enumerate(inputs))]:
        try:
            index, name, outputs = _child(cfg).call(frontend.first_accepted, cfg, batch)
            return Truth(rows[start + index], name, outputs)
        except ReferenceRunError as exc:
            errors.append(exc)
        if not errors[0].crashed:
            break
    raise ReferenceRunError(
        f"the reference accepts none of the inputs tried, so nothing can be verified. {errors[0].message}",
        'give inputs that the model accepts: [verify] inputs = "x.npz" (--verify-inputs), ranges or dims',
        errors[0].details,
    )


def run_each_accepted(cfg: Config, feeds: Sequence[compare.Feeds]) -> list[list[np.ndarray] | None]:
    """What the reference gives on each of `feeds`; None where it refuses them, as models do wrong sizes."""
    if not feeds:
        return []
    try:
        return list(run_first_accepted(cfg, [feeds]).want)
    except ReferenceRunError as exc:
        if exc.crashed:
            raise
    return _child(cfg).call(frontend.each_accepted, cfg, [one.inputs for one in feeds])


def draw_accepted(cfg: Config, manifest: Manifest) -> Mapping[str, np.ndarray]:
    """Inputs that the reference accepts."""
    return run_reference(cfg, manifest).feeds[0].inputs


def _feeds(cfg: Config, manifest: Manifest) -> Iterator[list[compare.Feeds]]:
    """Inputs to try, the most telling first: one list, with one entry per seed, after another."""
    if cfg.verify.inputs is not None:
        arrays = npz.read(cfg.verify.inputs)
        inputs.check(manifest.signature, arrays)
        yield [compare.Feeds(arrays, {}, cfg.verify.inputs.name)]
        return
    per_seed = (compare.candidates(manifest.signature, cfg.verify, seed) for seed in cfg.verify.seeds)
    examples = _examples(cfg)
    yield from ([*examples, *row] for row in zip(*per_seed, strict=True))
    if examples:
        yield examples


def _examples(cfg: Config) -> list[compare.Feeds]:
    """The inputs that the model brings along, if any."""
    if not frontend.is_torch(cfg):
        return []
    inputs = _child(cfg).call(frontend.examples, cfg)
    return [compare.Feeds(inputs, {}, "example")] if inputs is not None else []


def _child(cfg: Config) -> Child:
    return Child("the reference", ReferenceRunError, torch=frontend.is_torch(cfg))
