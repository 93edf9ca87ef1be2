"""Converters from Core ATen to Relax that replace TVM's own, and the check that every conversion must pass.

TVM's importer computes matrix products and convolutions of any dtype in float32, and its relu, clip, maximum and
minimum lose NaN. The check compares dtype and shape of each converted value with what PyTorch derived for it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
import tvm
from tvm import relax
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

from tvmflow.errors import TvmflowError, UnsupportedError
from tvmflow.frontend.torch.symbols import expression, variables

Importer = ExportedProgramImporter
Node = torch.fx.Node
Converter = Callable[[Node, Importer], relax.Expr]
HALF = ("float16", "bfloat16")


def known_operators() -> set[str]:
    """Names of all operators that can be converted, e.g. "add.Tensor"."""
    return set(ExportedProgramImporter().convert_map) | set(OURS)


def convert_map(names: Iterable[str]) -> dict[str, Converter]:
    """Converters for `names`, each checked; for TVM's `from_exported_program(custom_convert_map=...)`."""
    return {name: _checked(name) for name in names}


def _checked(name: str) -> Converter:
    def convert(node: Node, importer: Importer) -> relax.Expr:
        try:
            converter = OURS.get(name)
            value = converter(node, importer) if converter else importer.create_convert_map()[name](node)
            if isinstance(value, relax.Call):
                value = importer.block_builder.emit(value)
            return _agreed(node, value, importer)
        except TvmflowError:
            raise
        except Exception as exc:
            reason = (str(exc).strip().splitlines() or [type(exc).__name__])[-1]
            raise UnsupportedError(f"operator {node.target} (node `{node.name}`): TVM's importer fails: {reason}",
                                   "write it with other operators, or fix the sizes it depends on in [shapes.dims]"
                                   ) from exc

    return convert


def _agreed(node: Node, value: Any, importer: Importer) -> Any:
    """`value`, with PyTorch's shape where TVM could not derive it; UnsupportedError where the two contradict."""
    wanted = node.meta.get("val")
    got = getattr(value, "ty", None)
    if isinstance(got, relax.TupleType) and isinstance(wanted, tuple | list):
        for tensor, field in zip(wanted, got.fields, strict=False):
            _compare(node, tensor, field, importer)
        return value
    tensor = wanted[0] if isinstance(wanted, tuple | list) and wanted else wanted
    if not isinstance(tensor, torch.Tensor) or not isinstance(got, relax.TensorType):
        return value
    _compare(node, tensor, got, importer)
    if all(isinstance(size, int) for size in tensor.shape):
        return value
    shape = relax.ShapeExpr(_sizes(node, importer))
    if got.shape is not None and _provably_equal(got.shape, shape):
        return value
    return importer.block_builder.match_cast(value, relax.TensorType(shape, got.dtype))


def _compare(node: Node, tensor: Any, typed: Any, importer: Importer) -> None:
    if not isinstance(tensor, torch.Tensor) or not isinstance(typed, relax.TensorType):
        return
    dtype = importer._convert_data_type(tensor.dtype)
    fixed = [] if typed.shape is None else [
        (a, int(b)) for a, b in zip(tensor.shape, typed.shape, strict=False)
        if isinstance(a, int) and isinstance(b, tvm.tirx.IntImm)]
    if str(typed.dtype) != dtype or typed.ndim != tensor.ndim or any(a != b for a, b in fixed):
        raise UnsupportedError(
            f"operator {node.target} (node `{node.name}`): imported as {typed}, but PyTorch says"
            f" {dtype}{list(tensor.shape)}", "write it with other operators; TVM's importer gets this one wrong")


def _sizes(node: Node, importer: Importer) -> list[Any]:
    """PyTorch's shape of a node's (first) result in TVM's variables."""
    wanted = node.meta["val"]
    tensor = wanted[0] if isinstance(wanted, tuple | list) else wanted
    symbols = variables({n: v for n, v in importer.env.items() if n.op == "placeholder"})
    return [expression(size, symbols) for size in tensor.shape]


def _provably_equal(a: Any, b: Any) -> bool:
    analyzer = tvm.sym.Analyzer()
    return all(analyzer.can_prove_equal(x, y) for x, y in zip(a, b, strict=True))


def _dtype(value: relax.Expr) -> str:
    return str(value.ty.dtype)


def _is_float(value: relax.Expr) -> bool:
    return "float" in _dtype(value)


def _argument(node: Node, index: int, name: str, default: Any = None) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def _relu(node: Node, importer: Importer) -> relax.Expr:
    x = importer.env[node.args[0]]
    return importer.block_builder.emit(_at_least(x, relax.const(0, _dtype(x))))


def _clamp(node: Node, importer: Importer) -> relax.Expr:
    x = importer.env[node.args[0]]
    low, high = (importer._retrieve_args(_argument(node, i, name)) for i, name in ((1, "min"), (2, "max")))
    for bound, pick in ((low, _at_least), (high, _at_most)):
        if bound is None:
            continue
        if isinstance(getattr(bound, "ty", None), relax.TensorType):
            x = importer.block_builder.emit(_keeping_nan(pick)(x, relax.op.astype(bound, _dtype(x))))
        else:
            x = importer.block_builder.emit(pick(x, _scalar(bound, _dtype(x), importer)))
    return x


def _at_least(x: relax.Expr, bound: relax.Expr) -> relax.Expr:
    """max(bound, x): LLVM code compares and takes the second operand where the comparison fails, so NaN in x stays."""
    return relax.op.maximum(bound, x)


def _at_most(x: relax.Expr, bound: relax.Expr) -> relax.Expr:
    return relax.op.minimum(bound, x)


def _keeping_nan(pick: Callable[[relax.Expr, relax.Expr], relax.Expr]) -> Callable[..., relax.Expr]:
    """The larger or smaller of two tensors, NaN where either is: `pick` keeps it in its first operand only."""

    def choose(a: relax.Expr, b: relax.Expr) -> relax.Expr:
        return relax.op.where(relax.op.isnan(b), b, pick(a, b)) if _is_float(a) else pick(a, b)

    return choose


def _pairwise(pick: Callable[[relax.Expr, relax.Expr], relax.Expr]) -> Converter:
    def convert(node: Node, importer: Importer) -> relax.Expr:
        a, b = importer.retrieve_args(node)
        return importer.block_builder.emit(_keeping_nan(pick)(a, b))

    return convert


def _matmul(node: Node, importer: Importer) -> relax.Expr:
    """Half precision is summed in float32 and rounded once."""
    a, b = importer.retrieve_args(node)[:2]
    dtype = _dtype(a)
    product = importer.block_builder.emit(relax.op.matmul(a, b, out_dtype="float32" if dtype in HALF else dtype))
    return importer.block_builder.emit(relax.op.astype(product, dtype)) if dtype in HALF else product


CONVOLUTIONS = {
    (1, False): (relax.op.nn.conv1d, "NCW", "OIW"), (1, True): (relax.op.nn.conv1d_transpose, "NCW", "IOW"),
    (2, False): (relax.op.nn.conv2d, "NCHW", "OIHW"), (2, True): (relax.op.nn.conv2d_transpose, "NCHW", "IOHW"),
    (3, False): (relax.op.nn.conv3d, "NCDHW", "OIDHW"), (3, True): (relax.op.nn.conv3d_transpose, "NCDHW", "IODHW"),
}


def _convolution(node: Node, importer: Importer) -> relax.Expr:
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = importer.retrieve_args(node)
    rank, dtype = x.ty.ndim - 2, _dtype(x)
    op, data_layout, kernel_layout = CONVOLUTIONS[rank, transposed]
    strides, pads, dilations, extra = (
        _per_axis(values, rank) for values in (stride, padding, dilation, output_padding))
    result = importer.block_builder.emit(op(
        x, weight, strides=strides, padding=pads, dilation=dilations, groups=groups, data_layout=data_layout,
        kernel_layout=kernel_layout, out_dtype="float32" if dtype in HALF else dtype,
        **({"output_padding": extra} if transposed else {})))
    if dtype in HALF:
        result = importer.block_builder.emit(relax.op.astype(result, dtype))
    if bias is None:
        return result
    return importer.block_builder.emit(relax.op.add(result, relax.op.reshape(bias, [1, -1, *[1] * rank])))


def _reduction(op: Callable[..., relax.Expr]) -> Converter:
    def convert(node: Node, importer: Importer) -> relax.Expr:
        x = importer.env[node.args[0]]
        axes = _argument(node, 1, "dim")
        axes = None if axes is None or axes == [] else axes
        return importer.block_builder.emit(op(x, axes, _argument(node, 2, "keepdim", False)))

    return convert


def _scatter(reduction: str | None) -> Converter:
    def convert(node: Node, importer: Importer) -> relax.Expr:
        x, dim, index, source = importer.retrieve_args(node)[:4]
        kind = reduction or REDUCTIONS[node.args[4]]
        if not isinstance(source, relax.Expr):
            source = relax.op.full(index.ty.shape, relax.const(source, _dtype(x)), _dtype(x))
        return importer.block_builder.emit(relax.op.scatter_elements(x, index, source, axis=dim, reduction=kind))

    return convert


REDUCTIONS = {"sum": "add", "prod": "mul", "amax": "max", "amin": "min"}


def _scalar(value: Any, dtype: str, importer: Importer) -> relax.Expr:
    """A number, or a size that is known at run time, as a tensor without axes."""
    if isinstance(value, tvm.ir.Expr):
        return importer._prim_value_to_scalar_tensor(value, dtype)
    return relax.const(value, dtype)


def _scalar_tensor(node: Node, importer: Importer) -> relax.Expr:
    return _scalar(importer.retrieve_args(node)[0], importer._convert_data_type(node.meta["val"].dtype), importer)


def _full(node: Node, importer: Importer) -> relax.Expr:
    """By broadcasting a constant: TVM's `full` cannot be lowered for infinity and NaN."""
    dtype = importer._convert_data_type(node.meta["val"].dtype)
    scalar = _scalar(importer._retrieve_args(node.args[1]), dtype, importer)
    return importer.block_builder.emit(relax.op.broadcast_to(scalar, relax.ShapeExpr(_sizes(node, importer))))


def _resize_nearest(node: Node, importer: Importer) -> relax.Expr:
    """PyTorch's nearest takes floor(out * in / size), which TVM calls asymmetric and floor."""
    x = importer.env[node.args[0]]
    size = [int(v) for v in node.meta["val"].shape[-2:]]
    return importer.block_builder.emit(relax.op.image.resize2d(
        x, size, layout="NCHW", method="nearest_neighbor", coordinate_transformation_mode="asymmetric",
        rounding_method="floor"))


def _max_pool(rank: int) -> Converter:
    """Values only; the positions are refused before."""

    def convert(node: Node, importer: Importer) -> relax.Expr:
        x, kernel, *rest = importer.retrieve_args(node)
        stride, padding, dilation, ceil_mode = [*rest, *([], [0], [1], False)[len(rest):]]
        pool = getattr(importer, f"_max_pool{rank}d_impl")
        return pool(x, _per_axis(kernel, rank), _per_axis(stride or kernel, rank), _per_axis(padding, rank),
                    _per_axis(dilation, rank), ceil_mode)

    return convert


def _per_axis(values: list[int], rank: int) -> list[int]:
    return list(values) * (rank if len(values) == 1 else 1)


def _take(node: Node, importer: Importer) -> relax.Expr:
    """Rows of a table. An index outside reads the nearest row, where PyTorch raises: never memory that is not ours."""
    args = importer.retrieve_args(node)
    x, axis, index = (args[0], 0, args[1]) if len(args) < 3 or "embedding" in node.target.__name__ else args[:3]
    return importer.block_builder.emit(relax.op.take(x, index, axis=axis % max(x.ty.ndim, 1), mode="clip"))


def _getitem(node: Node, importer: Importer) -> relax.Expr:
    source = importer.env[node.args[0]]
    if node.args[1] and isinstance(getattr(source, "ty", None), relax.TensorType):
        raise NotImplementedError(f"only the first result of {node.args[0].target} is imported")
    return importer._getitem(node)


def _slice(node: Node, importer: Importer) -> relax.Expr:
    """With the bounds that follow from PyTorch's size of the result; TVM's own carry min and max around."""
    x = importer.env[node.args[0]]
    dim = _argument(node, 1, "dim", 0) % x.ty.ndim
    start, step = (importer._retrieve_args(_argument(node, i, name, default))
                   for i, name, default in ((2, "start", 0), (4, "step", 1)))
    length, size = _sizes(node, importer)[dim], x.ty.shape[dim]
    start = 0 if start is None else start
    if isinstance(start, int):
        start = size + start if start < 0 else start
        if isinstance(size, tvm.tirx.IntImm):
            start = min(int(start), int(size))
    if _provably_equal([length], [size]):
        return x
    return importer.block_builder.emit(relax.op.strided_slice(
        x, [dim], [start], [start + (length - 1) * step + 1], [step], assume_inbound=True))


def _view(node: Node, importer: Importer) -> relax.Expr:
    return importer._emit_torch_reshape(importer.env[node.args[0]], _sizes(node, importer))


def _stable_sort(node: Node, importer: Importer) -> relax.Expr:
    x = importer.env[node.args[0]]
    keywords = dict(node.kwargs)
    dim = keywords.get("dim", node.args[-2] if len(node.args) > 2 else -1)
    descending = keywords.get("descending", node.args[-1] if len(node.args) > 2 else False)
    order = importer.block_builder.emit(relax.op.argsort(x, dim, descending, dtype="int64"))
    values = importer.block_builder.emit(relax.op.gather_elements(x, order, axis=dim))
    return importer.block_builder.emit(relax.Tuple([values, order]))


OURS: dict[str, Converter] = {
    "relu.default": _relu,
    "clamp.default": _clamp,
    "clamp.Tensor": _clamp,
    "hardtanh.default": _clamp,
    "maximum.default": _pairwise(_at_least),
    "minimum.default": _pairwise(_at_most),
    "mm.default": _matmul,
    "bmm.default": _matmul,
    "convolution.default": _convolution,
    "max_pool2d_with_indices.default": _max_pool(2),
    "max_pool3d_with_indices.default": _max_pool(3),
    "embedding.default": _take,
    "index_select.default": _take,
    "amax.default": _reduction(relax.op.max),
    "amin.default": _reduction(relax.op.min),
    "mean.dim": _reduction(relax.op.mean),
    "prod.dim_int": _reduction(relax.op.prod),
    "scatter.src": _scatter("update"),
    "scatter.value": _scatter("update"),
    "scatter_add.default": _scatter("add"),
    "scatter_reduce.two": _scatter(None),
    "full.default": _full,
    "full_like.default": _full,
    "scalar_tensor.default": _scalar_tensor,
    "upsample_nearest2d.vec": _resize_nearest,
    "slice.Tensor": _slice,
    "view.default": _view,
    "sort.stable": _stable_sort,
    operator.getitem.__name__: _getitem,
}
