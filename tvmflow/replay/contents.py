"""What a schedule made of a kernel, against what the kernel was: whatever its trace says, it is the same computation.

This looks at the scheduled kernel alone, so that it holds also where the grammar of traces or TVM's own checks do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import tvm_ffi
from tvm.ir import Call, StringImm, TensorLoad
from tvm.s_tir import SBlock, SBlockRealize, TensorIntrin
from tvm.tirx import (
    AllocBuffer,
    AttrStmt,
    BufferStore,
    BufferType,
    Cast,
    For,
    IfThenElse,
    IntImm,
    PrimFunc,
    SeqStmt,
    Stmt,
    Var,
)

from tvmflow.database.grammar.annotations import THREADS, Check, Where, of_blocks, of_loops
from tvmflow.kernels.schedules import repacking
from tvmflow.replay import size


class ContentError(ValueError):
    """What a scheduled kernel holds that it must not."""


# What schedules bring into a kernel where tiles do not divide its loops, or pad it.
CALLS = frozenset({("prim.if_then_else",), ("prim.likely",)})
INDEX_CASTS = frozenset({("int32", "int64"), ("int64", "int32")})
STATEMENTS = frozenset({For, SeqStmt, IfThenElse, BufferStore, SBlockRealize, SBlock})
ALIGNMENT = "buffer_dim_align"  # TVM's note of StorageAlign, whose values the grammar bounds
NAMED_BY_NUMBER = ("tirx.call_llvm_intrin", "tirx.call_llvm_pure_intrin")


@dataclass
class Contents:
    """What there is in a kernel, each thing once."""

    calls: set[tuple[str, ...]] = field(default_factory=set)
    """The name of the operator, and of what it calls by name or number."""
    casts: set[tuple[str, str]] = field(default_factory=set)
    types: set[str] = field(default_factory=set)
    """Of buffers."""
    scopes: set[str] = field(default_factory=set)
    statements: set[type] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    """Keys of the statements that set an attribute for a part of the kernel."""
    threads: set[str] = field(default_factory=set)
    loop_notes: dict[str, list[Any]] = field(default_factory=dict)
    block_notes: dict[str, list[Any]] = field(default_factory=dict)


def check(before: PrimFunc, after: PrimFunc, where: Where) -> None:
    """Raises ContentError where a kernel became something else than a schedule of itself, or SizeError too large a one.

    It may call what it called before, or what the tensor intrinsics of its target do; the same holds for types, casts,
    memory and statements. Notes must be those that it had or those of the grammar.
    """
    was, now = _of(before), _of(after)
    for intrinsic in sorted(where.intrinsics):
        if (known := TensorIntrin.get(intrinsic, allow_missing=True)) is not None:
            _gather(known.impl, was)
    _subset("calls", now.calls, was.calls | CALLS)
    _subset("converts", now.casts, was.casts | INDEX_CASTS)
    _subset("keeps numbers as", now.types, was.types)
    _subset("uses memory of the kind", now.scopes, was.scopes | where.scopes)
    _subset(
        "has statements of the kind",
        {kind.__name__ for kind in now.statements},
        {kind.__name__ for kind in was.statements | STATEMENTS},
    )
    _subset("sets", now.attributes, was.attributes)
    _subset("is bound to", now.threads, was.threads | (THREADS if where.kind == "cuda" else frozenset()))
    _subset("notes on the function", _keys(after), _keys(before))
    _check_notes(now.loop_notes, was.loop_notes, of_loops(where))
    _check_notes(now.block_notes, was.block_notes, {**of_blocks(where), ALIGNMENT: lambda value: True})
    _check_repacking(after)
    size.check(before, after)


def _of(function: PrimFunc) -> Contents:
    found = Contents()
    for param in function.params:
        _note_buffer(param, found)
    _gather(function, found)
    return found


def _gather(function: PrimFunc, found: Contents) -> None:
    """Adds what the body of a function holds."""

    def visit_statement(statement: Stmt | SBlock) -> None:
        found.statements.add(type(statement))
        if isinstance(statement, For):
            _note_loop(statement, found)
        elif isinstance(statement, SBlock):
            _note_block(statement, found)
        elif isinstance(statement, AttrStmt):
            found.attributes.add(str(statement.attr_key))
        elif isinstance(statement, AllocBuffer):
            _note_buffer(statement.buffer, found)

    tvm_ffi.structural_walk(
        function.body,
        [
            ((Stmt, SBlock), visit_statement),
            (Call, lambda call: found.calls.add(_called(call))),
            (Cast, lambda cast: found.casts.add((str(cast.value.ty.dtype), str(cast.ty.dtype)))),
            (Var, lambda var: _note_buffer(var, found)),
        ],
    )


def _keys(function: PrimFunc) -> set[str]:
    return {str(key) for key in function.attrs.keys()} if function.attrs is not None else set()  # noqa: SIM118


def _note_loop(loop: For, found: Contents) -> None:
    if loop.thread_binding is not None:
        found.threads.add(str(loop.thread_binding.thread_tag))
    _note_all(loop.annotations, found.loop_notes)


def _note_block(block: SBlock, found: Contents) -> None:
    _note_all(block.annotations, found.block_notes)
    for buffer in (*block.alloc_buffers, *(match.buffer for match in block.match_buffers)):
        _note_buffer(buffer, found)


def _note_buffer(var: Var, found: Contents) -> None:
    if isinstance(var.ty, BufferType):
        found.types.add(str(var.ty.dtype))
        found.scopes.add(str(var.ty.storage_scope))


def _note_all(notes: Mapping[str, Any] | None, found: dict[str, list[Any]]) -> None:
    for key, value in (notes or {}).items():
        found.setdefault(str(key), []).append(value)


def _called(call: Call) -> tuple[str, ...]:
    """The name of what is called, with every name or code that it is given."""
    name = str(getattr(call.op, "name", call.op))
    given = [str(argument.value) for argument in call.args if isinstance(argument, StringImm)]
    if name in NAMED_BY_NUMBER:
        given.append(str(call.args[0]))
    return (name, *given)


def _subset(what: str, now: Iterable[Any], allowed: Iterable[Any]) -> None:
    if extra := set(now) - set(allowed):
        first = min(extra)
        shown = " ".join(first)[:100] if isinstance(first, tuple) else first
        raise ContentError(f"it {what} {shown}, which the kernel did not")


def _check_notes(now: Mapping[str, list[Any]], was: Mapping[str, list[Any]], known: Mapping[str, Check]) -> None:
    """Raises ContentError for a note that neither was there nor is one of `known` with a value that fits."""
    for key, values in now.items():
        for value in values:
            if any(tvm_ffi.structural_equal(value, old) for old in was.get(key, ())):
                continue
            if key not in known or not known[key](_plain(value)):
                raise ContentError(f"it notes {key[:60]} = {str(value)[:60]}")


def _plain(value: Any) -> Any:
    if isinstance(value, IntImm):
        return int(value)
    return [_plain(item) for item in value] if isinstance(value, tvm_ffi.Array) else value


def _check_repacking(function: PrimFunc) -> None:
    """Raises ContentError where something else than a copy of a weight is put before the kernel proper."""
    weights = [function.params[int(index)] for index in (function.attrs or {}).get("layout_free_buffers", ())]
    for block in repacking.blocks(function):
        body = block.body
        copies = isinstance(body, BufferStore) and isinstance(body.value, TensorLoad)
        if not copies or not any(body.value.source.same_as(weight) for weight in weights):
            raise ContentError("it repacks something that is no weight")
