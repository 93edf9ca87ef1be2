"""The table of docs/proof.md: whose the difference to the reference is, for every config, fast math included.

    python scripts/attribution.py configs/*.toml

Each model is compiled with numerics.fast_math = true and then attributed, which builds it three or four times. Of a
model with several outputs the one is shown that is furthest off, as a share of its tolerance.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STAGES = ("import", "schedule", "winograd", "fast_math")


def main() -> None:
    print("| model | reference | outputs | import | schedules | Winograd | fast math | values out of tolerance |")
    print("|---|---|---|---|---|---|---|---|")
    for config in sys.argv[1:]:
        print(row(Path(config)), flush=True)


def row(config: Path) -> str:
    """One model's row, or why it has none."""
    with tempfile.TemporaryDirectory() as folder:
        artifact = str(Path(folder) / "model.tvmflow")
        made = tvmflow("compile", str(config), "--no-verify", "--set", "numerics.fast_math=true", "-o", artifact)
        if made.returncode:
            return f"| {config.stem} | {made.stderr.strip().splitlines()[0]} |"
        done = tvmflow("verify", artifact, "--attribute", "--json")
    if not done.stdout:
        return f"| {config.stem} | {done.stderr.strip().splitlines()[0]} |"
    found = json.loads(done.stdout)
    outputs = list(dict.fromkeys(one["output"] for one in found["rows"]))
    worst = max(outputs, key=lambda name: share(found, name))
    rows = {one["stage"]: one for one in found["rows"] if one["output"] == worst}
    cells = [cell(rows[stage]) if stage in rows else "" for stage in STAGES]
    wrong = [f"{stage}: {count}" for stage in rows if (count := mismatched(found, stage))]
    reference = found["verdict"]["reference"].partition(",")[0]
    return f"| {config.stem} | {reference} | {len(outputs)} | {' | '.join(cells)} | {', '.join(wrong) or 'none'} |"


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
