"""Runs the commands and the Python of a page of the documentation, in a copy of what a clone holds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README, GUIDE = ROOT / "README.md", ROOT / "docs" / "guide.md"  # the longest: their tests are in files of their own
OTHERS = [page for page in sorted((ROOT / "docs").glob("*.md")) if page != GUIDE]
# The command that is running this very test.
ELSEWHERE = {"make test"}
# What the configs of these commands read; `make test` fetches them.
NEEDED = ("ppocr_rec", "minilm_l6", "silero_ifless", "magika")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def commands(page: Path) -> list[str]:
    lines = [line.partition("  #")[0].strip() for block in blocks(page, "sh") for line in block.splitlines()]
    return [line for line in lines if line and line not in ELSEWHERE]


def run(page: Path) -> None:
    """The commands first: the Python works on what they made."""
    missing = [name for name in NEEDED if not (ROOT / ".cache" / "models" / "onnx" / f"{name}.onnx").exists()]
    if missing:
        pytest.skip(f"models are not fetched: python scripts/get_models.py .cache/models {' '.join(missing)}")
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command in commands(page):
        done = subprocess.run(command, shell=True, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    for block in blocks(page, "python"):
        done = subprocess.run([sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{block}\n{done.stderr[-2000:]}"
