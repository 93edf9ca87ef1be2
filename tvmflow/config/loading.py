"""From files, command lines and plain values to a Config, or to one ConfigError that lists every fault."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tvmflow import files
from tvmflow.config.faults import fault, located
from tvmflow.config.sections import Config
from tvmflow.errors import ConfigError
from tvmflow.places import path_keys

# Each override is a nested table, as TOML would read it; later ones win.
Overrides = Sequence[Mapping[str, Any]]
MAX_BYTES = 16 << 20


def load(path: Path, overrides: Overrides = ()) -> Config:
    """Reads a config file; `overrides` win over it. Paths in it are taken from the file's folder.

    Raises ConfigError with all faults at once.
    """
    if not os.path.lexists(path):
        raise ConfigError(f"{path}: no such config file", "check the path; `configs/` holds examples")
    try:
        raw = tomllib.loads(files.read_regular(path, ConfigError, MAX_BYTES).decode("utf-8-sig"))
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc}", "give a readable TOML file") from None
    except (ValueError, RecursionError) as exc:  # beside faults of grammar: numbers and nesting beyond all measure
        raise ConfigError(f"{path}: not valid TOML: {exc}", "mend what is named above") from None
    return from_dict(raw, overrides, source=str(path), folder=path.parent)


def from_dict(
    raw: Mapping[str, Any], overrides: Overrides = (), *, source: str = "command line", folder: Path = Path()
) -> Config:
    """Builds a Config from plain values. `source` names their origin in messages, relative paths start at `folder`."""
    merged = json.loads(json.dumps(raw, default=str))
    for table, key, _ in path_keys(merged):
        if isinstance(table, dict) and isinstance(table.get(key, ""), str) and (key in table or key == "folder"):
            table[key] = str(folder.absolute() / table.get(key, ""))
    for override in overrides:
        _merge(merged, override)
    if unwritable := list(_unwritable(merged, ())):
        raise located(source, unwritable, "rename the file, or write the config's text as UTF-8")
    try:
        config = from_json(merged)
    except ValidationError as exc:
        faults = [fault(merged, error) for error in exc.errors()]
        raise located(source, faults, "`tvmflow config schema` lists every key") from None
    missing = list(_missing_files(config))
    if missing:
        raise located(source, missing, "paths in a config file start at the file's folder")
    return config


def of_model(model: str, overrides: Overrides = (), defaults: Mapping[str, Any] | None = None) -> Config:
    """The Config of what a user may name: a config file (.toml), a model file, or a PyTorch entry "module:function".

    `defaults` hold where neither a file nor `overrides` say otherwise.
    """
    if not files.is_text(model):
        raise ConfigError(
            f"{model}: its name is not UTF-8, in which manifests are written",
            "rename the file, or run with PYTHONUTF8=1 where the locale is at fault",
        )
    if model.endswith(".toml"):
        return load(Path(model), overrides)
    is_entry = ":" in model and not os.path.lexists(model)
    source = {"entry": model} if is_entry else {"path": str(Path(model).absolute())}
    return from_dict({**(defaults or {}), "model": source}, overrides)


def parse_override(text: str) -> dict[str, Any]:
    """`numerics.fast_math=true` -> {"numerics": {"fast_math": True}}; a value that is no TOML is taken as a string."""
    key, separator, value = text.partition("=")
    for candidate in (value, json.dumps(value.strip())):
        with contextlib.suppress(ValueError, RecursionError):
            if separator and "\n" not in text:
                return tomllib.loads(f"{key} = {candidate}")
    raise ConfigError(f"--set {text[:200]}: not of the form section.key=value", "e.g. --set numerics.fast_math=true")


def from_json(values: Mapping[str, Any]) -> Config:
    """The config that `to_json` wrote, e.g. a manifest's; raises pydantic's ValidationError for anything else."""
    return Config.model_validate_json(json.dumps(values))


def _merge(values: dict[str, Any], override: Mapping[str, Any]) -> None:
    for key, value in override.items():
        if isinstance(value, Mapping) and isinstance(values.get(key), dict):
            _merge(values[key], value)
        else:
            values[key] = value


def _unwritable(value: Any, place: tuple[object, ...]) -> Iterator[str]:
    """The texts that no config file can hold. Python stands lone surrogates for the bytes of names not in UTF-8."""
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from _unwritable(key, place)
            yield from _unwritable(entry, (*place, key))
    elif isinstance(value, list):
        for entry in value:
            yield from _unwritable(entry, place)
    elif isinstance(value, str) and re.search(r"[\ud800-\udfff]", value):
        yield f"{'.'.join(map(str, place)) or 'config'}: not UTF-8: {value}"


def _missing_files(config: Config) -> Iterator[str]:
    for place, path in (("model.path", config.model.path), ("verify.inputs", config.verify.inputs)):
        if path is not None and (fault := files.fault_of(path)):
            yield f"{place}: {fault}: {path}"
    if config.model.folder is not None and not os.path.exists(config.model.folder):
        yield f"model.folder: no such file: {config.model.folder}"
