"""TF32 tensor cores on this machine's GPU: speed and error of products, beside cuBLAS and cuDNN if torch has CUDA.

    python benchmarks/tf32.py          # about a minute; without a GPU it says so

Each product is built as `compile` builds an untuned kernel, with numerics.tf32 off and on, and timed with events of the
device and cold caches. The error is the largest one against float64, as a share of the result's largest magnitude.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from tvmflow.codegen import cuda

# Rows, columns and depth of matrix products; height = width, channels in and out of 3 x 3 convolutions.
MATMULS = ((1024, 1024, 1024), (4096, 4096, 4096), (128, 384, 384), (128, 1536, 384), (3136, 64, 576))
CONVOLUTIONS = ((56, 64, 64), (28, 128, 128), (14, 256, 256))
HEADER = "| product | GFLOP | by | tf32 | us | TFLOP/s | largest error |"


def cases() -> Iterator[tuple[str, list[np.ndarray]]]:
    rng = np.random.default_rng(0)
    shapes = [((m, k), (k, n)) for m, n, k in MATMULS]
    shapes += [((1, s, s, ci), (3, 3, ci, co)) for s, ci, co in CONVOLUTIONS]
    for x, w in shapes:
        yield (
            " @ ".join("x".join(map(str, shape)) for shape in (x, w)),
            [rng.standard_normal(shape, dtype="float32") for shape in (x, w)],
        )


def reference(arrays: list[np.ndarray]) -> np.ndarray:
    """In float64; a convolution as the sum of nine products."""
    x, w = (array.astype("float64") for array in arrays)
    if x.ndim == 2:
        return np.asarray(x @ w)
    padded, size = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))), x.shape[1]
    return np.asarray(sum(padded[:, i : i + size, j : j + size] @ w[i, j] for i in range(3) for j in range(3)))


def ours(arrays: list[np.ndarray], arch: str, tf32: bool) -> tuple[float, np.ndarray]:
    """Seconds and the result of the kernel that an untuned build has."""
    import tvm
    from tvm import te, topi

    from tvmflow import target as targets
    from tvmflow.codegen import candidates, numerics
    from tvmflow.config import NumericsSection, TargetSection
    from tvmflow.pipeline import plan
    from tvmflow.pipeline.context import Context
    from tvmflow.tuning import evaluator

    section = NumericsSection(tf32=tf32)
    target = targets.to_tvm(targets.resolve(TargetSection(kind="cuda", arch=arch)), numerics.llvm_attributes(section))
    x, w = (te.placeholder(array.shape, name=name) for array, name in zip(arrays, "xw", strict=True))
    y = topi.matmul(x, w) if arrays[0].ndim == 2 else topi.nn.conv2d_nhwc(x, w, 1, 1, 1, "float32")
    mod = tvm.IRModule({"main": te.create_prim_func([x, w, y]).with_attr("global_symbol", "main")})
    with target, candidates.cuda_step(arch, section):
        mod = plan.run(mod, plan.steps_of(Context("cuda", tf32=tf32), "schedule", "rewrite"))
        built = tvm.compile(mod, target).jit()
    device = tvm.cuda(0)
    empty = np.zeros([int(size) for size in y.shape], "float32")
    args = [tvm.runtime.tensor(array, device) for array in [*arrays, empty]]
    samples = evaluator.seconds(built, device, args, evaluator.conditions("cuda", False), None)
    built["main"](*args)
    return float(np.median(samples)), args[-1].numpy()


def torchs(arrays: list[np.ndarray], tf32: bool) -> tuple[float, np.ndarray]:
    """Seconds and the result of cuBLAS or cuDNN by way of torch."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    x, w = (torch.from_numpy(array).cuda() for array in arrays)
    run: Callable[[], torch.Tensor]
    if x.ndim == 2:

        def run() -> torch.Tensor:
            return x @ w
    else:
        x, w = x.permute(0, 3, 1, 2), w.permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last)

        def run() -> torch.Tensor:
            return torch.nn.functional.conv2d(x, w, padding=1)

    flush = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    result, samples = run(), []
    for _ in range(10):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) * 1e-3)
    found = result.permute(0, 2, 3, 1) if result.ndim == 4 else result
    return float(np.median(samples)), found.cpu().numpy()


def rows(arch: str) -> Iterator[tuple[str, float, str, bool, float, float]]:
    """Product, 10^9 operations, whose kernel, TF32 or not, seconds, largest error."""
    peers: dict[str, Callable[[list[np.ndarray], bool], tuple[float, np.ndarray]]] = {
        "tvmflow": lambda arrays, tf32: ours(arrays, arch, tf32)
    }
    try:
        import torch

        if torch.cuda.is_available():
            peers["torch"] = torchs
    except ImportError:
        pass
    for name, arrays in cases():
        want = reference(arrays)
        gflop = 2e-9 * want.size * arrays[1].size / arrays[1].shape[-1]
        for peer, measure in peers.items():
            for tf32 in (False, True):
                seconds, got = measure(arrays, tf32)
                yield name, gflop, peer, tf32, seconds, float(np.abs(got - want).max() / np.abs(want).max())


def main() -> None:
    arch = cuda.detect_arch()
    if arch is None:
        sys.exit("no GPU is here, so nothing was measured")
    with tempfile.TemporaryDirectory() as folder:
        env = cuda.loader_env(Path(folder))
        if env and os.environ.get("LD_LIBRARY_PATH") != env["LD_LIBRARY_PATH"]:  # libcudart from a Python package
            os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **env})
    print(f"{arch}\n\n{HEADER}\n|---|---|---|---|---|---|---|", flush=True)
    for name, gflop, peer, tf32, seconds, error in rows(arch):
        print(
            f"| {name} | {gflop:.2f} | {peer} | {'on' if tf32 else 'off'} | {seconds * 1e6:.1f} "
            f"| {gflop / seconds / 1e3:.1f} | {error:.1e} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
