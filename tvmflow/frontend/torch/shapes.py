"""Which dimensions of a PyTorch source are dynamic and how they are called, and sources with some of them fixed."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from tvmflow.config import ModelInput
from tvmflow.errors import ConfigError, ModelError, UnsupportedError
from tvmflow.frontend.torch.source import Axis, Source, replace_inputs, tensor_placeholders


def resized(source: Source, model_inputs: Mapping[str, ModelInput], dims: Mapping[str, int]) -> Source:
    """`source` with the shapes and names of `model_inputs` and the sizes of `dims`; fixed axes are static in it.

    Example inputs are made longer by repeating them, so that their values keep making sense. Raises ConfigError for
    names that the model does not have and for shapes that do not fit it.
    """
    for name in model_inputs:
        if name not in source.names:
            raise ConfigError(
                f"model.inputs: {source.where} has no input `{name}`", f"its inputs are {', '.join(source.names)}"
            )
    wanted = [
        _wanted_axes(name, tensor, old, model_inputs.get(name, ModelInput()))
        for (name, tensor), old in zip(source.inputs.items(), source.axes, strict=True)
    ]
    _check_dims(source, wanted, dims)
    sizes = [
        [_fixed_size(name, i, axis, dims) for i, axis in enumerate(axes)]
        for name, axes in zip(source.names, wanted, strict=True)
    ]
    axes = tuple(
        tuple(None if size else axis for size, axis in zip(*pair, strict=True))
        for pair in zip(sizes, wanted, strict=True)
    )
    tensors = [_of_size(tensor, size) for tensor, size in zip(source.inputs.values(), sizes, strict=True)]
    args, kwargs = replace_inputs(source, tensors)
    same = all(a.shape == b.shape for a, b in zip(tensors, source.inputs.values(), strict=True)) and all(
        (a is None) == (b is None)
        for old, new in zip(source.axes, axes, strict=True)
        for a, b in zip(old, new, strict=True)
    )
    return dataclasses.replace(source, args=args, kwargs=kwargs, axes=axes, program=source.program if same else None)


def symbol_names(source: Source, program: ExportedProgram) -> dict[str, str]:
    """PyTorch's symbols ("s77") -> stable names: the one given, else "x_dim0" after the first input that has it.

    Raises UnsupportedError where an input's size is an expression of others, ModelError where one dimension has
    two given names.
    """
    given: dict[str, str] = {}
    automatic: dict[str, str] = {}
    for node, name, axes in zip(tensor_placeholders(program), source.names, source.axes, strict=True):
        for index, (size, axis) in enumerate(zip(node.meta["val"].shape, axes, strict=True)):
            if isinstance(size, int):
                continue
            if not size.node.expr.is_Symbol:
                raise UnsupportedError(
                    f"{source.where}: axis {index} of input `{name}` has the size {size.node.expr}",
                    "give it a dimension of its own, or a fixed size in [model.inputs]",
                )
            label = _given_name(axis)
            automatic.setdefault(str(size), f"{name}_dim{index}")
            if label and given.setdefault(str(size), label) != label:
                raise ModelError(
                    f"{source.where}: `{given[str(size)]}` and `{label}` must be equal in this model",
                    "give both dimensions one name",
                )
    return {**automatic, **given}


def export_shapes(source: Source) -> dict[str, Any]:
    """`dynamic_shapes` for torch.export, by the parameters of forward."""
    rest = iter(source.axes)
    leaves, spec = pytree.tree_flatten((source.args, dict(source.kwargs)))
    shapes = [_torch_axes(next(rest)) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    positional, keyword = pytree.tree_unflatten(shapes, spec)
    return dict(inspect.signature(source.module.forward).bind(*positional, **keyword).arguments)


def export_arguments(source: Source) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example inputs with dynamic axes of at least two: torch.export takes an axis of one for fixed."""
    tensors = [
        _of_size(
            tensor, [None if axis is None else max(size, 2) for size, axis in zip(tensor.shape, axes, strict=True)]
        )
        for tensor, axes in zip(source.inputs.values(), source.axes, strict=True)
    ]
    return replace_inputs(source, tensors)


def _torch_axes(axes: Sequence[Axis]) -> dict[int, Any] | None:
    return {i: Dim.DYNAMIC if isinstance(axis, str) else axis for i, axis in enumerate(axes) if axis is not None}


def _given_name(axis: Axis) -> str | None:
    """The user's name of an axis. "s77" is PyTorch's own."""
    if isinstance(axis, Dim):
        return str(axis.__name__)
    return axis if isinstance(axis, str) and not (axis[:1] == "s" and axis[1:].isdigit()) else None


def _fixed_size(name: str, index: int, axis: Axis, dims: Mapping[str, int]) -> int | None:
    if isinstance(axis, int) or axis is None:
        return axis
    return dims.get(_given_name(axis) or f"{name}_dim{index}")


def _wanted_axes(name: str, tensor: torch.Tensor, old: Sequence[Axis], given: ModelInput) -> list[Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if given.dtype is not None and given.dtype != dtype:
        raise ConfigError(
            f"model.inputs.{name}: the model's example input is {dtype}, not {given.dtype}",
            "change the example input, or leave `dtype` out",
        )
    if given.shape is None:
        return list(old)
    if len(given.shape) != tensor.ndim:
        raise ConfigError(
            f"model.inputs.{name}: {len(given.shape)} axes given, the example input has {tensor.ndim}",
            f"its shape is {list(tensor.shape)}",
        )
    return list(given.shape)


def _check_dims(source: Source, wanted: Sequence[Sequence[Axis]], dims: Mapping[str, int]) -> None:
    known = {
        _given_name(axis) or f"{name}_dim{index}"
        for name, axes in zip(source.names, wanted, strict=True)
        for index, axis in enumerate(axes)
        if axis is not None and not isinstance(axis, int)
    }
    for name in dims:
        if name not in known:
            raise ConfigError(
                f"shapes.dims: {source.where} has no dimension `{name}`",
                f"its dimensions are: {', '.join(sorted(known)) or 'none'}",
            )


def _of_size(tensor: torch.Tensor, sizes: Sequence[int | None]) -> torch.Tensor:
    for axis, size in enumerate(sizes):
        if size is not None and size != tensor.shape[axis]:
            tensor = tensor.index_select(axis, torch.arange(size) % tensor.shape[axis])
    return tensor
