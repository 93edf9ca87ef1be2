"""The pipeline is one value: its lists, as golden files, for configs that differ in what they ask for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tvmflow import config
from tvmflow.pipeline import plan
from tvmflow.pipeline.building import passes
from tvmflow.pipeline.context import Context, context_of

GOLDEN = Path(__file__).parent / "pipelines"
MODEL = {"model": {"entry": "m:f"}}
CONFIGS: dict[str, dict[str, Any]] = {
    "llvm": {"numerics": {"winograd": "off"}, "graph": {"layout": "keep"}},
    "llvm_tuned": {"tuning": {"database": "tuning_db"}},
    "llvm_guarded": {"graph": {"guards": True, "prepack": False}, "numerics": {"widen_half": False}},
    "cuda": {"target": {"kind": "cuda", "arch": "sm_90"}},
    "cuda_tf32": {"target": {"kind": "cuda", "arch": "sm_90"}, "numerics": {"tf32": True}},
}


def as_text(phases: dict[str, list[tuple[str, str]]]) -> str:
    return "".join(f"{phase}: {' '.join(name for name, _ in steps)}\n" for phase, steps in phases.items())


@pytest.mark.parametrize("name", CONFIGS)
def test_the_list_of_a_config(name: str) -> None:
    """`UPDATE_GOLDEN=1 pytest tests/tvm/test_pipeline.py` writes the lists anew; read what changed before a commit."""
    text = as_text(passes(config.from_dict(MODEL | CONFIGS[name])))
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


def test_the_list_of_a_bucket() -> None:
    """A bucket's library shares its weights with the others."""
    cfg = config.from_dict(MODEL)
    shared = context_of(cfg, prepack="shared")
    assert [step.name for step in plan.steps_of(shared, "fuse")][-1] == "ShareLayouts"
    others = [step.name for step in plan.steps_of(context_of(cfg), "fuse")]
    assert [step.name for step in plan.steps_of(shared, "fuse")][:-1] == others


def test_a_part_is_a_filter_of_the_whole() -> None:
    """Whatever phases are asked for come in the pipeline's order, with the steps that the whole has."""
    context = Context("llvm", guards=True, prepack=True)
    whole = [step.name for phase in plan.phases(context) for step in phase.steps]
    asked = [step.name for step in plan.steps_of(context, "lower", "rewrite", "prefetch")]
    positions = iter(whole)
    assert all(name in positions for name in asked)


def test_every_name_says_which_pass_it_is() -> None:
    """Passes of ours have names of their own: none is called like the pass of TVM's that it is put in place of."""
    context = Context("llvm", guards=True, widen_half=True, convolutions="winograd", prepack="shared", nhwc=True)
    steps = [step for phase in plan.phases(context) for step in phase.steps]
    ours = [step.name for step in steps if type(step.apply).__module__.startswith("tvmflow")]
    assert not {"FuseTIR", "SplitLayoutRewritePreproc", "RewriteDataflowReshape"} & set(ours)
    assert all(step.why for step in steps)
