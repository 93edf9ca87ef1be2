"""A config as text and as plain values: for files, manifests, messages and editors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tomli_w

from tvmflow.config import external
from tvmflow.config.sections import Config


def name(config: Config) -> str:
    """What the model is called: its file's name without the ending, or its function's."""
    return config.model.path.stem if config.model.path else str(config.model.entry).partition(":")[2]


def stated(modes: Mapping[str, Any]) -> str:
    """A section's values as a config file states them, on one line."""
    return ", ".join(f"{name} = {str(value).lower()}" for name, value in modes.items())


def to_json(config: Config) -> dict[str, Any]:
    """What changes the result, as plain JSON values, every default stated: without [limits]."""
    values: dict[str, Any] = config.model_dump(mode="json")
    return values


def to_toml(config: Config) -> str:
    """The config as a TOML text that `load` reads back to an equal Config; unset keys are left out."""
    return dump_toml(_without_unset(to_json(config) | _limits(config)))


def shown(config: Config) -> str:
    """The same text for a reader: without the patterns of [audit] allow that every config has."""
    values = to_json(config)
    own = {pattern: why for pattern, why in config.audit.allow.items() if external.ALLOWED.get(pattern) != why}
    return dump_toml(_without_unset({**values, "audit": {**values["audit"], "allow": own}, **_limits(config)}))


def dump_toml(values: Mapping[str, Any]) -> str:
    """Values as a TOML text. What cannot be seen is spelt as an escape: only quotes can hold it."""
    return "".join(char if char.isprintable() or char == "\n" else _spelt(char) for char in tomli_w.dumps(values))


def toml_key(name: str) -> str:
    """A name as a key of such a text, in quotes where it needs them."""
    return dump_toml({name: 0}).removesuffix(" = 0\n")


def schema() -> dict[str, Any]:
    """The JSON Schema of config files, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}


def _limits(config: Config) -> dict[str, Any]:
    return {"limits": config.limits.model_dump(mode="json")}


def _spelt(char: str) -> str:
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"


def _without_unset(value: Any) -> Any:
    """TOML has no null: what is unset is left out, and so are tables that hold nothing."""
    if not isinstance(value, dict):
        return value
    kept = {key: _without_unset(item) for key, item in value.items() if item is not None}
    return {key: item for key, item in kept.items() if item != {}}
