"""What is handed to a library as an input: right, or refused with the input's name and what to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tvmflow.errors import InputError
from tvmflow.manifest import Signature, TensorSpec
from tvmflow.runtime import inputs

X = np.arange(6, dtype="f4").reshape(2, 3)
SIGNATURE = Signature(inputs=(TensorSpec(name="x", dtype="float32", shape=(2, 3)),), outputs=())


class Marked:
    """Like a tensor of PyTorch: its memory holds the negatives of its values until they are resolved."""

    def __dlpack__(self) -> None:
        raise AssertionError("read before it was resolved")

    def is_neg(self) -> bool:
        return True

    def resolve_neg(self) -> np.ndarray:
        return -X


@pytest.mark.parametrize(
    "value",
    [
        X,
        np.asfortranarray(X),
        X[::-1, ::-1],
        np.ma.masked_array(X),
        np.broadcast_to(np.float32(2), (2, 3)),
    ],
)
def test_arrays_that_are_taken(value: Any) -> None:
    given = inputs.plain("x", value)
    inputs.check(SIGNATURE, {"x": given})
    np.testing.assert_array_equal(given, value)


def test_the_mark_of_a_negative_is_resolved() -> None:
    np.testing.assert_array_equal(inputs.plain("x", Marked()), -X)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "`x`: None is no array"),
        ({"a": 1}, "`x`: a dict is no array"),
        ([[1, 2], [3]], "`x`: not an array: "),
        (np.ma.masked_array(X, mask=X > 2), "`x`: some of its elements are masked"),
        (X.tolist(), "`x`: dtype float64, expected float32"),
        (1.0, "`x`: dtype float64, expected float32; `x`: rank 0, expected 2"),
        (X.astype(">f4"), "`x`: dtype >f4, expected float32"),
        (X.astype(object), "`x`: dtype object, expected float32"),
        (np.zeros((2, 3), [("a", "f4")]), r"`x`: dtype \[\('a', '<f4'\)\], expected float32"),
        (X.astype("c8"), "`x`: dtype complex64, expected float32"),
    ],
)
def test_what_is_refused_is_named(value: Any, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        inputs.check(SIGNATURE, {"x": inputs.plain("x", value)})
    assert caught.value.hint


@pytest.mark.parametrize("given", [[X], None, "x", X])
def test_inputs_are_given_by_name(given: Any) -> None:
    with pytest.raises(InputError, match="inputs are given by name, not as a ") as caught:
        inputs.check_named(SIGNATURE, given)
    assert "`x`" in caught.value.hint
