"""Faults planted into the processes that build: a `sitecustomize` module that changes one of tvmflow's functions.

Builds run in processes of their own, which monkeypatching a test's process does not reach; PYTHONPATH does.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent, indent

import pytest

SITE = """
import importlib.abc
import importlib.util
import sys


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != {module!r}:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            plant(module)

        spec.loader.exec_module = exec_module
        return spec


def plant(module):
{body}

sys.meta_path.insert(0, Finder())
"""


def plant(folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, body: str) -> None:
    """From now on `body` runs in every new process when it has imported `module`, which it gets as `module`."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(SITE.format(module=module, body=indent(dedent(body), "    ")))
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
