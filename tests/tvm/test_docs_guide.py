"""Every command and every piece of Python in the guide is run."""

from __future__ import annotations

from docs_runs import GUIDE, run


def test_page() -> None:
    run(GUIDE)
