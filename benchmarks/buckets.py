"""What buckets cost and save: latency beside tight and dynamic builds and ONNX Runtime, bytes, memory over many calls.

    python benchmarks/buckets.py [--batch 1 2 4 8 16] [--sequence 16 32 64 128] [--sizes 1x20 3x50 ...]
                                 [--seconds 8] [--threads 2] [--calls 1000] [--folder KEPT]

A sentence embedding model (configs/minilm_l6_buckets.toml) is compiled with the buckets given, statically for exactly
each request's sizes, and once with its dimensions open, all with the same tuning database. Latencies are medians of
calls that take turns in one process, at equal threads. Then threads call one loaded artifact with requests of mixed
sizes, each value held against ONNX Runtime's and bit for bit against the first call's. `--folder` keeps the artifacts.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import numpy as np
import serving
from overhead import peer_of

import tvmflow
from tvmflow import artifact, bench, config, flow
from tvmflow.host import cpu_name
from tvmflow.manifest import Bundle
from tvmflow.runtime.bucket_selection import Chooser
from tvmflow.verification import compare

ROOT = Path(__file__).resolve().parents[1]
CONFIG, MODEL = ROOT / "configs" / "minilm_l6_buckets.toml", ROOT / ".cache" / "models" / "onnx" / "minilm_l6.onnx"
WORDS = 30522
CALLERS, DISTINCT, BETWEEN = 8, 48, 1000  # threads; requests; calls from one look at memory to the next
BUNDLE, DYNAMIC = "buckets.tvmflow", "dynamic.tvmflow"
Shapes = Mapping[str, object]


def drawn(batch: int, sequence: int, seed: int) -> dict[str, np.ndarray]:
    """Sentences of 1 to `sequence` words; the first has all of them."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, sequence, (batch, 1), endpoint=True)
    lengths[:1] = sequence
    return {"ids": rng.integers(0, WORDS, (batch, sequence)), "mask": (np.arange(sequence) < lengths).astype("i8")}


def sizes_of(text: str) -> tuple[int, int]:
    batch, _, sequence = text.partition("x")
    return int(batch), int(sequence)


def build(arguments: argparse.Namespace) -> None:
    """Compiles what is not in the folder yet."""
    wanted: dict[str, Shapes] = {
        BUNDLE: {"buckets": {"batch": arguments.batch, "sequence": arguments.sequence}},
        DYNAMIC: {"buckets": []},
    }
    for text in arguments.sizes:
        dims = dict(zip(("batch", "sequence"), sizes_of(text), strict=True))
        wanted[f"{text}.tvmflow"] = {"buckets": [], "dims": dims}
    for name, shapes in wanted.items():
        if not (arguments.folder / name).exists():
            started = time.monotonic()
            cfg = config.load(CONFIG, [{"shapes": shapes, "target": {"threads": arguments.threads}}])
            flow.compile_model(cfg, arguments.folder / name)
            print(f"{name}: compiled in {time.monotonic() - started:.0f} s", flush=True)


def latency(arguments: argparse.Namespace) -> None:
    """Prints a row per request: the buckets that serve it, milliseconds, and ratios to the padded run's."""
    folder, threads = arguments.folder, arguments.threads
    padded, dynamic = (tvmflow.load(folder / name, threads) for name in (BUNDLE, DYNAMIC))
    peer = peer_of(MODEL, threads)
    for text in arguments.sizes:
        feeds = drawn(*sizes_of(text), seed=0)
        tight = tvmflow.load(folder / f"{text}.tvmflow", threads)
        ours, *others = bench.interleave(
            {
                "buckets": lambda f=feeds: padded.run(f),
                "tight": lambda f=feeds, s=tight: s.run(f),
                "dynamic": lambda f=feeds: dynamic.run(f),
                "ONNX Runtime": lambda f=feeds: peer.run(None, f),
            },
            arguments.seconds,
        )
        times = " | ".join(f"{samples.median_s * 1e3:.2f}" for samples in (ours, *others))
        ratios = " | ".join(f"{bench.ratio(ours, other):.2f}" for other in others)
        print(f"| {text} | {served_by(padded.manifest, *sizes_of(text))} | {times} | {ratios} |", flush=True)


def served_by(bundle: Bundle, batch: int, sequence: int) -> str:
    chooser = Chooser([bucket.dims for bucket in bundle.buckets], bundle.padding)
    pieces = chooser.pieces({"batch": batch, "sequence": sequence})
    return " + ".join("x".join(map(str, bundle.buckets[piece.bucket].dims.values())) for piece in pieces)


def sizes(arguments: argparse.Namespace) -> None:
    """Prints the bytes of the artifacts' weights and libraries."""
    print("\n| artifact | libraries | MiB of weights | MiB of libraries |\n|---|---|---|---|")
    for name in (BUNDLE, DYNAMIC, *(f"{text}.tvmflow" for text in arguments.sizes)):
        folder = arguments.folder / name
        libraries = artifact.libraries(folder, artifact.read(folder))
        code = sum((place / artifact.LIBRARY).stat().st_size for place, _ in libraries)
        weights = (folder / artifact.CONSTANTS).stat().st_size
        print(f"| {name} | {len(libraries)} | {weights / 2**20:.2f} | {code / 2**20:.2f} |", flush=True)


def memory(arguments: argparse.Namespace) -> None:
    """Prints resident memory while threads call one artifact with mixed sizes, and how many values were wrong."""
    rng = np.random.default_rng(0)
    shapes = [
        (
            int(2 ** rng.uniform(0, np.log2(max(arguments.batch) * 1.3))),
            int(2 ** rng.uniform(0, np.log2(max(arguments.sequence)))),
        )
        for _ in range(DISTINCT)
    ]
    requests = [drawn(*shape, seed) for seed, shape in enumerate(shapes)]
    peer = peer_of(MODEL)
    wanted = [peer.run(None, feeds) for feeds in requests]
    del peer
    print(f"\n{CALLERS} threads x {arguments.calls} calls of {len(set(shapes))} sizes, 1 thread per call\n")
    print(f"start, before the artifact is loaded: {serving.resident():.1f} MiB")
    session = tvmflow.load(arguments.folder / BUNDLE, threads=1)
    narrowest = artifact.read_manifest(arguments.folder / BUNDLE / session.manifest.buckets[0].folder).narrowest_float
    first = [session.run_list(feeds) for feeds in requests]
    faults = [0] * CALLERS
    for outputs, peers in zip(first, wanted, strict=True):
        for spec, got, want in zip(session.signature.outputs, outputs, peers, strict=True):
            tolerances = compare.tolerance(spec.name, want, config.VerifySection(), narrowest)
            faults[0] += not compare.compare_output(spec.name, got, want, tolerances).ok
    print(f"outputs that are not ONNX Runtime's within the default tolerance: {sum(faults)}")
    each = max(1, BETWEEN // CALLERS)

    def calls(thread: int, part: int) -> None:
        for step in range(each):
            index = (thread * 7 + part * each + step) % DISTINCT
            got = session.run_list(requests[index])
            faults[thread] += any(a.tobytes() != b.tobytes() for a, b in zip(got, first[index], strict=True))

    list(serving.memory_over(calls, CALLERS, 1))
    print(f"after warm-up: {serving.resident():.1f} MiB")
    started, parts = time.perf_counter(), max(1, CALLERS * arguments.calls // BETWEEN)
    for part, size in enumerate(serving.memory_over(calls, CALLERS, parts), 1):
        print(f"after {part * each * CALLERS} calls: {size:.1f} MiB", flush=True)
    rate = parts * each * CALLERS / (time.perf_counter() - started)
    print(f"{rate:.0f} calls per second; wrong or differing calls: {sum(faults)}")
    if sum(faults):
        raise SystemExit("error: values are wrong")


PARTS = {"build": build, "latency": latency, "sizes": sizes, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--sequence", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--sizes", nargs="+", default=["1x20", "3x50", "6x100", "16x128", "19x90"])
    parser.add_argument("--seconds", type=float, default=8.0, help="per request, all four together")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--calls", type=int, default=1000, help="of each thread while memory is read")
    parser.add_argument("--folder", type=Path, help="where artifacts stay; those in it are used as they are")
    parser.add_argument("--part", choices=list(PARTS), help="only this part, in this process")
    arguments = parser.parse_args()
    if arguments.part:
        PARTS[arguments.part](arguments)
        return
    print(f"{cpu_name()}; {', '.join(f'{name} {version(name)}' for name in ('apache-tvm', 'onnxruntime'))}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        # Each part and request in a process of its own: none warms up or fills another's memory.
        for part in PARTS:
            words = [sys.executable, __file__, *sys.argv[1:], "--part", part, "--folder", str(folder)]
            if part == "latency":
                print(f"\n{arguments.threads} threads; times in ms; ORT is ONNX Runtime; below 1: buckets are faster\n")
                print(
                    "| request | served by | buckets | tight | dynamic | ORT | buckets/tight | buckets/dynamic "
                    "| buckets/ORT |\n|---|---|---|---|---|---|---|---|---|",
                    flush=True,
                )
            for sizes_ in arguments.sizes if part == "latency" else [""]:
                subprocess.run([*words, *(["--sizes", sizes_] if sizes_ else [])], check=True)


if __name__ == "__main__":
    main()
