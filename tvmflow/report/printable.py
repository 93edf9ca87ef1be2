"""Texts from models and manifests as a terminal may show them: no markup of rich, nothing that a terminal acts on."""

from __future__ import annotations

from typing import Any, TypeVar

from rich.markup import escape

from tvmflow.manifest import Noun

AnyNoun = TypeVar("AnyNoun", bound=Noun)


def printable(noun: AnyNoun) -> AnyNoun:
    """The same noun with every text in it escaped; once, since a second time shows the signs of the first."""
    return type(noun).model_validate(_printable(noun.model_dump()))


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return escape("".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in value))
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    return type(value)(map(_printable, value)) if isinstance(value, list | tuple) else value
