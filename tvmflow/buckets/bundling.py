"""From a config with buckets to one artifact: a library per bucket, and the weights of all of them once."""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tvmflow import artifact, config, frontend, host, process
from tvmflow.artifact import ALIGNMENT, CONSTANTS, LIBRARY, MANIFEST
from tvmflow.config import Config
from tvmflow.dtypes import itemsize
from tvmflow.errors import ConfigError, ModelError, TvmflowError, UnsupportedError, did_you_mean
from tvmflow.frozen import evolve
from tvmflow.manifest import Bucket, Bundle, Constant, Manifest, Padding, Signature, Stage, TensorSpec
from tvmflow.pipeline import building
from tvmflow.process import Child
from tvmflow.runtime.bucket_selection import dims_of, size_of
from tvmflow.verification.running import OnEvent

Build = Callable[[Config, Path, OnEvent], Manifest]
UNSEEN = "the library was not run"


def build(cfg: Config, folder: Path, build_one: Build, on_event: OnEvent) -> Bundle:
    """Builds every bucket in a folder of its own inside `folder`, several at a time, and joins their weights.

    Returns the manifest of all, which has no verdict yet. Raises ConfigError where the config's dimensions are not
    the model's, UnsupportedError where the sizes of outputs do not follow from them, and what `build_one` raises.
    """
    started = time.monotonic()
    on_event("importing the model with open dimensions")
    signature = _signature(cfg)
    _check(cfg, signature)
    configs = configs_of(cfg)
    manifests = list(_built(configs, folder, build_one, on_event))
    on_event("joining the weights")
    joined = _joined_weights(folder, dict(zip(configs, manifests, strict=True)))
    for name, manifest in joined.items():
        artifact.write_manifest(folder / name, manifest)
    first = joined[next(iter(configs))]
    files = [CONSTANTS, *(f"{name}/{file}" for name in configs for file in (LIBRARY, MANIFEST))]
    buckets = tuple(
        Bucket(
            dims=sizes,
            folder=name,
            library_bytes=manifest.files[LIBRARY].size_bytes,
            weight_bytes=sum(map(_size, manifest.constants)),
            planned_bytes=manifest.planned_bytes or 0,
            kernels=Counter(kernel.origin for kernel in manifest.kernels),
            transposes=len(manifest.layout.transforms),
        )
        for sizes, (name, manifest) in zip(cfg.shapes.bucket_sizes(), joined.items(), strict=True)
    )
    bundle = Bundle(
        format_version=artifact.FORMAT_VERSION,
        name=config.name(cfg),
        signature=signature,
        config=config.to_json(_resolved(cfg, first)),
        source=first.source,
        source_data=first.source_data,
        target=first.target,
        versions=first.versions,
        files={name: artifact.file_entry(folder / name) for name in files},
        stages=(Stage(name="build the buckets", seconds=time.monotonic() - started),),
        peak_rss_bytes=max(manifest.peak_rss_bytes or 0 for manifest in manifests),
        notes=tuple(_notes(joined)),
        verdict=None,
        buckets=buckets,
        pad={name: float(value) for name, value in cfg.shapes.pad.items()},
        padding={
            dim: Padding(kind="unproven", allowed=dim in cfg.shapes.allow_padding, reason=UNSEEN, runs=0)
            for dim in buckets[0].dims
        },
    )
    artifact.write_manifest(folder, bundle)
    return bundle


def timed(folder: Path, bundle: Bundle, manifests: Sequence[Manifest], seconds: Sequence[float]) -> Bundle:
    """The bundle with the seconds of each bucket's kernels; the buckets' manifests are written anew."""
    for bucket, manifest in zip(bundle.buckets, manifests, strict=True):
        artifact.write_manifest(folder / bucket.folder, manifest)
    files = {name: artifact.file_entry(folder / name) for name in bundle.files}
    buckets = tuple(evolve(bucket, kernel_seconds=taken) for bucket, taken in zip(bundle.buckets, seconds, strict=True))
    return evolve(bundle, files=files, buckets=buckets)


def _signature(cfg: Config) -> Signature:
    """Inputs and outputs with the dimensions left open; raises UnsupportedError where the model cannot be read so."""
    open_ = config.symbolic(cfg)
    try:
        importer = Child("importing the model", torch=frontend.needs_torch(cfg))
        signature, _ = importer.call(building.inspect, open_)
    except ModelError as exc:
        raise exc.within("with its dimensions left open, as buckets need it, ") from None
    return signature


def _check(cfg: Config, signature: Signature) -> None:
    """Raises where config and model disagree about dimensions or inputs, or an output's sizes cannot be computed."""
    dims = list(dict.fromkeys(size for spec in signature.inputs for size in spec.shape if isinstance(size, str)))
    given = list(cfg.shapes.bucket_sizes()[0])
    _check_names("shapes.buckets", given, dims, "dimension")
    _check_names("shapes.pad", list(cfg.shapes.pad), [spec.name for spec in signature.inputs], "input")
    for spec in signature.inputs:
        if spec.name in cfg.shapes.pad and spec.dtype != "bfloat16":
            _check_pad(spec, cfg.shapes.pad[spec.name])
    if left := [dim for dim in dims if dim not in given]:
        raise ConfigError(
            f"shapes.buckets: the model's dimension `{left[0]}` has neither buckets nor a size",
            f"add it to the buckets, or fix it with --dim {left[0]}=SIZE",
        )
    for spec in signature.outputs:
        for axis, size in enumerate(spec.shape):
            if not _follows(size, given):
                raise UnsupportedError(
                    f"output `{spec.name}`: its size along axis {axis} does not follow from {', '.join(given)} before "
                    f"the model runs ({size})",
                    "compile one library per size, with --dim",
                )


def _check_names(key: str, names: Sequence[str], known: Sequence[str], kind: str) -> None:
    for name in names:
        if name not in known:
            meant = did_you_mean(name, known)
            known_names = f", {meant}" if meant else f"; it has: {', '.join(known) or 'none'}"
            raise ConfigError(
                f"{key}: the model has no open {kind} `{name}`{known_names}",
                "[model.inputs] names dimensions, `tvmflow inspect` lists them",
            )


def _check_pad(spec: TensorSpec, value: float) -> None:
    dtype = np.dtype(spec.dtype)
    limits = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype) if dtype.kind in "iu" else None
    low, high = spec.range or ((float(limits.min), float(limits.max)) if limits else (0.0, 1.0))
    if not low <= value <= high or (dtype.kind != "f" and value != int(value)):
        raise ConfigError(
            f"shapes.pad: `{spec.name}` = {value:g}, but it is {spec.dtype} from {low:g} to {high:g}",
            "give a value that the input may hold",
        )


def _follows(size: int | str, dims: Sequence[str]) -> bool:
    try:
        size_of(size)
    except ValueError:
        return False
    return dims_of(size) <= set(dims)


def _built(configs: Mapping[str, Config], folder: Path, build_one: Build, on_event: OnEvent) -> Iterator[Manifest]:
    """The manifest of each bucket, in order, with an estimate of the time left."""
    started, done = time.monotonic(), 0

    def run(name: str, cfg: Config) -> Manifest:
        def heard(event: str) -> None:
            left = (time.monotonic() - started) / done * (len(configs) - done) if done else 0.0
            estimate = f", about {left:.0f} s left" if done else ""
            on_event(f"{done} of {len(configs)} buckets done{estimate}; {name}: {event}")

        place = folder / name
        place.mkdir()
        try:
            return build_one(cfg, place, heard)
        except TvmflowError as exc:
            raise exc.within(f"bucket {name}: ") from None

    with ThreadPoolExecutor(host.cores()) as pool:
        futures = [pool.submit(run, name, cfg) for name, cfg in configs.items()]
        try:
            for future in futures:
                yield future.result()
                done += 1
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            process.kill_all()
            raise


def _joined_weights(folder: Path, manifests: Mapping[str, Manifest]) -> dict[str, Manifest]:
    """Moves the weights of all buckets into one file, equal ones once; the manifests that point there."""
    known: dict[tuple[str, tuple[int, ...], bytes], Constant] = {}
    entries = {}
    with (folder / CONSTANTS).open("wb") as stream:
        for name, manifest in manifests.items():
            file = folder / name / CONSTANTS
            content = np.memmap(file, np.uint8, mode="r") if file.stat().st_size else np.zeros(0, np.uint8)
            entries[name] = tuple(_joined(stream, content, entry, known) for entry in manifest.constants)
            del content
            file.unlink()
    weights = f"../{CONSTANTS}"
    shared = artifact.file_entry(folder / CONSTANTS)
    return {
        name: evolve(
            manifest,
            name=f"{manifest.name} {name}",
            weights=weights,
            constants=entries[name],
            files={LIBRARY: manifest.files[LIBRARY], weights: shared},
        )
        for name, manifest in manifests.items()
    }


def _joined(
    stream: BinaryIO, content: np.ndarray, entry: Constant, known: dict[tuple[str, tuple[int, ...], bytes], Constant]
) -> Constant:
    """Where a weight stands in the joined file, to which it is written unless it is there."""
    data = content[entry.offset : entry.offset + _size(entry)].tobytes()
    key = (entry.dtype, entry.shape, hashlib.sha256(data).digest())
    if key not in known:
        stream.write(b"\0" * (-stream.tell() % ALIGNMENT))
        known[key] = evolve(entry, offset=stream.tell())
        stream.write(data)
    return known[key]


def _size(entry: Constant) -> int:
    return math.prod(entry.shape) * itemsize(entry.dtype)


def _notes(manifests: Mapping[str, Manifest]) -> Iterator[str]:
    """What the buckets' own notes say, each once with the number of buckets that it is said of."""
    said: dict[str, list[str]] = {}
    for name, manifest in manifests.items():
        for note in manifest.notes:
            said.setdefault(note, []).append(name)
    for note, names in said.items():
        where = "" if len(names) == len(manifests) else f" ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        yield note + where


def _resolved(cfg: Config, first: Manifest) -> Config:
    """The config with the target that its buckets were built for."""
    return evolve(cfg, target=config.from_json(first.config).target)


def configs_of(cfg: Config) -> dict[str, Config]:
    """The config of each bucket's library by its folder; without buckets the config itself, under an empty name."""
    return dict(zip(map(_folder_name, cfg.shapes.bucket_sizes() or ({},)), config.per_bucket(cfg), strict=True))


def _folder_name(sizes: Mapping[str, int]) -> str:
    """What a bucket's folder is called."""
    return "_".join(f"{dim}-{size}" for dim, size in sizes.items())
