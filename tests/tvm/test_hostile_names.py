"""Every command that prints a model's names shows them, in full as JSON, and does nothing else with them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tvmflow import text

INPUTS = (
    "tokens[ids][/][link=http://example.org]x[/link]",
    "state[/h]\n  next: do this\r\t\x1b[2J\x9b31m",
    "in" * 5000,
)
OUTPUTS = ("[bold]y|`z`\x7f\u202eabc\u2069", "\u05d0\u05d1[/]\u2066\x1b]0;title\x07", "out" * 3000 + "\n")
MODEL = "m[bold]|`x`$(id)[i].onnx"
TARGET = ("--set", 'target.mcpu="x86-64-v3"', "--set", "target.threads=1")


def run(*arguments: str | Path, cwd: Path, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "tvmflow.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **env},
        check=False,
    )
    assert done.returncode == code, done.stderr
    for output in (done.stdout, done.stderr):
        assert_plain(output)
    return done


def assert_plain(output: str) -> None:
    """Nothing but what can be seen, line breaks and colours; no line beyond reason, none that a name has made."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
    bad = {char for char in plain if not (char.isprintable() or char == "\n")}
    assert not bad, bad
    assert "\x1b[31m" not in output or plain.startswith("error: ")
    if not plain.startswith("{"):  # JSON is one line
        assert max(map(len, plain.splitlines()), default=0) < 5000
    assert not re.search(r"^ *next: do this", plain, re.MULTILINE)


def save(path: Path, nodes: list[onnx.NodeProto] | None = None) -> Path:
    """An output per input: relu of its product with the same weights."""
    nodes = nodes or [
        node
        for index, (x, y) in enumerate(zip(INPUTS, OUTPUTS, strict=True))
        for node in (
            helper.make_node("MatMul", [x, "w[/]"], [f"h{index}[/h]\n"], name=f"[bold]n{index}\x1b[0m"),
            helper.make_node("Relu", [f"h{index}[/h]\n"], [y], name=f"{index}" + "[/]" * 4000),
        )
    ]
    graph = helper.make_graph(
        nodes,
        "g[/g]\n",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b[/]\n", 4]) for name in INPUTS],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b[/]\n", 3]) for name in OUTPUTS],
        [numpy_helper.from_array(np.linspace(-1, 1, 12, dtype="f4").reshape(4, 3), "w[/]")],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("d[/]", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model, what `compile` said of it in compile.txt, and the artifact, a.tvmflow."""
    folder = tmp_path_factory.mktemp("hostile")
    save(folder / MODEL)
    done = run("compile", MODEL, *TARGET, "--set", "verify.seeds=[0]", "-o", "a.tvmflow", cwd=folder)
    (folder / "compile.txt").write_text(done.stdout)
    return folder


def assert_names(output: str, names: tuple[str, ...]) -> None:
    """Each name stands in one piece of the output, where columns leave room for that."""
    for name in names:
        assert text.cell(name) in output, output


def test_compile(folder: Path) -> None:
    output = (folder / "compile.txt").read_text()
    assert_names(output, OUTPUTS)
    assert "note a run's time: 100% default schedule" in output
    assert f"`tvmflow tune '{MODEL}' --set" in output


@pytest.mark.parametrize("path", [MODEL, "a.tvmflow"])
def test_inspect(path: str, folder: Path) -> None:
    assert_names(run("inspect", path, cwd=folder).stdout, INPUTS + OUTPUTS)


def test_a_narrow_terminal(folder: Path) -> None:
    coloured = run("inspect", "a.tvmflow", cwd=folder, FORCE_COLOR="1", COLUMNS="30").stdout
    assert "\x1b[32mok\x1b[0m" in coloured
    grey = run("inspect", "a.tvmflow", cwd=folder, FORCE_COLOR="1", COLUMNS="30", NO_COLOR="1").stdout
    assert not re.search(r"\x1b\[3\d", grey)
    joined = re.sub(r"\s", "", grey)
    assert all(re.sub(r"\s", "", part)[:3] in joined for part in INPUTS + OUTPUTS)


def test_json_has_names_in_full(folder: Path) -> None:
    manifest = json.loads(run("inspect", "a.tvmflow", "--json", cwd=folder).stdout)
    assert tuple(spec["name"] for spec in manifest["signature"]["inputs"]) == INPUTS
    assert tuple(spec["name"] for spec in manifest["signature"]["outputs"]) == OUTPUTS
    (checked,) = manifest["verdict"]["runs"]
    assert tuple(out["name"] for out in checked["outputs"]) == OUTPUTS


def test_run_takes_and_gives_arrays_by_name(folder: Path) -> None:
    arrays: dict[str, Any] = {name: np.full((2, 4), index, "f4") for index, name in enumerate(INPUTS)}
    np.savez(folder / "in.npz", **arrays)
    output = run("run", "a.tvmflow", "--inputs", "in.npz", "--outputs", "out.npz", cwd=folder).stdout
    assert output.splitlines()[:3] == [text.line(f"{name}: float32 [2, 3]") for name in OUTPUTS]
    weights = np.linspace(-1, 1, 12, dtype="f4").reshape(4, 3)
    with np.load(folder / "out.npz") as results:
        assert tuple(results.files) == OUTPUTS
        for x, y in zip(INPUTS, OUTPUTS, strict=True):
            np.testing.assert_allclose(results[y], np.maximum(arrays[x] @ weights, 0), rtol=1e-5)


def test_errors_of_run(folder: Path) -> None:
    np.savez(folder / "wrong.npz", **{OUTPUTS[0]: np.zeros(3, "f4"), INPUTS[1]: np.zeros((2, 5), "f4")})
    shown = run("run", "a.tvmflow", "--inputs", "wrong.npz", cwd=folder, code=12).stderr
    assert len(shown.splitlines()) == 2
    for name in (*INPUTS[:2], OUTPUTS[0]):
        assert text.line(name) in shown


def test_verify(folder: Path) -> None:
    assert_names(run("verify", "a.tvmflow", cwd=folder).stdout, OUTPUTS)
    overrides = ("--set", "verify.rtol=0", "--set", "verify.atol=0", "--set", 'verify.reference="nothing[/]"')
    refused = run("verify", "a.tvmflow", *overrides, cwd=folder, code=3).stderr
    assert "nothing[/]" in refused


def test_audit(folder: Path) -> None:
    title = f"Audit of {MODEL.removesuffix('.onnx')} for llvm (x86-64-v3)"
    assert run("audit", "a.tvmflow", cwd=folder).stdout.startswith(title)
    assert json.loads(run("audit", "a.tvmflow", "--json", cwd=folder).stdout)["name"] in MODEL
    markdown = run("audit", "a.tvmflow", "--markdown", "-", cwd=folder).stdout
    assert markdown.startswith("# Audit of m\\[bold]\\|\\`x\\`\\$(id)\\[i] for llvm (x86-64-v3)")


def test_bench(folder: Path) -> None:
    assert "ONNX Runtime" in run("bench", "a.tvmflow", "--seconds", "0.1", cwd=folder).stdout


@pytest.mark.parametrize("command", ["tasks", "passes"])
def test_lists(command: str, folder: Path) -> None:
    run(command, MODEL, *TARGET, cwd=folder)


def test_buckets(folder: Path) -> None:
    (dim,) = {spec["shape"][0] for spec in json.loads(run("inspect", MODEL, "--json", cwd=folder).stdout)["inputs"]}
    (folder / "trace.csv").write_text(f"{dim}\n1\n4\n")
    run("buckets", MODEL, *TARGET, "--trace", "trace.csv", "--plot", "plot.svg", cwd=folder)
    (folder / "bad.csv").write_text("b[/]\x1b[31m\n1\n")
    refused = run("buckets", MODEL, *TARGET, "--trace", "bad.csv", cwd=folder, code=12)
    assert r"b[/]\x1b[31m" in refused.stderr


def test_errors_of_compile(folder: Path) -> None:
    nodes = [
        helper.make_node("Odd[/]", [x], [y], name=f"[/]{index}\n  next: do this", domain="d[/]")
        for index, (x, y) in enumerate(zip(INPUTS, OUTPUTS, strict=True))
    ]
    save(folder / "bad.onnx", nodes)
    shown = run("compile", "bad.onnx", *TARGET, cwd=folder, code=5).stderr.splitlines()
    assert shown[0].endswith("3 things cannot be compiled")
    assert all(rf"d[/]::Odd[/] '[/]{index}\n  next: do this'" in line for index, line in enumerate(shown[1:4]))
    assert len(shown) == 5
