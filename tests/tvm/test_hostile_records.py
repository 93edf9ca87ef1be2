"""Records that try to do more than schedule: refused by every command that meets them, and nothing of them runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper
from tvm import te
from tvm.s_tir import Schedule
from tvm.tirx import PrimFunc

import tvmflow
from tvmflow import config, frontend, replay, tasks
from tvmflow.cli import cli
from tvmflow.codegen import tuned
from tvmflow.config import Config
from tvmflow.database import Provenance, Record, Store, pack
from tvmflow.database.grammar import Where
from tvmflow.database.record import to_line
from tvmflow.database.store import folder_name
from tvmflow.exchange import conversion
from tvmflow.frozen import evolve
from tvmflow.pipeline.prepare import prepare, setting
from tvmflow.replay import ReplayError, contents, layouts
from tvmflow.tuning import search, space
from tvmflow.tuning.transfer import Experience

PROVENANCE = Provenance(
    versions={"apache-tvm": "0.27.0"},
    machine="x86_64",
    cpu="c",
    threads=1,
    trials=1,
    protocol="p",
    date="2026-01-01T00:00:00Z",
    seed=0,
    tvmflow="0.1.0",
)
BLOCK = ["GetSBlock", [], ["b1", "main"], ["b0"]]
LOOPS = ["GetLoops", ["b0"], [], ["l1", "l2", "l3"]]
CACHE = ["CacheRead", ["b0", []], [0, "global"], ["b9"]]
CPU = Where("llvm", "x86_64", False)


def assembly(command: str) -> str:
    """LLVM IR whose module-level assembly runs a command when a library that holds it is opened."""
    lines = [
        ".text",
        "payload: subq $8, %rsp",
        "leaq command(%rip), %rdi",
        "call system@PLT",
        "addq $8, %rsp",
        "ret",
        ".section .rodata",
        f"command: .asciz \\22{command}\\22",
        ".section .init_array,\\22aw\\22",
        ".quad payload",
    ]
    return "".join(f'module asm "{line}"\n' for line in [*lines, ".text"])


def index_map(first: str) -> str:
    """A map of (i, j) whose first index is i plus something that is never seen: a call, or a sum shared 60 times."""
    nodes: list[dict[str, Any]] = [
        {"type": "None"},
        {"type": "ir.PrimType", "data": {"span": 0, "dtype": "int64"}},
        {"type": "ffi.String", "data": "i"},
        {"type": "ir.Var", "data": {"span": 0, "ty": 1, "name": 2}},
        {"type": "ffi.String", "data": "j"},
        {"type": "ir.Var", "data": {"span": 0, "ty": 1, "name": 4}},
    ]
    if first == "call":
        nodes += [
            {"type": "ir.Op", "data": "tirx.call_extern"},
            {"type": "ffi.Array", "data": []},
            {"type": "ir.Call", "data": {"span": 0, "ty": 1, "op": 6, "args": 7, "attrs": 0, "ty_args": 7}},
        ]
    else:
        for _ in range(60):
            a = 3 if len(nodes) == 6 else len(nodes) - 1
            nodes.append({"type": "prim.Add", "data": {"span": 0, "ty": 1, "a": a, "b": a}})
    last = len(nodes) - 1
    nodes += [
        {"type": "ffi.Array", "data": [3, 5]},
        {"type": "ffi.Array", "data": [last, 5]},
        {
            "type": "tirx.IndexMap",
            "data": {"initial_indices": last + 1, "final_indices": last + 2, "inverse_index_map": 0},
        },
    ]
    return json.dumps({"root_index": len(nodes) - 1, "nodes": nodes})


def variants(ran: Path) -> dict[str, tuple[list[Any], str]]:
    """Traces by what they try, and what is said of them."""
    code = assembly(f"touch {ran}")
    second = [["GetSBlock", [], ["b2", "main"], ["b5"]], ["GetLoops", ["b5"], [], ["l6", "l7"]]]
    return {
        "links code": (
            [BLOCK, LOOPS, ["Annotate", ["l1", f'"{code}"'], ["pragma_import_llvm"], []]],
            "instruction 2 (Annotate): `pragma_import_llvm`",
        ),
        "leaves a part out": (
            [BLOCK, LOOPS, ["Annotate", ["l1", 1], ["pragma_debug_skip_region"], []]],
            "`pragma_debug_skip_region`",
        ),
        "computes in half": ([BLOCK, ["UnsafeSetDType", ["b0"], [0, "float16"], []]], "(UnsafeSetDType): no instr"),
        "reads halves": ([BLOCK, CACHE, ["UnsafeSetDType", ["b9"], [0, "float16"], []]], "instruction 2 (Unsafe"),
        "calls in an index": (
            [BLOCK, CACHE, ["TransformLayout", ["b9", index_map("call")], [0, 1, None, 0], []]],
            "ir.Op has no place here",
        ),
        "unrolls all": ([BLOCK, LOOPS, *(["Unroll", [loop], [], []] for loop in LOOPS[3])], "statements, unrolled"),
        "has it unrolled": (
            [BLOCK, LOOPS, ["Annotate", ["l1", 2**31 - 1], ["pragma_auto_unroll_max_step"], []]],
            "`pragma_auto_unroll_max_step` is `2147483647`",
        ),
        "one vector": (
            [BLOCK, *second, ["Fuse", ["l6", "l7"], [1], ["l8"]], ["Vectorize", ["l8"], [], []]],
            "lanes in a vector, more than 64",
        ),
        "long rows": ([BLOCK, CACHE, ["StorageAlign", ["b9"], [0, 0, 2**30, 0], []]], "(StorageAlign): no instruction"),
        "explodes": (
            [BLOCK, CACHE, ["TransformLayout", ["b9", index_map("shared")], [0, 1, None, 0], []]],
            "nodes when it is unfolded",
        ),
    }


@pytest.fixture(scope="module")
def cfg(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("hostile")
    weight = np.random.default_rng(0).standard_normal((32, 16), np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Relu", ["y"], ["z"])]
    ends = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)]
        for name, shape in (("x", [8, 32]), ("z", [8, 16]))
    ]
    graph = helper.make_graph(nodes, "g", *ends, [numpy_helper.from_array(weight, "w")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), folder / "m.onnx")
    return config.of_model(str(folder / "m.onnx"), [{"target": {"mcpu": "x86-64-v3", "threads": 1}}])


@pytest.fixture(scope="module")
def prepared(cfg: Config) -> Iterator[tuple[tvm.IRModule, tasks.Task]]:
    chosen = setting(cfg)
    with chosen.entered():
        mod, _ = prepare(cfg, frontend.load(cfg))
        (task,) = tasks.extract(mod, {}, chosen.target, cfg.numerics)
        yield mod, task


def record_of(task: tasks.Task, trace: list[Any], number: int = 0) -> Record:
    parts = evolve(task.parts, preparation=task.parts.preparation + number)
    return Record(
        parts=parts,
        name="crafted",
        workload_json=pack(tvm.ir.save_json(task.mod)),
        trace=[trace, []],
        timings_s=(1e-9,),
        flop=task.flop,
        provenance=PROVENANCE,
    )


def written(path: Path, *records: Record) -> Store:
    """A database of records, whatever they hold."""
    folder = path / folder_name(records[0].parts)
    folder.mkdir(parents=True)
    lines = sorted(map(to_line, records), key=lambda line: str(json.loads(line)["key"]))
    (folder / "records.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return Store(path)


@pytest.fixture(scope="module")
def store(prepared: tuple[tvm.IRModule, tasks.Task], tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Path]:
    """All variants under keys of their own, and a good record."""
    folder = tmp_path_factory.mktemp("all")
    _, task = prepared
    bad = [record_of(task, trace, 1 + number) for number, (trace, _) in enumerate(variants(folder / "ran").values())]
    return written(folder / "db", record_of(task, [BLOCK, LOOPS]), *bad), folder / "ran"


def test_verify_names_each(store: tuple[Store, Path], prepared: tuple[tvm.IRModule, tasks.Task]) -> None:
    database, ran = store
    faults = {fault.key: fault for fault in database.verify(conversion.replay)}
    _, task = prepared
    for number, (trace, what) in enumerate(variants(ran).values()):
        assert what in faults[record_of(task, trace, 1 + number).key].what
    assert len(faults) == 10
    assert all(fault.line for fault in faults.values())


def test_merge_takes_the_good_one_alone(store: tuple[Store, Path], tmp_path: Path) -> None:
    database, ran = store
    done = CliRunner().invoke(cli, ["db", "merge", str(tmp_path / "into"), str(database.path)])
    assert getattr(done.exception, "exit_code", None) == 15, done.output
    assert [one.trace for one in Store(tmp_path / "into").read().records] == [[[BLOCK, LOOPS], []]]
    assert done.stderr.count("skipped: ") == 10
    assert not ran.exists()


@pytest.mark.parametrize("name", variants(Path()))
def test_neither_compile_nor_tune_uses_it(
    name: str, cfg: Config, prepared: tuple[tvm.IRModule, tasks.Task], tmp_path: Path
) -> None:
    trace, what = variants(tmp_path / "ran")[name]
    mod, task = prepared
    record = record_of(task, trace)
    reading = written(tmp_path / "db", record).read()
    target = setting(cfg).target
    applied = tuned.apply(mod, reading, target, cfg.numerics, target.features)
    assert any(what in note and record.key[:12] in note for note in applied.notes)
    assert not any(
        "tirx.is_scheduled" in function.attrs
        for function in applied.mod.functions.values()
        if isinstance(function, PrimFunc)
    )
    assert search._replayed(task, record) is None
    context = space.context(task.mod, setting(cfg).tvm_target, "task", 1)
    assert Experience([record]).starts(task.mod, context) == []
    assert not (tmp_path / "ran").exists()


def test_a_library_has_the_default_schedule_and_says_why(
    cfg: Config, prepared: tuple[tvm.IRModule, tasks.Task], tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    trace, what = variants(ran)["links code"]
    database = written(tmp_path / "db", record_of(prepared[1], trace))
    arguments = [
        "compile",
        str(cfg.model.path),
        "--set",
        f"tuning.database={database.path}",
        "--set",
        "target.threads=1",
        "--set",
        "target.mcpu=x86-64-v3",
    ]
    done = CliRunner().invoke(cli, [*arguments, "-o", str(tmp_path / "strict"), "--require-tuned", "0.5"])
    assert getattr(done.exception, "exit_code", None) == 7, done.output
    done = CliRunner().invoke(cli, [*arguments, "-o", str(tmp_path / "made")])
    assert done.exit_code == 0, done.output
    manifest = json.loads((tmp_path / "made" / "manifest.json").read_text())
    assert any(what in note for note in manifest["notes"])
    assert {kernel["origin"] for kernel in manifest["kernels"]} == {"default schedule"}
    assert tvmflow.load(tmp_path / "made") is not None
    assert not ran.exists()


# --- what comes of a trace, whatever it says --------------------------------------------------------------------------


def spoilt(task: tasks.Task, change: Callable[[Schedule, Any], None]) -> Schedule:
    schedule = Schedule(task.mod, debug_mask="none")
    change(schedule, schedule.get_sblock("b1"))
    return schedule


CHANGES: dict[str, tuple[Callable[[Schedule, Any], Any], str]] = {
    "float16": (lambda s, b: s.unsafe_set_dtype(s.cache_read(b, 0, "global"), 0, "float16"), "float16"),
    "shared": (lambda s, b: s.cache_read(b, 0, "shared"), "uses memory of the kind shared"),
    "thread": (lambda s, b: s.bind(s.get_loops(b)[0], "threadIdx.x"), "is bound to threadIdx.x"),
    "note": (lambda s, b: s.annotate(s.get_loops(b)[0], "pragma_import_c", "x"), "it notes pragma_import_c"),
    "block note": (lambda s, b: s.annotate(b, "tirx.unknown", 1), "it notes tirx.unknown = 1"),
    "high step": (lambda s, b: s.annotate(s.get_loops(b)[0], "pragma_auto_unroll_max_step", 4096), "max_step = 4096"),
    "no weight": (lambda s, b: s.annotate(b, "meta_schedule.layout_rewrite_preproc", True), "that is no weight"),
    "runs": (lambda s, b: s.split(s.get_loops(b)[0], [None, 1 << 20]), "runs of statements"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_kernel_that_became_something_else(name: str, prepared: tuple[tvm.IRModule, tasks.Task]) -> None:
    _, task = prepared
    change, what = CHANGES[name]
    contents.check(task.mod["main"], Schedule(task.mod).mod["main"], CPU)
    with pytest.raises(ValueError, match=what):
        contents.check(task.mod["main"], spoilt(task, change).mod["main"], CPU)


def test_a_call_that_was_not_there() -> None:
    a = te.placeholder((8,), name="a")
    plain = te.create_prim_func([a, te.compute((8,), lambda i: a[i], name="b")])
    call = te.compute((8,), lambda i: tvm.tirx.call_pure_extern("float32", "system", a[i]), name="b")
    with pytest.raises(contents.ContentError, match=r"calls tirx\.call_pure_extern system, which the kernel did not"):
        contents.check(plain, te.create_prim_func([a, call]), CPU)


def squared(tensor: te.Tensor) -> Callable[[Any], Any]:
    return lambda i: tensor[i] * tensor[i]


def test_a_workload_that_explodes_when_it_is_inlined() -> None:
    first = one = te.placeholder((8,), name="a")
    for step in range(40):
        one = te.compute((8,), squared(one), name=f"b{step}")
    mod = tvm.IRModule({"main": te.create_prim_func([first, one]).with_attr("global_symbol", "main")})
    assert not tasks.can_be_recorded(mod)


def test_an_inverse_that_is_none(prepared: tuple[tvm.IRModule, tasks.Task]) -> None:
    def schedule(inverse: Callable[..., list[Any]]) -> Schedule:
        made = Schedule(prepared[1].mod, debug_mask="none")
        cached = made.cache_read(made.get_sblock("b1"), 0, "global")
        back = tvm.tirx.IndexMap.from_func(inverse, ndim=2, index_dtype="int64")
        there = tvm.tirx.IndexMap.from_func(lambda i, j: [j, i], ndim=2, inverse_index_map=back, index_dtype="int64")
        made.transform_layout(cached, ("write", 0), there)
        return made

    trace = tasks.trace_json(schedule(lambda a, b: [b, a]))
    replay.replay(prepared[1].mod, trace, CPU)
    layouts.check(schedule(lambda a, b: [b, a]), prepared[1].mod)
    with pytest.raises(ReplayError, match="an index map whose inverse does not lead back"):
        replay.replay(prepared[1].mod, tasks.trace_json(schedule(lambda a, b: [a, b])), CPU)
