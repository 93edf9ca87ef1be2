"""Runs an artifact with buckets against the reference, and sees what padding does to its values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tvmflow import artifact, npz
from tvmflow.buckets import padding as padding_
from tvmflow.buckets.padding import drawn_for_padding
from tvmflow.config import Config
from tvmflow.errors import InputError, VerifyError
from tvmflow.frozen import evolve
from tvmflow.manifest import Bundle, Padding, RunVerdict, Verdict
from tvmflow.process import Child
from tvmflow.runtime import inputs
from tvmflow.runtime.bucket_selection import Chooser, cut, leaves_outputs, output_sizes, shown
from tvmflow.runtime.inputs import padded_to
from tvmflow.verification import compare, judgement, reference, running
from tvmflow.verification.compare import Feeds
from tvmflow.verification.running import OnEvent

RANDOM_SIZES = 12  # requests of random sizes, against the reference
CHILD = Child("padding the buckets", VerifyError, running.RUN_ENV)


@dataclass(frozen=True)
class Exact:
    """Every bucket on its own sizes: verdicts, per bucket some inputs that the model accepts, the reference's name.

    `fallback` is the range of integers that neither config nor model limits.
    """

    runs: tuple[RunVerdict, ...]
    feeds: tuple[Feeds, ...]
    reference: str
    fallback: tuple[int, int]


def exact(cfg: Config, folder: Path, bundle: Bundle, on_event: OnEvent) -> Exact:
    """Runs every bucket on its own sizes, once per seed, and compares with the reference."""
    on_event("running the reference")
    ranges, seeds = compare.open_ranges(bundle.signature, cfg.verify), cfg.verify.seeds
    rows = [
        [
            compare.drawn(bundle.signature, cfg.verify, bucket.dims, seed, fallback)
            for bucket in bundle.buckets
            for seed in seeds
        ]
        for fallback in ranges
    ]
    truth = reference.run_first_accepted(cfg, rows)
    on_event("running the buckets")
    got = running.run(folder, bundle, [f.inputs for f in truth.feeds], None, VerifyError)
    signature, narrowest = bundle.signature, _narrowest(folder, bundle)
    runs = [
        judgement.compare_run(cfg, signature, narrowest, f, g, w)
        for f, g, w in zip(truth.feeds, got, truth.want, strict=True)
    ]
    fallback = next(limits for limits, row in zip(ranges, rows, strict=True) if row is truth.feeds)
    return Exact(tuple(runs), tuple(truth.feeds[:: len(seeds)]), truth.name, fallback)


def observed(cfg: Config, folder: Path, bundle: Bundle, fallback: tuple[int, int], on_event: OnEvent) -> Bundle:
    """The bundle with what padding does within each bucket, and how far the same rows agree between buckets."""
    on_event("padding the buckets")
    found = CHILD.call(padding_.observe, cfg, folder, fallback)
    padding = _confirmed(cfg, folder, evolve(bundle, padding=found.padding), fallback)
    smallest, narrowest = bundle.buckets[0].dims, _narrowest(folder, bundle)
    runs = [
        judgement.compare_run(cfg, bundle.signature, narrowest, feeds, got, found.smallest)
        for feeds, got in found.elsewhere
        if not any(padding[dim].kind == "mixes" and size != smallest[dim] for dim, size in feeds.dims.items())
    ]
    agreement = _verdict(runs, f"the bucket {shown(smallest)}") if runs else None
    return evolve(bundle, padding=padding, agreement=agreement)


def verify(cfg: Config, folder: Path, bundle: Bundle, found: Exact) -> Verdict:
    """The verdict on every bucket's own sizes and on requests that are padded and split."""
    runs, refused = requests(cfg, folder, bundle, found.fallback)
    notes = [f"{found.reference} refuses {'; '.join(map(shown, refused))}, which buckets serve"] if refused else []
    return _verdict([*found.runs, *runs], found.reference, notes)


def _confirmed(cfg: Config, folder: Path, bundle: Bundle, fallback: tuple[int, int]) -> dict[str, Padding]:
    """What padding does, with "mixes" where the stated values hold but results are not those of the tight inputs.

    A constant in the padding of all inputs hides nothing that changes: only the reference on tight inputs shows it.
    """
    largest = bundle.buckets[-1].dims
    candidates = [
        (dim, Feeds(drawn_for_padding(bundle, cfg.verify, sizes, 0, fallback), sizes, "fewer"))
        for dim, one in bundle.padding.items()
        if one.kind == "masked"
        # Half as many; models that only take multiples of a number take what other buckets hold.
        for size in sorted({largest[dim] // 2, *(bucket.dims[dim] for bucket in bundle.buckets)})
        for sizes in [{**largest, dim: size}]
        if 0 < size < largest[dim] and leaves_outputs(bundle.signature, sizes)
    ]
    truth = reference.run_each_accepted(cfg, [feeds for _, feeds in candidates])
    chosen = [(dim, feeds, want) for (dim, feeds), want in zip(candidates, truth, strict=True) if want is not None]
    if not chosen:
        return bundle.padding
    got = CHILD.call(padding_.run_in_last, folder, [feeds.inputs for _, feeds, _ in chosen])
    padding, narrowest = dict(bundle.padding), _narrowest(folder, bundle)
    for (dim, feeds, want), outputs in zip(chosen, got, strict=True):
        run = judgement.compare_run(cfg, bundle.signature, narrowest, feeds, outputs, want)
        if wrong := [out for out in run.outputs if not out.ok]:
            reason = f"padded, output `{wrong[0].name}` is not what the model gives for the tight inputs"
            padding[dim] = evolve(padding[dim], kind="mixes", reason=reason)
    return padding


def requests(
    cfg: Config, folder: Path, bundle: Bundle, fallback: tuple[int, int]
) -> tuple[list[RunVerdict], list[dict[str, int]]]:
    """Runs requests of random sizes as a user would, and those under [verify] inputs, and compares with the reference.

    Where a dimension is padded although that changes values, the reference gets the padded inputs. Returns the sizes
    that the reference refuses too, which happens to models that only take multiples of a number.
    """
    random, given = list(_random(cfg, bundle, fallback)), list(_given(cfg, bundle))
    truth = reference.run_each_accepted(cfg, [_of_reference(bundle, feeds) for feeds in random])
    if given:
        truth += reference.run_first_accepted(cfg, [[_of_reference(bundle, feeds) for feeds in given]]).want
    chosen = [(feeds, want) for feeds, want in zip([*random, *given], truth, strict=True) if want is not None]
    sizes, narrowest = output_sizes(bundle.signature), _narrowest(folder, bundle)
    got = running.run(folder, bundle, [feeds.inputs for feeds, _ in chosen], None, VerifyError) if chosen else []
    runs = [
        judgement.compare_run(cfg, bundle.signature, narrowest, feeds, g, cut(want, sizes, feeds.dims))
        for (feeds, want), g in zip(chosen, got, strict=True)
    ]
    return runs, [feeds.dims for feeds, want in zip(random, truth, strict=False) if want is None]


def _verdict(runs: Sequence[RunVerdict], reference: str, notes: Sequence[str] = ()) -> Verdict:
    ok = all(out.ok for run in runs for out in run.outputs)
    return Verdict(ok=ok, reference=reference, notes=tuple(notes), runs=tuple(runs))


def _narrowest(folder: Path, bundle: Bundle) -> str:
    return artifact.read_manifest(folder / bundle.buckets[0].folder).narrowest_float


def _random(cfg: Config, bundle: Bundle, fallback: tuple[int, int]) -> Iterator[Feeds]:
    """Requests that some buckets serve: nothing but ones, the largest, one more than that, and random sizes."""
    rng = np.random.default_rng(0)
    held = {dim: sorted({bucket.dims[dim] for bucket in bundle.buckets}) for dim in bundle.buckets[0].dims}
    rows = [
        dict.fromkeys(held, 1),
        {dim: sizes[-1] for dim, sizes in held.items()},
        {dim: sizes[-1] + 1 for dim, sizes in held.items()},
    ]
    for dim in held:  # each alone above the largest
        rows.append({d: s[-1] + (d == dim) for d, s in held.items()})
    rows += [{dim: int(rng.integers(1, sizes[-1] + 2)) for dim, sizes in held.items()} for _ in range(RANDOM_SIZES)]
    rows += [
        {
            dim: int(rng.choice(sizes)) if not _may_pad(bundle, dim) else int(rng.integers(1, sizes[-1] + 1))
            for dim, sizes in held.items()
        }
        for _ in range(RANDOM_SIZES)
    ]
    exact = [bucket.dims for bucket in bundle.buckets]
    unique = {tuple(row.values()): row for row in rows if row not in exact}.values()
    served = [row for row in unique if _is_served(bundle, row)]
    for seed, row in enumerate(served):
        inputs = drawn_for_padding(bundle, cfg.verify, row, seed, fallback)
        yield Feeds(inputs, row, f"seed {seed}")


def _given(cfg: Config, bundle: Bundle) -> Iterator[Feeds]:
    if cfg.verify.inputs is not None:
        arrays = npz.read(cfg.verify.inputs)
        inputs.check(bundle.signature, arrays)
        sizes = {
            size: arrays[spec.name].shape[axis]
            for spec in bundle.signature.inputs
            for axis, size in enumerate(spec.shape)
            if isinstance(size, str)
        }
        yield Feeds(arrays, sizes, cfg.verify.inputs.name)


def _is_served(bundle: Bundle, sizes: Mapping[str, int]) -> bool:
    try:
        pieces = _chooser(bundle).pieces(sizes)
    except InputError:
        return False
    if not leaves_outputs(bundle.signature, sizes):  # which references refuse
        return False
    # Where values depend on the bucket's size, a request in pieces has no one reference.
    return len(pieces) == 1 or not _mixing(bundle)


def _of_reference(bundle: Bundle, feeds: Feeds) -> Feeds:
    """What the reference gets for a request: itself, padded along the dimensions where that changes values."""
    mixing = _mixing(bundle)
    if not mixing:
        return feeds
    (piece,) = _chooser(bundle).pieces(feeds.dims)
    held = bundle.buckets[piece.bucket].dims
    sizes = {dim: held[dim] if dim in mixing else size for dim, size in feeds.dims.items()}
    padded = {
        spec.name: padded_to(spec, feeds.inputs[spec.name], sizes, bundle.pad.get(spec.name, 0))
        for spec in bundle.signature.inputs
    }
    return Feeds(padded, sizes, feeds.origin)


def _mixing(bundle: Bundle) -> list[str]:
    """The dimensions that are padded although it changes values."""
    return [dim for dim, one in bundle.padding.items() if one.allowed and one.kind in ("mixes", "unproven")]


def _may_pad(bundle: Bundle, dim: str) -> bool:
    return _chooser(bundle).may_pad(dim)


def _chooser(bundle: Bundle) -> Chooser:
    return Chooser([bucket.dims for bucket in bundle.buckets], bundle.padding)
