"""`tvmflow db verify`, `export` and `import` with the real TVM: what applies, what is refused, what may not happen.

References: what TVM's own JSONDatabase, MetaScheduleApplyDatabase and Schedule make of the same files and traces.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tvm
from click.testing import CliRunner
from tvm import te
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms

from tvmflow import tasks
from tvmflow.cli.db import db
from tvmflow.config import NumericsSection
from tvmflow.database import KeyParts, Provenance, Record, Store, pack, unpack
from tvmflow.database.grammar import Where
from tvmflow.database.metaschedule import TUNING_RECORDS, WORKLOADS, Stated, check_plain
from tvmflow.database.record import to_line
from tvmflow.errors import DatabaseError, TvmflowError, UsageError
from tvmflow.exchange import child, conversion
from tvmflow.exchange import records as exchange_records
from tvmflow.exchange.child import Item
from tvmflow.frozen import evolve
from tvmflow.replay import replay
from tvmflow.tuning import space

CPU = {"kind": "llvm", "mcpu": "x86-64-v3", "mtriple": "x86_64-linux-gnu", "num-cores": 2}
PROVENANCE = Provenance(
    versions={"apache-tvm": "0.19.0"},
    machine="unknown",
    cpu="some CPU",
    threads=1,
    date="2025-01-31T00:00:00Z",
    seed=None,
    trials=0,
    protocol="imported",
    tvmflow="0.1.0",
)
WHERE = Where("llvm", "x86_64", False)
STATED = Stated({"fast_math": False, "tf32": False}, None, None, None, PROVENANCE)


def kernel(rows: int, names: str = "data weight product relu") -> tvm.IRModule:
    """relu(a @ b) as MetaSchedule's workload."""
    one, two, three, four = names.split()
    a, b = te.placeholder((rows, 32), name=one), te.placeholder((32, 48), name=two)
    r = te.reduce_axis((0, 32), name="r")
    c = te.compute((rows, 48), lambda i, j: te.sum(a[i, r] * b[r, j], axis=r), name=three)
    d = te.compute((rows, 48), lambda i, j: tvm.tirx.max(c[i, j], tvm.tirx.const(0, "float32")), name=four)
    return tvm.IRModule({"main": te.create_prim_func([a, b, d]).with_attr("global_symbol", "main")})


def tiled(mod: tvm.IRModule, block: str, factor: int = 4) -> Schedule:
    """A schedule that names a block which a primitive made, after the buffer that it caches."""
    schedule = Schedule(mod, debug_mask="none")
    product = schedule.get_sblock(block)
    schedule.split(schedule.get_loops(product)[0], [None, factor])
    schedule.cache_read(product, 0, "global")
    cached = schedule.get_sblock(f"{schedule.get(product).reads[0].source.name}")
    schedule.vectorize(schedule.get_loops(cached)[-1])
    return schedule


def searched(mod: tvm.IRModule) -> Schedule:
    """What MetaSchedule's default rules and postprocessors make."""
    context = space.context(mod, tvm.target.Target(CPU), "main", seed=1)
    schedule = context.generate_design_space()[0]
    schedule.enter_postproc()
    for postprocessor in context.space_generator.postprocs:
        assert postprocessor.apply(schedule)
    return schedule


def plain(trace: Any) -> Any:
    workload = ms.database.Workload(kernel(8))
    return json.loads(json.dumps(ms.database.TuningRecord(trace, workload, [1.0], tvm.target.Target(CPU)).as_json()))[0]


def record(rows: int, **changes: Any) -> Record:
    mod, workload = tasks.canonical(kernel(rows)["main"])
    target = exchange_records._target(CPU, STATED, NumericsSection())
    made = Record(
        parts=tasks.key_parts(workload, target, NumericsSection()),
        name=f"matmul {rows}",
        workload_json=pack(tvm.ir.save_json(mod)),
        trace=plain(searched(mod).trace),
        timings_s=(2e-3, 1e-3, 3e-3),
        flop=2.0 * rows * 32 * 48,
        provenance=PROVENANCE,
    )
    return evolve(made, **changes)


def renamed_nodes(text: str, kind: str, **fields: Any) -> str:
    graph = json.loads(text)
    for index, node in enumerate(graph["nodes"]):
        if node["type"] == kind:
            node["data"] |= {name: index if value == "itself" else value for name, value in fields.items()}
    return json.dumps(graph)


def structure(mod: tvm.IRModule) -> tvm.tirx.PrimFunc:
    return mod["main"].without_attr("global_symbol")


# --- verify -----------------------------------------------------------------------------------------------------------

EVIL = "__import__('os').system('touch {}')"


def hostile(tmp_path: Path) -> Mapping[str, tuple[Record, str]]:
    """Records that are not what they say, by what is said of them."""
    good = record(16)
    text = unpack(good.workload_json)
    evil = EVIL.format(tmp_path / "ran")
    block = ["GetSBlock", [], ["b1", "main"], ["b0"]]
    cases = [
        ({"trace": [[["Nonsense", [], [], []]], []]}, "instruction 0 (Nonsense): no instruction that a"),
        ({"trace": [[block, ["Annotate", ["b0", evil], ["x"], []]], []]}, "`x` is no note that a record may make"),
        ({"trace": [[block, ["TransformLayout", ["b0", f"lambda: {evil}"], [0, 0, None, 0], []]], []]}, "no JSON"),
        ({"trace": [[block, ["Annotate", ["b0"], [evil, [evil]], []]], []]}, "(Annotate): 1 inputs, not 2"),
        (
            {
                "trace": [
                    [
                        block,
                        ["GetLoops", ["b0"], [], ["l1", "l2", "l3"]],
                        ["Split", ["l1", 0, None], [1, 0], ["l4", "l5"]],
                    ],
                    [],
                ]
            },
            "input 1: `0` has no place here",
        ),
        ({"trace": [[["GetSBlock", [], ["nowhere", "main"], ["b0"]]], []]}, "its trace does not apply to its workload"),
        ({"trace": None}, "trace: not a list of instructions"),
        ({"trace": "x"}, "trace: not a list of instructions"),
        ({"workload_json": pack("{}")}, "its workload: no list of nodes"),
        ({"workload_json": pack(json.dumps({"root_index": 0, "nodes": [{"type": "None"}]}))}, "its root is no ir"),
        ({"workload_json": pack(renamed_nodes(text, "prim.Add", a="itself"))}, "prim.Add.a: names no earlier node"),
        ({"workload_json": pack(tvm.ir.save_json(tasks.canonical(kernel(24)["main"])[0]))}, "its workload hashes to"),
        ({"workload_json": pack(text.replace('"main"', json.dumps(evil)))}, "has no place here"),
    ]
    found = {}
    for number, (change, what) in enumerate(cases):
        parts = evolve(good.parts, preparation=100 + number)
        one = evolve(good, parts=parts, **change)
        found[one.key] = (one, what)
    return found


def test_verify_pins_each_fault_to_its_record_and_runs_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    bad = hostile(tmp_path)
    store.add([record(8), record(16)])
    (path,) = store.path.glob("*/records.jsonl")
    lines = sorted([*path.read_text().splitlines(), *(to_line(one) for one, _ in bad.values())])
    path.write_text("".join(f"{line}\n" for line in lines))
    faults = [fault for fault in store.verify(conversion.replay) if fault.skipped]
    assert {json.loads(lines[fault.line - 1])["key"] for fault in faults} == bad.keys()
    for fault in faults:
        assert bad[str(fault.key)][1] in fault.what
        assert str(fault).isprintable()
    assert not (tmp_path / "ran").exists()


class Killer:
    """Ends the process that looks at it."""

    @property
    def workload_json(self) -> str:
        os.kill(os.getpid(), signal.SIGSEGV)
        return ""


def test_what_ends_the_process_costs_itself_until_it_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    items = [Item(number, one) for number, one in enumerate([record(16), Killer(), record(24), Killer(), record(8)])]
    done, refused = conversion._each(child.check, items, "replaying it")
    assert list(done) == [0, 2, 4]
    assert {why.partition(":")[0] for why in refused.values()} == {"replaying it crashed (signal 11, SIGSEGV)"}
    monkeypatch.setattr(conversion, "MAX_DEATHS", 1)
    done, refused = conversion._each(child.check, items, "replaying it")
    assert list(done) == [0]
    assert [refused[index].partition(":")[0] for index in (2, 3, 4)] == ["not looked at"] * 3


def test_verify_as_people_see_it(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    (tmp_path / "m.onnx").touch()
    (tmp_path / "c.toml").write_text('[model]\npath = "m.onnx"\n[tuning]\ndatabase = "db"\n')
    store.add([record(8, trace=[[["GetSBlock", [], ["nowhere", "main"], ["b0"]]], []])])
    done = CliRunner().invoke(db, ["verify", "--no-replay", "--config", str(tmp_path / "c.toml")])
    assert (done.exit_code, done.output) == (0, f"{store.path}: 1 records, no faults\n")
    done = CliRunner().invoke(db, ["verify", "--config", str(tmp_path / "c.toml")])
    assert isinstance(done.exception, DatabaseError)
    assert "records.jsonl:1: " in done.stderr
    assert "its trace does not apply to its workload" in done.stderr


# --- export -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a database and its export, but for one record that does not apply."""
    folder = tmp_path_factory.mktemp("exported")
    fewer = record(8).parts.target
    fewer |= {"features": tuple(name for name in fewer["features"] if name not in ("bmi", "movbe"))}

    def changed(rows: int, preparation: int = tasks.PREPARATION, **changes: Any) -> Record:
        update = {"target": fewer, "preparation": preparation}
        return record(rows, parts=evolve(record(rows).parts, **update), **changes)

    bad = changed(24, trace=[[["GetSBlock", [], ["nowhere", "main"], ["b0"]]], []])
    store = Store(folder / "db")
    store.add([changed(8), changed(16), changed(8, tasks.PREPARATION + 1, timings_s=(4e-3,)), bad])
    count, faults = conversion.export_files(store, folder / "out", lambda one: True)
    assert (count, [fault.key for fault in faults]) == (3, [bad.key])
    return folder


def test_tvm_finds_what_was_exported(exported: Path) -> None:
    assert len((exported / "out" / WORKLOADS).read_text().splitlines()) == 2
    database = ms.database.JSONDatabase(work_dir=str(exported / "out"), allow_missing=False)
    target = tvm.target.Target(CPU)
    for size in (8, 16):
        wanted = replay(tasks.canonical(kernel(size)["main"])[0], record(size).trace, WHERE)
        found = database.query_schedule(kernel(size, "one two three four"), target, "main")
        assert found is not None
        tvm.ir.assert_structural_equal(structure(found.mod), structure(wanted.mod), map_free_vars=True)
    entry = database.query_tuning_record(kernel(8), target, "main")
    assert [float(seconds) for seconds in entry.run_secs] == [2e-3, 1e-3, 3e-3]
    assert (str(entry.target.attrs["mcpu"]), int(entry.target.attrs["num-cores"])) == ("x86-64-v3", 2)
    with target:
        module = tvm.IRModule({"eight": structure(kernel(8)), "other": structure(kernel(48))})
        applied = tvm.relax.transform.MetaScheduleApplyDatabase(str(exported / "out"))(module)
    assert ["tirx.is_scheduled" in applied[name].attrs for name in ("eight", "other")] == [True, False]


def test_what_is_exported_is_imported_as_it_was(exported: Path, tmp_path: Path) -> None:
    known = next(one for one in Store(exported / "db").read().records if one.name == "matmul 16")
    Store(tmp_path / "db").add([known])
    result = conversion.import_files(Store(tmp_path / "db"), exported / "out", STATED)
    assert (len(result.records), result.taken, result.faults) == (2, 1, ())
    ours = Store(exported / "db").read().by_key
    for one in Store(tmp_path / "db").read().records:
        assert (one.trace, one.timings_s, one.workload_json, one.flop) == (
            ours[one.key].trace,
            ours[one.key].timings_s,
            ours[one.key].workload_json,
            one.flop,
        )
    assert known in Store(tmp_path / "db").read().records, "its provenance is worth more than an equal one's"


def test_an_export_is_of_one_target(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    other = record(8).parts.target | {"threads": 4}
    store.add([record(8), record(8, parts=evolve(record(8).parts, target=other))])
    arguments = ["export", str(tmp_path / "out"), "--database", str(store.path)]
    assert isinstance(error := CliRunner().invoke(db, arguments).exception, UsageError)
    assert "records of 2 targets: llvm-x86-64-v3-2t-precise-" in str(error)
    assert isinstance(error := CliRunner().invoke(db, [*arguments, "--target", "cuda-*"]).exception, UsageError)
    assert "no record that was asked for" in str(error)
    assert not (tmp_path / "out").exists()


# --- import -----------------------------------------------------------------------------------------------------------


def metaschedule_files(folder: Path, target: Mapping[str, object] = CPU) -> ms.database.JSONDatabase:
    folder.mkdir()
    database = ms.database.JSONDatabase(work_dir=str(folder))

    def commit(mod: tvm.IRModule, schedule: Schedule, seconds: list[float]) -> None:
        where = tvm.target.Target(dict(target))
        database.commit_tuning_record(
            ms.database.TuningRecord(
                schedule.trace,
                database.commit_workload(mod),
                seconds,
                where,
                ms.arg_info.ArgInfo.from_prim_func(mod["main"]),
            )
        )

    for rows in (8, 16):
        commit(kernel(rows), tiled(kernel(rows), "product", 2), [9e-3])
        commit(kernel(rows), tiled(kernel(rows), "product"), [2e-3, 1e-3, 4e-3])
        commit(kernel(rows), searched(kernel(rows)), [1e10])
    return database


def hostile_workload(trap: Path) -> list[str]:
    """A kernel that calls a function: TVM prints its name as it is, and TVMScript's parser runs what it reads."""
    call = tvm.tirx.Evaluate(tvm.ir.Call(tvm.ir.GlobalVar(EVIL.format(trap)), []))
    mod = tvm.IRModule({"main": tvm.tirx.PrimFunc([], call).with_attr("global_symbol", "main")})
    return ms.database.Workload(mod).as_json()


def append(path: Path, *lines: object) -> None:
    added = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text(path.read_text() + "".join(f"{line}\n" for line in added))


def test_records_of_metaschedule_are_taken(tmp_path: Path) -> None:
    metaschedule_files(tmp_path / "in")
    records = tmp_path / "in" / TUNING_RECORDS
    first = json.loads(records.read_text().splitlines()[0])
    broken = [first[0], [[[["Nonsense", [], [], []]], []], [1e-4], first[1][2], first[1][3]]]
    evil = hostile_workload(tmp_path / "ran")
    append(tmp_path / "in" / WORKLOADS, "[1,", ["0", "AAAA"], evil)
    append(
        records,
        broken,
        "garbage",
        [2, first[1]],
        [3, first[1]],
        [0, [first[1][0], [-1.0], first[1][2], []]],
        "",
        [4, [[[], []], [1e-3], CPU, []]],
    )
    arguments = [
        "import",
        str(tmp_path / "in"),
        "--database",
        str(tmp_path / "db"),
        "--no-fast-math",
        "--no-tf32",
        "--tvm",
        "0.19.0",
        "--cpu",
        "some CPU",
        "--date",
        "2025-01-31",
    ]
    done = CliRunner().invoke(db, [*arguments, "--json"])
    assert isinstance(done.exception, TvmflowError)
    places = {line.split(": ")[1]: line.split(": ", 2)[2] for line in done.stderr.splitlines() if "skipped" in line}
    assert [place.rpartition("/")[2] for place in places] == [
        f"{WORKLOADS}:3",
        *(f"{TUNING_RECORDS}:{line}" for line in (8, 9, 11, 7, 10, 13)),
    ]
    for said, what in zip(
        places.values(),
        [
            "no JSON",
            "no JSON",
            "its workload, line 3",
            "no run times: [-1.0]",
            "(Nonsense): no instruction that a record",
            "its workload is damaged",
            "has no place here",
        ],
        strict=True,
    ):
        assert what in said
    assert not (tmp_path / "ran").exists()
    store = Store(tmp_path / "db")
    assert len(json.loads(done.stdout)) == len(store.read().records) == 2
    for rows in (8, 16):
        mod, workload = tasks.canonical(kernel(rows)["main"])
        parts: KeyParts = record(rows).parts
        assert parts.workload == workload
        found = store.read().by_key[parts.key]
        assert (found.timings_s, found.name) == ((2e-3, 1e-3, 4e-3), "product_relu")
        given = found.provenance
        assert (given.versions, given.cpu, given.threads) == ({"apache-tvm": "0.19.0"}, "some CPU", 2)
        assert (given.date, given.seed, given.protocol) == ("2025-01-31T00:00:00Z", None, "imported")
        assert given.trials == (3 if rows == 8 else 2)
        replayed = replay(mod, found.trace, WHERE)
        wanted = tiled(kernel(rows), "product").mod
        tvm.ir.assert_structural_equal(structure(replayed.mod), structure(wanted), map_free_vars=True)


def test_a_trace_of_real_rules_is_re_expressed() -> None:
    theirs = kernel(64)
    ours, _ = tasks.canonical(theirs["main"])
    schedule = searched(theirs)
    trace = plain(schedule.trace)
    again = exchange_records.reexpressed(trace, (theirs, "main"), ours, WHERE)
    assert any(step[0] == "EnterPostproc" for step in again[0])
    assert {step[2][0] for step in again[0] if step[0] == "GetSBlock"} == {"root", "b1", "b2"}
    got = replay(ours, again, WHERE)
    tvm.ir.assert_structural_equal(structure(got.mod), structure(schedule.mod), map_free_vars=True)


@pytest.mark.parametrize(
    ("target", "stated", "what"),
    [
        ({"kind": "llvm", "num-cores": 2}, {}, "its target does not say mcpu: state it with --mcpu"),
        ({"kind": "llvm", "num-cores": 2}, {"mcpu": "x86-64-v3"}, "does not say mtriple"),
        (CPU, {"threads": 4}, "its target says threads = 2, not 4"),
        (CPU, {"mcpu": "x86-64-v4"}, "its target says mcpu = x86-64-v3, not x86-64-v4"),
        (CPU | {"fast-math-nsz": True}, {}, "its target says fast-math-nsz = "),
        (CPU | {"mcpu": "nonsense"}, {}, "LLVM knows no CPU `nonsense`"),
        ({"kind": "opencl"}, {}, "its target is opencl, not llvm or cuda"),
    ],
)
def test_targets_that_do_not_fit_are_refused(target: Mapping[str, object], stated: dict[str, Any], what: str) -> None:
    given = Stated(**{**STATED.__dict__, **stated})
    with pytest.raises((ValueError, TvmflowError)) as caught:
        exchange_records._target(target, given, NumericsSection())
    assert what in str(caught.value)


def test_targets_that_are_whole() -> None:
    given = Stated({"fast_math": False, "tf32": False}, "x86-64-v3", "x86_64-linux-gnu", 4, PROVENANCE)
    open_ = exchange_records._target({"kind": "cuda", "arch": "sm_90"}, given, NumericsSection())
    assert (open_.kind, open_.arch, open_.mcpu, open_.threads) == ("cuda", "sm_90", "x86-64-v3", 4)
    less = exchange_records._target(CPU | {"mattr": ["-avx2"]}, STATED, NumericsSection())
    assert "avx2" in open_.features
    assert set(open_.features) - set(less.features) >= {"avx2"}


def test_scripts_of_kernels_are_plain() -> None:
    for mod in (kernel(8), tasks.canonical(kernel(8)["main"])[0], searched(kernel(16)).mod):
        check_plain(structure(mod).script(show_meta=False))
