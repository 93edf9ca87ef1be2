"""Changes real tuning records at random, makes their checksums right again, and reads, verifies and replays them.

    python scripts/fuzz_records.py --seconds 600 --seed 1

Whatever a record holds, it is refused with a reason or replayed: no signal, no traceback, no hang. One summary line;
exit code 1 where a record did something else, which is left in --keep for whoever mends it.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import hashlib
import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tvmflow.database import Record, Store, pack, unpack
from tvmflow.database.files import LineError
from tvmflow.database.record import examine, parse, to_line
from tvmflow.frozen import evolve

TIMEOUT_S = 30
MEMORY_BYTES = 4 << 30
NUMBERS = (0, 1, -1, 2, 3, 7, 16, 64, 65, 1 << 20, 1 << 31, -(1 << 31), (1 << 63) - 1, 1 << 70, 0.5, 1e308, True, None)
NOTES = (
    "pragma_import_llvm",
    "pragma_debug_skip_region",
    "pragma_auto_unroll_max_step",
    "software_pipeline_stage",
    "meta_schedule.layout_rewrite_preproc",
    "pragma_unroll_explicit",
    "buffer_dim_align",
)
KINDS = (
    "UnsafeSetDType",
    "StorageAlign",
    "SetScope",
    "CacheRead",
    "CacheWrite",
    "Vectorize",
    "Unroll",
    "Parallel",
    "Fuse",
    "Reorder",
    "Split",
    "ComputeInline",
    "ReverseComputeInline",
    "ComputeAt",
    "ReverseComputeAt",
    "RFactor",
    "DecomposeReduction",
    "Blockize",
    "Annotate",
    "GetLoops",
    "GetSBlock",
    "GetProducers",
    "Bind",
)


def main() -> None:
    """Fuzzes for as long as asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--database", type=Path, default=Path(__file__).parents[1] / "tuning_db")
    parser.add_argument("--keep", type=Path, default=Path("fuzz_findings"), help="folder for records that were found")
    chosen = parser.parse_args()
    counts = run(list(Store(chosen.database).read().records), chosen.seconds, chosen.seed, chosen.keep)
    print(", ".join(f"{counts[name]} {name}" for name in ("records", "refused", "not applied", "replayed", "findings")))
    sys.exit(1 if counts["findings"] else 0)


def run(records: list[Record], seconds: float, seed: int, keep: Path) -> collections.Counter[str]:
    """Fuzzes `records` in a process that is started anew where one ends it; returns how often what happened."""
    draw = random.Random(seed)
    counts: collections.Counter[str] = collections.Counter()
    worker = Worker()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        line = changed(draw.choice(records), draw)
        outcome = worker.ask(line)
        counts["records"] += 1
        if outcome not in ("refused", "not applied", "replayed"):
            keep.mkdir(parents=True, exist_ok=True)
            place = keep / f"{hashlib.sha256(line).hexdigest()[:12]}.jsonl"
            place.write_bytes(line + b"\n")
            print(f"{place}: {outcome}", file=sys.stderr)
            outcome = "findings"
        counts[outcome] += 1
    worker.close()
    return counts


class Worker:
    """A process that reads and replays records one by one."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        assert self._pipe.recv() == "ready"

    def ask(self, line: bytes) -> str:
        """What became of a record: refused, not applied, replayed; or how it ended the process."""
        self._pipe.send(line)
        try:
            if self._pipe.poll(TIMEOUT_S):
                return str(self._pipe.recv())
            self._process.kill()
            outcome = f"took more than {TIMEOUT_S} s"
        except EOFError:
            self._process.join()
            code = self._process.exitcode or 0
            outcome = f"ended the process: {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
        self._start()
        return outcome

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.join()


def serve(pipe: Connection) -> None:
    """The worker: for each line that comes, what became of it."""
    from tvmflow.exchange.records import check

    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # TVM's warnings
    pipe.send("ready")
    while True:
        pipe.send(outcome_of(pipe.recv(), check))


def outcome_of(line: bytes, check: Callable[[Record], None]) -> str:
    """Reads a line, examines its record and replays it."""
    from tvmflow.replay import REPLAY_ERRORS

    try:
        record = parse(line)
        examine(record)
    except LineError:
        return "refused"
    except Exception as exc:
        return f"reading raised {type(exc).__name__}: {exc}"[:300]
    try:
        check(_with_its_key(record))
    except REPLAY_ERRORS:
        return "not applied"
    except Exception as exc:
        return f"replaying raised {type(exc).__name__}: {exc}"[:300]
    return "replayed"


def _with_its_key(record: Record) -> Record:
    """The record under the key that its workload makes, so that it is not refused for its key alone."""
    from tvmflow.replay import load_workload

    text = load_workload(record)["main"].without_attr("global_symbol").script(show_meta=False)
    parts = evolve(record.parts, workload=hashlib.sha256(text.encode()).hexdigest())
    return evolve(record, parts=parts)


def changed(record: Record, draw: random.Random) -> bytes:
    """The line of a record with one to four changes of its trace or its workload."""
    trace = copy.deepcopy(record.trace)
    workload = json.loads(unpack(record.workload_json))
    for _ in range(draw.randint(1, 4)):
        changes, value = (TRACE_CHANGES, trace) if draw.random() < 0.75 else (WORKLOAD_CHANGES, workload)
        with contextlib.suppress(AttributeError, TypeError, LookupError, ValueError):  # an earlier change is in the way
            draw.choice(changes)(value, draw)
    body = json.loads(to_line(record)) | {"trace": trace, "workload_json": pack(json.dumps(workload))}
    return json.dumps(body).encode()


def _some(value: Any, draw: random.Random) -> tuple[Any, Any]:
    """A container somewhere in a JSON value, and a place in it."""
    while True:
        places = list(value) if isinstance(value, dict) else range(len(value))
        place = draw.choice(list(places))
        inner = value[place]
        if not isinstance(inner, dict | list) or not inner or draw.random() < 0.2:
            return value, place
        value = inner


def _other_value(value: Any, draw: random.Random) -> None:
    container, place = _some(value, draw)
    old = container[place]
    choices = [draw.choice(NUMBERS), draw.choice(NUMBERS)]
    if type(old) is int:
        choices += [old + 1, old - 1, old * 2, -old, draw.randint(0, max(1, abs(old)))] * 2
    if isinstance(old, str):
        choices += [old[:-1], f"{old}0", draw.choice(NOTES), "None", "b0", "l1", "v1", '"x"'] * 2
    container[place] = draw.choice(choices)


def _drop(trace: Any, draw: random.Random) -> None:
    if trace[0]:
        trace[0].pop(draw.randrange(len(trace[0])))


def _repeat(trace: Any, draw: random.Random) -> None:
    if trace[0]:
        step = copy.deepcopy(draw.choice(trace[0]))
        for _ in range(draw.choice((1, 1, 2, 50))):
            again = copy.deepcopy(step)
            if isinstance(again, list) and len(again) == 4 and isinstance(again[3], list):
                again[3] = [f"{str(name)[:1]}{draw.randint(1000, 99999)}" for name in again[3]]
            trace[0].insert(draw.randrange(len(trace[0]) + 1), again)


def _swap(trace: Any, draw: random.Random) -> None:
    if len(trace[0]) > 1:
        i, j = draw.sample(range(len(trace[0])), 2)
        trace[0][i], trace[0][j] = trace[0][j], trace[0][i]


def _another(trace: Any, draw: random.Random) -> None:
    """An instruction of another kind on values that are there."""
    place = draw.randrange(len(trace[0]) + 1)
    names = [name for step in trace[0][:place] for name in step[3] if isinstance(name, str)]
    kind = draw.choice(KINDS)
    block, loop = (draw.choice([n for n in names if n.startswith(letter)] or ["b0"]) for letter in "bl")
    number = draw.choice(NUMBERS)
    new = f"{draw.choice('bl')}{draw.randint(1000, 99999)}"
    step = {
        "Annotate": [[draw.choice((block, loop)), number], [draw.choice(NOTES)], []],
        "StorageAlign": [[block], [0, 0, number, 0], []],
        "SetScope": [[block], [0, "local"], []],
        "UnsafeSetDType": [[block], [0, "float16"], []],
        "CacheRead": [[block, []], [0, "global"], [f"b{new[1:]}"]],
        "CacheWrite": [[block, []], [0, "global"], [f"b{new[1:]}"]],
        "Split": [[loop, number, "None"], [True, False], [f"l{new[1:]}", f"l{new[1:]}1"]],
        "Fuse": [[loop, draw.choice(names or ["l1"])], [1], [f"l{new[1:]}"]],
        "Reorder": [[loop, draw.choice(names or ["l1"])], [], []],
        "ComputeAt": [[block, loop], [1, -1], []],
        "ReverseComputeAt": [[block, loop], [1, -1], []],
        "RFactor": [[loop], [0], [f"b{new[1:]}"]],
        "DecomposeReduction": [[block, loop], [], [f"b{new[1:]}"]],
        "Blockize": [[loop], [1], [f"b{new[1:]}"]],
        "GetLoops": [[block], [], [f"l{new[1:]}"]],
        "GetSBlock": [[], ["root", "main"], [f"b{new[1:]}"]],
        "GetProducers": [[block], [], [f"b{new[1:]}"]],
        "Bind": [[loop], ["threadIdx.x"], []],
        "ComputeInline": [[block], [], []],
        "ReverseComputeInline": [[block], [], []],
    }.get(kind, [[loop], [], []])
    trace[0].insert(place, [kind, *step])


def _index_map(trace: Any, draw: random.Random) -> None:
    """A change inside an index map."""
    steps = [step for step in trace[0] if isinstance(step, list) and len(step) == 4 and step[0] == "TransformLayout"]
    if steps and isinstance(inputs := draw.choice(steps)[1], list) and len(inputs) > 1 and isinstance(inputs[1], str):
        try:
            graph = json.loads(inputs[1])
            _other_value(graph["nodes"], draw)
        except (ValueError, KeyError, TypeError, IndexError):
            return
        inputs[1] = json.dumps(graph)


def _node_kind(workload: Any, draw: random.Random) -> None:
    nodes = workload["nodes"]
    one, other = draw.choice(nodes), draw.choice(nodes)
    one["type"] = other["type"]


def _node(workload: Any, draw: random.Random) -> None:
    nodes = workload["nodes"]
    nodes[draw.randrange(len(nodes))] = copy.deepcopy(draw.choice(nodes))


def _reference(workload: Any, draw: random.Random) -> None:
    """Another node of the same kind in the place of one."""
    nodes = workload["nodes"]
    index = draw.randrange(len(nodes))
    data = nodes[index].get("data")
    if not isinstance(data, dict | list) or not data:
        return
    place = draw.choice(list(data) if isinstance(data, dict) else list(range(len(data))))
    if type(old := data[place]) is int and 0 <= old < len(nodes):
        alike = [i for i in range(index) if nodes[i].get("type") == nodes[old].get("type")]
        data[place] = draw.choice(alike or [old])


TRACE_CHANGES = (_other_value, _other_value, _drop, _repeat, _swap, _another, _another, _another, _index_map)
WORKLOAD_CHANGES = (_other_value, _node_kind, _node, _reference, _reference)


if __name__ == "__main__":
    main()
