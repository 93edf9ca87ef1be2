"""Many threads, one loaded library: values against ONNX Runtime's, calls per second, and memory over time.

    python benchmarks/serving.py [ARTIFACT MODEL.onnx]     # default: silero_ifless, compiled first

Eight threads make 1,000 calls each on one session, each on inputs of its own; memory is read after each tenth of them.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
from overhead import feeds_of, peer_of

import tvmflow
from tvmflow import config, flow
from tvmflow.host import cpu_name

ROOT = Path(__file__).resolve().parents[1]
THREADS, CALLS, PARTS = 8, 1000, 10


def resident() -> float:
    """This process's memory in MiB."""
    return float(psutil.Process().memory_info().rss / 2**20)


def memory_over(calls: Callable[[int, int], None], threads: int, parts: int) -> Iterator[float]:
    """Resident MiB after each part, in which all threads make calls at once: `calls(thread, part)`."""
    together = threading.Barrier(threads)

    def start(thread: int, part: int) -> None:
        together.wait()
        calls(thread, part)

    with ThreadPoolExecutor(threads) as pool:
        for part in range(parts):
            list(pool.map(start, range(threads), [part] * threads))
            yield resident()


def serve(artifact: Path, model: Path, threads: int) -> None:
    """Prints one row of the table for calls that each use `threads` threads."""
    session = tvmflow.load(artifact, threads)
    peer = peer_of(model)
    feeds = [feeds_of(session, seed) for seed in range(THREADS)]
    wanted = [peer.run(None, feed) for feed in feeds]
    worst = [0.0] * THREADS

    def calls(thread: int, _part: int) -> None:
        for _ in range(CALLS // PARTS):
            for got, want in zip(session.run_list(feeds[thread]), wanted[thread], strict=True):
                worst[thread] = max(worst[thread], float(np.abs(got - want).max()))

    started = time.perf_counter()
    memory = list(memory_over(calls, THREADS, PARTS))
    rate = THREADS * CALLS / (time.perf_counter() - started)
    print(f"| {threads} | {rate:.0f} | {max(worst):.1e} | {', '.join(f'{size:.1f}' for size in memory)} |", flush=True)


def main() -> None:
    print(f"{cpu_name()}; {THREADS} threads x {CALLS} calls\n")
    print("| threads of a call | calls per second | largest error | resident MiB after each tenth |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        paths = [Path(argument) for argument in sys.argv[1:3]]
        if not paths:
            paths = [Path(name) / "a.tvmflow", ROOT / ".cache" / "models" / "onnx" / "silero_ifless.onnx"]
            flow.compile_model(config.load(ROOT / "configs" / "silero_ifless.toml", []), paths[0])
        for threads in (1, 2):
            serve(paths[0], paths[1], threads)


if __name__ == "__main__":
    main()
