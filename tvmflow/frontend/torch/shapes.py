"""Which dimensions of a PyTorch source are dynamic, what they are called, and a source with some of them fixed."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tvmflow.config import ModelInput
from tvmflow.errors import ConfigError, ModelError, UnsupportedError
from tvmflow.frontend.torch.source import Axis, Source, replace_inputs, tensor_placeholders

Dim = torch.export.Dim


def resized(source: Source, model_inputs: Mapping[str, ModelInput], dims: Mapping[str, int]) -> Source:
    """`source` with the shapes and names of `model_inputs` and the sizes of `dims`; fixed axes are static in it.

    Example inputs are made longer by repeating them, so that their values keep making sense. Raises ConfigError for
    names that the model does not have and for shapes that do not fit it.
    """
    names = list(source.inputs)
    for name in model_inputs:
        if name not in names:
            raise ConfigError(f"model.inputs: {source.where} has no input `{name}`", f"its inputs are {', '.join(names)}")
    axes, sizes = [], []
    for (name, tensor), old in zip(source.inputs.items(), source.axes, strict=True):
        wanted = _wanted_axes(name, tensor, old, model_inputs.get(name, ModelInput()))
        fixed = [axis if isinstance(axis, int) else dims.get(axis_name(name, i, axis)) if axis is not None else None
                 for i, axis in enumerate(wanted)]
        sizes.append([given or size for given, size in zip(fixed, tensor.shape, strict=True)])
        axes.append(tuple(None if given else axis for given, axis in zip(fixed, wanted, strict=True)))
    _check_dims(source, dims, model_inputs)
    tensors = [_of_size(tensor, size) for tensor, size in zip(source.inputs.values(), sizes, strict=True)]
    if tuple(axes) == source.axes and all(a is b for a, b in zip(tensors, source.inputs.values(), strict=True)):
        return source
    args, kwargs = replace_inputs(source, tensors)
    same = source.program is not None and sizes == [list(t.shape) for t in source.inputs.values()] and _only_renamed(
        source.axes, axes)
    return dataclasses.replace(source, args=args, kwargs=kwargs, axes=tuple(axes),
                               names=tuple(source.inputs), program=source.program if same else None)


def axis_name(input_name: str, index: int, axis: Axis) -> str:
    """The name of a dynamic axis: the user's, or "x_dim0" for one that has none."""
    if isinstance(axis, str) and not _is_symbol(axis):
        return axis
    name = getattr(axis, "__name__", None) if isinstance(axis, Dim) else None
    return name or f"{input_name}_dim{index}"


def symbol_names(source: Source, program: torch.export.ExportedProgram) -> dict[str, str]:
    """The program's symbols ("s77") -> stable names. The first name found for a symbol counts.

    Raises UnsupportedError where an input's size is an expression of others.
    """
    names: dict[str, str] = {}
    for node, (name, axes) in zip(tensor_placeholders(program), zip(source.inputs, source.axes, strict=True), strict=True):
        for index, (size, axis) in enumerate(zip(node.meta["val"].shape, axes, strict=True)):
            if isinstance(size, int):
                continue
            if not size.node.expr.is_Symbol:
                raise UnsupportedError(f"{source.where}: axis {index} of input `{name}` has the size {size.node.expr}",
                                       "give it a dimension of its own, or a fixed size in [model.inputs]")
            given, symbol = axis_name(name, index, axis), str(size)
            if _is_given(axis) and symbol in names and names[symbol] != given and not names[symbol].endswith(f"_dim{index}"):
                raise ModelError(f"{source.where}: dimensions `{names[symbol]}` and `{given}` must be equal in this model",
                                 "give them one name")
            if symbol not in names or _is_given(axis):
                names[symbol] = given
    return names


def export_shapes(source: Source) -> dict[str, Any]:
    """`dynamic_shapes` for torch.export, by the parameters of forward."""
    rest = iter(source.axes)
    leaves, spec = pytree.tree_flatten((source.args, dict(source.kwargs)))
    shapes = [_torch_axes(next(rest)) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    positional, keyword = pytree.tree_unflatten(shapes, spec)
    return dict(inspect.signature(source.module.forward).bind(*positional, **keyword).arguments)


def export_arguments(source: Source) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example inputs with dynamic axes of at least two: torch takes an axis of one for fixed."""
    tensors = [_of_size(tensor, [max(size, 2) if axis is not None else size
                                 for size, axis in zip(tensor.shape, axes, strict=True)])
               for tensor, axes in zip(source.inputs.values(), source.axes, strict=True)]
    return replace_inputs(source, tensors)


def _torch_axes(axes: Sequence[Axis]) -> dict[int, Any] | None:
    dynamic = {i: Dim.DYNAMIC if isinstance(axis, str) else axis for i, axis in enumerate(axes) if axis is not None}
    return dynamic or None


def _is_symbol(axis: str) -> bool:
    """torch's own names of sizes: s77."""
    return axis[:1] == "s" and axis[1:].isdigit()


def _is_given(axis: Axis) -> bool:
    return (isinstance(axis, str) and not _is_symbol(axis)) or isinstance(axis, Dim)


def _wanted_axes(name: str, tensor: torch.Tensor, old: Sequence[Axis], given: ModelInput) -> list[Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if given.dtype is not None and given.dtype != dtype:
        raise ConfigError(f"model.inputs.{name}: the model's example input is {dtype}, not {given.dtype}",
                          "change the example input, or leave `dtype` out")
    if given.shape is None:
        return list(old)
    if len(given.shape) != tensor.ndim:
        raise ConfigError(f"model.inputs.{name}: {len(given.shape)} axes given, the example input has {tensor.ndim}",
                          f"its shape is {list(tensor.shape)}")
    return list(given.shape)


def _check_dims(source: Source, dims: Mapping[str, int], model_inputs: Mapping[str, ModelInput]) -> None:
    known = {axis_name(name, i, axis)
             for (name, tensor), old in zip(source.inputs.items(), source.axes, strict=True)
             for i, axis in enumerate(_wanted_axes(name, tensor, old, model_inputs.get(name, ModelInput())))
             if axis is not None and not isinstance(axis, int)}
    for name in dims:
        if name not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise ConfigError(f"shapes.dims: {source.where} has no dimension `{name}`", f"its dimensions are: {listed}")


def _only_renamed(old: Sequence[Sequence[Axis]], new: Sequence[Sequence[Axis]]) -> bool:
    return all((a is None) == (b is None) for before, after in zip(old, new, strict=True)
               for a, b in zip(before, after, strict=True))


def _of_size(tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    for axis, size in enumerate(sizes):
        if size != tensor.shape[axis]:
            tensor = tensor.index_select(axis, torch.arange(size) % tensor.shape[axis])
    return tensor
