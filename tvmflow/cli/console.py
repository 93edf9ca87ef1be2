"""The console script: all commands, and what every error of theirs becomes."""

from __future__ import annotations

import signal
import sys

import click

from tvmflow import __version__
from tvmflow.cli import artifacts, audit, buckets, compiling, db, output, proof, tune
from tvmflow.errors import EXIT_BUG, EXIT_INTERRUPTED, OutputError, TvmflowError, UsageError


def main() -> None:
    """The console script: every TvmflowError becomes two lines and its exit code."""
    debug = "--debug" in sys.argv
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what CI sends; it cleans up like Ctrl-C
    output.prepare_streams()
    try:
        cli(standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt):
        output.say("interrupted; what was finished before is kept, nothing else was left behind", err=True)
        sys.exit(EXIT_INTERRUPTED)
    except click.ClickException as exc:
        output.say_usage(exc)
        sys.exit(UsageError.exit_code)
    except TvmflowError as exc:
        output.say_error(exc, debug)
        sys.exit(exc.exit_code)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except OSError as exc:
        if exc.filename is not None:
            output.say_error(UsageError(f"{exc.filename}: {exc.strerror}", "check the path"), debug)
            sys.exit(UsageError.exit_code)
        output.say_error(OutputError(f"standard output cannot be written: {exc.strerror}", "free space"), debug)
        sys.exit(OutputError.exit_code)
    except Exception:
        import traceback

        output.say("this is a bug of tvmflow; what follows belongs into the report", err=True)
        output.say_lines(traceback.format_exc(), err=True)
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


for command in (
    compiling.compile,
    compiling.passes,
    compiling.config_group,
    compiling.doctor,
    artifacts.run,
    artifacts.bench,
    artifacts.inspect,
    audit.audit,
    buckets.buckets,
    db.db,
    proof.verify,
    proof.sign,
    proof.bisect,
    tune.tasks,
    tune.tune,
):
    cli.add_command(command)
