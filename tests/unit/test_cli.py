"""The command line's own part: quick help, options to config, errors to exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from tvmflow import errors
from tvmflow.cli import cli

COMMANDS = ["compile", "run", "verify", "bisect", "bench", "inspect", "passes", "config", "doctor", "buckets"]


def tvmflow(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tvmflow.cli", *arguments], capture_output=True, text=True, cwd=cwd, check=False
    )


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['tvmflow', '--help']\n"
        "from tvmflow.cli import cli\n"
        "try: cli()\n"
        "except SystemExit: pass\n"
        "print(sorted({'tvm', 'numpy', 'onnx', 'torch', 'pydantic', 'rich', 'asyncio'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    result = CliRunner().invoke(cli, [command, "--help"])
    assert result.exit_code == 0
    assert len(result.output) > 200


def test_exit_codes_are_distinct_and_documented() -> None:
    found = {
        cls.__name__: cls.exit_code
        for cls in vars(errors).values()
        if isinstance(cls, type) and issubclass(cls, errors.TvmflowError)
    }
    assert len(set(found.values())) == len(found)
    for name, code in found.items():
        assert f"{name} " in (errors.__doc__ or "")
        assert f" {code} " in (errors.__doc__ or "") or f" {code}\n" in (errors.__doc__ or "")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["compile", "nothing.onnx"], 3, "no such file"),
        (["compile", "nothing.toml"], 3, "no such config file"),
        (["compile", "m:f", "--set", "numerics.fastmath=true"], 3, "did you mean `fast_math`?"),
        (["compile", "m:f", "--target", "vulkan"], 2, "'vulkan' is not one of 'llvm', 'cuda'"),
        (["compile", "m:f", "--shape", "x"], 2, "not of the form NAME=VALUE"),
        (["compile", "m:f", "--dim", "b=two"], 2, "`two` is no size"),
        (["compile", "m:f", "--dim", "b=²"], 2, "`²` is no size"),
        (["run", "nothing"], 2, "give either --inputs or --seed"),
        (["run", "nothing", "--seed", "0"], 9, "no artifact is there"),
        (["verify", "nothing"], 9, "no artifact is there"),
        (["bench", "nothing"], 9, "no artifact is there"),
        (["nonsense"], 2, "No such command"),
        (["compile", "/dev/zero"], 3, "model.path: is a device, not a file: /dev/zero"),
        (["inspect", "n" * 300 + ".onnx"], 2, "File name too long"),
        (["inspect", os.fsdecode(b"\xff.onnx")], 3, "\\udcff.onnx: its name is not UTF-8"),
        (["compile", "a\x1b[31mb.onnx"], 3, "no such file: "),
    ],
)
def test_errors(arguments: list[str], code: int, message: str, tmp_path: Path) -> None:
    done = tvmflow(*arguments, cwd=tmp_path)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_options_become_config(tmp_path: Path) -> None:
    done = tvmflow(
        "config",
        "show",
        "m:f",
        "--target",
        "cuda",
        "--arch",
        "sm_90",
        "--shape",
        "0.a=1x3xn",
        "--shape",
        "s=",
        "--shape",
        "q=1,max_len",
        "--dim",
        "n=4",
        "--set",
        "verify.seeds=[5]",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    shown = tomllib.loads(done.stdout)
    assert (shown["target"]["kind"], shown["target"]["arch"]) == ("cuda", "sm_90")
    shapes = {name: entry["shape"] for name, entry in shown["model"]["inputs"].items()}
    assert shapes == {"0.a": [1, 3, "n"], "s": [], "q": [1, "max_len"]}
    assert (shown["shapes"]["dims"], shown["verify"]["seeds"]) == ({"n": 4}, [5])


def test_schema_is_json_schema() -> None:
    assert json.loads(tvmflow("config", "schema").stdout)["additionalProperties"] is False
