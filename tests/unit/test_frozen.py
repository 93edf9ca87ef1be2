"""A frozen value only becomes what its kind may be."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from tvmflow import config
from tvmflow.frozen import evolve
from tvmflow.manifest import Stage, TensorSpec

ROOT = Path(__file__).resolve().parents[2]
CONFIG = config.from_dict({"model": {"entry": "m:f"}, "shapes": {"buckets": {"n": [1, 2]}, "allow_padding": ["n"]}})
STAGE = Stage(name="graph", seconds=1.5)


def test_fields_change_and_the_value_itself_stays() -> None:
    fast = evolve(CONFIG, numerics=evolve(CONFIG.numerics, fast_math=True))
    assert (CONFIG.numerics.fast_math, fast.numerics.fast_math) == (False, True)
    assert fast == config.from_dict({**config.to_json(CONFIG), "numerics": {"fast_math": True}})
    assert evolve(STAGE, seconds=2, ir_hash="0") == Stage(name="graph", seconds=2.0, ir_hash="0")
    assert evolve(CONFIG) == CONFIG


def test_parts_are_not_looked_through_again() -> None:
    assert evolve(CONFIG, kernels={}).numerics is CONFIG.numerics


@pytest.mark.parametrize(
    ("value", "changes", "message"),
    [
        (CONFIG.numerics, {"fast_mth": True}, "NumericsSection has no field `fast_mth`, did you mean `fast_math`?"),
        (STAGE, {"minutes": 1}, "Stage has no field `minutes`"),
    ],
)
def test_an_unknown_field_is_named(value: BaseModel, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        evolve(value, **changes)


@pytest.mark.parametrize(
    ("value", "changes"),
    [
        (CONFIG.numerics, {"fast_math": 1}),
        (CONFIG.target, {"threads": 0}),
        (CONFIG.target, {"arch": "sm_90"}),  # which contradicts kind = "llvm"
        (CONFIG.shapes, {"buckets": ()}),  # whose dimension stays in allow_padding
        (CONFIG, {"numerics": config.NumericsSection(tf32=True)}),
        (CONFIG, {"numerics": {"fast_math": "off"}}),
        (STAGE, {"seconds": "1.5"}),  # which is converted where a stage is made
        (TensorSpec(name="x", dtype="float32", shape=(1,)), {"shape": [1]}),
    ],
)
def test_what_the_value_may_not_hold_is_refused(value: BaseModel, changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        evolve(value, **changes)


def test_nothing_copies_a_model_unchecked() -> None:
    sources = [file for part in ("tvmflow", "scripts", "benchmarks", "tests") for file in (ROOT / part).rglob("*.py")]
    unchecked = re.compile(r"\.model_copy\(|\.copy\(update=")
    assert [str(file) for file in sources if unchecked.search(file.read_text())] == []
