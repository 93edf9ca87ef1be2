"""The eleven headline models beside ONNX Runtime and stock TVM, built with the committed tuning database.

    python benchmarks/headline.py [--threads 2] [--no-stock] [MODEL ...]      # tuned: kernels from tuning_db/
    python benchmarks/untuned.py [--threads 2] [--no-stock] [MODEL ...]       # the same without a database

Both need `make models`.

Each model is compiled and verified, then timed in a process of its own: our library and ONNX Runtime in turns, at equal
threads, medians; then stock TVM (its default `llvm` pipeline on the module that we import), which is too slow to take
turns. The slowest kernels are those of one run, timed call by call inside the model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tvmflow import config, flow, frontend, runtime
from tvmflow.host import cpu_name
from tvmflow.verification import child, reference

ROOT = Path(__file__).resolve().parents[1]
MODELS = (
    "resnet50",
    "effnet_lite0",
    "minilm_l6",
    "ppocr_rec",
    "ppocr_det",
    "realesr_fp32",
    "crepe_tiny",
    "smollm2_135m",
    "silero_ifless",
    "magika",
    "basic_pitch",
)
SECONDS = 8.0
STOCK_RUNS = 3


def compiled(model: str, database: Path | None, threads: int, folder: Path) -> tuple[Path, float]:
    """The verified artifact of a model, and the seconds that it took."""
    out = folder / f"{model}.tvmflow"
    settings = {"target": {"threads": threads}, "tuning": {"database": database and str(database)}}
    started = time.monotonic()
    flow.compile_model(config.load(ROOT / "configs" / f"{model}.toml", [settings]), out)
    return out, time.monotonic() - started


def stock_s(cfg: config.Config, feeds: dict[str, Any]) -> float:
    """Seconds of one run of what TVM's own default pipeline makes of the module that we import."""
    import tvm

    from tvmflow.target import resolve, to_tvm

    target = to_tvm(resolve(cfg.target), {})
    with tvm.transform.PassContext(opt_level=3):
        built = tvm.compile(frontend.load(cfg).mod, target=target)
    machine = tvm.relax.VirtualMachine(built, tvm.cpu())
    arrays = [tvm.runtime.tensor(array) for array in feeds.values()]
    seconds = []
    for _ in range(STOCK_RUNS):
        started = time.perf_counter()
        machine["main"](*arrays)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def time_model(artifact: Path, stock: bool) -> None:
    """Prints the figures of one artifact as JSON."""
    manifest = runtime.load(artifact).manifest
    cfg = config.from_dict(
        manifest.config, [{"verify": {"seeds": [0]}}], source=str(artifact), folder=artifact.resolve().parent
    )
    feeds = reference.draw_accepted(cfg, manifest)
    ours, peer = child.time_beside_peer(cfg, artifact, feeds, manifest.target.threads, SECONDS)
    (kernels,) = child.kernel_times([(artifact, feeds)])
    tuned = sum(kernels.get(kernel.name, 0.0) for kernel in manifest.kernels if kernel.origin == "tuned")
    slowest = sorted(((kernels.get(k.name, 0.0), k.name) for k in manifest.kernels), reverse=True)[:3]
    print(
        json.dumps(
            {
                "ours_s": ours.median_s,
                "peer_s": peer.median_s,
                "tuned": tuned / sum(kernels.values()),
                "stock_s": stock_s(cfg, {spec.name: feeds[spec.name] for spec in manifest.signature.inputs})
                if stock
                else 0.0,
                "slowest": ", ".join(f"{name} {seconds * 1e3:.2f}" for seconds, name in slowest),
            }
        )
    )


def main(database: Path | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-stock", action="store_true", help="leave stock TVM out, which takes minutes")
    parser.add_argument("--time", type=Path, help=argparse.SUPPRESS)  # of a process of its own
    arguments = parser.parse_args()
    if arguments.time:
        time_model(arguments.time, not arguments.no_stock)
        return
    versions = ", ".join(f"{name} {version(name)}" for name in ("apache-tvm", "onnxruntime"))
    print(f"{cpu_name()}; {arguments.threads} threads; {versions}\n")
    print("| model | compile s | tvmflow ms | ONNX Runtime ms | ratio | stock TVM ms | tuned | slowest kernels, ms |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    ratios = []
    with tempfile.TemporaryDirectory() as name:
        for model in arguments.models or MODELS:
            artifact, seconds = compiled(model, database, arguments.threads, Path(name))
            words = [sys.executable, sys.argv[0], "--time", artifact, *(["--no-stock"] if arguments.no_stock else [])]
            done = subprocess.run(words, check=True, stdout=subprocess.PIPE)
            found = json.loads(done.stdout.splitlines()[-1])
            ratios.append(found["ours_s"] / found["peer_s"])
            print(
                f"| {model} | {seconds:.1f} | {found['ours_s'] * 1e3:.3f} | {found['peer_s'] * 1e3:.3f} "
                f"| {ratios[-1]:.2f} | {found['stock_s'] * 1e3:.1f} | {found['tuned']:.0%} | {found['slowest']} |",
                flush=True,
            )
    mean = statistics.geometric_mean(ratios)
    print(f"\nRatios to ONNX Runtime: geometric mean {mean:.2f}, largest {max(ratios):.2f}")


if __name__ == "__main__":
    main(ROOT / "tuning_db")
