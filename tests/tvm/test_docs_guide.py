"""Every command and every piece of Python in the guide is run."""

from __future__ import annotations

from docs_runs import GUIDE, run_commands, run_python


def test_commands() -> None:
    run_commands(GUIDE)


def test_python() -> None:
    run_python(GUIDE)
