"""The kernels of the headline models, by name: what stops being fused, or loses its schedule's rule, is seen.

Each list was made by `python tests/tvm/test_headline_kernels.py`; run that again where a change is meant.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tvm

from tvmflow import config, frontend
from tvmflow.codegen import library
from tvmflow.errors import ConfigError
from tvmflow.graph.passes import fuse_kernels
from tvmflow.kernels.schedules.default_schedule import RULE_ATTR
from tvmflow.pipeline import plan
from tvmflow.pipeline.context import Context
from tvmflow.pipeline.prepare import prepare, setting

ROOT = Path(__file__).resolve().parents[2]
LISTS = Path(__file__).parent / "kernels"
MODELS = (
    "resnet50",
    "effnet_lite0",
    "minilm_l6",
    "ppocr_rec",
    "ppocr_det",
    "realesr_fp32",
    "crepe_tiny",
    "smollm2_135m",
    "silero_ifless",
    "magika",
    "basic_pitch",
)


def module(model: str) -> tvm.IRModule:
    """A model's kernels with default schedules for AVX-512 on two threads."""
    settings = {"target": {"mcpu": "x86-64-v4", "mtriple": "x86_64-unknown-linux-gnu", "threads": 2}}
    cfg = config.load(ROOT / "configs" / f"{model}.toml", [settings])
    chosen = setting(cfg)
    with chosen.entered():
        prepared, _ = prepare(cfg, frontend.load(cfg))
        return plan.run(prepared, plan.steps_of(Context("llvm"), "schedule", "rewrite"))


def kernels(scheduled: tvm.IRModule) -> str:
    """One line per kernel: calls, operators, the rule of its schedule."""
    counts = library.calls(scheduled)
    lines = [
        f"{counts[var.name_hint]} {_operators(var.name_hint)}: {function.attrs.get(RULE_ATTR)}"
        for var, function in scheduled.functions.items()
        if isinstance(function, tvm.tirx.PrimFunc)
    ]
    return "\n".join(sorted(lines)) + "\n"


def _operators(name: str) -> str:
    """A kernel's operators, without the numbers that tell kernels apart."""
    return " ".join(re.sub(r"\d+$", "", part) for part in name.removeprefix("fused_").split("_"))


@pytest.mark.parametrize("model", MODELS)
def test_the_kernels_are_those_listed(model: str) -> None:
    try:
        config.load(ROOT / "configs" / f"{model}.toml")
    except ConfigError as exc:
        if "no such file" not in exc.message:
            raise
        pytest.skip(f"{exc.message}; `make models` fetches every model")
    scheduled = module(model)
    assert kernels(scheduled).splitlines() == (LISTS / f"{model}.txt").read_text().splitlines()
    for var, function in scheduled.functions.items():
        if isinstance(function, tvm.tirx.PrimFunc):
            computed = fuse_kernels.operators(var.name_hint, function)
            assert set(computed) <= fuse_kernels.known_names(), var.name_hint


if __name__ == "__main__":
    for name in MODELS:
        (LISTS / f"{name}.txt").write_text(kernels(module(name)))
