"""Transposed convolutions whose windows do not overlap, as what they are: a product, and its results side by side."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.tirx import IntImm

from tvmflow.graph.mutation import mutated


@tvm.transform.module_pass(opt_level=0, name="SplitTransposedConvolutions")
class SplitTransposedConvolutions:
    """A kernel of k x k at stride k, without padding, as a 1x1 convolution to k*k times the channels (NCHW).

    TVM's own kernel multiplies with the zeros between its inputs: k*k times the work.
    """

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return mutated(mod, _Splitter)


@mutator
class _Splitter(PyExprMutator):  # type: ignore[misc] # TVM has no types
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        return self._split(call) if _is_apart(call) else call

    def _split(self, call: relax.Call) -> relax.Expr:
        batch, _, height, width = call.args[0].ty.shape.values
        weight = call.args[1].value.numpy()  # input channels, output channels, height and width of the kernel
        _, out, high, wide = weight.shape
        # The output's channels stay neighbours, for they are what vectors go along in NHWC.
        flat = relax.const(weight.transpose(2, 3, 1, 0).reshape(high * wide * out, -1, 1, 1).copy())
        products = self.builder_.emit(relax.op.nn.conv2d(call.args[0], flat))
        apart = self.builder_.emit(relax.op.reshape(products, [batch, high, wide, out, height, width]))
        beside = self.builder_.emit(relax.op.permute_dims(apart, [0, 3, 4, 1, 5, 2]))
        return relax.op.reshape(beside, [batch, out, height * high, width * wide])


def _is_apart(call: relax.Call) -> bool:
    """Whether a call is a transposed convolution by constant weights whose windows lie side by side."""
    if getattr(call.op, "name", "") != "relax.nn.conv2d_transpose" or not isinstance(call.args[1], tvm.ir.GenericConst):
        return False
    attrs = call.attrs
    kernel = [int(size) for size in call.args[1].value.shape[2:]]
    numbers = (attrs.padding, attrs.output_padding, [int(d) - 1 for d in attrs.dilation])
    nothing_else = int(attrs.groups) == 1 and not any(int(n) for group in numbers for n in group)
    layouts = (str(attrs.data_layout), str(attrs.kernel_layout))
    known = all(isinstance(size, IntImm) for size in call.args[0].ty.shape.values)
    return kernel == [int(s) for s in attrs.strides] and nothing_else and layouts == ("NCHW", "IOHW") and known
