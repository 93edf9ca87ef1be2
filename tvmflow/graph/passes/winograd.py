"""Replaces 3 x 3 convolutions by Winograd's where that pays, with filters that are transformed here and now."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax
from tvm.ir import GenericConst
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.target import Target
from tvm.tirx import IntImm

from tvmflow.graph.mutation import mutated
from tvmflow.kernels.schedules.axes import Registers
from tvmflow.kernels.user import OPERATORS_ATTR
from tvmflow.kernels.winograd import minimal_filtering, tir
from tvmflow.kernels.winograd.minimal_filtering import Measured, Shape, unmeasured


@tvm.transform.module_pass(opt_level=0, name="Winograd")
class Winograd:
    """Convolutions in NHWC of stride 1, dilation 1, one group, float32, constant weights and fixed shapes."""

    def __init__(self, measured: Measured = unmeasured) -> None:
        self._measured = measured

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return mutated(mod, lambda mod: _Mutator(mod, self._measured))


@mutator
class _Mutator(PyExprMutator):  # type: ignore[misc] # TVM has no types
    def __init__(self, mod: tvm.IRModule, measured: Measured) -> None:
        super().__init__(mod)
        self._measured = measured

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        planned = plan_of(call, self._measured)
        if planned is None:
            return call
        shape, chosen = planned
        function = tir.function(shape, chosen, Registers.of(Target.current()).lanes)
        function = function.with_attr(OPERATORS_ATTR, "conv2d")
        filters = relax.const(minimal_filtering.transformed(call.args[1].value.numpy(), chosen))
        return relax.call_tir(self.builder_.add_func(function, "winograd"), [call.args[0], filters], call.ty)


def shapes(mod: tvm.IRModule) -> tuple[Shape, ...]:
    """The convolutions of a graph that Winograd's method could serve, each once."""
    found: dict[Shape, None] = {}

    def visit(node: object) -> None:
        if isinstance(node, relax.Call) and (shape := shape_of(node)) is not None and minimal_filtering.fits(shape):
            found[shape] = None

    for function in mod.functions.values():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, visit)
    return tuple(found)


def plan_of(call: relax.Call, measured: Measured = unmeasured) -> tuple[Shape, minimal_filtering.Plan] | None:
    """A convolution, and how Winograd's method would compute it on the current target; None where it does not pay."""
    shape = shape_of(call)
    chosen = minimal_filtering.best_plan(shape, Target.current(), measured) if shape is not None else None
    return (shape, chosen) if shape is not None and chosen is not None else None


def shape_of(call: relax.Call) -> Shape | None:
    """The convolution that a call computes; None for anything that is not of the kind that Winograd's method serves."""
    if getattr(call.op, "name", "") != "relax.nn.conv2d" or not isinstance(call.args[1], GenericConst):
        return None
    attrs, image, weights = call.attrs, _sizes(call.args[0]), _sizes(call.args[1])
    layouts = (attrs.data_layout, attrs.kernel_layout, attrs.out_layout or attrs.data_layout)
    plain = [*map(int, attrs.strides), *map(int, attrs.dilation), int(attrs.groups)] == [1] * 5
    dtypes = {str(call.args[0].ty.dtype), str(call.args[1].ty.dtype), str(call.ty.dtype)}
    if image is None or weights is None or not plain or layouts != ("NHWC", "HWIO", "NHWC"):
        return None
    if weights[:2] != (3, 3) or dtypes != {"float32"} or 0 in image:
        return None
    batch, height, width, channels = image
    top, left, bottom, right = map(int, attrs.padding)
    return Shape(batch, height, width, channels, weights[3], (top, left, bottom, right))


def _sizes(value: Any) -> tuple[int, ...] | None:
    shape = value.ty.shape
    sizes = list(shape.values) if isinstance(shape, relax.ShapeExpr) else []
    return tuple(map(int, sizes)) if len(sizes) == 4 and all(isinstance(s, IntImm) for s in sizes) else None
