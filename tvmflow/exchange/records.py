"""One tuning record and TVM: replayed, in MetaSchedule's own words, or made of those. TVM may die of any of it."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import tvm
from tvm.ir import assert_structural_equal
from tvm.s_tir import Schedule
from tvm.s_tir.analysis import estimate_tir_flops
from tvm.s_tir.meta_schedule.arg_info import ArgInfo
from tvm.s_tir.meta_schedule.database import Workload
from tvm.s_tir.schedule import SBlockRV
from tvm.target import Target as TvmTarget
from tvm.target import codegen
from tvm.tirx import PrimFunc

from tvmflow import target as targets
from tvmflow import tasks
from tvmflow.codegen import numerics
from tvmflow.config import NumericsSection, TargetSection
from tvmflow.database import Record, pack
from tvmflow.database.files import shown
from tvmflow.database.grammar import Where, check_trace, check_workload
from tvmflow.database.metaschedule import Stated, check_plain
from tvmflow.database.record import MAX_WORKLOAD_BYTES
from tvmflow.errors import last_line
from tvmflow.frozen import evolve
from tvmflow.host import CPU_FEATURES
from tvmflow.replay import apply, load_workload, replay

QUERIES = ("Get", "Sample", "Enter")  # beginnings of the kinds of instructions that leave the module as it is


def check(record: Record) -> None:
    """Raises ValueError where a record's workload is not that of its key, or its trace cannot be used on it."""
    replay(_workload(record), record.trace, Where.of(record.parts))


def exported(record: Record) -> tuple[list[str], list[object]]:
    """A record as MetaSchedule writes it: the values of its workload's line and of its own. Raises like `check`."""
    mod = _workload(record)
    replay(mod, record.trace, Where.of(record.parts))
    arguments = [info.as_json() for info in ArgInfo.from_prim_func(mod["main"])]
    target = json.loads(str(_tvm_target(record)))
    return Workload(mod).as_json(), [record.trace, list(record.timings_s), target, arguments]


def imported(workload: str, text: str, stated: Stated, trials: int) -> Record:
    """The record of two lines of MetaSchedule's files; raises ValueError, TargetError where there is none.

    The workload gets canonical names, the trace those of its blocks; what both traces make must be the same.
    """
    theirs = _loaded(_decoded(workload))
    _, (trace, seconds, target_json, _) = json.loads(text)
    section = NumericsSection.model_validate(stated.numerics)
    target = _target(target_json, stated, section)
    where = Where(target.kind, target.machine, section.tf32)
    check_trace(_on_main(trace), where)
    (name,) = (var.name_hint for var in theirs.functions)
    function = theirs[name]
    check_plain(_bare(function).script(show_meta=False))
    if not tasks.is_tunable(function):
        raise ValueError("its workload is no kernel that could be tuned: shapes are open, or it calls the run time")
    ours, workload_hash = tasks.canonical(function)
    renamed = reexpressed(trace, (theirs, name), ours, where)
    check_workload(tvm.ir.save_json(ours))
    return Record(
        parts=tasks.key_parts(workload_hash, target, section),
        name=_described(theirs, name),
        workload_json=pack(tvm.ir.save_json(ours)),
        trace=renamed,
        timings_s=tuple(seconds),
        flop=float(estimate_tir_flops(ours)),
        provenance=evolve(stated.provenance, threads=target.threads, trials=trials),
    )


def reexpressed(trace: Any, function: tuple[tvm.IRModule, str], ours: tvm.IRModule, where: Where) -> list[Any]:
    """The trace on `ours`, which is `function`, by module and name, under other names, that does what `trace` does.

    A block is what stands at the same place after the same instructions; TVM makes names of new blocks from those of
    buffers, so that no table of names would do. Raises ValueError where both results are not structurally equal.
    """
    theirs, name = function
    wanted = apply(theirs, trace, where)
    instructions, decisions = trace
    renamed: list[Any] = []
    known: tuple[list[str], list[str]] | None = None
    for index, (kind, inputs, attributes, outputs) in enumerate(instructions):
        if kind == "GetSBlock":
            if known is None:
                so_far = [step for step in decisions if step[0] < index]
                known = (
                    _blocks(apply(theirs, [instructions[:index], so_far], where), name),
                    _blocks(apply(ours, [renamed, so_far], where), "main"),
                )
            attributes = [_counterpart(str(attributes[0]), *known), "main"]
        elif not str(kind).startswith(QUERIES):
            known = None
        renamed.append([kind, inputs, attributes, outputs])
    result = [renamed, decisions]
    got = _bare(replay(ours, result, where).mod["main"])
    try:
        assert_structural_equal(got, _bare(wanted.mod[name]), map_free_vars=True)
    except ValueError:
        raise ValueError("its trace does something else on the workload under canonical names") from None
    return result


def _workload(record: Record) -> tvm.IRModule:
    """The record's workload. Its hash is that of its text as it is printed: nothing is parsed, which could run code."""
    mod = load_workload(record)
    found = hashlib.sha256(mod["main"].without_attr("global_symbol").script(show_meta=False).encode()).hexdigest()
    if found != record.parts.workload:
        raise ValueError(f"its workload hashes to {found[:12]}, its key says {record.parts.workload[:12]}")
    return mod


def _loaded(text: str) -> tvm.IRModule:
    check_workload(text)
    try:
        mod = tvm.ir.load_json(text)
    except Exception as exc:  # TVM raises many kinds for a text that is no module
        raise ValueError(f"its workload does not load: {_reason(exc)}") from None
    if not isinstance(mod, tvm.IRModule) or [type(f) for f in mod.functions.values()] != [PrimFunc]:
        raise ValueError("its workload is no module of one kernel")
    return mod


def _blocks(schedule: Schedule, function: str) -> list[str]:
    """The names of a function's blocks, outer before inner."""

    def inside(block: SBlockRV) -> Iterator[str]:
        yield str(schedule.get(block).name_hint)
        for child in schedule.get_child_blocks(block):
            yield from inside(child)

    root = schedule.mod[function].body.block.name_hint
    return list(inside(schedule.get_sblock(root, function)))


def _counterpart(block: str, theirs: list[str], ours: list[str]) -> str:
    if theirs.count(block) != 1 or len(theirs) != len(ours):
        raise ValueError(f"its trace names the block {block}, of which there are {theirs.count(block)}")
    name = ours[theirs.index(block)]
    if ours.count(name) != 1:
        raise ValueError(f"its block {block} has no name of its own under canonical names")
    return name


def _target(stated_by_record: Mapping[str, Any], stated: Stated, section: NumericsSection) -> targets.Target:
    """The record's target; what it leaves open comes from `stated`. Raises ValueError where they contradict."""
    record = stated_by_record
    if "kind" not in record:  # a tag alone; TVM must not see others, because it fills them with this machine's values
        record = json.loads(str(TvmTarget(record)))
    kind = record["kind"]
    if kind not in ("llvm", "cuda"):
        raise ValueError(f"its target is {shown(str(kind))}, not llvm or cuda")
    cpu = record if kind == "llvm" else record.get("host") or {}
    mcpu = _settled("mcpu", cpu.get("mcpu"), stated.mcpu)
    mtriple = _settled("mtriple", cpu.get("mtriple"), stated.mtriple)
    threads = _settled("threads", cpu.get("num-cores"), stated.threads)
    for name, value in numerics.llvm_attributes(section).items():
        if name in cpu and bool(cpu[name]) != value:
            raise ValueError(f"its target says {name} = {cpu[name]}, which is not the numerics that were stated")
    target = targets.resolve(
        TargetSection(kind=kind, mcpu=mcpu, mtriple=mtriple, threads=threads, arch=record.get("arch"))
    )
    mattr = tuple(map(str, cpu.get("mattr", ())))
    used = codegen.llvm_get_cpu_features(
        TvmTarget({"kind": "llvm", "mcpu": mcpu, "mtriple": mtriple, "mattr": list(mattr)})
    )
    known = CPU_FEATURES.get(target.machine, {})
    return replace(target, mattr=mattr, features=tuple(sorted({str(name) for name in used} & known.keys())))


def _settled(what: str, by_record: Any, stated: Any) -> Any:
    if by_record is None and stated is None:
        raise ValueError(f"its target does not say {what}: state it with --{what}")
    if by_record is not None and stated is not None and by_record != stated:
        raise ValueError(f"its target says {what} = {shown(str(by_record))}, not {stated}")
    return stated if by_record is None else by_record


def _tvm_target(record: Record) -> TvmTarget:
    parts = record.parts.target
    section = NumericsSection.model_validate(record.parts.numerics)
    mtriple = f"{parts.get('machine')}-linux-gnu"
    target = targets.resolve(
        TargetSection.model_validate(
            {
                "kind": parts["kind"],
                "mcpu": parts["mcpu"],
                "mtriple": mtriple,
                "threads": parts["threads"],
                "arch": parts.get("arch"),
            }
        )
    )
    unused = tuple(f"-{name}" for name in target.features if name not in record.parts.features)
    return targets.to_tvm(replace(target, mattr=unused), numerics.llvm_attributes(section))


def _on_main(trace: Any) -> Any:
    """A trace as of the function `main`, whatever TVM's own files call it."""
    if not isinstance(trace, list) or len(trace) != 2 or not isinstance(trace[0], list):
        return trace
    found = [
        [kind, inputs, [attributes[0], "main"], outputs]
        if kind == "GetSBlock" and len(attributes) == 2
        else [kind, inputs, attributes, outputs]
        for kind, inputs, attributes, outputs in trace[0]
    ]
    return [found, trace[1]]


def _decoded(text: str) -> str:
    """The JSON behind MetaSchedule's base64, which begins with its length in 8 bytes."""
    body = base64.b64decode(text, validate=True)
    if len(body) < 8 or len(body) - 8 > MAX_WORKLOAD_BYTES or struct.unpack("<Q", body[:8])[0] != len(body) - 8:
        raise ValueError("its workload is damaged: its length is not what it says")
    return body[8:].decode()


def _bare(function: PrimFunc) -> PrimFunc:
    for attr in tasks.NAME_ATTRS:
        function = function.without_attr(attr)
    return function


def _described(mod: tvm.IRModule, name: str) -> str:
    """For people: the kernel's name where it has one, else those of its blocks."""
    blocks = _blocks(Schedule(mod, debug_mask="none"), name)[1:]
    return shown("_".join(blocks) if name == "main" else name)[:100]


def _reason(exc: Exception) -> str:
    return shown(last_line(exc))[:200]
