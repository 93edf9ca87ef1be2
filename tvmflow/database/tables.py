"""Records as pandas tables: one row each, summed up per target, compared between two databases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from tvmflow.database.comparison import EDGES, Comparison
from tvmflow.database.record import Record, to_line
from tvmflow.database.store import folder_name

if TYPE_CHECKING:
    import pandas as pd

COMPILER = "apache-tvm"  # whose version tells how old a record is


def records(rows: Iterable[Record]) -> pd.DataFrame:
    """One row per record: key, name, target (its folder), GFLOP/s, median_s, samples, trials, bytes, tvm, date,
    machine."""
    import pandas as pd

    columns = {
        "key": str,
        "name": str,
        "target": str,
        "GFLOP/s": float,
        "median_s": float,
        "samples": int,
        "trials": int,
        "bytes": int,
        "tvm": str,
        "date": str,
        "machine": str,
    }
    values = [
        (
            r.key,
            r.name,
            folder_name(r.parts),
            r.gflops,
            r.median_s,
            len(r.timings_s),
            r.provenance.trials,
            len(to_line(r)) + 1,
            r.provenance.versions.get(COMPILER, "unknown"),
            r.provenance.date,
            r.provenance.machine,
        )
        for r in rows
    ]
    return pd.DataFrame(values, columns=list(columns)).astype(columns)


def comparisons(rows: Iterable[Comparison]) -> pd.DataFrame:
    """One row per convolution whose methods were compared: key, name, target (its folder), the schedule of the
    direct kernel, the median seconds of each method (none where it was not measured), the method that is taken,
    date, machine."""
    import pandas as pd

    texts = ("key", "name", "target", "schedule")
    columns = {
        **dict.fromkeys(texts, str),
        **dict.fromkeys((f"{method} s" for method in EDGES), float),
        **dict.fromkeys(("taken", "date", "machine"), str),
    }
    values = [
        (
            one.key,
            one.name,
            folder_name(one.parts),
            one.direct,
            *(one.medians_s.get(method) for method in EDGES),
            one.taken,
            one.provenance.date,
            one.provenance.machine,
        )
        for one in rows
    ]
    return pd.DataFrame(values, columns=list(columns)).astype(columns)


def stats(rows: Iterable[Record], quarantined: Mapping[str, int]) -> pd.DataFrame:
    """One row per target: records, median GFLOP/s, bytes, the versions of TVM they were tuned with, days of the
    first and last, and the candidates in its quarantine, which `quarantined` holds by target."""
    groups = records(rows).groupby("target", as_index=False)
    table = groups.agg(
        records=("key", "size"),
        speed=("GFLOP/s", "median"),
        bytes=("bytes", "sum"),
        tvm=("tvm", lambda versions: ", ".join(sorted(set(versions)))),
        first=("date", "min"),
        last=("date", "max"),
    )
    days = {name: table[name].str.slice(0, 10) for name in ("first", "last")}
    dead = table["target"].map(lambda target: quarantined.get(target, 0))
    return table.assign(**days, quarantined=dead).rename(columns={"speed": "median GFLOP/s"})


def diff(ours: Iterable[Record], theirs: Iterable[Record]) -> pd.DataFrame:
    """One row per key whose record is not the same in both: where it is, both medians, and B's time as a share of A's.

    Equal speed with another trace or provenance is a difference too ("changed").
    """
    import pandas as pd

    a, b = ({record.key: record for record in rows} for rows in (ours, theirs))
    rows = []
    for key in sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key)):
        mine, other = a.get(key), b.get(key)
        where = "only B" if mine is None else "only A" if other is None else _faster(mine, other)
        known = mine or other
        assert known is not None  # the key comes from one of the two
        medians = (mine.median_s if mine else None, other.median_s if other else None)
        share = other.median_s / mine.median_s if mine and other else None
        rows.append((key, known.name, folder_name(known.parts), where, *medians, share))
    return pd.DataFrame(rows, columns=["key", "name", "target", "where", "A median_s", "B median_s", "B / A"])


def _faster(ours: Record, theirs: Record) -> str:
    if ours.median_s == theirs.median_s:
        return "changed"
    return "A faster" if ours.median_s < theirs.median_s else "B faster"
