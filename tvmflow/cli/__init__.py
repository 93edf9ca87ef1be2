"""The command line: arguments become typed values for a function of flow, its result becomes text and an exit code.

The only package that prints or exits. Heavy imports stay inside the commands, so that --help answers at once.
"""

from tvmflow.cli.console import cli, main

__all__ = ["cli", "main"]
