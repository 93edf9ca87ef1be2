"""The grammar of records: what schedules need is in it, and what could run, lie or explode is not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from database_records import WORKLOAD, parts_of, record_of, tvmflow_db

from tvmflow.database import Record, Store, pack, unpack
from tvmflow.database.files import LineError
from tvmflow.database.grammar import GrammarError, Where, check_trace, check_workload
from tvmflow.database.merge import merge
from tvmflow.database.record import RECORDS, examine, to_line
from tvmflow.errors import DatabaseError
from tvmflow.frozen import evolve

CPU, GPU, TF32 = Where("llvm", "x86_64", False), Where("cuda", "x86_64", False), Where("cuda", "x86_64", True)
BLOCK = ["GetSBlock", [], ["b1", "main"], ["b0"]]
LOOPS = ["GetLoops", ["b0"], [], ["l1", "l2"]]
CACHE = ["CacheRead", ["b0", []], [0, "global"], ["b3"]]
I64 = {"type": "ir.PrimType", "data": {"span": 0, "dtype": "int64"}}


def node(kind: str, **data: object) -> dict[str, object]:
    return {"type": kind, "data": data}


def graph(*nodes: dict[str, object]) -> str:
    return json.dumps({"root_index": len(nodes) - 1, "nodes": nodes, "metadata": {"tvm_version": "0.27.0"}})


def index_map(*middle: dict[str, object], inverse: int = 0, name: str = "i") -> str:
    """A map of one variable, node 3, to the last of the expressions in `middle`, which begin at node 4."""
    start = ({"type": "None"}, I64, {"type": "ffi.String", "data": name}, node("ir.Var", span=0, ty=1, name=2))
    last = 3 + len(middle)
    lists = {"type": "ffi.Array", "data": [3]}, {"type": "ffi.Array", "data": [last]}
    root = node("tirx.IndexMap", initial_indices=last + 1, final_indices=last + 2, inverse_index_map=inverse)
    return graph(*start, *middle, *lists, root)


def transformed(text: object, injective: int = 0) -> list[Any]:
    return [BLOCK, CACHE, ["TransformLayout", ["b3", text], [0, 0, None, injective], []]]


def doubled(times: int) -> list[dict[str, object]]:
    """i + i, of that the sum with itself, and so on: a node for each step, twice as many in each when unfolded."""
    return [node("prim.Add", span=0, ty=1, a=3 + step, b=3 + step) for step in range(times)]


CALL = [
    {"type": "ir.Op", "data": "tirx.call_extern"},
    {"type": "ffi.Array", "data": []},
    node("ir.Call", span=0, ty=1, op=4, args=5, attrs=0, ty_args=5),
]
LOOP_NOTE = "is no note that a record may make there"
BAD_TRACES: dict[str, tuple[Where, list[Any], str]] = {
    "code": (CPU, [BLOCK, LOOPS, ["Annotate", ["l1", '"module asm"'], ["pragma_import_llvm"], []]], LOOP_NOTE),
    "C": (GPU, [BLOCK, LOOPS, ["Annotate", ["l1", '"x"'], ["pragma_import_c"], []]], LOOP_NOTE),
    "left out": (CPU, [BLOCK, LOOPS, ["Annotate", ["l1", 1], ["pragma_debug_skip_region"], []]], LOOP_NOTE),
    "on a block": (CPU, [BLOCK, ["Annotate", ["b0", 16], ["pragma_auto_unroll_max_step"], []]], LOOP_NOTE),
    "all unrolled": (
        CPU,
        [BLOCK, LOOPS, ["Annotate", ["l1", 2**31 - 1], ["pragma_auto_unroll_max_step"], []]],
        "`pragma_auto_unroll_max_step` is `2147483647`",
    ),
    "text for a number": (
        CPU,
        [BLOCK, LOOPS, ["Annotate", ["l1", '"16"'], ["pragma_auto_unroll_max_step"], []]],
        "which has no place there",
    ),
    "narrow": (CPU, [BLOCK, ["UnsafeSetDType", ["b0"], [0, "float16"], []]], "no instruction that a record may hold"),
    "hidden": (CPU, [BLOCK, ["UnsafeHideBufferAccess", ["b0"], ["read", [0]], []]], "no instruction that a record"),
    "unknown": (CPU, [["Nonsense", [], [], []]], "instruction 0 (Nonsense): no instruction"),
    "long rows on a CPU": (CPU, [BLOCK, ["StorageAlign", ["b0"], [0, 0, 2**30, 0], []]], "that a record for llvm may"),
    "long rows": (GPU, [BLOCK, ["StorageAlign", ["b0"], [0, 0, 2**30, 0], []]], "attribute 2: `1073741824`"),
    "threads": (CPU, [BLOCK, LOOPS, ["Bind", ["l1"], ["threadIdx.x"], []]], "no instruction that a record for llvm"),
    "no thread": (GPU, [BLOCK, LOOPS, ["Bind", ["l1"], ["clusterIdx.x"], []]], "attribute 0: `clusterIdx.x`"),
    "tensor cores": (GPU, [BLOCK, ["CacheRead", ["b0", []], [0, "wmma.matrix_a"], ["b3"]]], "attribute 1: `wmma"),
    "an intrinsic": (GPU, [BLOCK, ["Tensorize", ["b0"], ["tf32_clear", 1], []]], "attribute 0: `tf32_clear`"),
    "an intrinsic elsewhere": (CPU, [BLOCK, ["Tensorize", ["b0"], ["dot_4x4_i8i8s32_sdot", 1], []]], "attribute 0"),
    "no predicate": (CPU, [BLOCK, LOOPS, ["Split", ["l1", "None", 4], [1, 1], ["l3", "l4"]]], "attribute 1: `1`"),
    "huge factor": (CPU, [BLOCK, LOOPS, ["Split", ["l1", "None", 1 << 40], [1, 0], ["l3", "l4"]]], "input 2"),
    "outputs": (CPU, [BLOCK, LOOPS, ["Split", ["l1", "None", 4], [1, 0], ["l3"]]], "1 outputs"),
    "a name twice": (CPU, [BLOCK, BLOCK], "output `b0`: no new name"),
    "a name of another kind": (CPU, [["GetSBlock", [], ["b1", "main"], ["l0"]]], "output `l0`: no new name"),
    "not made yet": (CPU, [["ComputeInline", ["b7"], [], []]], "input 0: `b7`"),
    "another function": (CPU, [["GetSBlock", [], ["b1", "other"], ["b0"]]], "attribute 1: `other`"),
    "padding value": (CPU, [BLOCK, CACHE, ["TransformLayout", ["b3", index_map()], [0, 0, "", 0], []]], "attribute 2"),
    "taken on trust": (CPU, transformed(index_map(), 1), "attribute 3: `1`"),
    "a function in a map": (CPU, transformed(index_map(*CALL)), "ir.Op has no place here"),
    "another's variable": (
        CPU,
        transformed(index_map({"type": "ffi.String", "data": "j"}, node("ir.Var", span=0, ty=1, name=4))),
        "not its own",
    ),
    "a value's name": (CPU, transformed(index_map(name="b3")), "is called b3, as a value of the trace"),
    "explodes": (CPU, transformed(index_map(*doubled(60))), "when it is unfolded"),
    "deep": (CPU, transformed(index_map(*(node("prim.Cast", span=0, ty=1, value=3 + i) for i in range(70)))), "deep"),
    "itself": (CPU, transformed(index_map(node("prim.Cast", span=0, ty=1, value=4))), "names no earlier node"),
    "later": (CPU, transformed(index_map(node("prim.Cast", span=0, ty=1, value=5), I64)), "names no earlier node"),
    "a float map": (CPU, transformed(index_map(node("ir.PrimType", span=0, dtype="float16"))), "float16 has no"),
    "no map": (CPU, transformed('{"root_index": 0, "nodes": [{"type": "None"}]}'), "its root is no tirx.IndexMap"),
    "more": (CPU, transformed(index_map().replace('"metadata"', '"__import__"')), "no list of nodes"),
    "too long": (CPU, [BLOCK, *([LOOPS] * 1000)], "1001 instructions, more than 1000"),
    "too many copies": (
        CPU,
        [BLOCK, *(["CacheRead", ["b0", []], [0, "global"], [f"b{i}"]] for i in range(1, 102))],
        "more than 100 blocks are added",
    ),
}


@pytest.mark.parametrize("name", BAD_TRACES)
def test_traces_outside_the_grammar(name: str) -> None:
    where, trace, what = BAD_TRACES[name]
    with pytest.raises(GrammarError, match=re.escape(what)):
        check_trace([trace, []], where)


@pytest.mark.parametrize(
    "decisions",
    [
        [[9, 1]],
        [[-1, 1]],
        [[2, 7]],
        [[2, 0], [2, 0]],
        [[2, True]],
        [[True, 0]],
        [2, 0],
        [[2, None]],
        [],
        [[0, 1], [2, 0]],
    ],
)
def test_decisions_outside_the_grammar(decisions: list[Any]) -> None:
    trace = [BLOCK, LOOPS, ["SampleCategorical", [], [[0, 16], [0.5, 0.5]], ["v3"]]]
    check_trace([trace, [[2, 1]]], CPU)
    with pytest.raises(GrammarError):
        check_trace([trace, decisions], CPU)


def test_what_tensor_cores_need_is_for_tf32_alone() -> None:
    trace = [
        [
            BLOCK,
            ["CacheRead", ["b0", []], [0, "wmma.matrix_a"], ["b3"]],
            ["Tensorize", ["b0"], ["tf32_clear", 1], []],
            ["TransformLayout", ["b3", index_map()], [0, 1, None, 1], []],
        ],
        [],
    ]
    check_trace(trace, TF32)
    for where in (CPU, GPU):
        with pytest.raises(GrammarError):
            check_trace(trace, where)


def changed(text: str, node_kind: str, **fields: object) -> str:
    body = json.loads(text)
    next(one for one in body["nodes"] if one["type"] == node_kind)["data"].update(fields)
    return json.dumps(body)


def inserted(text: str, *nodes: dict[str, object]) -> str:
    """A workload with more nodes at its beginning, all references moved along. They name no others but themselves."""
    body = json.loads(text)
    body["nodes"] = [*nodes, *body["nodes"]]
    body["root_index"] += len(nodes)
    return json.dumps(body)


def test_workloads_outside_the_grammar() -> None:
    text = unpack(WORKLOAD)
    check_workload(text)
    for wrong, what in {
        text.replace('"tirx.noalias"', '"pragma_import_llvm"'): "`pragma_import_llvm` is no annotation",
        text.replace('"global"', '"wmma.matrix_a"'): "a buffer that is not in plain memory",
        text.replace('"float32"', '"handle"'): "ir.PrimType.dtype: handle has no place here",
        text.replace('"prim.Add"', '"prim.Nonsense"'): "prim.Nonsense has no place here",
        text.replace('"root"', json.dumps("__import__('os')")): "has no place here",
        changed(text, "tirx.For", kind=4): "tirx.For.kind: 4 has no place here",
        changed(text, "prim.Add", a=10**6): "prim.Add.a: names no earlier node",
        changed(text, "prim.Add", more=1): "prim.Add has other fields",
        json.dumps({"root_index": 0, "nodes": [[]]}): "node 0: not a type and data",
        json.dumps({"root_index": 0, "nodes": []}): "0 nodes",
        json.dumps(json.loads(text) | {"metadata": {"b64ndarrays": []}}): "metadata beside TVM",
        "[" * 10_000: "no JSON",
        graph({"type": "None"}, *({"type": "ffi.Array", "data": [step, step]} for step in range(60))): "unfolded",
        graph({"type": "None"}, *({"type": "ffi.Array", "data": [step]} for step in range(600))): "deep",
        inserted(text, {"type": "node.Function", "data": "system"}): "node.Function has no place here",
    }.items():
        with pytest.raises(GrammarError, match=re.escape(what)):
            check_workload(wrong)


def hostile(workload: int) -> Record:
    """A record whose trace is fine, and its workload is not."""
    return evolve(record_of(workload, 1e-9), workload_json=pack('{"nodes": []}'))


def test_committed_records_are_of_the_grammar() -> None:
    reading = Store(Path(__file__).parents[2] / "tuning_db").read()
    assert (len(reading.records), reading.faults) == (774, ())
    for record in reading.records[::25]:
        examine(record)


def test_a_merge_by_git_leaves_foreign_workloads_in_conflict() -> None:
    base = f"{to_line(record_of(0))}\n".encode()
    bad = to_line(hostile(1))
    theirs = base + f"{bad}\n{to_line(record_of(2))}\n".encode()
    merged = merge(base, base, theirs, RECORDS)
    text = merged.text.decode()
    good, _, conflict = text.partition("<<<<<<< ours\n")
    assert good == "".join(
        f"{line}\n"
        for line in sorted((to_line(record_of(0)), to_line(record_of(2))), key=lambda line: json.loads(line)["key"])
    )
    assert conflict == f"=======\n{bad}\n>>>>>>> theirs\n"
    assert [fault.what for fault in merged.faults] == ["no record: its workload: 0 nodes, not 1 to 200000"]


def test_foreign_records_are_named_and_the_others_merged(tmp_path: Path) -> None:
    source = Store(tmp_path / "source")
    source.add([record_of(0), hostile(1)])
    (path,) = source.path.glob("*/records.jsonl")
    trace = [[BLOCK, LOOPS, ["Annotate", ["l1", '"x"'], ["pragma_import_llvm"], []]], []]
    path.write_text(path.read_text() + to_line(evolve(record_of(2), trace=trace)) + "\n")
    with pytest.raises(DatabaseError, match="cost records: 2"):
        tvmflow_db("merge", "--no-replay", tmp_path / "into", source.path)
    assert Store(tmp_path / "into").read().records == (record_of(0),)
    found = {fault.key: str(fault) for fault in source.verify()}
    assert "records.jsonl:3" in found[record_of(2).key]
    assert "instruction 2 (Annotate): `pragma_import_llvm`" in found[record_of(2).key]
    assert "its workload: 0 nodes" in found[hostile(1).key]
    assert record_of(0).key not in found


def test_a_record_outside_the_grammar_is_not_written(tmp_path: Path) -> None:
    wrong = evolve(record_of(0), trace=[[["Nonsense", [], [], []]], []])
    with pytest.raises(DatabaseError, match="instruction 0 \\(Nonsense\\)"):
        Store(tmp_path).add([wrong])
    with pytest.raises(LineError, match="0 nodes"):
        examine(hostile(0))
    assert Where.of(parts_of()) == CPU
