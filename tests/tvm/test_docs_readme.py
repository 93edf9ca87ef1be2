"""Every command and the Python of README are run."""

from __future__ import annotations

from docs_runs import README, run_commands, run_python


def test_commands() -> None:
    run_commands(README)


def test_python() -> None:
    run_python(README)
