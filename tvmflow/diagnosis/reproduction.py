"""The folder that `bisect` leaves: what is wrong, as small as it gets, with inputs and a script that shows it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmflow import config, npz
from tvmflow.config import Config
from tvmflow.diagnosis import reproducers
from tvmflow.diagnosis.findings import KernelError
from tvmflow.errors import OutputError
from tvmflow.manifest import RunVerdict
from tvmflow.pipeline import partial
from tvmflow.pipeline.partial import VECTOR_MATH, Part

if TYPE_CHECKING:
    import tvm

SCRIPT, CASE, CONFIG, INPUTS = "reproduce.py", "case.json", "config.toml", "inputs.npz"


def clear(out: Path) -> None:
    """Removes an earlier reproducer; raises OutputError for anything else that is there."""
    if not out.exists():
        return
    if not out.is_dir() or (any(out.iterdir()) and not (out / CASE).exists()):
        raise OutputError(f"{out}: exists and is no reproducer, so it is not replaced", "choose another place with -o")
    shutil.rmtree(out)


def write_kernel(part: Part, error: KernelError, summary: str, out: Path) -> None:
    """Writes a kernel as it is before and after the part's last step, whose arguments are in `out` already.

    For a process of its own.
    """
    variants: dict[str, dict[str, Any]] = {}
    assert part.count is not None
    for name, count in (("good", part.count - 1), ("bad", part.count)):
        shorter = Part(part.cfg, part.layout, count)
        mod, setting = partial.module(shorter)
        _write_module(mod, error.kernel, out / name)
        variants[name] = {
            "target": json.loads(str(setting.tvm_target)),
            "options": setting.pass_config,
            "vector_math": VECTOR_MATH in partial.steps(shorter),
        }
    write_case(out, "kernel", {"summary": summary, "rtol": error.rtol, "atol": error.atol, "variants": variants})


def write_step(
    libraries: Mapping[str, Path], cfg: Config, run: RunVerdict, inputs: Mapping[str, Any], summary: str, out: Path
) -> None:
    """Writes the libraries before and after a step, with inputs on which the values of `run` are wrong after it."""
    out.mkdir(parents=True, exist_ok=True)
    for name, folder in libraries.items():
        shutil.copytree(folder, out / f"{name}.tvmflow", dirs_exist_ok=True)
    npz.write(out / INPUTS, inputs)
    (out / CONFIG).write_text(config.to_toml(cfg))
    tolerances = {output.name: (output.rtol, output.atol) for output in run.outputs}
    write_case(out, "step", {"summary": summary, "tolerances": tolerances})


def write_case(out: Path, script: str, case: Mapping[str, Any]) -> None:
    """Writes what was found, and the script of `reproducers` that shows it."""
    (out / CASE).write_text(json.dumps(case, indent=1) + "\n")
    shutil.copy(Path(reproducers.__file__).parent / f"{script}.py", out / SCRIPT)


def _write_module(mod: tvm.IRModule, kernel: str, path: Path) -> None:
    import tvm

    alone = tvm.IRModule({"main": mod[kernel].with_attr("global_symbol", "main")})
    path.with_suffix(".py").write_text(alone.script(show_meta=False))
    path.with_suffix(".json").write_text(tvm.ir.save_json(alone))
