"""What is wrong with a config, a line each: the dotted place, what is wrong, and what was probably meant."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from tvmflow.config.sections import Config
from tvmflow.errors import ConfigError, did_you_mean


def located(source: str, faults: list[str], hint: str) -> ConfigError:
    """The error for all faults of a config at once."""
    if len(faults) == 1:
        return ConfigError(f"{source}: {faults[0]}", hint)
    return ConfigError(f"{source}: {len(faults)} errors", hint, items=faults)


def fault(raw: Mapping[str, Any], error: Any) -> str:
    """One line for one of pydantic's errors: place, what is wrong, what was probably meant."""
    loc = tuple(part for part in error["loc"] if not str(part).startswith("<"))
    place = [part for part in loc if not _is_union_tag(raw, loc, part)]
    dotted = ".".join(map(str, place)) or "config"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        meant = did_you_mean(str(place[-1]), _known_names(place[:-1]))
        return f"{dotted}: unknown key" + (f", {meant}" if meant else "")
    if error["type"] == "missing":
        return f"{dotted}: missing"
    given = error.get("input")
    shown = f" (it is {json.dumps(given)})" if isinstance(given, str | int | float | bool) else ""
    return f"{dotted}: {message[0].lower()}{message[1:]}{shown}"


def _is_union_tag(raw: Mapping[str, Any], loc: tuple[Any, ...], part: Any) -> bool:
    """Pydantic adds the name of the tried alternative to a place; it is none of the file's own keys."""
    value: Any = raw
    for step in loc[: loc.index(part)]:
        value = value.get(step) if isinstance(value, dict) else value[step] if isinstance(value, list) else None
    known = part in value if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int)
    return not known and not isinstance(value, dict)


def _known_names(place: list[Any]) -> list[str]:
    def is_section(annotation: object) -> bool:
        return isinstance(annotation, type) and issubclass(annotation, BaseModel)

    section: Any = Config
    for step in place:
        if get_origin(section) is dict:  # a table of sections, whose names are the user's
            section = get_args(section)[1]
        elif is_section(section) and step in section.model_fields:
            section = section.model_fields[step].annotation
        else:
            return []
    return list(section.model_fields) if is_section(section) else []
