"""Every command and every piece of Python in docs is run; README and the guide have files of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from docs_runs import OTHERS, blocks, commands, run


@pytest.mark.parametrize("page", [p for p in OTHERS if commands(p) or blocks(p, "python")], ids=lambda page: page.name)
def test_page(page: Path) -> None:
    run(page)
