"""The commands `tasks` and `tune`."""

from __future__ import annotations

from typing import Any

import click

from tvmflow import cli_options


@click.command()
@cli_options.model
@cli_options.as_json
@cli_options.debug
def tasks(as_json: bool, debug: bool, **model: Any) -> None:
    """List the kernels of MODEL that can be tuned: calls, work, key, and the record that serves each.

    Where there is none, the named parts of the key that differ from the nearest record are shown.
    """
    import pandas as pd

    from tvmflow import cli_tables, flow

    cli_tables.show_frame(pd.DataFrame(flow.tasks(cli_options.config_of(**model))), as_json)


@click.command()
@cli_options.model
@click.option("--trials-per-task", type=click.IntRange(min=1), help="Candidates per kernel, over all sessions.")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), help="How long this session may take.")
@click.option("--seed", type=click.IntRange(min=0), help="Of everything random in the search.")
@click.option("--tasks", "pattern", default="*", metavar="PATTERN", help="Only tasks so named, e.g. '*conv2d*'.")
@cli_options.as_json
@cli_options.debug
def tune(trials_per_task: int | None, minutes: float | None, seed: int | None, pattern: str, as_json: bool,
         debug: bool, **model: Any) -> None:  # fmt: skip
    """Search faster schedules for the kernels of MODEL and keep them in [tuning] database.

    The machine should do nothing else meanwhile. Ctrl-C loses at most the batch in progress; the same command goes on
    where it stopped. `compile` builds from the records.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from tvmflow import flow

    named = (("trials_per_task", trials_per_task), ("minutes", minutes), ("seed", seed))
    cfg = cli_options.config_of(**model, tuning={key: value for key, value in named if value is not None})
    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        line = bar.add_task("preparing", total=cfg.tuning.minutes * 60)
        summary = flow.tune(cfg, pattern, lambda text, left_s: bar.update(
            line, description=text, completed=cfg.tuning.minutes * 60 - left_s))  # fmt: skip
    if as_json:
        import json

        click.echo(json.dumps(summary))
        return
    click.echo(f"{summary['tasks']} tasks, {summary['trials']} trials: the kernels together are "
               f"{summary['gain']:.2f} times as fast as at the start")  # fmt: skip
