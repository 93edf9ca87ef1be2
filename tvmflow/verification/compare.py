"""Holds a library's outputs against reference outputs: arrays in, Verdict out. No TVM and no files in here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tvmflow.config import VerifySection
from tvmflow.manifest import OutputVerdict, Signature, TensorSpec
from tvmflow.runtime.bucket_selection import leaves_outputs

# rtol, and atol as a share of the output's largest finite magnitude, for outputs without a tolerance in the config.
# tf32: float32 whose products are rounded to a significand of float16's length.
# float32: 1e-5 of the range is about 100 roundings; reductions in another order stay well below it.
DEFAULT_TOLERANCES = {
    "float16": (1e-2, 2e-3),
    "tf32": (1e-2, 2e-3),
    "bfloat16": (4e-2, 1e-2),
    "float32": (1e-3, 1e-5),
    "float64": (1e-6, 1e-9),
}
# Sizes tried for symbolic dimensions, one row after another, until the reference accepts one. Distinct odd sizes find
# mixed-up axes; models with strides want multiples; some relate their dimensions so that only equal ones work.
TRIED_SIZES = ((3, 5, 7, 11, 13), (32, 64, 96, 128, 160), (2, 4, 6, 8, 10), (1, 1, 1, 1, 1), (16, 16, 16, 16, 16))
# Integer inputs without a known range, likewise: wide and never 0 (a divisor), then like indices, flags or sizes.
TRIED_RANGES = ((-10, 10), (1, 10), (0, 1), (0, 0), (1, 1), (2, 2), (3, 3), (4, 4))


@dataclass(frozen=True)
class Feeds:
    """Inputs of one run, by name, with the symbolic sizes they were drawn for."""

    inputs: dict[str, np.ndarray]
    dims: dict[str, int]
    origin: str


def candidates(signature: Signature, section: VerifySection, seed: int) -> Iterator[Feeds]:
    """Inputs for one seed, the most telling first; later ones are for models that reject the earlier.

    Floats are standard normal, booleans even, integers uniform over the config's range, else over the range that the
    model implies, else over one of TRIED_RANGES; a range in the config holds for every dtype.
    """
    for dims, fallback in itertools.product(_sizes(signature, section, seed), open_ranges(signature, section)):
        yield drawn(signature, section, dims, seed, fallback)


def drawn(
    signature: Signature, section: VerifySection, dims: Mapping[str, int], seed: int, fallback: tuple[int, int]
) -> Feeds:
    """Inputs of given sizes for one seed; `fallback` is the range of integers that neither config nor model limits."""
    rng = np.random.default_rng(seed)
    inputs = {spec.name: _draw(spec, section, dims, rng, fallback) for spec in signature.inputs}
    return Feeds(inputs, dict(dims), f"seed {seed}")


def open_ranges(signature: Signature, section: VerifySection) -> Sequence[tuple[int, int]]:
    """The ranges to try for integers that neither config nor model limits, the most telling first."""
    return TRIED_RANGES if any(_is_open(spec, section) for spec in signature.inputs) else TRIED_RANGES[:1]


def tolerance(name: str, want: np.ndarray, section: VerifySection, narrowest: str) -> tuple[float, float]:
    """(rtol, atol) of one output: the config's, else by dtype and by the magnitude of what is expected.

    A float output is only as precise as the `narrowest` float dtype, or "tf32", that the model computes in.
    """
    if name in section.outputs:
        return section.outputs[name].rtol, section.outputs[name].atol
    rtol, share = DEFAULT_TOLERANCES.get(str(want.dtype), (0.0, 0.0))
    if rtol:
        rtol, share = max((rtol, share), DEFAULT_TOLERANCES[narrowest])
    finite = np.abs(want[np.isfinite(want)]) if share and want.size else np.zeros(0)
    largest = float(finite.max(initial=0.0))
    # A small sigmoid or softmax is what is left of sums near 1, and carries their rounding.
    atol = max(share * largest, min(4 * float(np.finfo(np.float32).eps), 1e-3 * largest) if share else 0.0)
    return section.rtol if section.rtol is not None else rtol, section.atol if section.atol is not None else atol


def compare_output(name: str, got: np.ndarray, want: np.ndarray, tolerances: tuple[float, float]) -> OutputVerdict:
    """One output: dtype, shape, the places of NaN and infinities, then |got - want| <= atol + rtol * |want|."""
    rtol, atol = tolerances
    if got.dtype != want.dtype or got.shape != want.shape:
        reason = f"is {got.dtype}{list(got.shape)}, the reference gives {want.dtype}{list(want.shape)}"
        return _verdict(name, reason, tolerances, total=want.size, mismatched=want.size)
    g, w = got.astype(_wide(got)), want.astype(_wide(want))
    special = ~np.isfinite(w) | ~np.isfinite(g)
    same_special = (np.isnan(w) & np.isnan(g)) | (w == g)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.where(special, 0, np.abs(g - w)).astype(np.float64)
        magnitude = np.where(special, 0, np.abs(w)).astype(np.float64)
    bad = np.where(special, ~same_special, error > atol + rtol * magnitude)
    differs = int((special & ~same_special).sum())
    reason = ""
    if bad.any():
        at = tuple(int(i) for i in np.unravel_index(int(np.argmax(np.where(bad, error, -1))), want.shape))
        reason = f"{int(bad.sum())} of {want.size} values differ, at {list(at)} got {got[at]}, want {want[at]}"
    relative = error[magnitude > 0] / magnitude[magnitude > 0]
    return _verdict(
        name,
        reason,
        tolerances,
        total=want.size,
        mismatched=int(bad.sum()),
        nan_or_inf_differs=differs,
        max_error=float(error.max(initial=0.0)),
        mean_error=float(error.mean()) if error.size else 0.0,
        max_relative_error=float(relative.max(initial=0.0)),
        top1_agreement=_top_agreement(g, w, 1),
        top5_agreement=_top_agreement(g, w, 5),
    )


def _verdict(name: str, reason: str, tolerances: tuple[float, float], **figures: float | None) -> OutputVerdict:
    unknown = {
        "max_error": None,
        "mean_error": None,
        "max_relative_error": None,
        "nan_or_inf_differs": 0,
        "top1_agreement": None,
        "top5_agreement": None,
    }
    return OutputVerdict.model_validate(
        {
            "name": name,
            "ok": not reason,
            "reason": reason,
            "rtol": tolerances[0],
            "atol": tolerances[1],
            **unknown,
            **figures,
        }
    )


def _wide(array: np.ndarray) -> np.dtype:
    """A dtype in which differences of the array's values are exact, or as near as numpy comes."""
    if array.dtype.kind in "biu":
        return np.dtype(np.longdouble)  # 64 bits of mantissa: int64 stays exact
    return np.dtype(np.float64)


def _top_agreement(got: np.ndarray, want: np.ndarray, count: int) -> float | None:
    """Share of rows (last axis) whose `count` largest entries are the reference's; None where a row is too short."""
    if want.dtype != np.float64 or want.ndim == 0 or want.shape[-1] <= count or not want.size:
        return None
    rows_got, rows_want = got.reshape(-1, got.shape[-1]), want.reshape(-1, want.shape[-1])
    top_got = np.sort(np.argpartition(-rows_got, count - 1, axis=1)[:, :count], axis=1)
    top_want = np.sort(np.argpartition(-rows_want, count - 1, axis=1)[:, :count], axis=1)
    return float((top_got == top_want).all(axis=1).mean())


def _is_open(spec: TensorSpec, section: VerifySection) -> bool:
    return np.dtype(spec.dtype).kind in "iu" and spec.range is None and spec.name not in section.ranges


def _sizes(signature: Signature, section: VerifySection, seed: int) -> Iterator[dict[str, int]]:
    """Sizes for the symbolic dimensions: the config's i-th for the i-th seed, the rest from TRIED_SIZES."""
    names = list(dict.fromkeys(d for spec in signature.inputs for d in spec.shape if isinstance(d, str)))
    stated = {name: sizes[seed % len(sizes)] for name, sizes in section.dims.items() if name in names}
    rest = [name for name in names if name not in stated]
    if not rest:
        yield stated
        return
    rows = [{**stated, **{name: row[i % len(row)] for i, name in enumerate(rest)}} for row in TRIED_SIZES]
    # Runtimes differ in what they make of an output without elements.
    yield from [sizes for sizes in rows if leaves_outputs(signature, sizes)] or rows


def _draw(
    spec: TensorSpec,
    section: VerifySection,
    dims: Mapping[str, int],
    rng: np.random.Generator,
    fallback: tuple[int, int],
) -> np.ndarray:
    shape = tuple(dims[d] if isinstance(d, str) else d for d in spec.shape)
    dtype = np.dtype(spec.dtype)
    limits = section.ranges.get(spec.name) or spec.range
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.kind == "f":
        reals = rng.standard_normal(shape) if limits is None else rng.uniform(*limits, shape)
        return np.asarray(reals).astype(dtype)
    low, high = limits or (max(fallback[0], np.iinfo(dtype).min), fallback[1])
    values = rng.integers(int(low), int(high), shape, np.int64, endpoint=True)
    if limits is None and fallback[0] != 0:
        values = np.where(values == 0, 1, values)
    return np.asarray(values).astype(dtype)
