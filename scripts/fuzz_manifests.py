"""Changes manifests of artifacts at random, makes their digests anew, and loads and runs what comes of it.

    python scripts/fuzz_manifests.py --seconds 600 --seed 1 [--rounds N] [--keep FOLDER] [ARTIFACT ...]

Each changed artifact either runs with the values of the original or is refused with an error of tvmflow. Anything else
(an exception, a signal, a hang, other values) is a finding: it is kept in FOLDER, and the exit code is 1. Without
ARTIFACT two small ones are compiled, one with buckets. They must load here, and run on ones.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import math
import random
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import tvmflow
from tvmflow import artifact, report
from tvmflow.artifact.parsing import digest
from tvmflow.errors import TvmflowError
from tvmflow.manifest import Bundle, Signature, TensorSpec

LIMIT_S = 20.0  # for one artifact
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    63,
    64,
    65,
    4096,
    1 << 31,
    1 << 62,
    (1 << 63) - 1,
    1 << 63,
    1 << 64,
    10**400,
    -(1 << 63),
    0.0,
    0.5,
    -0.5,
    1e308,
    float("inf"),
    float("nan"),
    "",
    "x",
    "..",
    "../constants.bin",
    "/etc/passwd",
    "a/../../b",
    "\0",
    "\ud800",
    "[/]",
    "\x1b[2J",
    "n",
    "n // 0",
    "n * 10 ** 9",
    "(" * 300,
    "é" * 4000,
    "float32",
    "float64",
    "int8",
    "bfloat16",
    "bool",
    "library.so",
    "constants.bin",
    "manifest.json",
    "cuda",
    [],
    [0],
    [[]],
    ["x"],
    [-1],
    {},
    {"x": 1},
    {"": {}},
]
Place = list[Any]  # keys and indices, from the top of a manifest


def places(value: Any, at: Place) -> list[Place]:
    """Every place in a manifest."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, item in inside for place in places(item, [*at, key]))]


def change(body: dict[str, Any], rng: random.Random) -> str:
    """Changes one place of a manifest; returns what was done."""
    # First a part, so that the small ones are not drowned by the long lists of kernels and stages.
    top = rng.choice(sorted(body))
    place = rng.choice(places(body[top], [top]))
    holder = body
    for key in place[:-1]:
        holder = holder[key]
    key, old = place[-1], holder[place[-1]]
    kind = rng.choice(["value", "value", "value", "number", "drop", "add", "swap", "text"])
    if kind == "drop":
        del holder[key]
    elif kind == "add" and isinstance(old, dict):
        old[rng.choice(["x", "", "../x", "/x", "library.so", "é", "\0"])] = rng.choice(VALUES)
    elif kind == "add" and isinstance(old, list):
        old.insert(rng.randint(0, len(old)), copy.deepcopy(rng.choice(rng.choice([old, VALUES]) or VALUES)))
    elif kind == "swap" and isinstance(old, list) and len(old) > 1:
        rng.shuffle(old)
    elif kind == "number" and isinstance(old, int | float):
        holder[key] = old + rng.choice([-1, 1, 64, -64, old, -2 * old, 1 << 40])
    elif kind == "text" and isinstance(old, str) and old:
        at = rng.randrange(len(old))
        holder[key] = old[:at] + rng.choice(["", "\n", "/", "..", "x", "\ud800", "[", "\x1b"]) + old[at + 1 :]
    else:
        holder[key] = copy.deepcopy(rng.choice(VALUES))
    return f"{kind} at {'.'.join(map(str, place))}"


def text_of(body: dict[str, Any], rng: random.Random) -> str:
    """A manifest's text with its digest made anew, some of them with damage below the level of values."""
    with contextlib.suppress(ValueError):
        body["manifest_sha256"] = digest({key: item for key, item in body.items() if key != "manifest_sha256"})
    text = json.dumps(body, indent=1, sort_keys=True)
    draw = rng.random()
    if draw < 0.02:
        return text[: rng.randrange(len(text))]
    if draw < 0.04:
        return "[" * 200_000 + text
    if draw < 0.06:
        return text.replace("{", '{"name": "twice", ', rng.randint(1, 3))
    return text


def changed(original: Path, folder: Path, rng: random.Random) -> str:
    """A changed copy of an artifact in a folder; its libraries and weights are those of the original, linked."""
    shutil.copytree(original, folder, copy_function=lambda source, target: Path(target).hardlink_to(source))
    manifests = sorted(folder.rglob(artifact.MANIFEST))
    chosen = rng.choice(manifests)
    body = json.loads(chosen.read_text())
    done = [change(body, rng) for _ in range(rng.choice([1, 1, 1, 2, 3])) if body]
    rewrite(chosen, text_of(body, rng))
    if chosen.parent != folder:  # the artifact knows the manifests of its buckets by their contents
        top = json.loads((folder / artifact.MANIFEST).read_text())
        top["files"][str(chosen.relative_to(folder))] = artifact.file_entry(chosen).model_dump()
        del top["manifest_sha256"]
        rewrite(folder / artifact.MANIFEST, json.dumps({**top, "manifest_sha256": digest(top)}))
    return f"{chosen.relative_to(folder)}: {'; '.join(done)}"


def rewrite(file: Path, text: str) -> None:
    file.unlink()
    file.write_text(text, encoding="utf-8", errors="surrogatepass")


def feeds_of(signature: Signature, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    def shape(spec: TensorSpec) -> list[int]:
        stated = [size if isinstance(size, int) else sizes.get(size, 1) for size in spec.shape]
        return stated if math.prod(stated) < 1 << 20 else [1] * len(stated)  # which does not fit, as it should be

    return {spec.name: np.ones(shape(spec), spec.dtype) for spec in signature.inputs}


def outputs_of(path: Path) -> list[np.ndarray]:
    """What an artifact gives for ones, at the sizes of its first bucket."""
    session = tvmflow.load(path, threads=1)
    sizes = session.manifest.buckets[0].dims if isinstance(session.manifest, Bundle) else {}
    return session.run_list(feeds_of(session.signature, sizes))


def outcome(path: Path, want: list[np.ndarray], exact: bool) -> str:
    """ "ran", "refused", or what is wrong; where not `exact`, values may be others."""
    from rich.console import Console

    from tvmflow.flow.artifacts import config_of

    try:
        got = outputs_of(path)
        manifest = artifact.read(path)
        Console(file=io.StringIO(), width=160).print(report.inspected(manifest))
        json.dumps(manifest.model_dump(mode="json"))
        config_of(path, manifest, None, [])
    except TvmflowError as exc:
        return "refused" if exc.message and exc.message.encode() else "an error without a message"
    except Exception:
        return traceback.format_exc()
    same = len(got) == len(want) and all(np.array_equal(g, w) for g, w in zip(got, want, strict=True))
    return "ran" if same or not exact else "other values"


def work(originals: list[Path]) -> None:
    """The child: an outcome for each line that names an original and a changed artifact."""
    want = [outputs_of(path) for path in originals]
    replies, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps("ready"), file=replies, flush=True)
    for line in sys.stdin:
        index, exact, path = json.loads(line)
        print(json.dumps(outcome(Path(path), want[index], exact)), file=replies, flush=True)


class Child:
    """A process that tries artifacts, one after the other, and is replaced when it dies or hangs."""

    def __init__(self, originals: list[Path]) -> None:
        self._command = [sys.executable, __file__, "--child", *map(str, originals)]
        self._process: subprocess.Popen[str] | None = None

    def outcome(self, request: object) -> str:
        if self._process is None:
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert self._process.stdout
            assert self._process.stdout.readline() == '"ready"\n'  # however long it takes to start
        process = self._process
        assert process.stdin
        assert process.stdout
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            line = process.stdout.readline() if selector.select(LIMIT_S) else None
        if line:
            return str(json.loads(line))
        self.close()
        return f"no answer for {LIMIT_S:.0f} s" if line is None else f"died with exit code {process.returncode}"

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            with self._process:
                pass
            self._process = None


def small_artifacts(folder: Path) -> list[Path]:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weights = [np.random.default_rng(seed).standard_normal((8, 8)).astype("f4") for seed in range(2)]
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"]),
        helper.make_node("Sin", ["h"], ["s"]),
        helper.make_node("MatMul", ["s", "b"], ["y"]),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 8]) for name in "xy"]
    initialisers = [numpy_helper.from_array(w, name) for w, name in zip(weights, "ab", strict=True)]
    graph = helper.make_graph(nodes, "small", values[:1], values[1:], initialisers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "small.onnx")
    tables = ({"dims": {"n": 4}}, {"buckets": {"n": [2, 4]}})
    return [
        tvmflow.compile(folder / "small.onnx", out=folder / f"{index}.tvmflow", overrides=[{"shapes": table}])
        for index, table in enumerate(tables)
    ]


def fuzz(originals: list[Path], arguments: argparse.Namespace, scratch: Path) -> tuple[Counter[str], list[str]]:
    """Outcomes by kind, and the findings."""
    rng, child = random.Random(arguments.seed), Child(originals)
    counts, findings, deadline = Counter[str](), list[str](), time.monotonic() + arguments.seconds
    for number in range(arguments.rounds):
        if time.monotonic() > deadline:
            break
        index, folder = rng.randrange(len(originals)), scratch / "changed.tvmflow"
        done = changed(originals[index], folder, rng)
        # Weights of one shape may change places within a bucket, as they may within constants.bin.
        exact = "/" not in done.partition(":")[0] or "constants" not in done
        result = child.outcome((index, exact, str(folder)))
        counts[result if result in ("ran", "refused") else "found"] += 1
        if result not in ("ran", "refused"):
            findings.append(f"{number}: {done}: {result}")
            shutil.copytree(folder, arguments.keep / f"seed{arguments.seed}-{number}.tvmflow", dirs_exist_ok=True)
        shutil.rmtree(folder)
    child.close()
    return counts, findings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifacts", nargs="*", type=Path, metavar="ARTIFACT")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=1 << 62, help="stop after as many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("fuzz_findings"), help="a folder for what is found")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        sys.modules["torch"] = None  # type: ignore[assignment] # tvm-ffi would import it, which takes seconds
        return work(arguments.artifacts)
    with tempfile.TemporaryDirectory(prefix="tvmflow-fuzz-") as name:
        scratch = Path(name)
        originals = [path.resolve() for path in arguments.artifacts] or small_artifacts(scratch)
        if arguments.artifacts:  # hard links need one file system
            originals = [Path(shutil.copytree(path, scratch / f"given{i}")) for i, path in enumerate(originals)]
        counts, findings = fuzz(originals, arguments, scratch)
    for finding in findings:
        print(finding)
    print(
        f"seed {arguments.seed}: {counts.total()} manifests: {counts['ran']} ran, {counts['refused']} refused, "
        f"{len(findings)} findings"
    )
    sys.exit(1 if findings else 0)


if __name__ == "__main__":
    main()
