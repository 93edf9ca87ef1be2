"""How a frozen value becomes another: sections of a config, parts of a manifest, tuning records."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel

from tvmflow.errors import did_you_mean

Frozen = TypeVar("Frozen", bound=BaseModel)


def evolve(value: Frozen, **changes: Any) -> Frozen:
    """The same value with some of its fields changed, checked as a new one is: names, types and contradictions.

    Nothing is converted, and parts that are frozen values themselves are taken as they are. Raises TypeError for a name
    that is no field, and pydantic's ValidationError for what the value may not hold.
    """
    kind = type(value)
    for name in changes:
        if name not in kind.model_fields:
            meant = did_you_mean(name, list(kind.model_fields))
            raise TypeError(f"{kind.__name__} has no field `{name}`" + (f", {meant}" if meant else ""))
    return kind.model_validate({**dict(value), **changes}, strict=True)
