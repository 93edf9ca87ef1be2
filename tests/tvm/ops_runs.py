"""One-node models, what our importer and TVM make of them, and what ONNX Runtime makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import tvm
from onnx import helper, numpy_helper
from tvm import relax

from tvmflow.frontend.onnx.loading import load
from tvmflow.pipeline import plan
from tvmflow.pipeline.context import Context

Arrays = Mapping[str, Any]


def one_node(
    op_type: str,
    feeds: Arrays,
    weights: Arrays | None = None,
    *,
    outputs: int = 1,
    opset: int = 18,
    order: Sequence[str] = (),
    domain: str = "",
    **attributes: Any,
) -> onnx.ModelProto:
    """A model of one node called `node1`: `feeds` are its inputs, `weights` constants; `order` may leave inputs out."""
    names = list(order) or [*feeds, *(weights or {})]
    results = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(op_type, names, results, name="node1", domain=domain, **attributes)
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.asarray(value).dtype), np.shape(value))
        for name, value in feeds.items()
    ]
    initialisers = [numpy_helper.from_array(np.asarray(value), name) for name, value in (weights or {}).items()]
    graph = helper.make_graph(
        [node], "one", inputs, [helper.make_empty_tensor_value_info(r) for r in results], initialisers
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def imported(model: onnx.ModelProto, folder: Path) -> tvm.IRModule:
    path = folder / "model.onnx"
    onnx.save(model, path)
    return load(path, {}, {}).mod


def compiled(model: onnx.ModelProto, feeds: Arrays, folder: Path) -> list[np.ndarray]:
    """The outputs of the model, compiled without any schedule."""
    opened = plan.run(imported(model, folder), plan.steps_of(Context("llvm"), "open"))
    machine = relax.VirtualMachine(tvm.compile(opened, target="llvm"), tvm.cpu())
    names = [value.name for value in model.graph.input]
    results = machine["main"](*[tvm.runtime.tensor(np.array(feeds[name])) for name in names])
    return [result.numpy() for result in ([results] if isinstance(results, tvm.runtime.Tensor) else results)]


def reference(model: onnx.ModelProto, feeds: Arrays, threads: int = 0) -> list[np.ndarray]:
    """The outputs by ONNX Runtime, without its optimisations; by default it chooses the number of threads."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, {name: np.asarray(value) for name, value in feeds.items()}))


def assert_same(got: Sequence[np.ndarray], want: Sequence[Any], rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Equal shapes and dtypes; floats within the tolerance and with NaN in the same places, all else exactly."""
    assert len(got) == len(want)
    for result, expected in zip(got, map(np.asarray, want), strict=True):
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
        if expected.dtype.kind in "fV" or expected.dtype.name == "bfloat16":
            np.testing.assert_allclose(result.astype("f8"), expected.astype("f8"), rtol, atol)
        else:
            np.testing.assert_array_equal(result, expected)


def assert_as_reference(model: onnx.ModelProto, feeds: Arrays, folder: Path, **tolerance: float) -> None:
    assert_same(compiled(model, feeds, folder), reference(model, feeds), **tolerance)
