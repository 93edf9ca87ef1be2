"""Times callables side by side: raw samples in rounds that take turns, medians, ratios. Knows nothing of TVM."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

PAUSE_S = 0.02  # between turns: threads that look for work a while before they sleep would take it from the next one
BLOCK_S = 0.05  # one callable's turn within a round: long enough that its threads are awake, short against drift


@dataclass(frozen=True)
class Samples:
    """The seconds that each call of one callable took, in order, and why they may be unstable."""

    name: str
    seconds: tuple[float, ...]
    warnings: tuple[str, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


def interleave(functions: Mapping[str, Callable[[], object]], budget_s: float) -> tuple[Samples, ...]:
    """Runs the functions in turns until `budget_s` seconds are spent, at least three rounds; the first warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    end = time.perf_counter() + budget_s
    rounds = 0
    while rounds < 4 or time.perf_counter() < end:
        for name, function in functions.items():
            block = _block(function)
            if rounds:
                seconds[name] += block
        rounds += 1
    return tuple(Samples(name, tuple(values), _instability(values)) for name, values in seconds.items())


def ratio(samples: Samples, baseline: Samples) -> float:
    """How many times as long as the baseline it takes, by medians."""
    return samples.median_s / baseline.median_s


def _block(function: Callable[[], object]) -> list[float]:
    """Times calls for about BLOCK_S seconds, behind a pause and a call that does not count."""
    time.sleep(PAUSE_S)
    function()
    taken: list[float] = []
    while not taken or sum(taken) < BLOCK_S:
        started = time.perf_counter()
        function()
        taken.append(time.perf_counter() - started)
    return taken


def _instability(seconds: list[float]) -> tuple[str, ...]:
    """What speaks against trusting the median, after pyperf's rules of thumb."""
    median = statistics.median(seconds)
    found = []
    if len(seconds) >= 4:
        low, _, high = statistics.quantiles(seconds, n=4)
        if high - low > 0.1 * median:
            found.append(f"the middle half of the samples spans {(high - low) / median:.0%} of the median")
    if max(seconds) > 1.5 * median:
        found.append(f"the slowest sample is {max(seconds) / median:.1f} times the median")
    return tuple(found)
