"""The commands `compile`, `passes`, `config` and `doctor`: from a model to an artifact, and what that rests on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from tvmflow.cli import options
from tvmflow.cli.output import progress, say, say_json, say_lines, show_either


@click.command()
@options.model
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Artifact to write [default: ./NAME.tvmflow].")
@click.option("--zip", "zipped", is_flag=True, help="Write one zip file instead of a folder.")
@click.option("--no-verify", is_flag=True, help="Do not run the library against the reference.")
@click.option("--verify-inputs", type=click.Path(path_type=Path), metavar="NPZ", help="Verify with these inputs.")
@click.option(
    "--require-tuned",
    type=click.FloatRange(0, 1),
    metavar="SHARE",
    help="Fail unless kernels from tuning records take this share of a run's time, e.g. 0.95.",
)
@click.option("--dump-ir", type=click.Path(path_type=Path), metavar="DIR", help="Write the module after each pass.")
@options.as_json
@options.debug
def compile(  # noqa: A001 # the command's name
    output: Path | None,
    zipped: bool,
    no_verify: bool,
    verify_inputs: Path | None,
    require_tuned: float | None,
    dump_ir: Path | None,
    as_json: bool,
    debug: bool,
    **model: Any,
) -> None:
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
        say_lines(f"# resolved config\n{config.shown(cfg)}\n")
    out = output or Path(f"{config.name(cfg)}.tvmflow" + (".zip" if zipped else ""))
    with progress("compiling") as on_event:
        manifest = flow.compile_model(cfg, out, flow.Options(zipped, dump_ir, model["model"], on_event))
    show_either(report.compiled(manifest), manifest.model_dump(mode="json") | {"path": str(out)}, as_json)
    if not as_json:
        say(f"wrote {out}")


@click.command()
@options.model
@options.as_json
@options.debug
def passes(as_json: bool, debug: bool, **model: Any) -> None:
    """List the graph passes that MODEL's config leads to, in order."""
    from tvmflow import flow, report

    phases = flow.passes(options.config_of(**model))
    show_either(report.pipeline(phases), phases, as_json)


@click.group(name="config")
def config_group() -> None:
    """Work with config files."""


@config_group.command()
def schema() -> None:
    """Print the JSON Schema of config files, for editors."""
    from tvmflow import config

    say_json(config.schema())


@config_group.command()
@options.model
@options.debug
def show(debug: bool, **model: Any) -> None:
    """Print the resolved config of MODEL as TOML, every default stated."""
    from tvmflow import config

    say_lines(config.to_toml(options.config_of(**model)))


@click.command()
@options.as_json
def doctor(as_json: bool) -> None:
    """Check this installation: pinned packages, threads, CUDA tools, conflicts; with the fix for each fault."""
    from tvmflow import doctor as checks

    findings = checks.examine()
    if as_json:
        say_json([finding.__dict__ for finding in findings])
    else:
        for finding in findings:
            say(f"{finding.state:>5}  {finding.name}: {finding.found}")
            if finding.fix:
                say(f"       fix: {finding.fix}")
    if any(finding.state == "fault" for finding in findings):
        sys.exit(14)
