"""matmul + bias + GELU (erf), 128 x 384 x 1536: one kernel of ours beside torch, ONNX Runtime, and naive loops.

    python benchmarks/fused.py [SECONDS] [TRIALS]       # default 10 s, and 0 trials: the default schedule

With trials the kernel is tuned first, into a database of its own. Two threads; the sides take turns in one process,
each makes its output anew. "Naive" is TVM without any schedule, timed apart: it is too slow to take turns.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from tvmflow import bench, config, flow, runtime
from tvmflow.host import cpu_name
from tvmflow.target import resolve, to_tvm

ROWS, INNER, COLUMNS = 128, 384, 1536
THREADS = 2


def write_model(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Writes GELU(x @ W + b) and returns W and b."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((INNER, COLUMNS), "float32") / INNER**0.5
    bias = rng.standard_normal(COLUMNS, "float32")
    nodes = [
        helper.make_node("MatMul", ["x", "W"], ["p"]),
        helper.make_node("Add", ["p", "b"], ["s"]),
        helper.make_node("Gelu", ["s"], ["y"]),
    ]
    value = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [ROWS, size])
        for name, size in (("x", INNER), ("y", COLUMNS))
    ]
    graph = helper.make_graph(
        nodes,
        "fused",
        value[:1],
        value[1:],
        [numpy_helper.from_array(weights, "W"), numpy_helper.from_array(bias, "b")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)
    return weights, bias


def naive_s(weights: np.ndarray, x: np.ndarray) -> float:
    """Seconds of the matmul alone in the loops that TVM starts from."""
    import tvm
    from tvm import te

    a, b = te.placeholder(x.shape, name="A"), te.placeholder(weights.shape, name="B")
    k = te.reduce_axis((0, INNER), name="k")
    product = te.compute((ROWS, COLUMNS), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="C")
    target = to_tvm(resolve(config.TargetSection(threads=THREADS)), {})
    mod = tvm.IRModule({"main": te.create_prim_func([a, b, product]).with_attr("global_symbol", "main")})
    kernel = tvm.tirx.build(mod, target=target)["main"]
    arguments = [tvm.runtime.tensor(array) for array in (x, weights, np.zeros((ROWS, COLUMNS), "float32"))]
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        kernel(*arguments)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def main() -> None:
    import torch

    budget_s, trials = (float(text) for text in [*sys.argv[1:], *["10", "0"][len(sys.argv) - 1 :]])
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "fused.onnx"
        weights, bias = write_model(model)
        artifact = Path(name) / "fused.tvmflow"
        tuning = {"database": str(Path(name) / "db"), "trials_per_task": int(trials)} if trials else {}
        cfg = config.of_model(str(model), [{"target": {"threads": THREADS}, "tuning": tuning}])
        if trials:
            flow.tune([cfg], flow.Selection(), lambda event: None)
        flow.compile_model(cfg, artifact)
        session = runtime.load(artifact, THREADS)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = THREADS
        peer = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        torch.set_num_threads(THREADS)
        x = torch.from_numpy(np.random.default_rng(1).standard_normal((ROWS, INNER), "float32")).clone()
        layer, b, feeds = torch.from_numpy(weights.T.copy()), torch.from_numpy(bias), {"x": x.numpy()}
        with torch.inference_mode():
            ours, ort, eager = bench.interleave(
                {
                    "tvmflow": lambda: session.run_list(feeds),
                    "ONNX Runtime": lambda: peer.run(None, feeds),
                    "torch": lambda: torch.nn.functional.gelu(torch.nn.functional.linear(x, layer, b)),
                },
                budget_s,
            )
        slow = naive_s(weights, feeds["x"])
    print(f"{cpu_name()}; {THREADS} threads; onnxruntime {onnxruntime.__version__}, torch {version('torch')}\n")
    print("| | us | times tvmflow's |\n|---|---|---|")
    for label, seconds in (
        ("tvmflow", ours.median_s),
        ("ONNX Runtime", ort.median_s),
        ("torch", eager.median_s),
        ("TVM's naive loops, matmul alone", slow),
    ):
        print(f"| {label} | {seconds * 1e6:.0f} | {seconds / ours.median_s:.2f} |")


if __name__ == "__main__":
    main()
