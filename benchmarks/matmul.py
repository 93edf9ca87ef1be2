"""A float32 matmul, 1024 x 1024 x 1024 with constant B, tuned: beside the machine's FMA peak, ONNX Runtime and PyTorch.

    python benchmarks/matmul.py [TRIALS]        # default 256 per thread count

For one thread and for two: tunes into a new database, compiles and verifies, then times the library in turns with
ONNX Runtime and torch.matmul at equal threads in one process. The peak is that of a kernel of nothing but independent
multiply-adds, measured before and after (tvmflow/tuning/peak.py); the higher one counts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import tvm
from onnx import TensorProto, helper, numpy_helper

from tvmflow import bench, config, flow, runtime
from tvmflow.host import cpu_name
from tvmflow.target import resolve, to_tvm
from tvmflow.tuning import peak
from tvmflow.tuning.measure import Measurer

SIZE = 1024
THREADS = (1, 2)


def write_model(path: Path) -> np.ndarray:
    """Writes MatMul(x, B) and returns B."""
    weights = np.random.default_rng(0).standard_normal((SIZE, SIZE)).astype("float32")
    value = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [SIZE, SIZE]) for name in ("x", "y")}
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "B"], ["y"])],
        "matmul",
        [value["x"]],
        [value["y"]],
        [numpy_helper.from_array(weights, "B")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return weights


def tuned(model: Path, folder: Path, threads: int, trials: int) -> Path:
    """The artifact of the model, tuned for `threads`."""
    overrides = [
        {
            "target": {"threads": threads},
            "tuning": {"database": str(folder / "db"), "trials_per_task": trials, "minutes": 10.0},
        }
    ]
    cfg = config.of_model(str(model), overrides)
    flow.tune([cfg], flow.Selection(), lambda event: None)
    out = folder / f"matmul{threads}.tvmflow"
    flow.compile_model(cfg, out)
    return out


def peak_gflops(threads: int) -> float:
    target = to_tvm(resolve(config.TargetSection(threads=threads)), {})
    with Measurer(str(target), threads, 1) as measurer:
        found = peak.fma_gflops(target, threads, measurer)
    assert found is not None
    return found


def timed(artifact: Path, model: Path, weights: np.ndarray, threads: int) -> tuple[bench.Samples, ...]:
    """Samples of the library, ONNX Runtime and torch; each makes its output anew in every call."""
    import torch  # not at the top: the measurer's workers import this file, and they have no torch

    session = runtime.load(artifact, threads)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    peer = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    torch.set_num_threads(threads)
    # Memory of torch's stands at 64 bytes, where our kernels read it in place; all three read the same.
    a = torch.from_numpy(np.random.default_rng(1).standard_normal((SIZE, SIZE)).astype("float32")).clone()
    b, feeds = torch.from_numpy(weights), {"x": a.numpy()}
    return bench.interleave(
        {
            "tvmflow": lambda: session.run_list(feeds),
            "ONNX Runtime": lambda: peer.run(None, feeds),
            "torch": lambda: torch.matmul(a, b),
        },
        10.0,
    )


def main() -> None:
    if len(sys.argv) == 5:  # one thread count in a process of its own: thread pools cannot grow
        artifact, model, threads = Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
        weights = numpy_helper.to_array(onnx.load(model).graph.initializer[0]).copy()
        before = peak_gflops(threads)
        samples = timed(artifact, model, weights, threads)
        best = max(before, peak_gflops(threads))
        speeds = [2 * SIZE**3 / item.median_s / 1e9 for item in samples]
        print(f"| {threads} | {best:.0f} | {' | '.join(f'{s:.0f}' for s in speeds)} | {speeds[0] / best:.0%} |")
        return
    trials = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    print(f"{cpu_name()}; tvm {tvm.__version__}, onnxruntime {onnxruntime.__version__}, torch {version('torch')}\n")
    print("| threads | FMA peak GFLOP/s | tvmflow | ONNX Runtime | torch | tvmflow of peak |")
    print("|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "matmul.onnx"
        write_model(model)
        for threads in THREADS:
            artifact = tuned(model, Path(name), threads, trials)
            subprocess.run(
                [sys.executable, __file__, "--time", artifact, model, str(threads)],
                check=True,
                env={**os.environ, "TVM_NUM_THREADS": str(threads)},
            )


if __name__ == "__main__":
    main()
