"""Runs artifacts: `load(path).run({name: array}) -> {name: array}`.

Only TVM's run time is needed: a process that sets TVM_USE_RUNTIME_LIB=1 before anything imports tvm never loads the
compiler.
"""

from __future__ import annotations

import ctypes
import os
import re
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from tvmflow import artifact, target
from tvmflow import inputs as inputs_
from tvmflow.artifact import CONSTANTS, LIBRARY
from tvmflow.errors import ArtifactError, InputError
from tvmflow.manifest import Constant, Signature

COPIED_BYTES = 4096  # smaller outputs are copied
# A library only loads into the run time whose structures it was compiled against.
ABI_PACKAGES = ("apache-tvm", "apache-tvm-ffi")
_pool = threading.local()


class Session:
    """A loaded library. Not a context manager: the library stays mapped until the process ends."""

    def __init__(self, path: Path, threads: int | None = None) -> None:
        """Checks and loads an artifact folder or zip; `threads` overrides the manifest's CPU threads.

        Raises ArtifactError for a damaged artifact or one that cannot run on this machine.
        """
        with artifact.opened(path) as (folder, manifest):
            installed = {name: version(name) for name in ABI_PACKAGES}
            artifact.check_machine(manifest, target.host_features(), installed)
            self.threads = threads or min(manifest.target.threads, target.cores())
            _use_threads(self.threads)
            self.manifest = manifest
            self._load(folder)

    @property
    def signature(self) -> Signature:
        return self.manifest.signature

    def run(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Runs the library once.

        `inputs` maps every input's name to a numpy array or anything that speaks DLPack, of exactly its dtype and of a
        shape that fits. Returns numpy arrays by output name, as many as the signature lists (of outputs that share a
        name the last). Raises InputError, with all faults at once, for inputs that do not fit.
        """
        results = self.run_list(inputs)
        return dict(zip((spec.name for spec in self.signature.outputs), results, strict=True))

    def run_list(self, inputs: Mapping[str, Any]) -> list[np.ndarray]:
        """Like `run`, with the outputs as a list in the signature's order."""
        arrays = {name: _as_numpy(name, value) for name, value in inputs.items()}
        if {name: (array.dtype, array.shape) for name, array in arrays.items()} != self._exact:
            inputs_.check(self.signature, arrays)
        _use_threads(self.threads)
        args = [self._tensor(arrays[spec.name]) for spec in self.signature.inputs]
        return self._arrays(_flat(self._call(args)), args)

    def time_kernels(self, inputs: Mapping[str, Any], runs: int) -> dict[str, float]:
        """Seconds that each kernel takes of one run, by name, all its calls together: medians over `runs` runs.

        Timed from outside, call by call, so that a run takes longer than the kernels say; CPU only.
        """
        taken: list[dict[str, float]] = []
        started: list[float] = []  # of the calls in progress: the branches of an If are functions that call kernels

        def around(_function: object, name: str, before: bool, _result: object, *_args: object) -> int:
            if before:
                started.append(time.perf_counter())
            else:
                taken[-1][name] = taken[-1].get(name, 0.0) + time.perf_counter() - started.pop()
            return 0  # run it

        for _ in range(runs + 1):  # the first one warms up
            taken.append({})
            self.watch_kernels(inputs, around)
        names = dict.fromkeys(name for run in taken for name in run)
        return {name: statistics.median(run.get(name, 0.0) for run in taken[1:]) for name in names}

    def watch_kernels(self, inputs: Mapping[str, Any], around: Callable[..., int]) -> list[np.ndarray]:
        """Like `run_list`, with `around(function, name, before, result, *args)` before and after each call.

        A kernel's arguments are its inputs and outputs, as tensors of the run time, and symbolic sizes. `around`
        returns 0; the machine is in no state to run anything else within it.
        """
        self._vm.set_instrument(around)
        try:
            return self.run_list(inputs)
        finally:
            self._vm.set_instrument(None)

    def _arrays(self, outputs: list[Any], args: list[Any]) -> list[np.ndarray]:
        """The outputs as arrays of their own.

        A large one is the run time's memory itself, unless that is an input, a weight, or another output too.
        """
        taken = {tensor.data_ptr() for tensor in args}
        arrays = []
        for tensor in outputs:
            place = tensor.data_ptr()
            own = (place not in taken and place not in self._constant_places and not self._on_gpu
                   and tensor.dtype != "bfloat16")  # fmt: skip
            array = np.from_dlpack(tensor) if own else tensor.numpy()
            # Small constants of the model are the library's own memory.
            arrays.append(array.copy() if own and array.nbytes < COPIED_BYTES else array)
            taken.add(place)
        return arrays

    def _call(self, args: list[Any]) -> Any:
        try:
            return self._main(*args, *self._constants)
        except RuntimeError as exc:
            if "match_cast" not in str(exc):
                raise
            # Indices and divisors are guarded by a cast to a shape that only holds while they are in range.
            guard = re.search(r"R\.Shape\(\[(\w+), \1\]\)", str(exc))
            what = f"{guard[1]} does not hold: " if guard else ""
            raise InputError(
                f"values of the inputs do not fit: {what}an index is out of range, a divisor is 0, or sizes disagree",
                "indices must lie within the axis that they pick from",
            ) from exc

    def _load(self, folder: Path) -> None:
        import tvm
        from tvm.runtime.vm import VirtualMachine

        manifest = self.manifest
        self._on_gpu = manifest.target.kind == "cuda"
        self._exact = _exact(manifest.signature)
        _load_parts(self._on_gpu)
        self._device = tvm.cuda(0) if self._on_gpu else tvm.cpu(0)
        if self._on_gpu and not self._device.exist:
            raise ArtifactError(f"{manifest.name}: built for CUDA {manifest.target.arch}, no usable GPU is here",
                                "run it on a machine with a GPU and its driver")  # fmt: skip
        self._tvm = tvm
        module = tvm.runtime.load_module(str(folder / LIBRARY))
        self._vm = VirtualMachine(module, self._device)
        self._main = self._vm["main"]
        self._constants = [self._constant(folder, entry) for entry in manifest.constants]
        self._constant_places = frozenset(tensor.data_ptr() for tensor in self._constants)

    def _constant(self, folder: Path, entry: Constant) -> Any:
        """One weight: on the CPU the mapped file itself, on a GPU a copy of it."""
        dtype = np.dtype(np.uint16) if entry.dtype == "bfloat16" else np.dtype(entry.dtype)
        data = np.memmap(folder / CONSTANTS, dtype, mode="c", offset=entry.offset, shape=entry.shape)
        tensor = self._tensor(data)
        return tensor._create_view(entry.shape, "bfloat16") if entry.dtype == "bfloat16" else tensor

    def _tensor(self, array: np.ndarray) -> Any:
        """The array as a tensor of the run time; without a copy where it stands at a boundary the kernels expect."""
        if self._on_gpu or not array.size:
            return self._tvm.runtime.tensor(array.copy(order="C"), device=self._device)
        flags = array.flags
        if array.ctypes.data % artifact.ALIGNMENT or not flags.c_contiguous or not flags.writeable:
            array = _aligned(array)
        return self._tvm.runtime.from_dlpack(array)


def load(path: str | Path, threads: int | None = None) -> Session:
    """Loads an artifact; see Session."""
    return Session(Path(path), threads)


def _load_parts(on_gpu: bool) -> None:
    """Loads the parts of the run time that `import tvm` leaves out where it leaves the compiler out."""
    import tvm

    if not tvm._RUNTIME_ONLY:
        return
    folder = Path(tvm.__file__).parent / "lib"
    for part in ("extra", *(["cuda"] if on_gpu else [])):  # sort, top-k and random numbers; the CUDA device
        ctypes.CDLL(str(folder / f"libtvm_runtime_{part}.so"), ctypes.RTLD_GLOBAL)


def _use_threads(count: int) -> None:
    """Sets the CPU threads of the calling thread's pool.

    TVM reads TVM_NUM_THREADS at a thread's first parallel run and can only go below it afterwards.
    """
    import tvm

    if getattr(_pool, "count", None) == count:
        return
    os.environ |= {**target.THREADING, **os.environ, "TVM_NUM_THREADS": str(max(count, target.cores()))}
    tvm.get_global_func("runtime.config_threadpool")(1, count)
    _pool.count = count


def _exact(signature: Signature) -> dict[str, tuple[np.dtype, tuple[int | str, ...]]] | None:
    """The inputs' dtypes and shapes by name, which those of arrays that fit equal; None where sizes are symbolic."""
    sizes = [size for spec in signature.inputs for size in spec.shape]
    if not all(isinstance(size, int) for size in sizes) or any(s.dtype == "bfloat16" for s in signature.inputs):
        return None
    return {spec.name: (np.dtype(spec.dtype), spec.shape) for spec in signature.inputs}


def _aligned(array: np.ndarray) -> np.ndarray:
    """A copy at a boundary that the kernels expect."""
    memory = np.empty(array.nbytes + artifact.ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % artifact.ALIGNMENT
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    np.copyto(copy, array)
    return copy


def _as_numpy(name: str, value: Any) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    try:
        return np.from_dlpack(value) if hasattr(value, "__dlpack__") else np.asarray(value)
    except (TypeError, ValueError, RuntimeError, BufferError) as exc:
        raise InputError(f"`{name}`: not an array: {exc}", "give a numpy array or a CPU tensor with DLPack") from None


def _flat(result: Any) -> list[Any]:
    """The outputs of `main`: one tensor, or a (nested) tuple of them."""
    if hasattr(result, "numpy"):
        return [result]
    return [tensor for item in result for tensor in _flat(item)]
