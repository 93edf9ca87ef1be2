"""A run time does not survive a fork: its threads are gone in the child, and their locks stay as they were."""

from __future__ import annotations

import functools
import os

from tvmflow.errors import SetupError

_lost = False


@functools.cache
def watch() -> None:
    """From now on, children that this process forks are told that the run time is of no use there."""
    os.register_at_fork(after_in_child=_forked)


def check() -> None:
    """Raises SetupError in a process that was forked after the run time was loaded."""
    if _lost:
        raise SetupError(
            "this process was forked from one that had loaded a library already: TVM's threads do not survive a fork",
            'load in the child only, or start it anew: multiprocessing.get_context("spawn")',
        )


def _forked() -> None:
    global _lost
    _lost = True
