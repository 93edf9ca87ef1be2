"""The tables of docs/proof.md: whose the difference to the reference is, for every config.

    python scripts/attribution.py configs/*.toml                                 # as configured: tuned
    python scripts/attribution.py --set numerics.fast_math=true configs/*.toml   # no record was made for that: untuned

Each model is compiled and then attributed, which builds it three or four times. Of a model with several outputs the
one is shown that is furthest off, as a share of its tolerance.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STAGES = ("import", "schedule", "winograd")
LAST = ("fast_math", "artifact")  # one of them, as the config has it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of `tvmflow compile`")
    given = parser.parse_args()
    print("| model | reference | outputs | tuned | import | schedules | Winograd | the artifact | out of tolerance |")
    print("|---|---|---|---|---|---|---|---|---|")
    for config in given.configs:
        print(row(config, [part for value in given.set for part in ("--set", value)]), flush=True)


def row(config: Path, options: list[str]) -> str:
    """One model's row, or why it has none."""
    with tempfile.TemporaryDirectory() as folder:
        artifact = str(Path(folder) / "model.tvmflow")
        made = tvmflow("compile", str(config), "--no-verify", *options, "--json", "-o", artifact)
        if made.returncode:
            return f"| {config.stem} | {made.stderr.strip().splitlines()[0]} |"
        done = tvmflow("verify", artifact, "--attribute", "--json")
    if not done.stdout:
        return f"| {config.stem} | {done.stderr.strip().splitlines()[0]} |"
    found = json.loads(done.stdout)
    outputs = list(dict.fromkeys(one["output"] for one in found["rows"]))
    worst = max(outputs, key=lambda name: share(found, name))
    rows = {one["stage"]: one for one in found["rows"] if one["output"] == worst}
    last = next(stage for stage in LAST if stage in rows)
    cells = [cell(rows[stage]) if stage in rows else "" for stage in (*STAGES, last)]
    kernels = json.loads(made.stdout)["kernels"]
    tuned = f"{sum(kernel['origin'] == 'tuned' for kernel in kernels)} of {len(kernels)}"
    wrong = [f"{stage}: {count}" for stage in rows if (count := mismatched(found, stage))]
    reference = found["verdict"]["reference"].partition(",")[0]
    columns = [config.stem, reference, str(len(outputs)), tuned, *cells, ", ".join(wrong) or "none"]
    return f"| {' | '.join(columns)} |"


def cell(one: dict[str, Any]) -> str:
    """The largest error, and the largest change to the stage before."""
    change = "" if one["change"] is None else f" ({one['change']:.1e})"
    return f"{one['max_error']:.1e}{change}"


def share(found: dict[str, Any], name: str) -> float:
    """The largest error of an output of the finished library, as a share of what is allowed for its largest value."""
    runs = [output for run in found["verdict"]["runs"] for output in run["outputs"] if output["name"] == name]
    return max((output["max_error"] or 0.0) / output["atol"] if output["atol"] else 0.0 for output in runs)


def mismatched(found: dict[str, Any], stage: str) -> int:
    return sum(one["mismatched"] for one in found["rows"] if one["stage"] == stage)


def tvmflow(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tvmflow.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    main()
