"""Which operators of the graph a kernel computes: noted when they are fused, because a fused name does not tell.

TVM joins names by `_`, so that `fused_conv2d_transpose1` may be a convolution and a transpose, or a transposed
convolution.
"""

from __future__ import annotations

import functools

import tvm
from tvm import relax
from tvm.relax import transform
from tvm.tirx import PrimFunc

from tvmflow.graph import regions
from tvmflow.kernels.user import OPERATORS_ATTR

# Named otherwise than in Relax.
LEGALISED = frozenset({"transpose", "concatenate", "cast", "pad", "reflect_pad", "where"})


@tvm.transform.module_pass(opt_level=0, name="FuseKernels")
class FuseKernels:
    """TVM's FuseTIR; each function that it makes of a group says which operators were in the group.

    And its blocks say all that they read (regions.py).
    """

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        groups = {
            var.name_hint: function
            for var, function in mod.functions.items()
            if isinstance(function, relax.Function) and "Primitive" in (function.attrs or {})
        }
        fused = transform.FuseTIR()(mod)
        functions = {}
        for var, function in fused.functions.items():
            group = groups.get(var.name_hint)
            if isinstance(function, PrimFunc) and group is not None:
                whole = regions.restated(function) if regions.takes_one_twice(group) else function
                functions[var] = whole.with_attr(OPERATORS_ATTR, ",".join(_members(group, mod)))
            else:
                functions[var] = function
        return tvm.IRModule(functions, attrs=fused.attrs)


def operators(name: str, function: PrimFunc) -> tuple[str, ...]:
    """The operators that a kernel called `name` computes, in their order."""
    noted = function.attrs.get(OPERATORS_ATTR)
    return tuple(str(noted).split(",")) if noted else (_operator(name),)


def operators_of_external(name: str) -> tuple[str, ...]:
    """Those of a function of another code generator, from the name that partitioning gave it."""
    found = [_longest_known(part) for part in name.split("relax_")[1:]]
    return tuple(operator for operator in found if operator)


@functools.cache
def known_names() -> frozenset[str]:
    """Relax's operators, and what legalisation calls some of them."""
    names = [str(op) for op in tvm.ir.Op.list_op_names()]
    return frozenset({name.rpartition(".")[2] for name in names if name.startswith("relax.")} | LEGALISED)


def _members(group: relax.Function, mod: tvm.IRModule) -> list[str]:
    found: list[str] = []

    def visit(node: object) -> None:
        if isinstance(node, relax.Call) and getattr(node.op, "name", "").startswith("relax.call_tir"):
            found.extend(operators(node.args[0].name_hint, mod[node.args[0]]))

    relax.analysis.post_order_visit(group, visit)
    return found


def _operator(name: str) -> str:
    """The operator of a legalised function's name, e.g. "max_pool2d" of "max_pool2d12"."""
    base = name.removesuffix("_prepacked").removeprefix("tir_")
    while base not in known_names() and base[-1:].isdigit():
        base = base[:-1]
    return base


def _longest_known(text: str) -> str:
    """The longest start of some words that names an operator; empty where there is none."""
    words = text.removeprefix("nn_").split("_")
    starts = ("_".join(words[:count]) for count in range(len(words), 0, -1))
    return next((start for start in starts if start in known_names()), "")
