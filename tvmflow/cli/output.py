"""Everything that is printed goes through here: tables or JSON, lines, errors, progress.

What others wrote is shown as `tvmflow.text` says, never read as markup, and never sent to the terminal as it is.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tvmflow import text
from tvmflow.errors import OutputError, TvmflowError

if TYPE_CHECKING:
    import pandas as pd

    from tvmflow.report.tables import Shown

LEAST_COLUMNS, PIPE_COLUMNS = 80, 160
"""The width of tables on a terminal that is narrower, and where there is none."""


def prepare_streams() -> None:
    """Characters that the encoding of a stream does not have are shown as escapes; they are no reason to fail."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(message: str, err: bool = False, label: tuple[str, str] | None = None) -> None:
    """One line; `label` stands before it in a colour of its own."""
    shown = f"{click.style(label[0], fg=label[1])}: " if label else ""
    click.echo(shown + text.line(message), err=err, color=_colour())


def say_lines(block: str, err: bool = False) -> None:
    """A text of many lines, all of it: a tool's log, or what is to be copied."""
    click.echo(text.lines(block.removesuffix("\n")), err=err, color=_colour())


def say_json(plain: object) -> None:
    """Plain values as JSON, in ASCII."""
    click.echo(json.dumps(plain))


def say_error(error: TvmflowError, debug: bool) -> None:
    """What is wrong, each thing on a line of its own, what to do next, and with `debug` what lies beneath."""
    say(error.summary, err=True, label=("error", "red"))
    for item in error.items:
        say(f"  {item}", err=True)
    if error.hint:
        say(f"  next: {error.hint}", err=True)
    if debug and error.details:
        say_lines(error.details, err=True)


def say_usage(error: click.ClickException) -> None:
    """What click says of a command line that it does not understand."""
    shown = io.StringIO()
    error.show(shown)
    say_lines(shown.getvalue(), err=True)


def show(table: Shown) -> None:
    """Prints what rich can render, as wide as the terminal is; one of less than LEAST_COLUMNS breaks the lines."""
    from rich.console import Console, Group

    console = Console(highlight=False, markup=False, emoji=False)
    console.width = max(console.width, LEAST_COLUMNS) if console.is_terminal else PIPE_COLUMNS
    console.print(Group(table), crop=False)  # a text alone would be copied, and forget that it is not to be broken


def show_either(table: Shown, plain: object, as_json: bool) -> None:
    """One of the two: what rich can render, or plain values as JSON."""
    if as_json:
        say_json(plain)
    else:
        show(table)


def show_frame(frame: pd.DataFrame, as_json: bool) -> None:
    """One line per row under the columns' names, keys cut to 12 digits; as JSON a list with an object per row."""
    if as_json:
        click.echo(frame.to_json(orient="records", double_precision=15))
        return
    from tvmflow.report import tables

    show(tables.frame(frame))


def show_pairs(rows: Iterable[tuple[str, str]]) -> None:
    """Names and values, one pair a line."""
    from tvmflow.report import tables

    show(tables.pairs(rows))


def write_text(option: str, file: Path, content: str) -> None:
    """Writes the file that an option names, - is standard output; raises OutputError."""
    if str(file) == "-":
        click.echo(content, nl=False)
        return
    try:
        file.write_text(content, encoding="utf-8")
    except OSError as exc:
        raise OutputError(f"{option} {file}: {exc.strerror}", "name a file in a folder that can be written") from None


@contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """A line on standard error that names the step in progress and the time so far; nothing without a terminal."""
    from rich.progress import SpinnerColumn, TimeElapsedColumn

    with _bar(what, None, SpinnerColumn(), None, TimeElapsedColumn()) as update:
        yield lambda event: update(event)


@contextmanager
def progress_of(what: str, total_s: float) -> Iterator[Callable[..., None]]:
    """A bar over `total_s` seconds, with a text and the time left: `update("searching", 3.5)`, the seconds done."""
    from rich.progress import BarColumn, TimeRemainingColumn

    with _bar(what, total_s, BarColumn(), None, TimeRemainingColumn()) as update:
        yield update


@contextmanager
def _bar(what: str, total: float | None, *columns: Any) -> Iterator[Callable[..., None]]:
    """A bar of rich's columns, None for the text."""
    from rich.console import Console
    from rich.progress import Progress, TextColumn

    console = Console(stderr=True)
    plain = TextColumn("{task.description}", markup=False)
    shown = [column or plain for column in columns]
    with Progress(*shown, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(text.cell(what), total=total)

        def update(event: str, completed: float | None = None) -> None:
            bar.update(task, description=text.cell(event), completed=completed)

        yield update


def _colour() -> bool | None:
    """No colour where the user wants none (https://no-color.org), else where there is a terminal."""
    return False if os.environ.get("NO_COLOR") else None
