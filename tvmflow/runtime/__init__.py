"""Loads artifacts: `load(path).run({name: array}) -> {name: array}`. TVM's run time is all it needs of TVM."""

from tvmflow.runtime.loading import load, load_one

__all__ = ["load", "load_one"]
