"""What runs in a process of its own to see what padding does to the values of each bucket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tvmflow.config import Config, VerifySection
from tvmflow.frozen import evolve
from tvmflow.manifest import Bundle, Padding, TensorSpec
from tvmflow.runtime.bucket_selection import Chooser, cut, dims_of, leaves_outputs, output_sizes, shown
from tvmflow.verification import compare
from tvmflow.verification.compare import Feeds

if TYPE_CHECKING:
    from tvmflow.runtime.bucket_session import BucketSession

Arrays = Mapping[str, np.ndarray]
HUGE = 0.5  # of the largest finite number


@dataclass(frozen=True)
class Observed:
    """Per dimension what padding does; the rows of the smallest bucket, and what they become in the others."""

    padding: dict[str, Padding]
    smallest: list[np.ndarray]
    elsewhere: list[tuple[Feeds, list[np.ndarray]]]


def observe(cfg: Config, folder: Path, fallback: tuple[int, int]) -> Observed:
    """Pads each dimension within each bucket, with other values behind the rows; runs the smallest in all others."""
    session = _session(folder)
    bundle = session.manifest
    padding = {dim: _padding_of(session, cfg, dim, fallback) for dim in bundle.buckets[0].dims}
    smallest = bundle.buckets[0].dims
    inputs = drawn_for_padding(bundle, cfg.verify, smallest, 0, fallback)
    chooser = Chooser([smallest], {dim: evolve(one, allowed=False) for dim, one in padding.items()})
    elsewhere = [
        (Feeds(inputs, bucket.dims, "the same rows"), session.run_in(index, inputs))
        for index, bucket in enumerate(bundle.buckets)
        if index
        and all(
            size == smallest[dim] or (size > smallest[dim] and chooser.may_pad(dim))
            for dim, size in bucket.dims.items()
        )
    ]
    return Observed(padding, session.run_in(0, inputs), elsewhere)


def run_in_last(folder: Path, feeds: Sequence[Arrays]) -> list[list[np.ndarray]]:
    """The outputs of the largest bucket on each of `feeds`, padded to it."""
    session = _session(folder)
    return [session.run_in(len(session.sessions) - 1, one) for one in feeds]


def _session(folder: Path) -> BucketSession:
    from tvmflow import runtime
    from tvmflow.runtime.bucket_session import BucketSession

    session = runtime.load(folder)
    assert isinstance(session, BucketSession)
    return session


def drawn_for_padding(
    bundle: Bundle, section: VerifySection, sizes: Mapping[str, int], seed: int, fallback: tuple[int, int]
) -> dict[str, np.ndarray]:
    """Inputs that are told from their padding: where the config states an input's value there, it holds another."""
    arrays = dict(compare.drawn(bundle.signature, section, sizes, seed, fallback).inputs)
    for spec in bundle.signature.inputs:
        if spec.name in bundle.pad:
            value, array = bundle.pad[spec.name], arrays[spec.name]
            low, high = section.ranges.get(spec.name) or spec.range or (0, 1)
            arrays[spec.name] = np.where(array == value, high if high != value else low, array).astype(array.dtype)
    return arrays


def _padding_of(session: BucketSession, cfg: Config, dim: str, fallback: tuple[int, int]) -> Padding:
    """What padding one dimension does in each bucket that has more than one position of it."""
    bundle, allowed = session.manifest, dim in cfg.shapes.allow_padding
    stated = [spec.name for spec in bundle.signature.inputs if spec.name in bundle.pad and dim in spec.shape]
    faults: dict[bool, str] = {}  # by whether the stated inputs hold their values in the padding
    tied, runs = "", 0
    for index, bucket in enumerate(bundle.buckets):
        possible = _real_sizes(bundle, bucket.dims, dim)
        if not possible:
            continue
        real = int(np.random.default_rng(index).choice(possible))
        trial = _Trial(session, cfg.verify, index, dim, real, fallback)
        for held in (True, False) if stated else (False,):
            if held in faults:
                continue
            for what, feeds in trial.variants(frozenset(stated) if held else frozenset()):
                runs += 1
                if fault := trial.changed(feeds):
                    faults[held] = f"output `{fault}` changes with {what} in the padding of {trial.place}"
                    break
        if False not in faults and not tied:
            runs += 1
            tied = trial.tied()
    return evolve(_judged(bundle, stated, faults, tied, runs), allowed=allowed)


def _judged(bundle: Bundle, stated: list[str], faults: Mapping[bool, str], tied: str, runs: int) -> Padding:
    def padding(kind: str, reason: str) -> Padding:
        return Padding.model_validate({"kind": kind, "allowed": False, "reason": reason, "runs": runs})

    if not runs:
        return padding("unproven", "no bucket has more than one position to pad")
    if False not in faults and tied:
        return padding("masked", f"nothing in the padding changes values; {tied}")
    if False not in faults:
        return padding("independent", "no position changes the values of another")
    if stated and True not in faults:
        values = ", ".join(f"`{name}` = {bundle.pad[name]:g}" for name in stated)
        return padding("masked", f"nothing in the padding changes values while it holds {values}")
    return padding("mixes", faults.get(True, faults[False]))


class _Trial:
    """One bucket filled with rows, of which only the first are real in one dimension."""

    def __init__(
        self, session: BucketSession, section: VerifySection, index: int, dim: str, real: int, fallback: tuple[int, int]
    ) -> None:
        bundle = session.manifest
        self._session, self._section, self._dim = session.sessions[index], section, dim
        self._signature, self._pad = bundle.signature, bundle.pad
        full = bundle.buckets[index].dims
        self._sizes = full | {dim: real}
        self._base = drawn_for_padding(bundle, section, full, 0, fallback)
        self._other = drawn_for_padding(bundle, section, full, 1, fallback)
        self._want = self._run(self._filled({name: np.asarray(self._pad.get(name, 0)) for name in self._base}))
        self.place = f"the bucket {shown(full)}, {self._sizes[dim]} of them real"

    def variants(self, held: frozenset[str]) -> Iterator[tuple[str, Arrays]]:
        """The same rows with other values in the padding; the inputs in `held` keep their stated value there."""
        fills: dict[str, dict[str, np.ndarray]] = {"other values": self._other, "the largest values": {}, "NaN": {}}
        for spec in self._signature.inputs:
            fills["the largest values"][spec.name] = self._largest(spec)
            fills["NaN"][spec.name] = np.asarray(np.nan) if _is_float(spec) else self._other[spec.name]
        if not any(_is_float(spec) and self._dim in spec.shape for spec in self._signature.inputs):
            del fills["NaN"]
        for what, values in fills.items():
            kept = {name: np.asarray(self._pad[name]) for name in held}
            yield what, self._filled(values | kept)

    def changed(self, feeds: Arrays) -> str | None:
        """The first output of which a real row is not bit for bit what it was."""
        for spec, got, want in zip(self._signature.outputs, self._run(feeds), self._want, strict=True):
            if got.tobytes() != want.tobytes():
                return spec.name
        return None

    def tied(self) -> str:
        """Why a request cannot be served in pieces though no padding changes its rows; empty where it can.

        Causal models and those that number positions are seen when all rows move along the dimension.
        """
        for spec in (*self._signature.inputs, *self._signature.outputs):
            if any(self._dim in dims_of(size) and size != self._dim for size in spec.shape):
                return f"`{spec.name}` is not cut where inputs are"
            if spec.shape.count(self._dim) > 1:
                return f"`{spec.name}` has it along two axes"
        moved = {spec.name: self._moved(spec, self._base[spec.name]) for spec in self._signature.inputs}
        narrowest = self._session.manifest.narrowest_float
        outputs = (self._session.run_list(feeds) for feeds in (moved, self._base))
        for spec, got, before in zip(self._signature.outputs, *outputs, strict=True):
            want = self._moved(spec, before)
            tolerance = compare.tolerance(spec.name, want, self._section, narrowest)
            if not compare.compare_output(spec.name, got, want, tolerance).ok:
                return f"output `{spec.name}` changes with the place of a position"
        return ""

    def _moved(self, spec: TensorSpec, array: np.ndarray) -> np.ndarray:
        """The array with its rows moved on along the dimension, the last ones to the front."""
        axes = tuple(axis for axis, size in enumerate(spec.shape) if size == self._dim)
        return np.roll(array, [self._sizes[self._dim]] * len(axes), axes)

    def _filled(self, values: Arrays) -> Arrays:
        """The real rows, with `values` (one for all, or an array of the whole input) behind them."""
        return {spec.name: self._fill(spec, values[spec.name]) for spec in self._signature.inputs}

    def _fill(self, spec: TensorSpec, value: np.ndarray) -> np.ndarray:
        array = self._base[spec.name].copy()
        for axis in (axis for axis, size in enumerate(spec.shape) if size == self._dim):
            behind = (slice(None),) * axis + (slice(self._sizes[self._dim], None),)
            array[behind] = value[behind] if value.ndim else value
        return array

    def _largest(self, spec: TensorSpec) -> np.ndarray:
        dtype = np.dtype(spec.dtype)
        if _is_float(spec):
            return np.asarray(float(np.finfo(dtype).max) * HUGE).astype(dtype)
        limits = self._section.ranges.get(spec.name) or spec.range
        return np.asarray(limits[1] if limits else self._other[spec.name].max(initial=0)).astype(dtype)

    def _run(self, feeds: Arrays) -> list[np.ndarray]:
        return cut(self._session.run_list(feeds), output_sizes(self._signature), self._sizes)


def _real_sizes(bundle: Bundle, full: Mapping[str, int], dim: str) -> list[int]:
    """How many positions of a bucket may be real so that some are padding and every output has something."""
    return [real for real in range(1, full[dim]) if leaves_outputs(bundle.signature, {**full, dim: real})]


def _is_float(spec: TensorSpec) -> bool:
    return np.dtype(spec.dtype).kind == "f"
