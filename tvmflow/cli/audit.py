"""The command `audit`."""

from __future__ import annotations

from pathlib import Path

import click

from tvmflow.cli import options
from tvmflow.cli.output import progress, show_either, write_text


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--time", "timed", is_flag=True, help="Run it here, on a CPU, and give each kernel's share of the time.")
@click.option(
    "--config",
    "stated",
    type=click.Path(path_type=Path),
    metavar="CONFIG",
    help="Hold it against [numerics], [target] and [audit] allow of this file, not its own manifest's.",
)
@click.option("--model", type=click.Path(path_type=Path), help="For --time: the model, if it was moved.")
@click.option(
    "--markdown",
    type=click.Path(path_type=Path, allow_dash=True),
    metavar="FILE",
    help="Write the report as Markdown; - is standard output.",
)
@options.as_json
@options.debug
def audit(
    artifact: Path,
    timed: bool,
    stated: Path | None,
    model: Path | None,
    markdown: Path | None,
    as_json: bool,
    debug: bool,
) -> None:
    """Show what is inside ARTIFACT, read from its code, and fail where something is there that should not be.

    \b
    external calls   what the library calls or needs beyond its own kernels, against [audit] allow
    library          code that runs when it is loaded, that no kernel reaches or that cannot be read; system calls
    config           with --config: what the artifact says otherwise of [numerics], [target], [audit] allow
    kernels          where each one's schedule comes from; one without a schedule is a fault
    layouts          transposes before and after the graph passes; needless ones are a fault
    CUDA resources   registers, shared memory, spills, theoretical occupancy and what limits it
    numerics         [numerics] against LLVM's IR, PTX and the machine code of CPU and GPU

    Nothing is run (but for --time), and no GPU is needed. Exit code 0: no fault; 16: faults, each with what to do.
    An artifact of others is audited with --config: its own manifest may allow anything. No audit proves that code does
    no harm: see docs/security.md.
    """
    from tvmflow import audit as audits
    from tvmflow import flow
    from tvmflow.report import audit as report_audit
    from tvmflow.report import tables

    given = None if stated is None else options.config_of(str(stated))
    with progress("auditing"):
        found = flow.audit_artifact(artifact, timed, model, given)
    if markdown is not None:
        write_text("--markdown", markdown, "\n".join(map(report_audit.markdown, found.values())))
    if as_json or markdown is None:
        plain = {name: one.model_dump(mode="json") for name, one in found.items()}
        show_either(
            tables.stack(*map(report_audit.rendered, found.values())), plain.get("", {"buckets": plain}), as_json
        )
    audits.check(found)
