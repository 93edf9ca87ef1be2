"""What a call costs beside its kernels: `run` beside ONNX Runtime's, same threads, in turns.

    python benchmarks/overhead.py           # needs .cache/models/onnx/silero_ifless.onnx

Silero's voice detector takes tens of microseconds, so that calls count; a negation of arrays of its sizes
has next to no kernels, so that its time is the calls'.
"""

from __future__ import annotations

import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

import tvmflow
from tvmflow import bench, config, flow
from tvmflow.host import cpu_name
from tvmflow.runtime.session import Session

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 4.0


def negative(folder: Path) -> Path:
    """A model of arrays as long as those of silero that negates them."""
    inputs = [
        helper.make_tensor_value_info("input", TensorProto.FLOAT, [1, 576]),
        helper.make_tensor_value_info("state", TensorProto.FLOAT, [2, 1, 128]),
    ]
    outputs = [
        helper.make_tensor_value_info("state2", TensorProto.FLOAT, [2, 1, 128]),
        helper.make_tensor_value_info("input2", TensorProto.FLOAT, [1, 576]),
    ]
    nodes = [helper.make_node("Neg", ["state"], ["state2"]), helper.make_node("Neg", ["input"], ["input2"])]
    onnx.save(
        helper.make_model(
            helper.make_graph(nodes, "negative", inputs, outputs),
            ir_version=8,
            opset_imports=[helper.make_opsetid("", 17)],
        ),
        folder / "negative.onnx",
    )
    return tvmflow.compile(folder / "negative.onnx", out=folder / "negative.tvmflow")


def feeds_of(session: Session, seed: int) -> dict[str, np.ndarray]:
    """Drawn inputs; integers are a sample rate."""
    rng = np.random.default_rng(seed)
    return {
        spec.name: np.full(spec.shape, 16000, spec.dtype)
        if spec.dtype == "int64"
        else rng.standard_normal(spec.shape).astype(spec.dtype)
        for spec in session.signature.inputs
    }


def peer_of(model: Path, threads: int = 0) -> onnxruntime.InferenceSession:
    """ONNX Runtime's session of a model; 0 threads are as many as it takes by itself."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def row(name: str, artifact: Path, model: Path, threads: int) -> None:
    session = tvmflow.load(artifact, threads)
    peer = peer_of(model, threads)
    feeds = feeds_of(session, 0)
    ours, theirs = bench.interleave({"a": lambda: session.run(feeds), "b": lambda: peer.run(None, feeds)}, SECONDS)
    print(
        f"| {name} | {threads} | {ours.median_s * 1e6:.1f} | {theirs.median_s * 1e6:.1f} | "
        f"{bench.ratio(ours, theirs):.2f} |",
        flush=True,
    )


def main() -> None:
    print(f"{cpu_name()}; onnxruntime {version('onnxruntime')}\n")
    print("| model | threads | tvmflow us | ONNX Runtime us | ratio |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flow.compile_model(config.load(ROOT / "configs" / "silero_ifless.toml", []), folder / "silero.tvmflow")
        simple = negative(folder)
        for threads in (1, 2):
            row("silero_ifless", folder / "silero.tvmflow", ROOT / ".cache/models/onnx/silero_ifless.onnx", threads)
            row("negative", simple, folder / "negative.onnx", threads)


if __name__ == "__main__":
    main()
