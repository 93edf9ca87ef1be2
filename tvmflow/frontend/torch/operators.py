"""Converters from Core ATen to Relax that replace or add to TVM's own.

TVM's importer computes matrix products and convolutions of any dtype in float32; its relu, clip, maximum and minimum
lose NaN; slices of dynamic sizes carry minima and maxima along.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import relax
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter as Importer

from tvmflow.frontend.emitter import Emitter
from tvmflow.frontend.powers import integer_power
from tvmflow.frontend.torch.places import PLACES
from tvmflow.frontend.torch.symbols import expression, variables
from tvmflow.graph import rounding

Converter = Callable[[Any, Importer], relax.Expr]
Pick = Callable[[relax.Expr, relax.Expr], relax.Expr]
HALF = ("float16", "bfloat16")


def sizes_of(node: Any, importer: Importer) -> list[Any]:
    """PyTorch's shape of a node's first result, in TVM's variables."""
    value = node.meta["val"]
    tensor = value[0] if isinstance(value, tuple | list) else value
    symbols = variables({n: v for n, v in importer.env.items() if n.op == "placeholder"})
    return [expression(size, symbols) for size in tensor.shape]


def _dtype(value: relax.Expr) -> str:
    return str(value.ty.dtype)


def _is_tensor(value: Any) -> bool:
    return isinstance(getattr(value, "ty", None), relax.TensorType)


def _argument(node: Any, index: int, name: str, default: Any = None) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def _per_axis(values: Sequence[int], rank: int) -> list[int]:
    return list(values) * (rank if len(values) == 1 else 1)


def _scalar(value: Any, dtype: str, importer: Importer) -> relax.Expr:
    """A number, or a size that is known at run time, as a tensor without axes."""
    if isinstance(value, tvm.ir.Expr):
        return importer._prim_value_to_scalar_tensor(value, dtype)
    return relax.const(value, dtype)


def _at_least(x: relax.Expr, bound: relax.Expr) -> relax.Expr:
    """max(bound, x): LLVM code takes the second operand where a comparison fails, so a NaN in x stays."""
    return relax.op.maximum(bound, x)


def _at_most(x: relax.Expr, bound: relax.Expr) -> relax.Expr:
    return relax.op.minimum(bound, x)


def _keeping_nan(pick: Pick) -> Pick:
    """The larger or smaller of two tensors, NaN where either is; `pick` keeps only that of its first operand."""

    def choose(a: relax.Expr, b: relax.Expr) -> relax.Expr:
        return relax.op.where(relax.op.isnan(b), b, pick(a, b)) if "float" in _dtype(a) else pick(a, b)

    return choose


def _pairwise(pick: Pick) -> Converter:
    def convert(node: Any, importer: Importer) -> relax.Expr:
        a, b = importer.retrieve_args(node)
        return _keeping_nan(pick)(a, b)

    return convert


def _relu(node: Any, importer: Importer) -> relax.Expr:
    x = importer.env[node.args[0]]
    return _at_least(x, relax.const(0, _dtype(x)))


def _clamp(node: Any, importer: Importer) -> relax.Expr:
    x = importer.env[node.args[0]]
    for index, name, pick in ((1, "min", _at_least), (2, "max", _at_most)):
        bound = importer._retrieve_args(_argument(node, index, name))
        if _is_tensor(bound):
            x = importer.block_builder.emit(_keeping_nan(pick)(x, relax.op.astype(bound, _dtype(x))))
        elif bound is not None:
            x = importer.block_builder.emit(pick(x, _scalar(bound, _dtype(x), importer)))
    return x


def _hardtanh(node: Any, importer: Importer) -> relax.Expr:
    x, dtype = importer.env[node.args[0]], _dtype(importer.env[node.args[0]])
    low, high = _argument(node, 1, "min_val", -1.0), _argument(node, 2, "max_val", 1.0)
    return _at_most(_at_least(x, relax.const(low, dtype)), relax.const(high, dtype))


def _converted(name: str) -> Converter:
    """A conversion that PyTorch knows of; TVM's own where no narrow format is rounded."""

    def convert(node: Any, importer: Importer) -> relax.Expr:
        x, wanted = importer.env[node.args[0]], node.meta["val"].dtype
        dtype = importer._convert_data_type(wanted)
        if dtype == _dtype(x) or not {dtype, _dtype(x)} & set(HALF):
            return importer.create_convert_map()[name](node)
        return rounding.converted(importer.block_builder, x, dtype)

    return convert


def _matmul(node: Any, importer: Importer) -> relax.Expr:
    """Half precision is summed in float32 and rounded once."""
    a, b = importer.retrieve_args(node)[:2]
    dtype = _dtype(a)
    if dtype not in HALF:
        return relax.op.matmul(a, b, out_dtype=dtype)
    return relax.op.astype(importer.block_builder.emit(relax.op.matmul(a, b, out_dtype="float32")), dtype)


CONVOLUTIONS = {
    (1, False): (relax.op.nn.conv1d, "NCW", "OIW"),
    (2, False): (relax.op.nn.conv2d, "NCHW", "OIHW"),
    (3, False): (relax.op.nn.conv3d, "NCDHW", "OIDHW"),
    (1, True): (relax.op.nn.conv1d_transpose, "NCW", "IOW"),
    (2, True): (relax.op.nn.conv2d_transpose, "NCHW", "IOHW"),
    (3, True): (relax.op.nn.conv3d_transpose, "NCDHW", "IODHW"),
}


def _convolution(node: Any, importer: Importer) -> relax.Expr:
    x, weight, bias, stride, padding, dilation, transposed, *rest = importer.retrieve_args(node)
    output_padding, groups = rest
    rank, dtype = x.ty.ndim - 2, _dtype(x)
    op, data_layout, kernel_layout = CONVOLUTIONS[rank, transposed]
    extra = {"output_padding": _per_axis(output_padding, rank)} if transposed else {}
    result = importer.block_builder.emit(
        op(
            x,
            weight,
            strides=_per_axis(stride, rank),
            padding=_per_axis(padding, rank),
            dilation=_per_axis(dilation, rank),
            groups=groups,
            data_layout=data_layout,
            kernel_layout=kernel_layout,
            out_dtype="float32" if dtype in HALF else dtype,
            **extra,
        )
    )
    if dtype in HALF:
        result = importer.block_builder.emit(relax.op.astype(result, dtype))
    return result if bias is None else relax.op.add(result, relax.op.reshape(bias, [1, -1, *[1] * rank]))


def _reduction(op: Callable[..., relax.Expr]) -> Converter:
    def convert(node: Any, importer: Importer) -> relax.Expr:
        axes = _argument(node, 1, "dim")
        axes = list(axes) if isinstance(axes, list | tuple) else axes
        return op(importer.env[node.args[0]], None if axes == [] else axes, _argument(node, 2, "keepdim", False))

    return convert


def _power(node: Any, importer: Importer) -> relax.Expr:
    """Of integers exactly; TVM's power is for floating-point numbers."""
    base, exponent = importer.retrieve_args(node)
    if "float" in _dtype(base):
        return relax.op.power(base, exponent)
    most = int(exponent.value.numpy().max()) if isinstance(exponent, tvm.ir.GenericConst) else -1
    return integer_power(Emitter(importer.block_builder), base, exponent, None if most < 0 else most)


def _scalar_tensor(node: Any, importer: Importer) -> relax.Expr:
    dtype = importer._convert_data_type(node.meta["val"].dtype)
    return _scalar(importer.retrieve_args(node)[0], dtype, importer)


def _full(node: Any, importer: Importer) -> relax.Expr:
    """By broadcasting a constant: TVM's `full` cannot be lowered for infinity and NaN."""
    dtype = importer._convert_data_type(node.meta["val"].dtype)
    scalar = _scalar(importer._retrieve_args(node.args[1]), dtype, importer)
    return relax.op.broadcast_to(scalar, relax.ShapeExpr(sizes_of(node, importer)))


def _resize_nearest(node: Any, importer: Importer) -> relax.Expr:
    """PyTorch's nearest takes floor(out * in / size), which TVM calls asymmetric and floor."""
    size = [int(v) for v in node.meta["val"].shape[-2:]]
    return relax.op.image.resize2d(
        importer.env[node.args[0]],
        size,
        layout="NCHW",
        method="nearest_neighbor",
        coordinate_transformation_mode="asymmetric",
        rounding_method="floor",
    )


def _max_pool(rank: int) -> Converter:
    """Values only; the positions are refused before."""

    def convert(node: Any, importer: Importer) -> relax.Expr:
        kernel, ceil_mode = node.args[1], _argument(node, 5, "ceil_mode", False)
        stride, padding, dilation = (
            _argument(node, i, name, default)
            for i, name, default in ((2, "stride", []), (3, "padding", [0]), (4, "dilation", [1]))
        )
        window = [_per_axis(values, rank) for values in (kernel, stride or kernel, padding, dilation)]
        return getattr(importer, f"_max_pool{rank}d_impl")(importer.env[node.args[0]], *window, ceil_mode)

    return convert


def _slice(node: Any, importer: Importer) -> relax.Expr:
    """With the bounds that follow from PyTorch's size of the result; TVM's own carry min and max around."""
    x = importer.env[node.args[0]]
    dim = _argument(node, 1, "dim", 0) % x.ty.ndim
    start = importer._retrieve_args(_argument(node, 2, "start", 0))
    step = _argument(node, 4, "step", 1)
    length, size = sizes_of(node, importer)[dim], x.ty.shape[dim]
    if start is None:
        start = 0
    if isinstance(start, int):
        start = size + start if start < 0 else start
        start = min(int(start), int(size)) if isinstance(size, tvm.tirx.IntImm) else start
    end = start + (length - 1) * step + 1
    if isinstance(end, int) and isinstance(size, tvm.tirx.IntImm) and (start, end, step) == (0, int(size), 1):
        return x
    return relax.op.strided_slice(x, [dim], [start], [end], [step], assume_inbound=True)


def _view(node: Any, importer: Importer) -> relax.Expr:
    return importer._emit_torch_reshape(importer.env[node.args[0]], sizes_of(node, importer))


def _getitem(node: Any, importer: Importer) -> relax.Expr:
    if node.args[1] and _is_tensor(importer.env[node.args[0]]):
        raise NotImplementedError(f"only the first result of {node.args[0].target} is imported")
    return importer._getitem(node)


OPERATORS: dict[str, Converter] = {
    "_to_copy.default": _converted("_to_copy.default"),
    "to.dtype": _converted("to.dtype"),
    **PLACES,
    "relu.default": _relu,
    "clamp.default": _clamp,
    "clamp.Tensor": _clamp,
    "hardtanh.default": _hardtanh,
    "maximum.default": _pairwise(_at_least),
    "minimum.default": _pairwise(_at_most),
    "mm.default": _matmul,
    "bmm.default": _matmul,
    "convolution.default": _convolution,
    "amax.default": _reduction(relax.op.max),
    "amin.default": _reduction(relax.op.min),
    "mean.dim": _reduction(relax.op.mean),
    "prod.dim_int": _reduction(relax.op.prod),
    "max_pool2d_with_indices.default": _max_pool(2),
    "max_pool3d_with_indices.default": _max_pool(3),
    "upsample_nearest2d.vec": _resize_nearest,
    "slice.Tensor": _slice,
    "view.default": _view,
    "full.default": _full,
    "full_like.default": _full,
    "pow.Tensor_Tensor": _power,
    "scalar_tensor.default": _scalar_tensor,
    operator.getitem.__name__: _getitem,
}
