"""Every command and every piece of Python in docs is run; README and the guide have files of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from docs_runs import OTHERS, blocks, commands, run_commands, run_python


@pytest.mark.parametrize("page", [p for p in OTHERS if commands(p)], ids=lambda page: page.name)
def test_commands(page: Path) -> None:
    run_commands(page)


@pytest.mark.parametrize("page", [p for p in OTHERS if blocks(p, "python")], ids=lambda page: page.name)
def test_python(page: Path) -> None:
    run_python(page)
