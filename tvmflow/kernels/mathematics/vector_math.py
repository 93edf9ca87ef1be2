"""Mathematical functions on CPUs as vector code, in place of one call of the C library per lane.

TVM lowers a call like T.exp(x) after vectorisation, by rules that anybody may register for a target. `register` puts
ours in place for `llvm`: they hold for everything that this process builds from then on, tuned or not, to a file or
just in time, and change nothing before that point of the build, so that tuning records do not depend on them.

float32 is computed as elementary.py and trigonometry.py say, within 4 units in the last place, the same on every CPU;
but GELU by AVX-512 is more precise than elsewhere, where numbers below -1.3 are further off. float16 and bfloat16 are
computed as float32. float64 is left to the C library. With fast_math the same expressions are compiled, but LLVM may
reorder sums and lose the sign of a zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from tvm import tirx
from tvm.ir import Op

from tvmflow.kernels.mathematics import elementary, trigonometry
from tvmflow.kernels.mathematics.lanes import Expr, Scope, cast
from tvmflow.kernels.rewriting import PRIORITY, define

FUNCTIONS: dict[str, Callable[..., Expr]] = {
    "exp": elementary.exp,
    "exp2": elementary.exp2,
    "exp10": elementary.exp10,
    "log": elementary.log,
    "log2": elementary.log2,
    "log10": elementary.log10,
    "log1p": elementary.log1p,
    "sigmoid": elementary.sigmoid,
    "tanh": elementary.tanh,
    "sinh": elementary.sinh,
    "cosh": elementary.cosh,
    "erf": elementary.erf,
    "gelu": elementary.gelu,
    "gelu_by_table": elementary.gelu_by_table,
    "pow": elementary.power,
    "sin": trigonometry.sin,
    "cos": trigonometry.cos,
    "tan": trigonometry.tan,
    "asin": trigonometry.asin,
    "acos": trigonometry.acos,
    "atan": trigonometry.atan,
    "asinh": trigonometry.asinh,
    "acosh": trigonometry.acosh,
    "atanh": trigonometry.atanh,
}
OURS = {"gelu", "gelu_by_table"}  # TVM has none in TensorIR
# What LLVM itself expands for float64; the others are TVM's own expressions of these, or called lane by lane.
LLVM_INTRINSICS = (
    "exp",
    "exp2",
    "exp10",
    "log",
    "log2",
    "log10",
    "tanh",
    "sinh",
    "cosh",
    "pow",
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
)
BY_LANES = ("log1p", "erf", "asinh", "acosh", "atanh")


@functools.cache
def register() -> None:
    """Makes LLVM code of this process use these functions; every process that builds calls it first."""
    for name in OURS:
        define(op_name(name), "x times the normal distribution's P(X < x)")
    for name, function in FUNCTIONS.items():
        rule = functools.partial(_lower, name, function)
        tirx.register_intrin_lowering(op_name(name), target="llvm", f=rule, level=PRIORITY)
    for name in {*FUNCTIONS, "rsqrt"} - OURS:  # without this attribute a loop around the call stays scalar
        Op.get(op_name(name)).set_attr("TVectorizable", True, PRIORITY)


def op_name(name: str) -> str:
    """What TVM calls a function."""
    return f"prim.{name}" if name == "log2" else f"tirx.{name}"


def _lower(name: str, function: Callable[..., Expr], call: Expr) -> Expr:
    """What replaces a call of a function; itself leaves it to TVM's next rule."""
    element = str(call.ty.dtype).split("x")[0]
    if element == "float16":
        args = [cast("float32", arg) for arg in call.args]
        return cast("float16", tirx.call_intrin(args[0].ty, call.op, *args))
    if element == "float32":
        let = Scope()
        return let.close(function(let, *call.args))
    if name in LLVM_INTRINSICS:
        return tirx.call_llvm_pure_intrin(call.ty, f"llvm.{name}", *call.args)
    return _lane_by_lane(name, call) if name in BY_LANES else call


def _lane_by_lane(name: str, call: Expr) -> Expr:
    """The C library's function of each lane."""
    lanes = int(call.ty.dtype.lanes)
    if lanes == 1:
        return tirx.call_pure_extern(call.ty, name, *call.args)
    let = Scope()
    x = let(call.args[0])
    values = [tirx.call_pure_extern("float64", name, tirx.Shuffle([x], [lane])) for lane in range(lanes)]
    return let.close(tirx.Shuffle(values, list(range(lanes))))
