"""The command `buckets`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from tvmflow.cli import options
from tvmflow.cli.output import progress, say, show_either, write_text
from tvmflow.errors import UsageError


@click.command()
@options.model
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    required=True,
    metavar="CSV",
    help="Observed sizes: a column per open dimension, perhaps `count`, a line per request.",
)
@click.option("--most", type=click.IntRange(1, 32), default=8, show_default=True, help="At most so many buckets.")
@click.option("--align", multiple=True, metavar="K|DIM=K", help="Only multiples of K, in all dimensions or in one.")
@click.option("--measure", is_flag=True, help="Build libraries of some sizes and time them here, not estimate.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="SVG", help="Draw sizes, buckets and times.")
@options.as_json
@options.debug
def buckets(
    trace: Path,
    most: int,
    align: tuple[str, ...],
    measure: bool,
    plot: Path | None,
    as_json: bool,
    debug: bool,
    **model: Any,
) -> None:
    """Propose shape buckets for MODEL from observed sizes: those with which a request takes the least time.

    A library is compiled for each bucket, and a request is padded to the smallest one that it fits into. MODEL is what
    `compile` takes, with open dimensions; the trace names them in its first line:

    \b
      batch,sequence,count
      1,17,3050
      4,96,12

    What a call costs is estimated from the operations and bytes of the model's kernels at some sizes, or measured with
    --measure; in between it is interpolated. One bucket always is the largest size of every dimension. The output ends
    with the lines for a config file.
    """
    from tvmflow import bucket_search
    from tvmflow.bucket_search import plot as bucket_plot
    from tvmflow.report import buckets as report_buckets

    if plot is not None and plot.suffix != ".svg":
        raise UsageError(f"--plot {plot}: only SVG is drawn", "name a file that ends in .svg")
    request = bucket_search.Request(trace, most, dict(map(_aligned, align)), measure)
    with progress("importing the model") as on_event:
        found = bucket_search.propose(options.config_of(**model), request, on_event)
    show_either(report_buckets.rendered(found), bucket_search.plain(found), as_json)
    if plot is not None:
        write_text("--plot", plot, bucket_plot.svg(found))
        if not as_json:
            say(f"wrote {plot}")


def _aligned(text: str) -> tuple[str, int]:
    """`16` or `sequence=16`: the dimension, "" for all, and the step."""
    name, _, step = text.rpartition("=")
    if not re.fullmatch(r"[0-9]{1,9}", step) or int(step) == 0 or text.startswith("="):
        raise UsageError(f"--align {text}: not of the form K or DIM=K", "e.g. --align 8 or --align sequence=16")
    return name, int(step)
