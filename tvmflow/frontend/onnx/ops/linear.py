"""Convolutions and matrix products: padding by the standard's rules, half precision summed in float32."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import relax

from tvmflow.frontend.onnx.ops.activation import full_rank
from tvmflow.frontend.onnx.ops.node import Converters, Node, dtype_of, scalar
from tvmflow.frontend.onnx.ops.pooling import same_padding

LAYOUTS = {1: ("NCW", "OIW", "IOW"), 2: ("NCHW", "OIHW", "IOHW"), 3: ("NCDHW", "OIDHW", "IODHW")}

MANY_FILTERS = 8


def _wide(dtype: str) -> str | None:
    """The type to sum products in where it is not the operands' own."""
    return "float32" if dtype in ("float16", "bfloat16") else None


def matmul(op: Any, a: Any, b: Any) -> Any:
    """a @ b, summed in float32 for half precision; over no elements at all it is zero."""
    length = a.ty.shape[-1] if a.ty.shape is not None else None
    dtype = dtype_of(a)
    if length is not None and hasattr(length, "value") and int(length) == 0:
        shape = op.matmul(a, b).ty.shape
        return op.broadcast_to(scalar(0, dtype), shape)
    product = op.matmul(a, b, out_dtype=_wide(dtype))
    return product if dtype_of(product) == dtype else op.astype(product, dtype)


def _matmul(node: Node) -> Any:
    return matmul(node.op, node.tensor(0), node.tensor(1))


def _gemm(node: Node) -> Any:
    op, dtype = node.op, node.dtype()
    a = op.permute_dims(node.tensor(0), [1, 0]) if node.integer("transA", 0) else node.tensor(0)
    b = op.permute_dims(node.tensor(1), [1, 0]) if node.integer("transB", 0) else node.tensor(1)
    alpha, beta = node.number("alpha", 1.0), node.number("beta", 1.0)
    y = matmul(op, a, b)
    y = y if alpha == 1.0 else op.multiply(y, scalar(alpha, dtype))
    if not node.has(2) or beta == 0.0:
        return y
    c = full_rank(op, node.tensor(2), 2)
    return op.add(y, c if beta == 1.0 else op.multiply(c, scalar(beta, dtype)))


def padding(node: Node, kernel: list[int], strides: list[int], dilations: list[int]) -> list[int]:
    """A convolution's padding, all begins before all ends."""
    rank, auto = len(kernel), node.text("auto_pad", "NOTSET")
    if auto == "VALID":
        return [0] * (2 * rank)
    if auto == "NOTSET":
        return node.ints("pads", [0] * (2 * rank))
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    pads = same_padding(node, reach, strides, spare=2)
    return [p[0] for p in pads] + [p[1] for p in pads]


def convolve(node: Node, x: Any, weight: Any, out_dtype: str | None, bias: int | None = None) -> Any:
    """The node's convolution of given tensors, plus the bias that its input number `bias` holds, if it has that.

    A 1-D convolution becomes a 2-D one of height 1: the layouts and fast schedules are for those.
    """
    rank, op = int(x.ty.ndim) - 2, node.op
    if rank not in LAYOUTS:
        raise node.refuse(f"{rank} spatial axes; one to three are supported")
    kernel = [int(k) for k in list(weight.ty.shape)[2:]]
    strides, dilations = node.ints("strides", [1] * rank), node.ints("dilations", [1] * rank)
    pads = padding(node, kernel, strides, dilations)
    if rank == 1:
        x, weight = op.expand_dims(x, 2), op.expand_dims(weight, 2)
        strides, dilations, pads = [1, *strides], [1, *dilations], [0, pads[0], 0, pads[1]]
    function, layouts = getattr(op.nn, f"conv{len(strides)}d"), LAYOUTS[len(strides)]
    y = function(
        x, weight, strides, pads, dilations, node.integer("group", 1), layouts[0], layouts[1], out_dtype=out_dtype
    )
    y = y if bias is None else with_bias(node, y, bias)
    return op.squeeze(y, 2) if rank == 1 else y


def with_bias(node: Node, y: Any, index: int) -> Any:
    if not node.has(index):
        return y
    bias = node.tensor(index)
    bias = bias if dtype_of(bias) == dtype_of(y) else node.op.astype(bias, dtype_of(y))
    return node.op.add(y, node.op.reshape(bias, [1, -1] + [1] * (int(y.ty.ndim) - 2)))


def _conv(node: Node) -> Any:
    y = convolve(node, node.x, node.tensor(1), _wide(node.dtype()), bias=2)
    return y if dtype_of(y) == node.dtype() else node.op.astype(y, node.dtype())


def _conv_transpose(node: Node) -> Any:
    """The sum of the kernel placed at every input element; `pads` crops it, output_padding extends its end."""
    rank, op = node.rank() - 2, node.op
    if rank not in LAYOUTS:
        raise node.refuse(f"{rank} spatial axes; one to three are supported")
    kernel, strides, dilations = node.shape(1)[2:], node.ints("strides", [1] * rank), node.ints("dilations", [1] * rank)
    pads, extra = _transpose_padding(node, kernel, strides, dilations)
    if _is_upscaling(node, kernel, strides) and not any((*pads, *extra)) and dilations == [1] * rank:
        return with_bias(node, _upscaling(node, kernel), 2)
    fits = all(e < s for e, s in zip(extra, strides, strict=True))
    function = getattr(op.nn, f"conv{rank}d_transpose")
    y = function(
        node.x,
        node.tensor(1),
        strides,
        pads,
        extra if fits else [0] * rank,
        dilations,
        node.integer("group", 1),
        LAYOUTS[rank][0],
        LAYOUTS[rank][2],
        out_dtype=_wide(node.dtype()),
    )
    if not fits:
        y = op.nn.pad(y, [0, 0, 0, 0, *(v for e in extra for v in (0, e))])
    y = with_bias(node, y, 2)
    return y if dtype_of(y) == node.dtype() else op.astype(y, node.dtype())


def _is_upscaling(node: Node, kernel: list[int], strides: list[int]) -> bool:
    """Whether a transposed convolution gives each element a block of its own, and is faster as a plain one.

    With many filters, moving their results into place costs more than TVM's own kernel takes.
    """
    known = all(isinstance(size, int) for size in node.dims(0)[2:])
    return known and kernel == strides and node.integer("group", 1) == 1 and node.shape(1)[1] < MANY_FILTERS


def _upscaling(node: Node, kernel: list[int]) -> Any:
    """A transposed convolution whose kernels do not overlap: a product per element, its results put side by side."""
    rank, op, sizes = len(kernel), node.op, node.shape(0)[2:]
    channels, filters = node.shape(1)[:2]
    weight = op.permute_dims(node.tensor(1), [*range(2, rank + 2), 1, 0])
    weight = op.reshape(weight, [math.prod(kernel) * filters, channels] + [1] * rank)
    function = getattr(op.nn, f"conv{rank}d")
    y = function(
        node.x, weight, data_layout=LAYOUTS[rank][0], kernel_layout=LAYOUTS[rank][1], out_dtype=_wide(node.dtype())
    )
    # Channels last while they move: this cancels with the layout that convolutions get.
    y = op.reshape(op.permute_dims(y, [0, *range(2, rank + 2), 1]), [-1, *sizes, *kernel, filters])
    order = [axis for i in range(1, rank + 1) for axis in (i, i + rank)]
    y = op.permute_dims(y, [0, *order, 2 * rank + 1])
    y = op.reshape(y, [-1, *(s * k for s, k in zip(sizes, kernel, strict=True)), filters])
    return op.permute_dims(y, [0, rank + 1, *range(1, rank + 1)])


def _transpose_padding(
    node: Node, kernel: list[int], strides: list[int], dilations: list[int]
) -> tuple[list[int], list[int]]:
    """Padding (begins, then ends) and output padding; an output_shape or SAME decides the former."""
    rank, auto = len(kernel), node.text("auto_pad", "NOTSET")
    extra = node.ints("output_padding", [0] * rank)
    wanted = node.ints("output_shape", ())[-rank:] if "output_shape" in node.attributes else None
    if auto == "VALID" and wanted is None:
        return [0] * (2 * rank), extra
    if auto == "NOTSET" and wanted is None:
        return node.ints("pads", [0] * (2 * rank)), extra
    sizes = node.shape(0, range(2, rank + 2)) if wanted is not None else [0] * rank
    begins, ends = [], []
    for i in range(rank):
        reach = (kernel[i] - 1) * dilations[i] + 1
        if wanted is not None:
            total = strides[i] * (sizes[i] - 1) + extra[i] + reach - wanted[i]
        else:
            total = extra[i] + reach - strides[i]
        extra[i] += max(-total, 0) if wanted is not None else 0
        total = max(total, 0)
        begins.append(total // 2 if auto == "SAME_UPPER" else total - total // 2)
        ends.append(total - begins[-1])
    return begins + ends, extra


def _col2im(node: Node) -> Any:
    """A transposed convolution with the unit kernels: column k puts its elements at kernel place k, overlaps add up."""
    image, block = ([int(v) for v in node.known(i, name)] for i, name in ((1, "image_shape"), (2, "block_shape")))
    rank, op = len(image), node.op
    strides, dilations = node.ints("strides", [1] * rank), node.ints("dilations", [1] * rank)
    pads = node.ints("pads", [0] * (2 * rank))
    if rank not in LAYOUTS:
        raise node.refuse(f"{rank} spatial axes; one to three are supported")
    batch, rows, _ = node.shape()
    reach = [(k - 1) * d + 1 for k, d in zip(block, dilations, strict=True)]
    counts = [(image[i] + pads[i] + pads[i + rank] - reach[i]) // strides[i] + 1 for i in range(rank)]
    extra = [image[i] + pads[i] + pads[i + rank] - reach[i] - (counts[i] - 1) * strides[i] for i in range(rank)]
    places = math.prod(block)
    units = relax.const(np.eye(places).reshape(places, 1, *block).astype("float32"), "float32")
    units = units if node.dtype() == "float32" else op.astype(units, node.dtype())
    columns = op.reshape(node.x, (batch * rows // places, places, *counts))
    function = getattr(op.nn, f"conv{rank}d_transpose")
    y = function(columns, units, strides, pads, extra, dilations, 1, LAYOUTS[rank][0], LAYOUTS[rank][2])
    return op.reshape(y, (batch, rows // places, *image))


CONVERTERS: Converters = {
    "MatMul": {1: _matmul},
    "Gemm": {1: _gemm},
    "Conv": {1: _conv},
    "ConvTranspose": {1: _conv_transpose},
    "Col2Im": {18: _col2im},
}
