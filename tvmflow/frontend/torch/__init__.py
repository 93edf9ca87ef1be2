"""PyTorch -> Model. Used inside a process of its own; torch is imported before tvm."""

from tvmflow.errors import SetupError

try:
    import torch  # before tvm: see source.py
except ModuleNotFoundError:
    raise SetupError("this model needs PyTorch, which is not installed", 'pip install "tvmflow[torch]"') from None

from tvmflow.frontend.torch.importer import load
from tvmflow.frontend.torch.shapes import resized
from tvmflow.frontend.torch.source import Source, example_inputs, load_entry, load_program, run_eager

VERSION = f"eager PyTorch {torch.__version__}"
__all__ = ["VERSION", "Source", "example_inputs", "load", "load_entry", "load_program", "resized", "run_eager"]
