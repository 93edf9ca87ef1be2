"""`graph.guards`: indices out of range and division by zero stop the run; right values stay as they are.

References: eager PyTorch and ONNX Runtime, which raise for the same inputs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from tvmflow import config, flow, runtime
from tvmflow.errors import InputError

TORCH = """
import torch

class Picks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = torch.nn.Embedding(10, 4)

    def forward(self, ids, at, divisor):
        rows = self.rows(ids)
        written = torch.zeros_like(rows).scatter(0, at, rows)
        picked = self.rows.weight[ids, (ids % 4) - 4]
        gathered = rows.gather(1, at % 4) + picked[:, None]
        return gathered, written, torch.div(ids, divisor, rounding_mode="floor"), ids % divisor

def make():
    n = torch.export.Dim("n", min=2, max=64)
    at = torch.zeros(3, 4, dtype=torch.int64)
    return Picks().eval(), (torch.tensor([1, 2, 9]), at, torch.tensor([1, 2, 3])), ({0: n}, {0: n}, {0: n})
"""


def torch_inputs(**changed: np.ndarray) -> dict[str, np.ndarray]:
    good = {"ids": np.array([1, 2, 9]), "at": np.tile([[0], [2], [1]], (1, 4)), "divisor": np.array([1, -2, 3])}
    return good | changed


def test_a_pytorch_model_with_an_open_dimension(tmp_path: Path) -> None:
    import torch

    (tmp_path / "picks.py").write_text(TORCH)
    (tmp_path / "picks.toml").write_text('model.entry = "picks:make"\ngraph.guards = true\nverify.seeds = [0]\n')
    text = "[verify.ranges]\nids = [0, 9]\nat = [0, 1]\ndivisor = [1, 9]\n"
    with (tmp_path / "picks.toml").open("a") as stream:
        stream.write(text)
    flow.compile_model(config.load(tmp_path / "picks.toml"), tmp_path / "picks.tvmflow")  # verified against eager
    session = runtime.load(tmp_path / "picks.tvmflow")
    results = session.run_list(torch_inputs())
    assert (
        results[2].tolist()
        == torch.div(torch.tensor([1, 2, 9]), torch.tensor([1, -2, 3]), rounding_mode="floor").tolist()
    )
    for changed, said in (
        ({"ids": np.array([1, 10, 2])}, "embedding_index_in_range"),
        ({"ids": np.array([1, -1, 2])}, "embedding_index_in_range"),
        ({"at": np.tile([[0], [3], [1]], (1, 4))}, "scatter_index_in_range"),
        ({"divisor": np.array([1, 0, 2])}, "divisor_not_zero"),
        ({"ids": np.array([1, 2]), "at": np.full((2, 4), 2), "divisor": np.array([1, 2])}, "scatter_index_in_range"),
    ):
        with pytest.raises(InputError, match=said):
            session.run_list(torch_inputs(**changed))
    assert [a.tolist() for a in session.run_list(torch_inputs())] == [a.tolist() for a in results]


def test_the_branches_of_an_if(tmp_path: Path) -> None:
    def branch(op: str, inputs: list[str], name: str) -> onnx.GraphProto:
        return helper.make_graph(
            [helper.make_node(op, inputs, [name])],
            name,
            [],
            [helper.make_tensor_value_info(name, TensorProto.INT64, ["n"])],
        )

    node = helper.make_node(
        "If",
        ["flag"],
        ["y"],
        then_branch=branch("Gather", ["table", "i"], "picked"),
        else_branch=branch("Div", ["i", "d"], "divided"),
    )
    values = [
        helper.make_tensor_value_info(name, kind, shape)
        for name, kind, shape in (
            ("flag", TensorProto.BOOL, []),
            ("i", TensorProto.INT64, ["n"]),
            ("d", TensorProto.INT64, ["n"]),
        )
    ]
    result, table = helper.make_tensor_value_info("y", TensorProto.INT64, ["n"]), np.arange(10) * 7
    graph = helper.make_graph([node], "branches", values, [result], [numpy_helper.from_array(table, "table")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    onnx.save(model, tmp_path / "m.onnx")
    cfg = config.of_model(
        str(tmp_path / "m.onnx"),
        [{"graph": {"guards": True}, "verify": {"seeds": [0], "ranges": {"i": [0, 9], "d": [1, 5]}}}],
    )
    flow.compile_model(cfg, tmp_path / "m.tvmflow")
    session, reference = runtime.load(tmp_path / "m.tvmflow"), onnxruntime.InferenceSession(tmp_path / "m.onnx")

    def feeds(flag: bool, indices: list[int], divisors: list[int]) -> dict[str, np.ndarray]:
        return {"flag": np.array(flag), "i": np.array(indices), "d": np.array(divisors)}

    for good in (feeds(True, [9, -10, 3], [0, 0, 0]), feeds(False, [70, -1, 5], [2, 2, -3])):  # only one branch runs
        np.testing.assert_array_equal(session.run(good)["y"], reference.run(None, good)[0])
    with pytest.raises(Exception, match="indices element out of data bounds"):
        reference.run(None, feeds(True, [10], [1]))
    with pytest.raises(InputError, match="index_in_range"):
        session.run(feeds(True, [10], [1]))
    with pytest.raises(InputError, match="divisor_not_zero"):
        session.run(feeds(False, [10], [0]))
