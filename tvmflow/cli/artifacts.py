"""The commands `run`, `bench` and `inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tvmflow.cli import options
from tvmflow.cli.output import progress, say, say_json, show_either
from tvmflow.errors import UsageError


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--inputs", type=click.Path(path_type=Path), metavar="NPZ", help="Arrays by input name.")
@click.option("--seed", type=click.IntRange(min=0), help="Draw the inputs instead.")
@click.option("--dim", "dims", multiple=True, metavar="NAME=SIZE", help="For --seed: the size of an open dimension.")
@click.option("--outputs", type=click.Path(path_type=Path), metavar="NPZ", help="Where to write the outputs.")
@options.threads
@options.as_json
@options.debug
def run(
    artifact: Path,
    inputs: Path | None,
    seed: int | None,
    dims: tuple[str, ...],
    outputs: Path | None,
    threads: int | None,
    as_json: bool,
    debug: bool,
) -> None:
    """Run ARTIFACT once on arrays from an .npz file.

    An artifact with buckets takes all sizes that one of them holds: it pads, and splits where rows are independent.
    """
    from tvmflow import flow

    if (inputs is None) == (seed is None):
        raise UsageError("give either --inputs or --seed", "--inputs x.npz takes arrays by input name")
    if dims and seed is None:
        raise UsageError("--dim goes with --seed", "arrays have sizes of their own")
    source: Any = seed if inputs is None else inputs
    results = flow.run_artifact(artifact, source, outputs, threads, options.sizes_of(dims))
    summary = {name: {"dtype": str(a.dtype), "shape": list(a.shape)} for name, a in results.items()}
    if as_json:
        say_json(summary)
        return
    for name, array in results.items():
        say(f"{name}: {array.dtype} {list(array.shape)}")
    if outputs is not None:
        say(f"wrote {outputs}")


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--model", type=click.Path(path_type=Path), help="The model it was compiled from, if it was moved.")
@click.option("--seconds", type=click.FloatRange(min=0.1), default=5.0, show_default=True, help="Time to spend.")
@options.threads
@options.as_json
@options.debug
def bench(artifact: Path, model: Path | None, seconds: float, threads: int | None, as_json: bool, debug: bool) -> None:
    """Time ARTIFACT beside ONNX Runtime (or eager PyTorch), in turns, with the same inputs and threads."""
    from tvmflow import artifact as artifacts
    from tvmflow import flow, report

    with progress("timing") as on_event:
        measured = flow.bench_artifact(artifact, model, threads, seconds, on_event)
    used = threads or artifacts.read(artifact).target.threads
    plain = {
        name: [{"name": m.name, "median_s": m.median_s, "seconds": m.seconds, "warnings": m.warnings} for m in one]
        for name, one in measured.items()
    }
    samples = {"samples": plain[""]} if "" in plain else {"buckets": plain}
    show_either(report.samples(measured, used), {"threads": used, **samples}, as_json)


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@options.as_json
@options.debug
def inspect(path: Path, as_json: bool, debug: bool) -> None:
    """Show what is inside an artifact, or what goes in and out of a model."""
    from tvmflow import artifact, flow, report

    if path.is_dir() or path.suffix in (".zip", ".tvmflow"):
        manifest = artifact.read(path)
        show_either(report.inspected(manifest), manifest.model_dump(mode="json"), as_json)
        return
    cfg = options.config_of(str(path))
    signature, notes = flow.inspect_model(cfg)
    show_either(report.signature(signature), signature.model_dump(mode="json") | {"notes": notes}, as_json)
    if not as_json:
        for note in notes:
            say(f"note {note}")
