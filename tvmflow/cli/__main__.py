"""`python -m tvmflow.cli`: the console script without one."""

from __future__ import annotations

from tvmflow.cli import main

main()
