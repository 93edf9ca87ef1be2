"""The commands `verify`, `sign` and `bisect`."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tvmflow.cli import options, output
from tvmflow.cli.output import progress, show_either
from tvmflow.errors import DatabaseError, UsageError, VerifyError

if TYPE_CHECKING:
    from tvmflow.diagnosis.findings import Bisection


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--model", type=click.Path(path_type=Path), help="The model it was compiled from, if it was moved.")
@click.option("--verify-inputs", type=click.Path(path_type=Path), metavar="NPZ", help="Verify with these inputs.")
@click.option(
    "--signed-by",
    type=click.Path(path_type=Path),
    metavar="SIGNERS",
    help="First check that a key of this allowed_signers file signed it (`tvmflow sign`).",
)
@click.option("--no-run", is_flag=True, help="With --signed-by: check the signature and all hashes, and run nothing.")
@click.option("--attribute", is_flag=True, help="Say whose the difference is: import, schedules, Winograd, fast math.")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Override a key, e.g. verify.seeds=[7,8].")
@options.as_json
@options.debug
def verify(
    artifact: Path,
    model: Path | None,
    verify_inputs: Path | None,
    signed_by: Path | None,
    no_run: bool,
    attribute: bool,
    sets: tuple[str, ...],
    as_json: bool,
    debug: bool,
) -> None:
    """Hold ARTIFACT's outputs against the reference again.

    With --attribute the model is also built without passes and schedules, with them but with precise arithmetic, and
    so on; each build is held against the reference and against the one before it. It takes one build per stage.
    With --signed-by nothing of ARTIFACT is loaded before its signature and the hashes of all its files are right.
    """
    from tvmflow import config, flow, report, signing
    from tvmflow.verification import judgement

    if no_run and signed_by is None:
        raise UsageError("--no-run goes with --signed-by", "without a run there is nothing else to verify")
    if signed_by is not None:
        output.say(f"signed by {signing.check(artifact, signed_by)}", err=True)
        if no_run:
            return
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
        raise judgement.describe_wrong_values(verdict, str(artifact))


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option(
    "--key",
    type=click.Path(path_type=Path),
    required=True,
    help="A private SSH key, or a public one whose private key an agent holds.",
)
@options.debug
def sign(artifact: Path, key: Path, debug: bool) -> None:
    """Sign ARTIFACT with an SSH key, into ARTIFACT.sig beside it; `tvmflow verify --signed-by` checks it.

    The signature is ssh-keygen's, of manifest.json, which holds the hashes of all other files.
    """
    from tvmflow import signing

    output.say(f"wrote {signing.sign(artifact, key)}")


@click.command()
@options.model
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Reproducer to write [default: ./NAME.bisect].")
@click.option("--source", type=click.Path(path_type=Path), help="The model an artifact was compiled from, if moved.")
@click.option("--verify-inputs", type=click.Path(path_type=Path), metavar="NPZ", help="Inputs that show the fault.")
@options.as_json
@options.debug
def bisect(
    output: Path | None, source: Path | None, verify_inputs: Path | None, as_json: bool, debug: bool, **model: Any
) -> None:
    """Find out why MODEL's values are wrong: the first bad step of its build, then the kernel or tuning record.

    MODEL is an artifact, or what `compile` takes, with the same options; a library that `compile` refused for wrong
    values is found this way. The model is built up to some of its steps, by binary search, and run. At the first bad
    step the fused kernels of both builds run side by side on the arguments that they have in the model. A folder
    receives what is at fault alone, with inputs and a script that shows the difference.

    Exit codes: 0 nothing is wrong, 10 values are wrong and the culprit is named, 15 values are right, but records of
    the tuning database could not be used.
    """
    from tvmflow import report

    verification = {"verify": {"inputs": str(verify_inputs)}} if verify_inputs is not None else {}
    with progress("bisecting") as on_event:
        found, out = _bisected(model, source, verification, output, on_event)
    show_either(report.bisection(found), found.model_dump(mode="json"), as_json)
    _raise_culprit(found, out)


def _bisected(
    model: dict[str, Any],
    source: Path | None,
    verification: dict[str, Any],
    output: Path | None,
    on_event: Callable[[str], None],
) -> tuple[Bisection, Path]:
    """What was found, and the folder of the reproducer."""
    from tvmflow import artifact, config, flow

    path = Path(model["model"])
    if not (path.is_dir() or path.suffix == ".zip"):
        if source is not None:
            raise UsageError("--source goes with an artifact", "MODEL is what is compiled")
        cfg = options.config_of(**model, **verification)
        out = output or Path(f"{config.name(cfg)}.bisect")
        return flow.bisect_config(cfg, out, on_event), out
    given = [f"--{name.removesuffix('s')}" for name in ("target", "arch", "shapes", "dims") if model[name]]
    if given:
        raise UsageError(f"{', '.join(given)}: an artifact holds its own config", "give the model or config file")
    overrides = [*(config.parse_override(text) for text in model["sets"]), verification]
    out = output or Path(f"{artifact.read_manifest(path).name}.bisect")
    return flow.bisect_artifact(path, source, overrides, out, on_event), out


def _raise_culprit(found: Bisection, out: Path) -> None:
    if found.culprit is not None:
        command = shlex.join(["python", str(out / "reproduce.py")])
        shown = f"`{command}` shows it" if found.reproducer else "see the steps above"
        raise VerifyError(f"{found.culprit.summary}", shown)
    if found.unusable_records:
        faults = "; ".join(found.unusable_records)
        raise DatabaseError(
            f"values are right, but tuning records are not: {faults}",
            "`tvmflow db prune --key KEY` removes one, `tvmflow tune` makes a new one",
        )
