"""The text of MetaSchedule's files, and which TVMScript is plain enough to be parsed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tvmflow.database import metaschedule
from tvmflow.database.metaschedule import TUNING_RECORDS, WORKLOADS, check_plain
from tvmflow.errors import DatabaseError

TARGET = {"kind": "llvm"}


def record(workload: int, seconds: object, target: object = TARGET) -> str:
    return json.dumps([workload, [[[], []], seconds, target, []]])


def folder_of(tmp_path: Path, *lines: str) -> Path:
    (tmp_path / WORKLOADS).write_text('["1","AAA"]\ngarbage\n["2","BBB"]\n')
    (tmp_path / TUNING_RECORDS).write_text("".join(f"{line}\n" for line in lines))
    return tmp_path


def test_candidates_are_grouped_with_the_fastest_first(tmp_path: Path) -> None:
    lines = [
        record(2, [1.0, 3.0, 2.0]),
        record(0, [5.0]),
        record(2, [1.0]),
        record(2, [0.5], {"kind": "cuda"}),
        record(0, None),
        record(0, [1e10]),
    ]
    reading = metaschedule.read(folder_of(tmp_path, *lines))
    assert [(one.line, one.workload, one.median_s) for one in reading.candidates] == [
        (2, "AAA", 5.0),
        (4, "BBB", 0.5),
        (3, "BBB", 1.0),
        (1, "BBB", 2.0),
    ]
    assert reading.unmeasured == 2
    assert [(fault.path.name, fault.line) for fault in reading.faults] == [(WORKLOADS, 2)]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (record(0, [1.0])[:-3], "no JSON: EOF while parsing"),
        ("[" * 100_000, "no JSON: recursion limit exceeded"),
        ("{}", "no tuning record"),
        ("[0, [1, 2, 3, 4]]", "no tuning record"),
        ('[0, [[[],[]], [1.0], "llvm", []]]', "no tuning record"),
        (record(1, [1.0]), f"its workload, line 2 of {WORKLOADS}, is none"),
        (record(99, [1.0]), f"its workload, line 100 of {WORKLOADS}, is none"),
        (record(-1, [1.0]), f"its workload, line 0 of {WORKLOADS}, is none"),
        (record(0, []), "no run times: []"),
        (record(0, [True]), "no run times: [True]"),
        (record(0, [0.0]), "no run times: [0.0]"),
        (record(0, "\x1b[31m"), "no run times: ?[31m"),
        ("[0, [[[],[]], [NaN], {}, []]]", "no run times: [nan]"),
    ],
)
def test_a_bad_line_costs_itself_alone(tmp_path: Path, line: str, what: str) -> None:
    reading = metaschedule.read(folder_of(tmp_path, record(0, [1.0]), line, record(2, [1.0])))
    assert [one.line for one in reading.candidates] == [1, 3]
    (fault,) = [fault for fault in reading.faults if fault.path.name == TUNING_RECORDS]
    assert (fault.line, fault.skipped) == (2, True)
    assert fault.what.startswith(what)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match=f"{WORKLOADS}: cannot be read: No such file"):
        metaschedule.read(tmp_path)
    folder_of(tmp_path)
    with (tmp_path / TUNING_RECORDS).open("wb") as stream:
        stream.truncate(1 << 30)
    with pytest.raises(DatabaseError, match="1024 MiB, more than the 256 MiB"):
        metaschedule.read(tmp_path)


def test_what_is_written_is_read_and_never_overwritten(tmp_path: Path) -> None:
    entries = [
        ("a", ["1", "AAA"], [[[], []], [1.0], TARGET, []]),
        ("b", ["2", "BBB"], [[[], []], [2.0], TARGET, []]),
        ("a", ["1", "AAA"], [[[], []], [0.5], TARGET, []]),
    ]
    assert metaschedule.write(tmp_path / "new" / "out", entries) == 3
    reading = metaschedule.read(tmp_path / "new" / "out")
    assert [(one.workload, one.median_s) for one in reading.candidates] == [("AAA", 0.5), ("AAA", 1.0), ("BBB", 2.0)]
    with pytest.raises(DatabaseError, match=f"{WORKLOADS}: is there already"):
        metaschedule.write(tmp_path / "new" / "out", entries)


KERNEL = """# from tvm.script import tirx as T

@T.prim_func(private=True, s_tir=True)
def main(a: T.Buffer((8, 4), "float32"), b: T.Buffer((8,), "float32")):
    T.func_attr({"tirx.noalias": True})
    c = T.sblock_alloc_buffer((8,))
    for i, j in T.grid(8, 4):
        with T.sblock("b0"):
            v, w = T.axis.remap("SR", [i, j])
            T.reads(a[v, w])
            with T.init():
                b[v] = T.float32(0.0)
            b[v] = b[v] + T.if_then_else(w < 3 and -v < 0, a[v, w], T.call_extern("float32", "f", c.data))
"""


def test_a_kernel_is_plain() -> None:
    check_plain(KERNEL)


@pytest.mark.parametrize(
    "code",
    [
        '__import__("os").system("x")',
        "T.builder.os.system(1)",
        "open(1)",
        "T.__class__",
        "a._x",
        "a.data.x",
        "T.grid(8)(1)",
        "(lambda: 1)()",
        "[x for x in (1,)]",
        "f'{T}'",
        "T.axis.remap.x(1)",
        "eval('1')",
        '"a\\"b"',
        "main.x",
        "T['x'].y",
        "(T.x or T.y).z",
        "import os",
        "T = a",
        "def T(): 0",
        "range = eval",
    ],
)
def test_what_could_run_code_is_refused(code: str) -> None:
    with pytest.raises(ValueError, match="the workload's script"):
        check_plain(KERNEL + f"    {code}\n")
