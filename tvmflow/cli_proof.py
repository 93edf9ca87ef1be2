"""The commands `verify` and `bisect`."""

from __future__ import annotations

from pathlib import Path

import click

from tvmflow import cli_options
from tvmflow.cli_tables import progress, show_either


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--model", type=click.Path(path_type=Path), help="The model it was compiled from, if it was moved.")
@click.option("--verify-inputs", type=click.Path(path_type=Path), metavar="NPZ", help="Verify with these inputs.")
@click.option("--attribute", is_flag=True, help="Say whose the difference is: import, schedules, Winograd, fast math.")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Override a key, e.g. verify.seeds=[7,8].")
@cli_options.as_json
@cli_options.debug
def verify(artifact: Path, model: Path | None, verify_inputs: Path | None, attribute: bool,
           sets: tuple[str, ...], as_json: bool, debug: bool) -> None:  # fmt: skip
    """Hold ARTIFACT's outputs against the reference again.

    With --attribute the model is also built without passes and schedules, with them but with precise arithmetic, and
    so on; each build is held against the reference and against the one before it. It takes one build per stage.
    """
    from tvmflow import config, flow, proof, report

    overrides = [config.parse_override(text) for text in sets]
    if verify_inputs is not None:
        overrides.append({"verify": {"inputs": str(verify_inputs)}})
    with progress("verifying") as on_event:
        if attribute:
            found = flow.attribute_artifact(artifact, model, overrides, on_event)
            verdict, shown, plain = found.verdict, report.attribution(found), found.model_dump(mode="json")
        else:
            verdict = flow.verify_artifact(artifact, model, overrides, on_event)
            shown, plain = report.verdict(verdict), verdict.model_dump(mode="json")
    show_either(shown, plain, as_json)
    if not verdict.ok:
        raise proof.wrong_values(verdict)
