"""Candidates that killed the process that measured them: kept beside the records, so that no session tries them again.

A line accuses one trace on one workload. It holds no more of the trace than its hash, so that there is nothing to run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field, ValidationError

from tvmflow.database.files import Form, LineError, body_of, shown
from tvmflow.database.keys import Part, canonical
from tvmflow.frozen import evolve

FORMAT_VERSION = 1
CONVICTED = 2
"""Accusations from which on a candidate is not tried again: a single one may have been the machine's fault."""
LIMIT = 4096
"""Accusations that a file keeps: those with the highest counts."""

Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Accusation(Part):
    """A trace that ended its worker `count` times, and how the last time."""

    workload: Hash
    trace_sha256: Hash
    """Of the trace's canonical JSON: `fingerprint(trace)`."""
    error: str = Field(max_length=200, pattern=r"^[ -~]*$")
    count: int = Field(ge=1, le=10**9)

    @property
    def key(self) -> str:
        return self.workload + self.trace_sha256


def accusation(workload: str, trace_sha256: str, error: str) -> Accusation:
    """A first accusation; of `error` so much is kept as can be shown in a line."""
    return Accusation(workload=workload, trace_sha256=trace_sha256, error=shown(error)[:200], count=1)


def charged(known: Iterable[Accusation], new: Accusation) -> tuple[Accusation, ...]:
    """`known` and `new`, counted up where it was known; of more than LIMIT the least counted go, but never `new`."""
    by_key = {one.key: one for one in known}
    old = by_key.pop(new.key, None)
    if old is not None:
        new = evolve(new, count=min(old.count + 1, 10**9))
    return (*limited(by_key.values(), LIMIT - 1), new)


def limited(accusations: Iterable[Accusation], limit: int = LIMIT) -> tuple[Accusation, ...]:
    """At most so many of them, the most counted first."""
    return tuple(sorted(accusations, key=lambda one: (-one.count, one.key))[:limit])


def _to_line(one: Accusation) -> str:
    return canonical({"format_version": FORMAT_VERSION, **one.model_dump()})


def _parse(line: bytes) -> Accusation:
    body = body_of(line)
    version = body.pop("format_version", None)
    if type(version) is not int or version != FORMAT_VERSION:
        raise LineError(
            f"format version {str(version)[:20]}, this tvmflow reads {FORMAT_VERSION}",
            "install the tvmflow that wrote it, or drop it: `tvmflow db prune --faulty`",
        )
    try:
        return Accusation.model_validate(body)
    except ValidationError as exc:
        error = exc.errors(include_url=False, include_context=False, include_input=False)[0]
        raise LineError(f"{'.'.join(str(step) for step in error['loc'])}: {error['msg']}") from None


def _more(a: Accusation, b: Accusation) -> Accusation:
    """The higher count, not the sum: two copies of a file must not accuse twice."""
    return max(a, b, key=lambda one: (one.count, one.error))


QUARANTINE = Form("quarantine.jsonl", _parse, _to_line, lambda one: one.key, _more, 4 << 20, limited)
