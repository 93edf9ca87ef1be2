"""The key of a tuning record: a hash of named parts, so that a miss can say which part differs.

Two models that hold the same operator on the same target share a key; names, constants' values, paths and the
process that made it have no part in it. The method is that of jax's compilation cache: name what matters, hash that.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated

from pydantic import ConfigDict, Field, field_validator

from tvmflow.manifest import Noun

# Shown on terminals, so that control characters have no place in it.
Text = Annotated[str, Field(max_length=1000, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
PartValue = Text | int | bool | None | Annotated[tuple[Text, ...], Field(strict=False)]


class Part(Noun):
    """A frozen part of a record, strict: nothing is converted and NaN is no number. JSON's lists become tuples."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class KeyParts(Part):
    """What a schedule depends on. `key` is the name under which its record is kept."""

    workload: str = Field(pattern=r"^[0-9a-f]{64}$")
    """sha256 of the workload's canonical text, without names, symbols and constants' values."""
    target: dict[Text, PartValue]
    """At least kind, mcpu, threads and features (the instruction set extensions a build may use, any order)."""
    numerics: dict[Text, bool]
    """Modes by name, all stated: fast_math, tf32."""
    preparation: int = Field(ge=0)
    """Version of the graph passes before the tasks are taken."""

    @field_validator("target")
    @classmethod
    def _complete(cls, target: dict[str, PartValue]) -> dict[str, PartValue]:
        for name, kind in (("kind", str), ("mcpu", str), ("threads", int), ("features", tuple)):
            if type(target.get(name)) is not kind:
                raise ValueError(f"`{name}` is missing or no {kind.__name__}")
        return target | {"features": tuple(sorted(set(_names(target["features"]))))}

    @property
    def key(self) -> str:
        """64 hexadecimal digits: the sha256 of the parts' canonical JSON."""
        return fingerprint(self.model_dump(mode="json"))

    @property
    def features(self) -> frozenset[str]:
        """The instruction set extensions of the target."""
        return frozenset(_names(self.target["features"]))


def canonical(value: object) -> str:
    """JSON with one spelling per value: sorted names, no spaces, ASCII, floats in their shortest exact form.

    Raises ValueError for NaN, infinities and what is no JSON.
    """
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    except (TypeError, RecursionError) as exc:
        raise ValueError(f"no JSON value: {exc}") from None


def fingerprint(value: object) -> str:
    """The sha256 of a value's canonical JSON, as 64 hexadecimal digits."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def difference(a: KeyParts, b: KeyParts) -> tuple[str, ...]:
    """The named parts in which two keys differ, dotted, each with a's value and then b's; empty for equal keys."""
    lines = [] if a.workload == b.workload else [f"workload: {a.workload[:12]} against {b.workload[:12]}"]
    for section, ours, theirs in (("target", a.target, b.target), ("numerics", a.numerics, b.numerics)):
        for name in sorted(ours.keys() | theirs.keys()):
            mine, other = ours.get(name, "absent"), theirs.get(name, "absent")
            if mine != other or (name in ours) != (name in theirs):
                lines.append(f"{section}.{name}: {_against(mine, other)}")
    if a.preparation != b.preparation:
        lines.append(f"preparation: {a.preparation} against {b.preparation}")
    return tuple(lines)


def _against(mine: PartValue, other: PartValue) -> str:
    if isinstance(mine, tuple) and isinstance(other, tuple):
        sides = [" ".join(sorted(set(x) - set(y))) or "nothing" for x, y in ((mine, other), (other, mine))]
        return f"{sides[0]} against {sides[1]}, the rest is the same"
    return f"{_shown(mine)} against {_shown(other)}"


def _shown(value: PartValue) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


def _names(value: PartValue) -> tuple[str, ...]:
    return value if isinstance(value, tuple) else ()
