"""Tables and lines of a terminal. The only place where text becomes what rich can render, and none of it is markup."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tvmflow import text

if TYPE_CHECKING:
    import pandas as pd

Shown: TypeAlias = RenderableType
"""What `cli` can print."""
Part: TypeAlias = str | tuple[str, str]
"""A text, or a text and its style."""
Cell: TypeAlias = Part | list[Part]


@dataclass(frozen=True)
class Column:
    """A column's name, and whether it holds numbers, which stand to the right."""

    name: str
    right: bool = False


def line(*parts: Part) -> Text:
    """Parts one behind the other, on one line: a terminal breaks it where it must, and commands in it can be copied."""
    made = _assembled(parts, text.line)
    made.no_wrap, made.overflow = True, "ignore"
    return made


def table(columns: Sequence[str | Column], rows: Iterable[Sequence[Cell]], title: str = "") -> Table:
    """Rows under the columns' names. Cells wider than their column go on below."""
    made = Table(box=None, header_style="bold", padding=(0, 1), title_justify="left")
    if title:
        made.title = _assembled((title,), text.line)
    for column in columns:
        one = column if isinstance(column, Column) else Column(column)
        made.add_column(_cell(one.name), justify="right" if one.right else "left", overflow="fold")
    for row in rows:
        made.add_row(*map(_cell, row))
    return made


def pairs(rows: Mapping[str, Cell] | Iterable[tuple[str, Cell]]) -> Table:
    """Names and values, one pair a line."""
    made = Table(box=None, show_header=False, padding=(0, 1))
    made.add_column(style="bold")
    made.add_column(overflow="fold")
    for name, value in rows.items() if isinstance(rows, Mapping) else rows:
        made.add_row(_cell(name), _assembled(_parts(value), text.line))
    return made


def frame(data: pd.DataFrame) -> Table:
    """A row per row of a data frame, numbers with four digits, keys cut to twelve."""
    if "key" in data:
        data = data.assign(key=data["key"].str.slice(0, 12))
    columns = [Column(str(name), right=kind.kind in "if") for name, kind in data.dtypes.items()]
    return table(columns, ([_value(value) for value in row] for row in data.itertuples(index=False)))


def verbatim(block: str) -> Text:
    """A text of many lines to be copied: all of it, however narrow the terminal is."""
    return Text(text.lines(block), no_wrap=True, overflow="ignore")


def stack(*parts: RenderableType) -> Group:
    """One below the other."""
    return Group(*parts)


def _cell(cell: Cell) -> Text:
    return _assembled(_parts(cell), text.cell)


def _parts(cell: Cell) -> Sequence[Part]:
    return cell if isinstance(cell, list) else (cell,)


def _assembled(parts: Sequence[Part], shown: Callable[[str], str]) -> Text:
    styled = ((part, "") if isinstance(part, str) else part for part in parts)
    return Text.assemble(*((shown(content), style) for content, style in styled))


def _value(value: object) -> str:
    if isinstance(value, float):
        return "" if value != value else f"{value:.4g}"
    return "" if value is None else str(value)
