"""onnx's own node tests of what we convert: each gives its expected values, or is refused in words."""

from __future__ import annotations

import functools
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from ops_runs import assert_same, compiled

from tvmflow.errors import ModelError
from tvmflow.frontend.onnx import ops

CASES_PER_OPERATOR = 3
# Operators that must not be refused altogether, because they are in many models.
COMMON = frozenset(
    {
        "Add",
        "ArgMax",
        "AveragePool",
        "BatchNormalization",
        "Clip",
        "Conv",
        "ConvTranspose",
        "Div",
        "Expand",
        "Gather",
        "Gemm",
        "LSTM",
        "LayerNormalization",
        "MatMul",
        "MaxPool",
        "PRelu",
        "Pad",
        "QLinearConv",
        "ReduceMean",
        "Relu",
        "Resize",
        "Reshape",
        "ScatterND",
        "Slice",
        "Softmax",
        "Split",
        "TopK",
    }
)
# It counts indices in the shape that the windows cover; ONNX Runtime and the operator's text, in the output's.
WRONG = frozenset({"test_maxunpool_export_with_output_shape"})


@functools.cache
def cases() -> dict[str, list[Any]]:
    """The node tests of one node each by operator, without those that repeat others as function bodies."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's, while onnx computes expected values with infinities
        every = collect_testcases(None)
    found = defaultdict(list)
    for case in every:
        plain = "_expanded" not in case.name and case.name not in WRONG
        if plain and len(case.model.graph.node) == 1 and _has_arrays(case):
            found[case.model.graph.node[0].op_type].append(case)
    return found


def _has_arrays(case: Any) -> bool:
    values = [value for data in case.data_sets for part in data for value in part]
    arrays = all(isinstance(value, np.ndarray | np.generic) for value in values)
    return arrays and all(np.asarray(value).dtype.kind not in "OUS" for value in values)


def _with_constants(model: onnx.ModelProto, feeds: dict[str, Any]) -> onnx.ModelProto:
    """The model with all inputs but the first as constants, as parameters of an operator usually are."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    for value in list(model.graph.input)[1:]:
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(feeds[value.name]), value.name))
        model.graph.input.remove(value)
    return model


def _outcome(case: Any, folder: Path) -> str:
    inputs, outputs = case.data_sets[0]
    feeds = {value.name: array for value, array in zip(case.model.graph.input, inputs, strict=True)}
    half = any(np.asarray(array).dtype.itemsize == 2 for array in (*inputs, *outputs))
    for model in (case.model, _with_constants(case.model, feeds)):
        try:
            got = compiled(model, feeds, folder)
        except ModelError:
            continue
        assert_same(got, outputs, *((1e-2, 1e-2) if half else (max(case.rtol or 0, 1e-3), 1e-5)))
        return "right"
    return "refused"


@pytest.mark.parametrize("op_type", sorted(name for family in ops.FAMILIES for name in family if "::" not in name))
def test_node_tests_are_right_or_refused(op_type: str, tmp_path: Path) -> None:
    found = cases().get(op_type, [])
    chosen = found[:: max(1, -(-len(found) // CASES_PER_OPERATOR))]
    outcomes = [_outcome(case, tmp_path) for case in chosen]
    assert op_type not in COMMON or "right" in outcomes, outcomes
