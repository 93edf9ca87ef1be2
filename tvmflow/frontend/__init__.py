"""Frontends: a model file or a PyTorch entry becomes a Model; the same source, run as it is, gives the reference.

Both run native code that a bad model can bring down, so flow calls them in processes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tvmflow.config import Config
from tvmflow.errors import ReferenceRunError

if TYPE_CHECKING:
    from tvmflow.frontend.model import Model
    from tvmflow.frontend.torch import Source
    from tvmflow.manifest import TensorSpec

Feeds = dict[str, np.ndarray]


def is_torch(config: Config) -> bool:
    """Whether the model is PyTorch's: an `entry` or a .pt2 file; everything else is taken for ONNX."""
    path = config.model.path
    return path is None or path.suffix == ".pt2"


def needs_torch(*configs: Config) -> bool:
    """Whether a process that imports these models may need torch; functions under [kernels] may use it too."""
    return any(is_torch(config) or config.kernels for config in configs)


def load(config: Config) -> Model:
    """Imports the config's model. Raises ModelError, UnsupportedError, ConfigError."""
    if is_torch(config):
        from tvmflow.frontend import torch

        return torch.load(_torch_source(config), config.model.inputs, config.shapes.dims)
    from tvmflow.frontend.onnx import loading

    assert config.model.path is not None
    return loading.load(config.model.path, config.model.inputs, config.shapes.dims)


def inputs(config: Config) -> tuple[TensorSpec, ...]:
    """What goes into the config's model; of an ONNX file read without importing it, which open dimensions may prevent.

    Raises ModelError, ConfigError; for PyTorch what `load` raises.
    """
    if is_torch(config):
        return load(config).signature.inputs
    from tvmflow.frontend.onnx import loading

    assert config.model.path is not None
    return loading.inputs(config.model.path, config.model.inputs, config.shapes.dims)


def data_files(config: Config) -> dict[str, Path]:
    """The files that hold weights beside the model's own, by their paths from its folder. Raises ModelError."""
    path = config.model.path
    if path is None or is_torch(config):
        return {}
    from tvmflow.frontend.onnx import file

    return {location: path.parent / location for location in file.data_locations(path)}


def first_accepted(config: Config, rows: Sequence[Sequence[Feeds]]) -> tuple[int, str, list[list[np.ndarray]]]:
    """Runs the reference on one row of feeds after another until it accepts a whole row.

    Returns that row's index, what ran it, and its outputs. Raises the first row's ReferenceRunError where all fail.
    """
    errors: list[ReferenceRunError] = []
    for index, feeds in enumerate(rows):
        try:
            return index, *run_reference(config, feeds)
        except ReferenceRunError as exc:
            errors.append(exc)
    raise errors[0]


def each_accepted(config: Config, feeds: Sequence[Feeds]) -> list[list[np.ndarray] | None]:
    """Runs the reference on each of `feeds`: its outputs, or None where it refuses them."""
    outputs: list[list[np.ndarray] | None] = []
    for one in feeds:
        try:
            outputs += run_reference(config, [one])[1]
        except ReferenceRunError:
            outputs.append(None)
    return outputs


def run_reference(config: Config, feeds: Sequence[Feeds]) -> tuple[str, list[list[np.ndarray]]]:
    """Runs the model as it was given, not as it was rewritten, on each of `feeds`.

    Returns what ran it ("ONNX Runtime 1.23.0"), and per feed the outputs in the model's order.
    Raises ReferenceRunError.
    """
    if is_torch(config):
        from tvmflow.frontend import torch

        return torch.VERSION, torch.run_eager(_torch_source(config), feeds)
    from tvmflow.frontend.onnx.reference import run_onnx

    assert config.model.path is not None
    kind = "auto" if config.verify.reference == "torch" else config.verify.reference
    return run_onnx(config.model.path, feeds, kind)


def peer(config: Config, threads: int) -> tuple[str, Callable[[Feeds], object]]:
    """What to time a library beside: its name, and a function that runs the model as it was given on some inputs."""
    if is_torch(config):
        import torch

        from tvmflow.frontend import torch as frontend

        torch.set_num_threads(threads)
        source = _torch_source(config)
        return frontend.VERSION, lambda feeds: frontend.run_eager(source, [feeds])
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(config.model.path, options, providers=["CPUExecutionProvider"])
    return "ONNX Runtime", lambda feeds: session.run(None, feeds)


def examples(config: Config) -> Feeds | None:
    """The inputs that a PyTorch model brings along, at the config's sizes; None for ONNX, which has none."""
    if not is_torch(config):
        return None
    from tvmflow.frontend import torch

    return torch.example_inputs(torch.resized(_torch_source(config), config.model.inputs, config.shapes.dims))


def _torch_source(config: Config) -> Source:
    from tvmflow.frontend import torch

    model = config.model
    if model.entry is not None:
        return torch.load_entry(model.entry, model.folder)
    assert model.path is not None
    return torch.load_program(model.path, model.trust)
