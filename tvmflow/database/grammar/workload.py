"""What the workload of a record may hold: one kernel of loops, blocks, buffers in plain memory, and arithmetic.

The kinds are those of TVM 0.27's TensorIR that operators of a graph become before anything schedules them. Nothing
among them calls a function by its name, holds code, or tells a later stage of TVM to do so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tvmflow.database.grammar import inlining
from tvmflow.database.grammar.graph import INT64, Field, Grammar, GrammarError, Graph, Limits, parse, whole

LIMITS = Limits(nodes=200_000, depth=500, unfolded=1_000_000)  # real kernels: 8,000, 35 and 12,000 at most
FUNCTIONS = frozenset(
    ["prim.ceil", "prim.clz", "prim.if_then_else", "prim.likely", "prim.log2"]
    + [
        f"tirx.{name}"
        for name in (
            "acos",
            "acosh",
            "asin",
            "asinh",
            "atan",
            "atan2",
            "atanh",
            "copysign",
            "cos",
            "cosh",
            "erf",
            "exp",
            "exp10",
            "exp2",
            "fabs",
            "floor",
            "fma",
            "fmod",
            "hypot",
            "isfinite",
            "isinf",
            "isnan",
            "ldexp",
            "log",
            "log10",
            "log1p",
            "nearbyint",
            "nextafter",
            "popcount",
            "pow",
            "q_multiply_shift",
            "q_multiply_shift_per_axis",
            "reinterpret",
            "round",
            "rsqrt",
            "sigmoid",
            "sin",
            "sinh",
            "sqrt",
            "tan",
            "tanh",
            "trunc",
        )
    ]
)
"""What a kernel may call: functions of numbers, without effects."""
SCALAR = re.compile(r"bool|(u?int|float)(8|16|32|64)|bfloat16|float8_e[0-9a-z]+|float[46]_e[0-9a-z]+|u?int[14]")
WORD = re.compile(r"[\w.<>:/-]{0,500}", re.ASCII)
ATTRIBUTES = frozenset(
    {
        "global_symbol",
        "layout_free_buffers",
        "op_pattern",
        "s_tir",
        "tirx.noalias",
        "tvmflow.operators",
        "tvmflow.rule",
        "tvmflow.shared_layouts",
        "tvmflow.user_kernel",
    }
)
"""Of the function."""
ANNOTATIONS = frozenset(
    {
        "axis",
        "const_matrix",
        "layout_free_placeholders",
        "meta_schedule.write_cache_level",
        "schedule_rule",
        "tvmflow.shape",
    }
)
"""Of blocks, as TVM's operators write them and MetaSchedule reads them."""

SPAN = frozenset({"None", "ir.Span"})
TYPE = frozenset({"ir.PrimType"})
_TWO = tuple(
    f"prim.{name}"
    for name in (
        "Add",
        "And",
        "BitwiseAnd",
        "BitwiseOr",
        "BitwiseXor",
        "Div",
        "EQ",
        "FloorDiv",
        "FloorMod",
        "GE",
        "GT",
        "LE",
        "LShift",
        "LT",
        "Max",
        "Min",
        "Mod",
        "Mul",
        "NE",
        "Or",
        "RShift",
        "Sub",
    )
)
EXPRESSIONS = frozenset(
    {
        *_TWO,
        "prim.Not",
        "prim.BitwiseNot",
        "prim.Cast",
        "prim.Select",
        "prim.Let",
        "ir.Call",
        "ir.IntImm",
        "ir.FloatImm",
        "ir.TensorLoad",
        "variable",
    }
)
STATEMENTS = frozenset(
    {
        "tirx.BufferStore",
        "tirx.For",
        "tirx.IfThenElse",
        "tirx.SeqStmt",
        "tirx.Bind",
        "tirx.While",
        "tirx.Evaluate",
        "s_tir.SBlockRealize",
    }
)
LEAVES = frozenset({"ir.Var", "ir.PrimType", "ir.IntImm", "ir.FloatImm", "ir.Op", "ir.GlobalVar", "ir.Span"})
NONE = frozenset({"None"})


def node(**fields: Field) -> dict[str, Field]:
    """The fields of a node."""
    return fields


def expression(**fields: Field) -> dict[str, Field]:
    """The fields of an expression."""
    return {"span": SPAN, "ty": TYPE, **fields}


def statement(**fields: Field) -> dict[str, Field]:
    """The fields of a statement."""
    return {"span": SPAN, **fields}


def one(*labels: str) -> frozenset[str]:
    """A field that names a node with one of these labels."""
    return frozenset(labels)


ARITHMETIC: dict[str, dict[str, Field]] = {
    "ir.PrimType": statement(dtype=lambda value: isinstance(value, str) and SCALAR.fullmatch(value) is not None),
    "ir.IntImm": expression(value=one("int")),
    **dict.fromkeys(_TWO, expression(a=EXPRESSIONS, b=EXPRESSIONS)),
    "prim.Cast": expression(value=EXPRESSIONS),
}
_REGIONS = one("[ir.TensorRegion]", "[]")
_SIZES = one("[expression]", "[variable]", "[]")
_PLACE, _ALIGNMENT = whole(range(1 << 31)), whole(range(1, 4097))
_FIELDS: dict[str, dict[str, Field]] = {
    **ARITHMETIC,
    "ir.Span": node(source_name=one("ir.SourceName"), line=_PLACE, column=_PLACE, end_line=_PLACE, end_column=_PLACE),
    "ir.Type": node(span=SPAN),
    "tirx.BufferRegionType": node(span=SPAN),
    "ir.GlobalVar": node(span=SPAN, ty=one("ir.Type", "relax.FuncType"), name_hint=one("ffi.String")),
    "ir.Var": node(span=SPAN, ty=one("ir.PrimType", "tirx.BufferType"), name=one("ffi.String")),
    "ir.Range": node(min=EXPRESSIONS, extent=EXPRESSIONS, span=SPAN),
    "ir.TupleType": node(span=SPAN, fields=one("[]")),
    "ir.DictAttrs": node(__dict__=one("{}", "{attributes}")),
    "ir.SourceMap": node(source_map=one("{}")),
    "ir.IRModule": node(
        functions=one("{functions}"),
        global_var_map_=one("{names}"),
        source_map=one("ir.SourceMap"),
        attrs=one("ir.DictAttrs", "None"),
        global_infos=one("{}"),
    ),
    "relax.expr.ShapeExpr": node(span=SPAN, ty=one("relax.ShapeType"), values=_SIZES),
    "relax.ShapeType": node(span=SPAN, values=_SIZES | NONE, ndim=whole(range(-1, 64))),
    "relax.TensorType": node(
        span=SPAN, shape=one("relax.expr.ShapeExpr", "None"), dtype=TYPE, vdevice=NONE, ndim=whole(range(-1, 64))
    ),
    "relax.FuncType": node(
        span=SPAN,
        params=one("[relax.TensorType]", "[]"),
        ret=one("ir.TupleType"),
        derive_func=NONE,
        purity=lambda value: isinstance(value, bool),
    ),
    "ir.FloatImm": expression(value=lambda value: isinstance(value, float | int)),
    "prim.Not": expression(a=EXPRESSIONS),
    "prim.BitwiseNot": expression(a=EXPRESSIONS),
    "prim.Select": expression(condition=EXPRESSIONS, true_value=EXPRESSIONS, false_value=EXPRESSIONS),
    "prim.Let": expression(var=one("variable"), value=EXPRESSIONS, body=EXPRESSIONS),
    "ir.Call": expression(op=one("ir.Op"), args=_SIZES, attrs=NONE, ty_args=one("[]")),
    "ir.TensorLoad": expression(source=one("buffer"), indices=_SIZES),
    "ir.TensorRegion": node(
        span=SPAN, ty=one("tirx.BufferRegionType"), source=one("buffer"), region=one("[ir.Range]", "[]")
    ),
    "tirx.BufferType": node(
        span=SPAN,
        dtype=TYPE,
        storage_scope=one("ffi.String"),
        shape=_SIZES,
        strides=_SIZES,
        elem_offset=EXPRESSIONS | NONE,
        data_alignment=_ALIGNMENT,
        offset_factor=_ALIGNMENT,
        layout=NONE,
        allocated_addr=one("[]"),
    ),
    "tirx.IterVar": node(
        dom=one("ir.Range"), var=one("variable"), iter_type=whole(range(4)), thread_tag=one("ffi.String"), span=SPAN
    ),
    "tirx.BufferStore": statement(buffer=one("buffer"), value=EXPRESSIONS, indices=_SIZES),
    "tirx.For": statement(
        loop_var=one("variable"),
        min=EXPRESSIONS,
        extent=EXPRESSIONS,
        kind=whole(range(4)),
        body=STATEMENTS,
        thread_binding=NONE,
        annotations=one("{}"),
        step=NONE,
    ),
    "tirx.IfThenElse": statement(condition=EXPRESSIONS, then_case=STATEMENTS, else_case=STATEMENTS | NONE),
    "tirx.SeqStmt": statement(seq=one("[statement]")),
    "tirx.Bind": statement(var=one("variable"), value=EXPRESSIONS),
    "tirx.While": statement(condition=EXPRESSIONS, body=STATEMENTS),
    "tirx.Evaluate": statement(value=EXPRESSIONS),
    "s_tir.SBlock": statement(
        iter_vars=one("[tirx.IterVar]", "[]"),
        reads=_REGIONS,
        writes=_REGIONS,
        name_hint=one("ffi.String"),
        alloc_buffers=one("[buffer]", "[]"),
        match_buffers=one("[]"),
        annotations=one("{}", "{annotations}"),
        init=STATEMENTS | NONE,
        body=STATEMENTS,
    ),
    "s_tir.SBlockRealize": statement(iter_values=_SIZES, predicate=EXPRESSIONS, block=one("s_tir.SBlock")),
    "tirx.PrimFunc": node(
        span=SPAN,
        ty=one("relax.FuncType"),
        attrs=one("ir.DictAttrs", "None"),
        params=one("[buffer]", "[]"),
        ret_type=one("ir.TupleType"),
        body=STATEMENTS,
    ),
}


def is_word(value: Any) -> bool:
    """Whether a value is a name, or a short text like one."""
    return isinstance(value, str) and WORD.fullmatch(value) is not None


_LITERALS = {
    "None": lambda value: value is None,
    "bool": lambda value: isinstance(value, bool),
    "int": whole(INT64),
    "float": lambda value: isinstance(value, float | int),
    "ffi.String": is_word,
    "ir.SourceName": is_word,
    "ir.Op": lambda value: isinstance(value, str) and value in FUNCTIONS,
}


def check(text: str) -> None:
    """Raises GrammarError where TVM's JSON of a workload holds more than one kernel of this grammar."""
    graph = parse(text, GRAMMAR, {"ir.IRModule"})
    for index, label in graph.labels.items():
        if label == "tirx.BufferType" and graph.value(graph.value(index)["storage_scope"]) not in ("", "global"):
            raise GrammarError(f"node {index}: a buffer that is not in plain memory")
        if label == "tirx.IterVar" and graph.value(graph.value(index)["thread_tag"]) != "":
            raise GrammarError(f"node {index}: an axis that is bound to a thread")
    inlining.check(graph, EXPRESSIONS)


def _label(graph: Graph, data: dict[str, Any]) -> str:
    return "buffer" if graph.labels[data["ty"]] == "tirx.BufferType" else "variable"


def _mapping(graph: Graph, named: list[int]) -> str:
    """The label of a map, whose names and values take turns."""
    if not named:
        return "{}"
    names, values = named[::2], named[1::2]
    if len(names) != len(values):
        raise GrammarError("a map with a name that has no value")
    labels = {graph.labels[index] for index in names}, {graph.labels[index] for index in values}
    if labels == ({"ir.GlobalVar"}, {"tirx.PrimFunc"}) and len(names) == 1:
        return "{functions}"
    if labels == ({"ffi.String"}, {"ir.GlobalVar"}) and len(names) == 1:
        return "{names}"
    if labels[0] != {"ffi.String"} or not labels[1] <= _VALUES:
        raise GrammarError(f"a map of {', '.join(sorted(labels[0] | labels[1]))}")
    found = {graph.value(index) for index in names}
    for label, known in (("{attributes}", ATTRIBUTES), ("{annotations}", ANNOTATIONS)):
        if found <= known:
            return label
    raise GrammarError(f"`{min(found - ATTRIBUTES - ANNOTATIONS, default='?')[:60]}` is no annotation of a workload")


_VALUES = frozenset(
    {"bool", "int", "float", "ffi.String", "ir.IntImm", "[]", "[int]", "[expression]", "[ffi.String]", "[buffer]"}
)
ELEMENTS: Mapping[str, str] = {
    **dict.fromkeys(EXPRESSIONS, "expression"),
    "variable": "variable",
    **dict.fromkeys(STATEMENTS, "statement"),
}
GRAMMAR = Grammar(_FIELDS, _LITERALS, LEAVES, ELEMENTS, _mapping, "ir.Var", _label, LIMITS)
