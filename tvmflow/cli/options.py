"""What a user says about a model on the command line, and the Config that this makes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tvmflow.errors import UsageError

if TYPE_CHECKING:
    from tvmflow.config import Config

F = TypeVar("F", bound=Callable[..., Any])

debug = click.option("--debug", is_flag=True, help="Show the whole trace behind an error.")
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
threads = click.option("--threads", type=click.IntRange(1, 1024), help="CPU threads; default: the manifest's.")


def model(command: F) -> F:
    """MODEL and everything that makes a Config of it; the command gets them as keywords for `config_of`."""
    return click.argument("model")(_overrides(command))


def models(command: F) -> F:
    """Like `model` for one MODEL or several, in `models`."""
    return click.argument("models", nargs=-1, required=True, metavar="MODEL...")(_overrides(command))


def _overrides(command: F) -> F:
    for decorate in reversed(
        [
            click.option("--target", type=click.Choice(["llvm", "cuda"]), help="What to generate code for."),
            click.option("--arch", metavar="SM", help="CUDA architecture, e.g. sm_90; needed without a GPU."),
            click.option(
                "--shape",
                "shapes",
                multiple=True,
                metavar="NAME=1x3x224x224",
                help="Shape of an input; a name instead of a number keeps that axis symbolic.",
            ),
            click.option("--dim", "dims", multiple=True, metavar="NAME=SIZE", help="Size of a symbolic dimension."),
            click.option(
                "--set",
                "sets",
                multiple=True,
                metavar="KEY=VALUE",
                help="Override any config key, e.g. numerics.fast_math=true.",
            ),
        ]
    ):
        command = decorate(command)
    return command


def config_of(
    model: str,
    target: str | None = None,
    arch: str | None = None,
    shapes: tuple[str, ...] = (),
    dims: tuple[str, ...] = (),
    sets: tuple[str, ...] = (),
    **sections: dict[str, Any],
) -> Config:
    """The Config of a model or config file with the command line's options over it; raises UsageError, ConfigError.

    Its [limits] hold for all processes from now on.
    `sections` are tables of single sections, e.g. verify={"enabled": False}.
    """
    from tvmflow import config, process

    section = {key: value for key, value in (("kind", target), ("arch", arch)) if value is not None}
    inputs = {name: {"shape": _sizes(value)} for name, value in (_pair("--shape", text) for text in shapes)}
    sizes = sizes_of(dims)
    overrides: list[dict[str, Any]] = [
        {"target": section},
        {"model": {"inputs": inputs}},
        {"shapes": {"dims": sizes}},
        sections,
        *(config.parse_override(text) for text in sets),
    ]
    cfg = config.of_model(model, overrides)
    process.limit(cfg.limits.memory_gib, cfg.limits.minutes)
    return cfg


def sizes_of(dims: tuple[str, ...]) -> dict[str, int]:
    """What --dim says; raises UsageError."""
    return {name: _size(name, value) for name, value in (_pair("--dim", text) for text in dims)}


def _pair(option: str, text: str) -> tuple[str, str]:
    name, separator, value = text.rpartition("=")
    if not separator or not name:
        raise UsageError(f"{option} {text}: not of the form NAME=VALUE", f"e.g. {option} x=4")
    return name, value


def _sizes(value: str) -> list[int | str]:
    """`1x3x224x224`, or with commas where a dimension's name holds an x; nothing at all is a scalar."""
    parts = [part for part in value.split("," if "," in value else "x") if part]
    return [int(part[:20]) if re.fullmatch(r"-?[0-9]+", part) else part for part in parts]  # more is too much anyway


def _size(name: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", value):
        raise UsageError(f"--dim {name}={value}: `{value}` is no size", "e.g. --dim batch=4")
    return int(value)
