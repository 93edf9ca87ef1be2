"""Every command and every piece of Python in README is run."""

from __future__ import annotations

from docs_runs import README, run


def test_page() -> None:
    run(README)
