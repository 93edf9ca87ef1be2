"""One tuning record and its one line of text. Whatever a line holds, reading it runs no code and stays bounded."""

from __future__ import annotations

import base64
import binascii
import re
import statistics
import zlib
from typing import Annotated, TypeVar

from pydantic import BaseModel, Field, JsonValue, SkipValidation, ValidationError, field_validator

from tvmflow.database.files import Form, LineError, body_of
from tvmflow.database.grammar import GrammarError, Where, check_trace, check_workload
from tvmflow.database.keys import KeyParts, Part, Text, canonical

FORMAT_VERSION = 1
MAX_WORKLOAD_BYTES = 16 << 20
MAX_PLAIN_BYTES = 256 << 10  # of a line without its workload and trace

Seconds = Annotated[float, Field(gt=0)]
Timings = Annotated[tuple[Seconds, ...], Field(strict=False, min_length=1)]
Model = TypeVar("Model", bound=BaseModel)


class Provenance(Part):
    """Where a record's timings come from."""

    versions: dict[Text, Text]
    """Of the compiler's packages: apache-tvm, apache-tvm-ffi."""
    machine: Text
    cpu: Text
    threads: int = Field(gt=0)
    date: str = Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")
    """In UTC, e.g. 2025-01-31T12:00:00Z."""
    seed: int | None
    """Of everything random in the search; None where nobody knows, as for an imported record."""
    trials: int = Field(ge=0)
    """Candidates measured for this task until this one was the best; of an imported record, those that the files held.
    """
    protocol: Text
    """How it was measured, e.g. "local cold-weights 25x"."""
    tvmflow: Text


class Record(Part):
    """The best schedule known for a key."""

    parts: KeyParts
    name: Text
    """Operator and shapes, for people; not part of the key."""
    workload_json: str
    """TVM's JSON of the workload, as `pack` makes it."""
    trace: Annotated[JsonValue, SkipValidation]  # node by node that takes longer than all the rest; `parse` checks it
    """MetaSchedule's trace as JSON; inert data until TVM replays it on the workload."""
    timings_s: Timings
    """Seconds of one run each, as measured."""
    flop: float = Field(ge=0)
    """Floating point operations of one run."""
    provenance: Provenance

    @field_validator("workload_json")
    @classmethod
    def _unpacks(cls, packed: str) -> str:
        unpack(packed)
        return packed

    @property
    def key(self) -> str:
        return self.parts.key

    @property
    def median_s(self) -> float:
        return statistics.median(self.timings_s)

    @property
    def gflops(self) -> float:
        """Speed in 10^9 floating point operations per second, from the median."""
        return self.flop / self.median_s / 1e9


def pack(text: str) -> str:
    """TVM's JSON of a workload in the form a record holds: base64 of zlib."""
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode("ascii")


def unpack(packed: str) -> str:
    """The text that `pack` got. Raises ValueError where it is damaged or longer than MAX_WORKLOAD_BYTES."""
    stream = zlib.decompressobj()
    try:
        text = stream.decompress(base64.b64decode(packed, validate=True), MAX_WORKLOAD_BYTES + 1)
    except (binascii.Error, zlib.error) as exc:
        raise ValueError(f"damaged: {exc}") from None
    if len(text) > MAX_WORKLOAD_BYTES:
        raise ValueError(f"unpacks to more than {MAX_WORKLOAD_BYTES >> 20} MiB")
    if not stream.eof or stream.unused_data:
        raise ValueError("damaged: it ends too early or too late")
    return text.decode()


def better(a: Record, b: Record) -> Record:
    """The one with the lower median; of equals the one whose line sorts first, so that order never matters."""
    return min(a, b, key=lambda record: (record.median_s, to_line(record)))


def to_line(record: Record) -> str:
    """The record's one spelling, without a line end."""
    plain = record.model_dump(exclude={"trace"})
    return canonical({"format_version": FORMAT_VERSION, "key": record.key, "trace": record.trace, **plain})


def parse(line: bytes) -> Record:
    """The record of a line; raises LineError for anything that is not exactly a record of this format version."""
    body, key = keyed_body(line)
    record = validated(Record, body, key)
    check_key(record.parts, key)
    try:
        check_trace(record.trace, Where.of(record.parts))
    except GrammarError as exc:
        raise LineError(f"no record: {exc}", key=key) from None
    return record


def examine(record: Record) -> None:
    """Raises LineError where a record's workload is outside the grammar.

    That takes longer than reading the record, which does not need it: to build with a record nobody looks at its
    workload. So this is asked before a record is taken in, and before TVM loads the workload.
    """
    try:
        check_workload(unpack(record.workload_json))
    except GrammarError as exc:
        raise LineError(f"no record: its workload: {exc}", key=record.key) from None


def keyed_body(line: bytes) -> tuple[dict[str, object], str | None]:
    """The fields of a line of this format version, and apart from them the key that it states; raises LineError."""
    body = body_of(line)
    stated = body.pop("key", None)
    key = stated if isinstance(stated, str) and re.fullmatch(r"[0-9a-f]{64}", stated) else None
    version = body.pop("format_version", None)
    if type(version) is not int or version != FORMAT_VERSION:
        raise LineError(
            f"format version {str(version)[:20]}, this tvmflow reads {FORMAT_VERSION}",
            "install the tvmflow that wrote it, or tune again",
            key,
        )
    return body, key


def check_key(parts: KeyParts, stated: str | None) -> None:
    """Raises LineError where a line states another key than its parts make."""
    if parts.key != stated:
        raise LineError(f"the key does not fit its parts, which make {parts.key[:12]}", key=stated)


def validated(kind: type[Model], body: dict[str, object], key: str | None) -> Model:
    """The entry that the fields of a line make; raises LineError, with the line's key."""
    try:
        plain = {name: value for name, value in body.items() if name not in ("workload_json", "trace")}
        if len(canonical(plain)) > MAX_PLAIN_BYTES:
            raise LineError(f"more than {MAX_PLAIN_BYTES >> 10} KiB beside workload and trace", key=key)
        return kind.model_validate(body)
    except ValidationError as exc:
        error = exc.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(step) for step in error["loc"])
        raise LineError(f"{place}: {error['msg']}", key=key) from None
    except ValueError as exc:
        raise LineError(str(exc), key=key) from None


RECORDS = Form("records.jsonl", parse, to_line, lambda record: record.key, better, max_bytes=64 << 20, examine=examine)
