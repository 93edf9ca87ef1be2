"""Prints tables on a terminal or as JSON, and progress. What tables hold is shown as it is, never read as markup."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tvmflow.errors import OutputError

if TYPE_CHECKING:
    import pandas as pd


def show_frame(frame: pd.DataFrame, as_json: bool) -> None:
    """One line per row under the columns' names, keys cut to 12 digits; as JSON a list with an object per row."""
    if as_json:
        click.echo(frame.to_json(orient="records", double_precision=15))
        return
    from rich.table import Table
    from rich.text import Text

    if "key" in frame:
        frame = frame.assign(key=frame["key"].str.slice(0, 12))
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name, kind in frame.dtypes.items():
        table.add_column(str(name), justify="right" if kind.kind in "if" else "left", overflow="fold")
    for row in frame.itertuples(index=False):
        table.add_row(*(Text(_cell(value)) for value in row))
    show(table)


def show_rows(rows: Iterable[tuple[str, str]]) -> None:
    """Names and values, one pair a line."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in rows:
        table.add_row(Text(name, style="bold"), Text(value))
    show(table)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return "" if value != value else f"{value:.4g}"
    return str(value)


def show(table: object) -> None:
    """Prints what rich can render, as wide as the terminal is, or 160 columns where there is none."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    console.print(table)


def show_either(table: object, plain: object, as_json: bool) -> None:
    """One of the two: what rich can render, or plain values as JSON."""
    if as_json:
        click.echo(json.dumps(plain))
    else:
        show(table)


def write_text(option: str, file: Path, text: str) -> None:
    """Writes the file that an option names, - is standard output; raises OutputError."""
    if str(file) == "-":
        click.echo(text, nl=False)
        return
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise OutputError(f"{option} {file}: {exc.strerror}", "name a file in a folder that can be written") from None


@contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """A line on standard error that names the step in progress and the time so far; nothing without a terminal."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what)
        yield lambda event: bar.update(task, description=event)
