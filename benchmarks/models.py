"""Compiles and verifies every config, then times each library beside ONNX Runtime or eager PyTorch; prints a table.

    python benchmarks/models.py [CONFIG ...]        # default: all of configs/; needs `make models`

Seconds and memory are those of `tvmflow compile` as a user runs it: import, graph, code generation, verification, each
in processes of its own. Latencies are medians of runs that take turns in one process, at equal threads.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from tvmflow.host import cpu_name

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = "| model | compile s | import | graph | code | verify | peak MiB | max error | ms | peer ms | ratio |"


def tvmflow(*arguments: str | Path) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "tvmflow.cli", *map(str, arguments), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{arguments}: {done.stderr}")
    return json.loads(done.stdout)


def measure(config: Path, folder: Path) -> tuple[str, float]:
    """One row of the table, and the ratio of the medians."""
    artifact = folder / config.stem
    started = time.monotonic()
    manifest = tvmflow("compile", config, "-o", artifact)
    total = time.monotonic() - started
    seconds = {stage["name"]: stage["seconds"] for stage in manifest["stages"]}
    error = max(out["max_error"] for run in manifest["verdict"]["runs"] for out in run["outputs"])
    ours, peer = (sample["median_s"] for sample in tvmflow("bench", artifact, "--seconds", "6")["samples"])
    stages = " | ".join(f"{seconds[name]:.1f}" for name in ("import", "graph", "code generation", "verify"))
    row = (
        f"| {config.stem} | {total:.1f} | {stages} | {manifest['peak_rss_bytes'] >> 20} | {error:.1e} "
        f"| {ours * 1e3:.2f} | {peer * 1e3:.2f} | {ours / peer:.2f} |"
    )
    return row, ours / peer


def main() -> None:
    configs = [Path(name) for name in sys.argv[1:]] or sorted((ROOT / "configs").glob("*.toml"))
    print(f"{cpu_name()}, {platform.machine()}, Python {platform.python_version()}\n\n{COLUMNS}")
    print("|" + "---|" * COLUMNS.count(" | ") + "---|", flush=True)
    ratios = []
    with tempfile.TemporaryDirectory() as name:
        for config in configs:
            row, ratio = measure(config, Path(name))
            ratios.append(ratio)
            print(row, flush=True)
    print(f"\nGeometric mean of the ratios: {geometric_mean(ratios):.2f}")


if __name__ == "__main__":
    main()
