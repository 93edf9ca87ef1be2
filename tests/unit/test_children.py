"""Calls into other processes are typed by what they call, and what they call is imported without its heavy packages."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"tvm", "tvm_ffi", "torch", "onnx", "onnxruntime"}
CALLS = """
from tvmflow.process import Child

def repeated(text: str, times: int = 2) -> str:
    return text * times

child = Child("repeating")
right: str = child.call(repeated, "a", times=3)
child.call(repeated)  # wrong: an argument is missing
child.call(repeated, 1)  # wrong: the type of one
child.call(repeated, "a", time=3)  # wrong: the name of one
child.call(repeated, "a", 2, 3)  # wrong: one too many
number: int = child.call(repeated, "a")  # wrong: the type of the value
child.measure(repeated, "a")[0].nothing()  # wrong: what is done with it
child.call("tvmflow.cli:main")  # wrong: a name is no function
"""


def test_a_type_checker_sees_a_wrong_call(tmp_path: Path) -> None:
    (tmp_path / "calls.py").write_text(CALLS)
    options = ["--strict", "--follow-imports=silent", "--no-error-summary", "--config-file", "pyproject.toml"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(tmp_path / "calls.py")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    found = {int(number) for number in re.findall(r"calls\.py:(\d+): error", done.stdout)}
    assert found == {number for number, line in enumerate(CALLS.split("\n"), 1) if "# wrong" in line}, done.stdout


def test_who_calls_a_child_imports_nothing_heavy() -> None:
    """The parent imports the functions that its children run, but never TVM or PyTorch, which may crash."""
    modules = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in (ROOT / "tvmflow").rglob("*.py")
        if re.search(r"\bChild\(|process import .*\bemit\b", file.read_text())
    ]
    assert {"tvmflow.flow.compiling", "tvmflow.exchange.conversion", "tvmflow.pipeline.building"} <= set(modules)
    code = (
        "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\n"
        f"print(*sorted({HEAVY} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "tvmflow.cli", *modules], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.split() == []
