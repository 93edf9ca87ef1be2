"""Scripts say what they take, and refuse what they do not know before any work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "tune_headline.py"


def test_tune_headline_names_the_models_that_it_knows() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "resnet51"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "unknown: resnet51; known: effnet_lite0, " in done.stderr
