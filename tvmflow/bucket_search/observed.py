"""Observed sizes: a CSV file with a column per dimension of a model and a row per request."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from tvmflow.errors import InputError, did_you_mean
from tvmflow.files import open_regular

COUNT = "count"  # the column that says how often a row was seen
LARGEST = 1 << 31
SHAPE_HINT = "--shape INPUT=... names a model's open axes, e.g. --shape ids=batchxsequence"


@dataclass(frozen=True)
class Observed:
    """The distinct sizes of some requests: int64 (rows, dims), and how often each was seen: int64 (rows,)."""

    dims: tuple[str, ...]
    sizes: np.ndarray
    counts: np.ndarray


def read(path: Path, dims: Sequence[str]) -> Observed:
    """The sizes in a CSV file, which has a column for each of `dims`, in any order, and perhaps `count`.

    Raises InputError, with the line, for what is no such file.
    """
    if not os.path.lexists(path):
        raise InputError(f"{path}: no such file", f"--trace takes a CSV file that starts with {','.join(dims)}")
    try:
        with io.TextIOWrapper(open_regular(path, InputError), encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream)
            columns = _columns(path, next(reader, []), dims)
            values = list(_values(path, reader, columns))
    except (OSError, UnicodeDecodeError, csv.Error) as exc:
        raise InputError(f"{path}: cannot be read as CSV: {exc}", "give a readable CSV file in UTF-8") from None
    rows = pd.DataFrame(values, columns=columns, dtype="int64")
    counts = rows.pop(COUNT) if COUNT not in dims and COUNT in columns else pd.Series(1, rows.index)
    unique = counts.groupby([rows[dim] for dim in dims], sort=True).sum()
    unique = unique[unique > 0]
    if unique.empty:
        raise InputError(f"{path}: holds no requests", "add a line with the sizes of each request below the header")
    sizes = unique.index.to_frame().to_numpy(dtype=np.int64)
    return Observed(tuple(dims), sizes, unique.to_numpy(dtype=np.int64))


def _columns(path: Path, header: list[str], dims: Sequence[str]) -> list[str]:
    """The names in the header; raises InputError unless they are the model's dimensions, each once."""
    columns = [name.strip() for name in header]
    if not any(columns):
        raise InputError(f"{path}: is empty, or its first line is", f"it must start with {','.join(dims)}")
    unknown = [name for name in columns if name not in dims and name != COUNT]
    faults = [f"no column `{dim}`, a dimension of the model" for dim in dims if dim not in columns]
    for name in unknown:
        meant = did_you_mean(name, [*dims, COUNT])
        faults.append(f"column `{name}` is no dimension of the model" + (f", {meant}" if meant else ""))
    faults += [f"column `{name}` is there twice" for name in dict.fromkeys(columns) if columns.count(name) > 1]
    if faults:
        raise InputError(
            f"{path}, line 1: {'; '.join(faults)}",
            f"the model's open dimensions are {', '.join(dims)}; --dim NAME=SIZE fixes one, {SHAPE_HINT}",
        )
    return columns


def _values(path: Path, reader: Iterator[list[str]], columns: list[str]) -> Iterator[list[int]]:
    for row in reader:
        if not "".join(row).strip():
            continue
        place = f"{path}, line {reader.line_num}"  # type: ignore[attr-defined] # csv's reader has it
        if len(row) != len(columns):
            raise InputError(f"{place}: {len(row)} values for {len(columns)} columns", "mend the line")
        yield [_value(f"{place}, column `{name}`", text.strip(), name) for name, text in zip(columns, row, strict=True)]


def _value(place: str, text: str, name: str) -> int:
    lowest = 0 if name == COUNT else 1
    if not re.fullmatch(r"-?[0-9]+", text):
        raise InputError(
            f"{place}: `{text}` is no whole number" if text else f"{place}: nothing stands there",
            "write sizes as whole numbers, e.g. 128",
        )
    value = int(text[:20])  # Python refuses numbers of thousands of digits
    if not lowest <= value <= LARGEST:
        raise InputError(
            f"{place}: {text} is too {'small' if value < lowest else 'large'}",
            f"{'counts' if name == COUNT else 'sizes'} are from {lowest} to {LARGEST}",
        )
    return value
