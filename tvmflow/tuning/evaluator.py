"""Timing with TVM's own evaluator, which runs where the kernel runs: device events on a GPU, a clock on a CPU.

It calls a kernel again and again with the same arguments, so weights are made cold by flushing caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvmflow.tuning.worker import BUDGET_S, HOPELESS, SAMPLE_S, SAMPLES

L2_BYTES = 128 << 20  # more than a GPU's second-level cache holds
FEWEST = 3  # samples


def conditions(kind: str, has_weights: bool) -> Mapping[str, Any]:
    """The evaluator's options for one sample on a target of this kind ("llvm", "cuda").

    A GPU's cache is flushed whole before each run, a CPU's of all arguments but the first if the kernel has weights.
    """
    if kind != "llvm":
        return {"number": 1, "cache_flush_bytes": L2_BYTES}
    if has_weights:
        return {"number": 1, "f_preproc": "cache_flush_cpu_non_first_arg"}
    return {"number": 1, "min_repeat_ms": int(SAMPLE_S * 1e3)}


def seconds(
    module: Any, device: Any, args: Sequence[Any], options: Mapping[str, Any], best_s: float | None
) -> tuple[float, ...]:
    """Seconds per call of the module's `main`, one value per sample; a single one where the first was hopeless."""

    def samples(count: int) -> tuple[float, ...]:
        evaluate = module.time_evaluator("main", device, repeat=count, **options)
        return tuple(float(value) for value in evaluate(*args).results)

    (first,) = samples(1)
    if best_s is not None and first > HOPELESS * best_s:
        return (first,)
    return samples(max(FEWEST, min(SAMPLES, int(BUDGET_S / max(first, SAMPLE_S)))))
