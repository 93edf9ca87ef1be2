"""What a config's model is, and its import: an ONNX file, a PyTorch program or entry."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tvmflow.config import Config

if TYPE_CHECKING:
    from tvmflow.frontend.model import Model
    from tvmflow.frontend.torch import Source
    from tvmflow.manifest import TensorSpec


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

        return torch.load(torch_source(config), config.model.inputs, config.shapes.dims)
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


def torch_source(config: Config) -> Source:
    """The config's PyTorch module or program, and its example inputs."""
    from tvmflow.frontend import torch

    model = config.model
    if model.entry is not None:
        return torch.load_entry(model.entry, model.folder)
    assert model.path is not None
    return torch.load_program(model.path, model.trust)
