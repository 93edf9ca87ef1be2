"""The commands `tasks` and `tune`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from tvmflow.cli import options as cli_options
from tvmflow.cli.output import progress, progress_of, say, say_json, show_frame
from tvmflow.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd

    from tvmflow.tuning.child import Compared
    from tvmflow.tuning.session import Progress


@click.command()
@cli_options.model
@cli_options.as_json
@cli_options.debug
def tasks(as_json: bool, debug: bool, **model: Any) -> None:
    """List the kernels of MODEL that can be tuned: calls, work, key, and the record that serves each.

    Where there is none, the named parts of the key that differ from the nearest record are shown.
    """
    import pandas as pd

    from tvmflow import flow

    show_frame(pd.DataFrame(flow.tasks(cli_options.config_of(**model))), as_json)


@click.command()
@cli_options.models
@click.option("--trials-per-task", type=click.IntRange(min=1), help="Candidates per kernel, over all sessions.")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), help="How long this session may search.")
@click.option("--seed", type=click.IntRange(min=0), help="Of everything random in the search.")
@click.option("--tasks", "pattern", default="*", metavar="PATTERN", help="Only tasks so named, e.g. '*conv2d*'.")
@click.option("--shard", default="1/1", metavar="I/N", help="Only the I-th of N parts of the tasks of all MODELs.")
@click.option("--only", type=click.Choice(["winograd"]), help="No search: compare the methods of convolutions, anew.")
@cli_options.as_json
@cli_options.debug
def tune(
    models: tuple[str, ...], pattern: str, shard: str, only: str | None, as_json: bool, debug: bool, **options: Any
) -> None:
    """Search faster schedules for the kernels of MODEL and keep them in [tuning] database.

    The machine should do nothing else meanwhile. Ctrl-C loses at most the batch in progress; the same command goes on
    where it stopped. `compile` builds from the records.

    When the search ends, each kernel's best schedules are measured inside the whole model, beside the default one.
    Then the direct kernel of each 3 x 3 convolution on a CPU is compared with Winograd's, of either tile size, where
    that is not known yet; `compile` takes the fastest. Not after a part of the tasks: --only winograd does that later.

    Several MODELs share one session; kernels that they have in common are tuned once. With --shard, machines or CI jobs
    that are given the same MODELs each tune their part, without talking to each other, each into a database of its own:

    \b
      tvmflow tune configs/*.toml --set tuning.database=part2 --shard 2/8
      tvmflow db merge tuning_db part1 part2 ...
    """
    from tvmflow import flow

    named = {name: options.pop(name) for name in ("trials_per_task", "minutes", "seed")}
    tuning = {name: value for name, value in named.items() if value is not None}
    what = flow.Selection(pattern, _shard(shard))
    if only and what != flow.Selection():
        raise UsageError(
            "--only winograd: it searches no tasks, of which --tasks and --shard would be a part", "leave them out"
        )
    cfgs = [cli_options.config_of(model, **options, tuning=tuning) for model in models]
    if only:
        with progress("comparing methods") as on_step:
            compared = flow.compare_methods(cfgs, True, on_step)
        if compared or as_json:
            show_frame(_methods(compared), as_json)
        else:
            say("no convolution here is one that Winograd's method could serve")
        return
    with _progress(cfgs[0].tuning.minutes * 60) as on_event:
        done = flow.tune(cfgs, what, on_event)
    if as_json:
        compared = json.loads(_methods(done.compared).to_json(orient="records", double_precision=15))
        say_json({**asdict(replace(done, compared=[])), "compared": compared})
        return
    say(
        f"{done.tasks} tasks, {done.trials} trials: the kernels together are {done.gain:.2f} times as fast "
        "as at the start"
    )
    for name, settled in done.settled.items():
        say(
            f"{name}: the kernels of a run take {settled.kept_s * 1e3:.3f} ms in the model, "
            f"{settled.default_s * 1e3:.3f} ms with default schedules; there another than the first was "
            f"fastest for {settled.changed} tasks"
        )
    if done.compared:
        show_frame(_methods(done.compared), False)


def _methods(compared: Sequence[Compared]) -> pd.DataFrame:
    """One row per convolution: its kernel, the median seconds of each method, the one taken, and that by rule."""
    from tvmflow.database import tables

    frame = tables.comparisons(one.comparison for one in compared)
    return frame.drop(columns=["key", "target", "machine"]).assign(**{"by rule": [one.by_rule for one in compared]})


def _shard(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text)
    index, count = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= index <= count:
        raise UsageError(f"--shard {text}: not of the form I/N with I from 1 to N", "e.g. --shard 2/8")
    return index, count


@contextmanager
def _progress(total_s: float) -> Iterator[Callable[[str | Progress], None]]:
    """A bar over the session's time, with what was found last."""
    with progress_of("preparing", total_s) as update:

        def show(event: str | Progress) -> None:
            if isinstance(event, str):
                update(event)
            else:
                update(_described(event), total_s - event.left_s)

        yield show


def _described(progress: Progress) -> str:
    peak = f" ({progress.peak_share:.0%} of peak)" if progress.peak_share is not None else ""
    return (
        f"{progress.task[:40]} {progress.best_gflops:.0f} GFLOP/s{peak}; {progress.done_tasks} of {progress.tasks} "
        f"tasks done, {progress.trials} trials, {progress.gain:.2f} x as fast, {progress.expected_gain:.0%} to gain"
    )
