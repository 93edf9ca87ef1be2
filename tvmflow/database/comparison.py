"""How long a convolution takes by each method, as measured: which one a library takes. Kept beside the records."""

from __future__ import annotations

import statistics
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tvmflow.database.files import Form
from tvmflow.database.keys import KeyParts, Part, Text, canonical, fingerprint
from tvmflow.database.record import FORMAT_VERSION, Provenance, Timings, check_key, keyed_body, validated

Method = Literal["direct", "F(2x2)", "F(4x4)"]
EDGES: dict[Method, int] = {"direct": 1, "F(2x2)": 2, "F(4x4)": 4}
"""Outputs along a tile's edge by method: F(m x m, 3 x 3) is Winograd's, of which m = 1 is the direct convolution."""
MARGIN = 0.02  # of the direct kernel's time, which Winograd's method must save at least

Size = Annotated[int, Field(gt=0)]
Padding = Annotated[int, Field(ge=0)]


class Convolution(Part):
    """A 3 x 3 convolution of stride 1 of float32[batch, height, width, channels], padded, to `filters`."""

    batch: Size
    height: Size
    width: Size
    channels: Size
    filters: Size
    padding: Annotated[tuple[Padding, Padding, Padding, Padding], Field(strict=False)]
    """top, left, bottom, right."""

    @property
    def workload(self) -> str:
        """The workload's part of a comparison's key: 64 hexadecimal digits."""
        return fingerprint({"3x3 convolution, stride 1": self.model_dump(mode="json")})


class Comparison(Part):
    """The timings of one convolution by each method, and where they come from."""

    parts: KeyParts
    convolution: Convolution
    name: Text
    """The kernel that was measured, for people: its shape, and what is fused into it."""
    direct: Text
    """The schedule of the direct kernel: its record, or its default."""
    timings_s: dict[Method, Timings]
    """Seconds of one run each, as measured; a method that could not be measured is absent."""
    provenance: Provenance

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if "direct" not in self.timings_s:
            raise ValueError("no timings of the direct kernel")
        if self.parts.workload != self.convolution.workload:
            raise ValueError("its workload is not that of its convolution")
        return self

    @property
    def key(self) -> str:
        return self.parts.key

    @property
    def medians_s(self) -> dict[Method, float]:
        return {method: statistics.median(timings) for method, timings in self.timings_s.items()}

    @property
    def taken(self) -> Method:
        """The fastest method, but the direct one unless another saves MARGIN of its time."""
        medians = self.medians_s
        best = min(medians, key=lambda method: (medians[method], EDGES[method]))
        return best if medians[best] <= (1 - MARGIN) * medians["direct"] else "direct"


def to_line(comparison: Comparison) -> str:
    """The comparison's one spelling, without a line end."""
    return canonical({"format_version": FORMAT_VERSION, "key": comparison.key, **comparison.model_dump()})


def parse(line: bytes) -> Comparison:
    """The comparison of a line; raises LineError for anything that is not exactly one of this format version."""
    body, key = keyed_body(line)
    comparison = validated(Comparison, body, key)
    check_key(comparison.parts, key)
    return comparison


def newer(a: Comparison, b: Comparison) -> Comparison:
    """The one measured later, by today's kernels and records; of equals the one whose line sorts last."""
    return max(a, b, key=lambda one: (one.provenance.date, to_line(one)))


COMPARISONS = Form("comparisons.jsonl", parse, to_line, lambda one: one.key, newer, max_bytes=16 << 20)
