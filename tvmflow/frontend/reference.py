"""The model as it was given, run on inputs: the reference of values and of speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tvmflow.config import Config
from tvmflow.errors import ReferenceRunError
from tvmflow.frontend.source import is_torch, torch_source

Feeds = dict[str, np.ndarray]


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

        return torch.VERSION, torch.run_eager(torch_source(config), feeds)
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
        source = torch_source(config)
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

    return torch.example_inputs(torch.resized(torch_source(config), config.model.inputs, config.shapes.dims))
