"""Keys: the same in every process, independent of order, and able to say in what they differ."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
from database_records import NATIVE, V3, V4, parts_of
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tvmflow.database import KeyParts, canonical, difference

PARTS = {
    "workload": "ab" * 32,
    "target": {"kind": "llvm", "mcpu": "x86-64-v3", "threads": 2, "features": ["fma", "avx2"], "arch": None},
    "numerics": {"fast_math": False, "tf32": False},
    "preparation": 3,
}
# By sha256sum, of the canonical text written by hand.
KEY = "2abf5b187f8f9268cc62e37637c3acc7777049e08f9b2393439ddeb6d53219d5"


def reversed_order(value: object) -> object:
    if isinstance(value, dict):
        return {name: reversed_order(value[name]) for name in reversed(value)}
    return value


def test_a_key_never_changes() -> None:
    """Databases in the field are keyed by it: this value is for ever."""
    assert KeyParts.model_validate_json(json.dumps(PARTS)).key == KEY
    assert KeyParts.model_validate_json(json.dumps(reversed_order(PARTS))).key == KEY
    other_order = PARTS | {"target": PARTS["target"] | {"features": ("avx2", "fma", "fma")}}
    assert KeyParts.model_validate(other_order).key == KEY


@pytest.mark.parametrize("seed", ["0", "1"])
def test_a_key_does_not_depend_on_the_hash_seed(seed: str) -> None:
    code = f"from tvmflow.database import KeyParts; print(KeyParts.model_validate({PARTS!r}).key)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
    )
    assert done.stdout.strip() == KEY


@pytest.mark.parametrize(
    ("section", "change", "what"),
    [
        ("workload", "cd" * 32, "workload: abababababab against cdcdcdcdcdcd"),
        ("target", {"mcpu": "znver4"}, "target.mcpu: x86-64-v3 against znver4"),
        ("target", {"threads": 8}, "target.threads: 2 against 8"),
        ("target", {"arch": "sm_90"}, "target.arch: None against sm_90"),
        ("target", {"features": ("fma", "bmi")}, "target.features: avx2 against bmi, the rest is the same"),
        ("target", {"new": True}, "target.new: absent against True"),
        ("numerics", {"fast_math": True}, "numerics.fast_math: False against True"),
        ("preparation", 4, "preparation: 3 against 4"),
    ],
)
def test_each_part_makes_another_key_and_is_named(section: str, change: object, what: str) -> None:
    changed = PARTS[section] | change if isinstance(change, dict) else change
    a, b = KeyParts.model_validate(PARTS), KeyParts.model_validate(PARTS | {section: changed})
    assert a.key != b.key
    assert difference(a, b) == (what,)
    assert difference(a, a) == ()


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("workload", "short"),
        ("target", {"kind": "llvm"}),
        ("target", {**PARTS["target"], "threads": True}),
        ("target", {**PARTS["target"], "threads": 2.0}),
        ("target", {**PARTS["target"], "mcpu": "\x1b[2J"}),
        ("numerics", {"fast_math": 0}),
        ("preparation", "3"),
        ("surprise", 1),
    ],
)
def test_parts_are_strict(section: str, change: object) -> None:
    with pytest.raises(ValidationError):
        KeyParts.model_validate(PARTS | {section: change})


def test_true_and_one_are_different_parts() -> None:
    one, true = (KeyParts.model_validate(PARTS | {"target": PARTS["target"] | {"x": x}}) for x in (1, True))
    assert one.key != true.key


def test_features_of_levels_are_kept() -> None:
    assert parts_of(features=reversed(V4)).key == parts_of(features=V4).key
    assert parts_of(features=V3).features < parts_of(features=NATIVE).features


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=20,
)


@given(json_values)
def test_canonical_json_round_trips(value: object) -> None:
    text = canonical(value)
    assert text.isascii()
    assert json.loads(text) == value
    assert canonical(json.loads(text)) == text
    assert canonical(reversed_order(value)) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_round_trip_bit_for_bit(value: float) -> None:
    back = json.loads(canonical(value))
    assert (back, math.copysign(1, back)) == (value, math.copysign(1, value))


@pytest.mark.parametrize("value", [math.nan, math.inf, {1, 2}, b"x", [object()]])
def test_what_is_no_json_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"JSON|nan|inf"):
        canonical(value)
