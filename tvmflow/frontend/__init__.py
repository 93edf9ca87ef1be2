"""Frontends: a model file or a PyTorch entry becomes a Model; the same source, run as it is, gives the reference.

Both run native code that a bad model can bring down, so they are called in processes of their own.
"""

from tvmflow.frontend.reference import each_accepted, examples, first_accepted, peer, run_reference
from tvmflow.frontend.source import data_files, inputs, is_torch, load, needs_torch

__all__ = [
    "data_files",
    "each_accepted",
    "examples",
    "first_accepted",
    "inputs",
    "is_torch",
    "load",
    "needs_torch",
    "peer",
    "run_reference",
]
