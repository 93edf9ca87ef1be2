"""Whether arrays fit a library's inputs, and how they are made to fit a bucket's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tvmflow.artifact import ALIGNMENT
from tvmflow.errors import InputError, first_line
from tvmflow.manifest import Signature, TensorSpec

GIVE = "give a numpy array, or a tensor that speaks DLPack, of the input's dtype"


def plain(name: str, value: Any) -> Any:
    """`value` as a numpy array, or as it is where it speaks DLPack, its memory holding its elements' values.

    PyTorch keeps the negative of a tensor as a mark on the same memory, numpy the elements that do not count as a mask
    beside them. Raises InputError for a mask that hides something and for what is no array.
    """
    if isinstance(value, np.ma.MaskedArray):
        if np.ma.is_masked(value):
            raise InputError(
                f"`{name}`: some of its elements are masked, and a library knows no masks", "give x.filled(VALUE)"
            )
        return value.data
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "__dlpack__"):
        for mark in ("neg", "conj"):
            if getattr(value, f"is_{mark}", bool)():
                value = getattr(value, f"resolve_{mark}")()
        return value
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as exc:
        raise InputError(f"`{name}`: not an array: {first_line(exc)}", GIVE) from None
    if array.dtype == object:
        raise InputError(f"`{name}`: {'None' if value is None else f'a {type(value).__name__}'} is no array", GIVE)
    return array


def check_named(signature: Signature, given: object) -> None:
    """Raises InputError for inputs that are no mapping."""
    if not isinstance(given, Mapping):
        names = ", ".join(f"`{spec.name}`" for spec in signature.inputs)
        raise InputError(
            f"inputs are given by name, not as a {type(given).__name__}", f"give a dictionary with {names}"
        )


def check(signature: Signature, arrays: Mapping[str, np.ndarray]) -> None:
    """Raises InputError with every fault: names, dtypes, ranks, sizes, and dimensions that contradict each other."""
    expected = {spec.name: spec for spec in signature.inputs}
    faults = [f"`{name}`: no such input" for name in arrays if name not in expected]
    sizes: dict[str, tuple[int, str]] = {}
    for name, spec in expected.items():
        if name not in arrays:
            faults.append(f"`{name}`: missing")
            continue
        faults += _misfits(spec, arrays[name], sizes)
    if faults:
        wanted = ", ".join(f"{s.name} {s.dtype}[{', '.join(map(str, s.shape))}]" for s in signature.inputs)
        cast = "; x.astype(DTYPE) converts an array" if any(": dtype " in fault for fault in faults) else ""
        raise InputError("inputs do not fit: " + "; ".join(faults), f"it takes: {wanted}{cast}")


def padded_to(spec: TensorSpec, array: np.ndarray, sizes: Mapping[str, int], value: float) -> np.ndarray:
    """One input at the sizes given, `value` standing behind what it holds; itself where it has them."""
    shape = tuple(sizes[size] if isinstance(size, str) else size for size in spec.shape)
    if array.shape == shape:
        return array
    padded = aligned(shape, array.dtype)
    padded.fill(value)
    padded[tuple(map(slice, array.shape))] = array
    return padded


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory for such an array, at a boundary that the kernels expect."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _misfits(spec: TensorSpec, array: np.ndarray, sizes: dict[str, tuple[int, str]]) -> list[str]:
    faults = []
    if str(array.dtype) != spec.dtype:
        faults.append(f"`{spec.name}`: dtype {array.dtype}, expected {spec.dtype}")
    if array.ndim != len(spec.shape):
        return [*faults, f"`{spec.name}`: rank {array.ndim}, expected {len(spec.shape)}"]
    for axis, (size, wanted) in enumerate(zip(array.shape, spec.shape, strict=True)):
        if isinstance(wanted, int):
            known, origin = wanted, "the library is compiled for it"
        else:
            known, origin = sizes.setdefault(wanted, (size, f"`{spec.name}` axis {axis}"))
        if size != known:
            faults.append(f"`{spec.name}`: axis {axis} has size {size}, expected {known} ({origin})")
    return faults
