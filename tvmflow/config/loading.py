"""From files, command lines and plain values to a Config, or to one ConfigError that lists every fault."""

from __future__ import annotations

import contextlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tvmflow.config.faults import fault, located
from tvmflow.config.sections import Config
from tvmflow.errors import ConfigError

# Each override is a nested table, as TOML would read it; later ones win.
Overrides = Sequence[Mapping[str, Any]]


def load(path: Path, overrides: Overrides = ()) -> Config:
    """Reads a config file; `overrides` win over it. Paths in it are taken from the file's folder.

    Raises ConfigError with all faults at once.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file", "check the path; `configs/` holds examples") from None
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: cannot be read: {exc}", "give a readable TOML file") from None
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"{path}: not valid TOML: {exc}", "mend the line named above") from None
    return from_dict(raw, overrides, source=str(path), folder=path.parent)


def from_dict(
    raw: Mapping[str, Any], overrides: Overrides = (), *, source: str = "command line", folder: Path = Path()
) -> Config:
    """Builds a Config from plain values. `source` names their origin in messages, relative paths start at `folder`."""
    merged = json.loads(json.dumps(raw, default=str))
    for table, key in _path_keys(merged):
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
    if model.endswith(".toml"):
        return load(Path(model), overrides)
    is_entry = ":" in model and not Path(model).exists()
    source = {"entry": model} if is_entry else {"path": str(Path(model).absolute())}
    return from_dict({**(defaults or {}), "model": source}, overrides)


def parse_override(text: str) -> dict[str, Any]:
    """`numerics.fast_math=true` -> {"numerics": {"fast_math": True}}; a value that is no TOML is taken as a string."""
    key, separator, value = text.partition("=")
    for candidate in (value, json.dumps(value.strip())):
        with contextlib.suppress(tomllib.TOMLDecodeError):
            if separator and "\n" not in text:
                return tomllib.loads(f"{key} = {candidate}")
    raise ConfigError(f"--set {text}: not of the form section.key=value", "e.g. --set numerics.fast_math=true")


def from_json(values: Mapping[str, Any]) -> Config:
    """The config that `to_json` wrote, e.g. a manifest's; raises pydantic's ValidationError for anything else."""
    return Config.model_validate_json(json.dumps(values))


def _path_keys(raw: Mapping[str, Any]) -> Iterator[tuple[Any, str]]:
    """Every table of a config file that may hold a path, and the path's key in it."""
    for section, key in (("model", "path"), ("model", "folder"), ("verify", "inputs"), ("tuning", "database")):
        yield raw.get(section), key
    kernels = raw.get("kernels")
    for kernel in kernels.values() if isinstance(kernels, dict) else ():
        yield kernel, "folder"


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
    given = (("model.path", config.model.path), ("model.folder", config.model.folder))
    for place, path in (*given, ("verify.inputs", config.verify.inputs)):
        if path is not None and not path.exists():
            yield f"{place}: no such file: {path}"
