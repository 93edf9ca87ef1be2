"""PyTorch -> Model. Used inside a process of its own; torch is imported before tvm."""

import torch  # noqa: F401  (first: see source.py)

from tvmflow.frontend.torch.importer import load
from tvmflow.frontend.torch.shapes import resized
from tvmflow.frontend.torch.source import Source, example_inputs, load_entry, load_program, run_eager

__all__ = ["Source", "example_inputs", "load", "load_entry", "load_program", "resized", "run_eager"]
