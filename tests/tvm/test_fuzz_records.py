"""Real records with random changes are refused or replayed, and end no process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "fuzz_records.py"


def test_changed_records_are_refused_or_replayed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--seconds", "8", "--seed", "3", "--keep", tmp_path / "found"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    counts = {name: int(count) for count, name in (part.split(" ", 1) for part in done.stdout.strip().split(", "))}
    assert counts["findings"] == 0
    assert counts["records"] == counts["refused"] + counts["not applied"] + counts["replayed"]
