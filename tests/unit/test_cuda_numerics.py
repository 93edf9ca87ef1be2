"""What each layer is told about precision: every switch is stated, none is left to a default."""

import pytest

from tvmflow.codegen.numerics import cuda_options, llvm_attributes, pass_config
from tvmflow.config import NumericsSection

PRECISE, FAST = NumericsSection(), NumericsSection(fast_math=True)


def test_precise_allows_nothing_but_fused_multiply_add() -> None:
    assert pass_config(PRECISE) == {"tirx.enable_fast_math": False}
    assert not any(llvm_attributes(PRECISE).values())
    assert cuda_options(PRECISE) == ("--fmad=true", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")


def test_fast_approximates_on_every_layer() -> None:
    assert pass_config(FAST) == {"tirx.enable_fast_math": True}
    assert llvm_attributes(FAST)["fast-math-reassoc"]
    assert "--use_fast_math" in cuda_options(FAST)


@pytest.mark.parametrize("numerics", [PRECISE, FAST])
def test_nan_and_infinity_are_never_assumed_away(numerics: NumericsSection) -> None:
    attributes = llvm_attributes(numerics)
    assumptions = ("fast-math", "fast-math-nnan", "fast-math-ninf")
    assert [attributes[name] for name in assumptions] == [False] * 3


@pytest.mark.parametrize("stated", [pass_config, llvm_attributes])
def test_both_modes_state_the_same_switches(stated: object) -> None:
    assert callable(stated)
    assert stated(PRECISE).keys() == stated(FAST).keys()


def test_tf32_changes_no_compiler_option() -> None:
    assert cuda_options(NumericsSection(tf32=True)) == cuda_options(PRECISE)
