"""From the bytes of manifest.json to a manifest whose parts fit each other and the files beside it.

What is read may have been changed by anybody, and its digests made anew: a digest shows damage, not intent. So types
are taken strictly, and whatever a library would be handed is held against the sizes of the files.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from pydantic import ValidationError

from tvmflow.artifact.layout import (
    AGAIN,
    ALIGNMENT,
    CONSTANTS,
    FORMAT_VERSION,
    LIBRARY,
    LOG,
    MANIFEST,
    SHARED_CONSTANTS,
)
from tvmflow.errors import ArtifactError
from tvmflow.manifest import ITEM_BYTES, BuildLog, Bundle, Constant, Described, Manifest

Fault = tuple[str, str]  # where in the manifest, and what is wrong there


def digest(body: dict[str, Any]) -> str:
    """Of a manifest as plain values, without its own digest."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def parse(content: bytes, where: str) -> Manifest | Bundle:
    """The manifest that the bytes hold, checked for damage; `where` names the artifact. Raises ArtifactError."""
    body = _table(content, where)
    stated, version = body.pop("manifest_sha256", None), body.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise ArtifactError(
            f"{where}: format version {repr(version)[:40]}, this tvmflow reads {FORMAT_VERSION}",
            f"{AGAIN}, or install the tvmflow that made it",
        )
    if stated != digest(body):
        raise ArtifactError(f"{where}: manifest.json was changed or damaged", AGAIN)
    kind = Bundle if "buckets" in body else Manifest
    try:
        manifest = kind.model_validate_json(json.dumps(body), strict=True)
    except ValidationError as exc:
        _refuse(where, _first(exc))
    for fault in _faults(manifest):
        _refuse(where, fault)
    return manifest


def parse_log(content: bytes, where: str) -> BuildLog:
    """What a build log holds; raises ArtifactError."""
    try:
        return BuildLog.model_validate_json(json.dumps(_table(content, f"{where}/{LOG}")), strict=True)
    except ValidationError as exc:
        raise ArtifactError(f"{where}/{LOG}: {_shown(_first(exc))}", f"delete {LOG}: nothing needs it") from None


def check_buckets(bundle: Bundle, manifests: Iterable[Manifest], where: str) -> None:
    """Raises ArtifactError where the libraries of buckets do not fit what the artifact says of all of them."""
    every: list[Constant] = []
    for bucket, manifest in zip(bundle.buckets, manifests, strict=True):
        place = f"{where}/{bucket.folder}"
        if manifest.weights != SHARED_CONSTANTS:
            _refuse(place, ("weights", f"is {manifest.weights}, not {SHARED_CONSTANTS} as of a bucket"))
        if manifest.files[SHARED_CONSTANTS] != bundle.files[CONSTANTS]:
            _refuse(place, (f"files.{SHARED_CONSTANTS}", "is not the file that the artifact lists"))
        if manifest.files[LIBRARY] != bundle.files[f"{bucket.folder}/{LIBRARY}"]:
            _refuse(place, (f"files.{LIBRARY}", "is not the file that the artifact lists"))
        if (manifest.target, manifest.versions) != (bundle.target, bundle.versions):
            _refuse(place, ("target", "is not that of the artifact, or its versions are not"))
        every += manifest.constants
    unique = sorted(dict.fromkeys(every), key=lambda entry: (entry.offset, entry.size_bytes))
    for fault in _of_constants(unique, bundle.files[CONSTANTS].size_bytes):
        _refuse(where, (f"of its buckets: {fault[0]}", fault[1]))


def _table(content: bytes, where: str) -> dict[str, Any]:
    """The JSON object in `content`; only what every reader of JSON understands alike."""
    try:
        body = json.loads(
            content.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_number, parse_float=_finite
        )
        json.dumps(body, ensure_ascii=False).encode("utf-8")  # a lone surrogate is no text
    except (ValueError, RecursionError) as exc:
        what = "it is nested too deeply" if isinstance(exc, RecursionError) else str(exc)[:200]
        raise ArtifactError(f"{where}: not an artifact: {what}", "give what `tvmflow compile` wrote") from None
    if not isinstance(body, dict):
        raise ArtifactError(
            f"{where}: not an artifact: no table of names and values", "give what `tvmflow compile` wrote"
        )
    return body


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"`{twice[:40]}` stands twice in one table")
    return table


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


def _first(exc: ValidationError) -> Fault:
    error = exc.errors(include_url=False, include_input=False)[0]
    return ".".join(map(str, error["loc"])), error["msg"]


def _refuse(where: str, fault: Fault) -> NoReturn:
    raise ArtifactError(f"{where}: manifest.json: {_shown(fault)}", AGAIN)


def _shown(fault: Fault) -> str:
    """A fault without what a terminal would act on."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in f"{fault[0][:200]}: {fault[1][:300]}")


def _faults(manifest: Manifest | Bundle) -> Iterator[Fault]:
    yield from _of_any(manifest)
    yield from _of_bundle(manifest) if isinstance(manifest, Bundle) else _of_library(manifest)


def _of_library(manifest: Manifest) -> Iterator[Fault]:
    if manifest.weights not in (CONSTANTS, SHARED_CONSTANTS):
        yield "weights", f"is `{manifest.weights}`, neither {CONSTANTS} nor {SHARED_CONSTANTS}"
    yield from _of_files(manifest, {LIBRARY, manifest.weights})
    size_bytes = manifest.files[manifest.weights].size_bytes
    for index, entry in enumerate(manifest.constants):
        if entry.dtype not in ITEM_BYTES:
            yield f"constants.{index}.dtype", f"`{entry.dtype}` is none"
    if manifest.weights == CONSTANTS:
        yield from _of_constants(manifest.constants, size_bytes)
    for index, entry in enumerate(manifest.constants):
        if entry.offset % ALIGNMENT or entry.offset + entry.size_bytes > size_bytes:
            yield f"constants.{index}", f"does not lie within {manifest.weights}, which has {size_bytes} bytes"


def _of_bundle(bundle: Bundle) -> Iterator[Fault]:
    if not bundle.buckets:
        yield "buckets", "are none"
    dims = {size for spec in bundle.signature.inputs for size in spec.shape if isinstance(size, str)}
    for index, bucket in enumerate(bundle.buckets):
        if bucket.dims.keys() != dims or list(bucket.dims) != list(bundle.buckets[0].dims):
            yield f"buckets.{index}.dims", "are not the dimensions of the inputs, in the order of the first bucket"
        if not bucket.folder or bucket.folder.startswith(".") or not {"/", "\0"}.isdisjoint(bucket.folder):
            yield f"buckets.{index}.folder", "is not the name of a folder inside the artifact"
    if len({tuple(bucket.dims.values()) for bucket in bundle.buckets}) < len(bundle.buckets):
        yield "buckets", "hold the same sizes twice"
    if len({CONSTANTS, MANIFEST, LOG, *(bucket.folder for bucket in bundle.buckets)}) < len(bundle.buckets) + 3:
        yield "buckets", "share a folder, or its name is another file's"
    if bundle.padding.keys() != dims:
        yield "padding", "does not name the dimensions of the inputs"
    if unknown := bundle.pad.keys() - {spec.name for spec in bundle.signature.inputs}:
        yield f"pad.{min(unknown)}", "is not the name of an input"
    inside = (f"{bucket.folder}/{name}" for bucket in bundle.buckets for name in (LIBRARY, MANIFEST))
    yield from _of_files(bundle, {CONSTANTS, *inside})


def _of_files(manifest: Described, expected: set[str]) -> Iterator[Fault]:
    for name in sorted(expected - manifest.files.keys()):
        yield "files", f"does not list {name}"
    for name in sorted(manifest.files.keys() - expected):
        yield f"files.{name}", "is not a file of an artifact"


def _of_constants(entries: Iterable[Constant], size_bytes: int) -> Iterator[Fault]:
    """Weights stand one behind the other at the next boundary, and fill the file, if there are any."""
    end = 0
    for index, entry in enumerate(entries):
        place = -(-end // ALIGNMENT) * ALIGNMENT
        if entry.offset != place:
            yield f"constants.{index}.offset", f"is {entry.offset}, but what is before it ends at {place}"
        end = place + entry.size_bytes
    if end not in (0, size_bytes):
        yield "constants", f"take {end} bytes, but {CONSTANTS} has {size_bytes}"


def _of_any(manifest: Described) -> Iterator[Fault]:
    if manifest.target.kind not in ("llvm", "cuda"):
        yield "target.kind", f"`{manifest.target.kind}` is none"
    for kind in ("inputs", "outputs"):
        for index, spec in enumerate(getattr(manifest.signature, kind)):
            if spec.dtype not in ITEM_BYTES:
                yield f"signature.{kind}.{index}.dtype", f"`{spec.dtype}` is none"
    names = [spec.name for spec in manifest.signature.inputs]
    if len(set(names)) < len(names):
        yield "signature.inputs", "has a name twice"
    for name in manifest.source_data:
        if name.startswith("/") or ".." in name.split("/") or "\0" in name:
            yield f"source_data.{name}", "does not lie beside the model"
    if manifest.config:
        for section in ("model", "numerics", "target"):
            if not isinstance(manifest.config.get(section), dict):
                yield f"config.{section}", "is no table"
        if not isinstance(manifest.config["numerics"].get("fast_math"), bool):
            yield "config.numerics.fast_math", "is neither true nor false"
