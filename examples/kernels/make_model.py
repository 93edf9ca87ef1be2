"""Writes the model of these examples: a transformer's first feed-forward layer with seeded weights.

python examples/kernels/make_model.py out/feed_forward.onnx
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

ROWS, WIDTH, HIDDEN = 128, 384, 1536


def model() -> onnx.ModelProto:
    """y[128, 1536] = GELU(x[128, 384] @ w + b), GELU spelled with Erf as exporters do before opset 20."""
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.standard_normal((WIDTH, HIDDEN)) / WIDTH**0.5,
        "b": rng.standard_normal(HIDDEN),
        "root": np.array(2**0.5),
        "one": np.array(1.0),
        "half": np.array(0.5),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["product"]),
        helper.make_node("Add", ["product", "b"], ["biased"]),
        helper.make_node("Div", ["biased", "root"], ["scaled"]),
        helper.make_node("Erf", ["scaled"], ["erf"]),
        helper.make_node("Add", ["erf", "one"], ["shifted"]),
        helper.make_node("Mul", ["biased", "shifted"], ["doubled"]),
        helper.make_node("Mul", ["doubled", "half"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [ROWS, WIDTH])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [ROWS, HIDDEN])
    initializers = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "feed_forward", [x], [y], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model(), path)
