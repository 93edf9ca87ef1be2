"""Converters of operators that read or write at computed places, and of those that find places: sorts.

TVM's kernels read and write wherever an index points. So each index is checked when the model runs, as in PyTorch, and
bad ones are replaced lest the check come late.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tvm import relax
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter as Importer

from tvmflow.frontend.emitter import Emitter
from tvmflow.frontend.order import dtype_of, sort_keys
from tvmflow.graph import run_time_check

Converter = Callable[[Any, Importer], relax.Expr]
REDUCTIONS = {"sum": "add", "prod": "mul", "amax": "max", "amin": "min"}

# What decompositions say with no operator of PyTorch's: the places that indices mean, which may count from the end and
# are checked; and an index_select of places that are known to lie in the axis.
_library = torch.library.Library("tvmflow", "DEF")
_library.define("in_range(Tensor index, SymInt size) -> Tensor")
_library.define("take(Tensor x, int dim, Tensor index) -> Tensor")


def _in_range(index: torch.Tensor, size: int) -> torch.Tensor:
    if not bool(((index >= -size) & (index < size)).all()):
        raise IndexError(f"an index is out of range for size {size}")
    return torch.where(index < 0, index + size, index)


def _take_by_pytorch(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    return x.index_select(dim, index)


def _in_range_fake(index: torch.Tensor, size: int) -> torch.Tensor:  # noqa: ARG001 # as the operator is declared
    return torch.empty_like(index)


def _take_fake(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    return x.new_empty([*x.shape[:dim], index.shape[0], *x.shape[dim + 1 :]])


for _name, _function, _fake in (("in_range", _in_range, _in_range_fake), ("take", _take_by_pytorch, _take_fake)):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tvmflow::{_name}", _fake, lib=_library)


def _argument(node: Any, index: int, name: str, default: Any = None) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def _checked(node: Any, importer: Importer, index: relax.Expr, size: Any, from_end: bool = False) -> relax.Expr:
    """Indices counted from the front, after a check that they lie in an axis of `size` (or, from its end, before)."""
    op, dtype = Emitter(importer.block_builder), dtype_of(index)
    bound = op.astype(op.reshape(op.shape_to_tensor(relax.ShapeExpr([size])), ()), dtype)
    zero = relax.const(0, dtype)
    lowest = op.negative(bound) if from_end else zero
    good = op.logical_and(op.less(index, bound), op.greater_equal(index, lowest))
    run_time_check.require(importer.block_builder, good, f"{node.name}_index_in_range")
    if from_end:
        index = op.where(op.less(index, zero), op.add(index, bound), index)
    return op.where(good, index, zero)


def _range_check(node: Any, importer: Importer) -> relax.Expr:
    """tvmflow.in_range"""
    index, size = importer.retrieve_args(node)
    return _checked(node, importer, index, size, from_end=True)


def _take(node: Any, importer: Importer) -> relax.Expr:
    """tvmflow.take"""
    x, axis, index = importer.retrieve_args(node)
    return relax.op.take(x, index, axis=axis % max(x.ty.ndim, 1), mode="clip")


def _embedding(node: Any, importer: Importer) -> relax.Expr:
    table, index = importer.retrieve_args(node)[:2]
    return relax.op.take(table, _checked(node, importer, index, table.ty.shape[0]), axis=0, mode="clip")


def _index_select(node: Any, importer: Importer) -> relax.Expr:
    x, axis, index = importer.retrieve_args(node)
    axis = axis % max(x.ty.ndim, 1)
    return relax.op.take(x, _checked(node, importer, index, x.ty.shape[axis]), axis=axis, mode="clip")


def _gather(node: Any, importer: Importer) -> relax.Expr:
    x, axis, index = importer.retrieve_args(node)[:3]
    axis = axis % max(x.ty.ndim, 1)
    return relax.op.gather_elements(x, _checked(node, importer, index, x.ty.shape[axis]), axis=axis)


def _scatter(reduction: str | None) -> Converter:
    """Writes or combines at an index; `reduction` None takes it from the node's arguments."""

    def convert(node: Any, importer: Importer) -> relax.Expr:
        x, axis, index, source = importer.retrieve_args(node)[:4]
        if not isinstance(getattr(source, "ty", None), relax.TensorType):
            source = relax.op.full(index.ty.shape, relax.const(source, dtype_of(x)), dtype_of(x))
        index = _checked(node, importer, index, x.ty.shape[axis % max(x.ty.ndim, 1)])
        return relax.op.scatter_elements(x, index, source, axis=axis, reduction=reduction or REDUCTIONS[node.args[4]])

    return convert


def _sort(first: int, values: bool = True) -> Converter:
    """Sorts, or gives the order alone; stable, which any sort may be. `first` is the place of the argument `dim`."""

    def convert(node: Any, importer: Importer) -> relax.Expr:
        x, op = importer.env[node.args[0]], Emitter(importer.block_builder)
        dim, descending = _argument(node, first, "dim", -1), _argument(node, first + 1, "descending", False)
        order = op.argsort(sort_keys(op, x), dim, descending, dtype="int64")
        return relax.Tuple([op.gather_elements(x, order, axis=dim), order]) if values else order

    return convert


def _top_k(node: Any, importer: Importer) -> relax.Expr:
    """aten.topk(x, k, dim=-1, largest=True, sorted=True)"""
    x, op = importer.env[node.args[0]], Emitter(importer.block_builder)
    k, dim, largest = node.args[1], _argument(node, 2, "dim", -1), _argument(node, 3, "largest", True)
    places = op.topk(sort_keys(op, x), k, dim, ret_type="indices", largest=largest, dtype="int64")
    return relax.Tuple([op.gather_elements(x, places, axis=dim), places])


PLACES: dict[str, Converter] = {
    "in_range.default": _range_check,
    "take.default": _take,
    "embedding.default": _embedding,
    "index_select.default": _index_select,
    "gather.default": _gather,
    "scatter.src": _scatter("update"),
    "scatter.value": _scatter("update"),
    "scatter_add.default": _scatter("add"),
    "scatter_reduce.two": _scatter(None),
    "sort.default": _sort(1),
    "sort.stable": _sort(2),
    "argsort.default": _sort(1, values=False),
    "argsort.stable": _sort(2, values=False),
    "topk.default": _top_k,
}
