"""The command line: arguments become typed values for a function of flow, its result becomes text and an exit code.

The only module that prints or exits. Heavy imports stay inside the commands, so that --help answers at once.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import click

from tvmflow import __version__
from tvmflow.cli import audit, buckets, db, options, proof, tune
from tvmflow.cli.tables import progress, show_either
from tvmflow.errors import EXIT_BUG, EXIT_INTERRUPTED, OutputError, TvmflowError, UsageError


def main() -> None:
    """The console script: every TvmflowError becomes two lines and its exit code."""
    debug = "--debug" in sys.argv
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what CI sends; it cleans up like Ctrl-C
    try:
        cli(standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt):
        click.echo("interrupted; what was finished before is kept, nothing else was left behind", err=True)
        sys.exit(EXIT_INTERRUPTED)
    except click.ClickException as exc:
        exc.show()
        sys.exit(UsageError.exit_code)
    except TvmflowError as exc:
        _show_error(exc, debug)
        sys.exit(exc.exit_code)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except OSError as exc:
        _show_error(OutputError(f"standard output cannot be written: {exc.strerror}", "free space"), debug)
        sys.exit(OutputError.exit_code)
    except Exception:
        click.echo("this is a bug of tvmflow; what follows belongs into the report", err=True)
        import traceback

        traceback.print_exc()
        sys.exit(EXIT_BUG)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="tvmflow")
def cli() -> None:
    """From a trained model to a tuned, verified, auditable library.

    \b
      tvmflow compile model.onnx --target llvm        build and verify ./model.tvmflow
      tvmflow compile configs/effnet_lite0.toml       the same from a config file
      tvmflow run model.tvmflow --inputs x.npz --outputs y.npz
      tvmflow bench model.tvmflow                     time it beside ONNX Runtime
      tvmflow audit model.tvmflow                     what is inside: calls, kernels, layouts, numerics

    Exit codes: 0 done, 2 usage, 3 config, 4 model unreadable, 5 model unsupported, 6 target, 7 budget exceeded,
    8 compiler failed, 9 artifact damaged or not for this machine, 10 wrong values, 11 reference failed,
    12 inputs do not fit, 13 output not writable, 14 installation, 15 tuning database, 16 an audit's findings,
    17 numerics broken, 70 a bug, 130 interrupted.
    """


@cli.command()
@options.model
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Artifact to write [default: ./NAME.tvmflow].")
@click.option("--zip", "zipped", is_flag=True, help="Write one zip file instead of a folder.")
@click.option("--no-verify", is_flag=True, help="Do not run the library against the reference.")
@click.option("--verify-inputs", type=click.Path(path_type=Path), metavar="NPZ", help="Verify with these inputs.")
@click.option("--require-tuned", type=click.FloatRange(0, 1), metavar="SHARE",
              help="Fail unless kernels from tuning records take this share of a run's time, e.g. 0.95.")
@click.option("--dump-ir", type=click.Path(path_type=Path), metavar="DIR", help="Write the module after each pass.")
@options.as_json
@options.debug
def compile(  # noqa: A001 # the command's name
    output: Path | None, zipped: bool, no_verify: bool, verify_inputs: Path | None, require_tuned: float | None,
    dump_ir: Path | None, as_json: bool, debug: bool, **model: Any,
) -> None:  # fmt: skip
    """Compile MODEL into a verified artifact.

    MODEL is an ONNX file, a torch.export program (.pt2), a PyTorch entry "package.module:function", or a config
    file (.toml) that names one of these. The library is run against ONNX Runtime or eager PyTorch before it is kept.
    """
    from tvmflow import config, flow, report

    verification: dict[str, Any] = {"enabled": False} if no_verify else {}
    if verify_inputs is not None:
        verification["inputs"] = str(verify_inputs)
    tuning = {"require_tuned": require_tuned} if require_tuned is not None else {}
    cfg = options.config_of(**model, verify=verification, tuning=tuning)
    if not as_json:
        click.echo(click.style("# resolved config", dim=True) + "\n" + config.shown(cfg))
    out = output or Path(f"{config.name(cfg)}.tvmflow" + (".zip" if zipped else ""))
    with progress("compiling") as on_event:
        manifest = flow.compile_model(cfg, out, flow.Options(zipped, dump_ir, model["model"], on_event))
    show_either(report.compiled(manifest), manifest.model_dump(mode="json") | {"path": str(out)}, as_json)
    if not as_json:
        click.echo(f"wrote {out}")


@cli.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--inputs", type=click.Path(path_type=Path), metavar="NPZ", help="Arrays by input name.")
@click.option("--seed", type=click.IntRange(min=0), help="Draw the inputs instead.")
@click.option("--dim", "dims", multiple=True, metavar="NAME=SIZE", help="For --seed: the size of an open dimension.")
@click.option("--outputs", type=click.Path(path_type=Path), metavar="NPZ", help="Where to write the outputs.")
@options.threads
@options.as_json
@options.debug
def run(artifact: Path, inputs: Path | None, seed: int | None, dims: tuple[str, ...], outputs: Path | None,
        threads: int | None, as_json: bool, debug: bool) -> None:  # fmt: skip
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
        click.echo(json.dumps(summary))
        return
    for name, array in results.items():
        click.echo(f"{name}: {array.dtype} {list(array.shape)}")
    if outputs is not None:
        click.echo(f"wrote {outputs}")


@cli.command()
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


@cli.command()
@click.argument("path", type=click.Path(path_type=Path))
@options.as_json
@options.debug
def inspect(path: Path, as_json: bool, debug: bool) -> None:
    """Show what is inside an artifact, or what goes in and out of a model."""
    from tvmflow import artifact, flow, report

    if path.is_dir() or path.suffix == ".zip":
        manifest = artifact.read(path)
        show_either(report.inspected(manifest), manifest.model_dump(mode="json"), as_json)
        return
    cfg = options.config_of(str(path))
    signature, notes = flow.inspect_model(cfg)
    show_either(report.signature(signature), signature.model_dump(mode="json") | {"notes": notes}, as_json)
    if not as_json:
        for note in notes:
            click.echo(f"note {note}")


@cli.command()
@options.model
@options.as_json
@options.debug
def passes(as_json: bool, debug: bool, **model: Any) -> None:
    """List the graph passes that MODEL's config leads to, in order."""
    from tvmflow import flow, report

    phases = flow.passes(options.config_of(**model))
    show_either(report.pipeline(phases), phases, as_json)


cli.add_command(audit.audit)
cli.add_command(buckets.buckets)
cli.add_command(db.db)
cli.add_command(proof.verify)
cli.add_command(proof.bisect)
cli.add_command(tune.tasks)
cli.add_command(tune.tune)


@cli.group(name="config")
def config_group() -> None:
    """Work with config files."""


@config_group.command()
def schema() -> None:
    """Print the JSON Schema of config files, for editors."""
    from tvmflow import config

    click.echo(json.dumps(config.schema(), indent=1))


@config_group.command()
@options.model
@options.debug
def show(debug: bool, **model: Any) -> None:
    """Print the resolved config of MODEL as TOML, every default stated."""
    from tvmflow import config

    click.echo(config.to_toml(options.config_of(**model)), nl=False)


@cli.command()
@options.as_json
def doctor(as_json: bool) -> None:
    """Check this installation: pinned packages, threads, CUDA tools, conflicts; with the fix for each fault."""
    from tvmflow import doctor as checks

    findings = checks.examine()
    if as_json:
        click.echo(json.dumps([finding.__dict__ for finding in findings]))
    else:
        for finding in findings:
            click.echo(f"{finding.state:>5}  {finding.name}: {finding.found}")
            if finding.fix:
                click.echo(f"       fix: {finding.fix}")
    if any(finding.state == "fault" for finding in findings):
        sys.exit(14)


def _show_error(exc: TvmflowError, debug: bool) -> None:
    click.echo(f"{click.style('error', fg='red')}: {exc.message}", err=True)
    if exc.hint:
        click.echo(f"  next: {exc.hint}", err=True)
    if debug and exc.details:
        click.echo(exc.details, err=True)
