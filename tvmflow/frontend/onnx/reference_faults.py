"""Where onnx's reference implementation departs from the standard's text, and what stands in for it there.

A reference that is wrong must not be held against a library. Each fault is one operator in versions up to the one it
was last seen in; the stand-in is written after the operator's text. What stood in for what is part of the reference's
name, and so of every verdict.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto
from onnx.reference.op_run import OpRun

from tvmflow.frontend.onnx.file import graphs

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ReferenceFault:
    """What is wrong with an operator of onnx's reference implementation, for which nodes, and what stands in."""

    last_seen: tuple[int, ...]
    concerns: Callable[[NodeProto], bool]
    why: str
    stand_in: type[OpRun]


class LRN(OpRun):  # type: ignore[misc] # onnx's classes have no types
    """x / (bias + alpha / size * the sum of squares over neighbouring channels) ^ beta, at any rank."""

    def _run(self, x: Array, alpha: float, beta: float, bias: float, size: int) -> tuple[Array]:
        before = (size - 1) // 2
        widths = [(0, 0), (before, size - 1 - before)] + [(0, 0)] * (x.ndim - 2)
        squares = np.pad(x.astype(np.float64) ** 2, widths)
        total = sum(squares[:, shift : shift + x.shape[1]] for shift in range(size))
        return ((x / (bias + alpha / size * total) ** beta).astype(x.dtype),)


class MaxUnpool(OpRun):  # type: ignore[misc]
    """Values written to where they were, counted in the output's shape, which `output_shape` gives if it is there."""

    def _run(
        self,
        x: Array,
        indices: Array,
        output_shape: Array | None = None,
        kernel_shape: Any = None,
        pads: Any = None,
        strides: Any = None,
    ) -> tuple[Array]:
        rank = x.ndim - 2
        strides, pads = strides or [1] * rank, pads or [0] * (2 * rank)
        covered = [(x.shape[i + 2] - 1) * strides[i] + kernel_shape[i] - pads[i] - pads[i + rank] for i in range(rank)]
        shape = [*x.shape[:2], *covered] if output_shape is None else output_shape.tolist()
        flat = np.zeros(int(np.prod(shape)), x.dtype)
        if ((indices < 0) | (indices >= flat.size)).any():
            raise IndexError(f"an index is out of range for {flat.size} elements")
        flat[indices.ravel()] = x.ravel()
        return (flat.reshape(shape),)


FAULTS = (
    ReferenceFault(
        (1, 23),
        lambda node: node.op_type == "LRN",
        "it sums squares in as many channels as there are images, and takes four axes only",
        LRN,
    ),
    ReferenceFault(
        (1, 23),
        lambda node: node.op_type == "MaxUnpool" and len(node.input) > 2,
        "it counts indices in another shape than the output's",
        MaxUnpool,
    ),
)


def faults_of(model: ModelProto) -> tuple[ReferenceFault, ...]:
    """The faults of the installed version of onnx that concern nodes of a model."""
    version = tuple(int(part) for part in importlib.metadata.version("onnx").split(".")[:2])
    nodes = list(_nodes(model))
    return tuple(fault for fault in FAULTS if version <= fault.last_seen and any(map(fault.concerns, nodes)))


def described(faults: tuple[ReferenceFault, ...]) -> str:
    """What is to be said of them behind the reference's name; nothing where there are none."""
    said = [
        f"{fault.stand_in.__name__} by tvmflow's own rewriting of its text, because {fault.why}" for fault in faults
    ]
    return "".join(f"; {text}" for text in said)


def _nodes(model: ModelProto) -> Iterator[NodeProto]:
    for nodes in (*(graph.node for graph in graphs(model)), *(function.node for function in model.functions)):
        yield from (node for node in nodes if node.domain in ("", "ai.onnx"))
