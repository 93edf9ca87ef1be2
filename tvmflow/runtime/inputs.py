"""Whether arrays fit a library's inputs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tvmflow.errors import InputError
from tvmflow.manifest import Signature, TensorSpec


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
        raise InputError("inputs do not fit: " + "; ".join(faults), f"it takes: {wanted}")


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
