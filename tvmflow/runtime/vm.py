"""TVM's run time and virtual machine through tvm-ffi: neither the compiler nor the Python package `tvm` is loaded."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import itertools
import math
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi

from tvmflow import host
from tvmflow.errors import ArtifactError, SetupError
from tvmflow.files import open_regular
from tvmflow.manifest import Constant, FileEntry
from tvmflow.runtime import fork
from tvmflow.runtime.inputs import aligned

CPU, CUDA = 1, 2  # DLPack's numbers of devices
POOLED = 2  # the allocator that keeps freed memory for the next call
# TVM gives each thread that calls it workers of its own and never takes them back, not even when the thread ends.
MOST_POOLS = 32
_thread = threading.local()
_seen = itertools.count()


class Machine:
    """One virtual machine over a library: any thread may use it, one call at a time."""

    def __init__(self, library: Any, on_gpu: bool) -> None:
        self.module = library["vm_load_executable"]()
        devices = [CUDA, CPU] if on_gpu else [CPU]  # the CPU computes shapes
        self.module["vm_initialization"](*(value for device in devices for value in (device, 0, POOLED)))
        self.main = self.module["main"]
        self._device = tvm_ffi.device("cuda" if on_gpu else "cpu", 0)
        self._copies: dict[int, tuple[tuple[int, ...], np.ndarray | None, Any]] = {}

    def copied(self, index: int, value: np.ndarray) -> Any:
        """A copy of an input in memory that the machine keeps for its next call, at a boundary the kernels expect."""
        shape, memory, tensor = self._copies.get(index, (None, None, None))
        if shape != value.shape:
            shape, memory, tensor = self._copies[index] = (value.shape, *self._memory(value))
        if memory is None:
            value = np.ascontiguousarray(value)
            _function("runtime.TVMTensorCopyFromBytes")(tensor, ctypes.c_void_p(value.ctypes.data), value.nbytes)
        else:
            memory[...] = value
        return tensor

    def _memory(self, like: np.ndarray) -> tuple[np.ndarray | None, Any]:
        if self._device.dlpack_device_type() == CUDA:
            return None, _empty(like.shape, str(like.dtype), self._device)
        array = aligned(like.shape, like.dtype)
        return array, tvm_ffi.from_dlpack(array)


def load_parts(on_gpu: bool) -> None:
    """Loads the run time: its core, sort, top-k and random numbers, and for a GPU CUDA's part.

    Raises SetupError where it is not installed, ArtifactError where no GPU can be used.
    """
    fork.check()
    fork.watch()
    _load("tvm_runtime")
    _load("tvm_runtime_extra")
    if not on_gpu:
        return
    try:
        _load("tvm_runtime_cuda")
    except OSError as exc:
        raise ArtifactError(f"no usable GPU is here: {exc}", "run it on a machine with a GPU and its driver") from None
    if not _function("runtime.GetDeviceAttr")(CUDA, 0, 0):
        raise ArtifactError("no usable GPU is here", "run it on a machine with a GPU and its driver")


def configure_threads(count: int) -> None:
    """Says how TVM's threads are to behave, and how many a thread's pool may have, before the first one starts.

    TVM reads TVM_NUM_THREADS at a thread's first parallel run and can only go below it afterwards.
    """
    os.environ |= {**host.THREADING, **os.environ, "TVM_NUM_THREADS": str(max(count, host.cores()))}


def use_threads(count: int, always: bool = False) -> bool:
    """Sets the number of CPU threads that calls of this thread use.

    False where it has none of its own and must not get any, because many threads have: see `lasting_threads`.
    """
    used = getattr(_thread, "count", None)
    if used == count:
        return True
    if used is None and not always and next(_seen) >= MOST_POOLS:
        return False
    _function("runtime.config_threadpool")(1, count)
    _thread.count = count
    return True


@functools.cache
def lasting_threads() -> ThreadPoolExecutor:
    """Threads that live as long as the process and make calls for threads that come and go."""
    return ThreadPoolExecutor(host.cores(), "tvmflow")


class Weights:
    """The weights in a file: on the CPU the mapped file itself, on a GPU a copy of each. Equal ones are one tensor.

    The file's pages are shared with other processes. What replaces it changes nothing, what writes into it would.
    """

    def __init__(self, file: Path, entry: FileEntry, on_gpu: bool, shown: Path) -> None:
        """Maps the file; raises ArtifactError where the mapped bytes are not those that `entry` tells of."""
        with open_regular(file, ArtifactError, place=f"{shown}: ") as stream:
            size_bytes = os.fstat(stream.fileno()).st_size
            mapped = mmap.mmap(stream.fileno(), size_bytes, access=mmap.ACCESS_COPY) if size_bytes else b""
        if (size_bytes, hashlib.sha256(mapped).hexdigest()) != (entry.size_bytes, entry.sha256):
            raise ArtifactError(f"{shown}: changed or damaged since it was built", "compile the model again")
        self._bytes = np.frombuffer(mapped, np.uint8)
        self._on_gpu = on_gpu
        self._tensors: dict[Constant, Any] = {}

    def tensor(self, entry: Constant) -> Any:
        if entry not in self._tensors:
            self._tensors[entry] = self._read(entry)
        return self._tensors[entry]

    def _read(self, entry: Constant) -> Any:
        dtype = np.dtype(np.uint16) if entry.dtype == "bfloat16" else np.dtype(entry.dtype)
        size = math.prod(entry.shape) * dtype.itemsize
        array = self._bytes[entry.offset : entry.offset + size].view(dtype).reshape(entry.shape)
        tensor = to_tensor(array)
        if entry.dtype == "bfloat16":
            tensor = _view(tensor, "bfloat16")
        return to_device(tensor, CUDA if self._on_gpu else CPU)


def items(values: Any) -> list[Any]:
    """The items of the run time's array; several times as fast as to iterate over it."""
    item = _function("ffi.ArrayGetItem")
    return [item(values, index) for index in range(len(values))]


def to_tensor(array: np.ndarray) -> Any:
    """The array's memory itself as a tensor on the CPU."""
    if str(array.dtype) == "bfloat16":
        return _view(tvm_ffi.from_dlpack(array.view(np.uint16)), "bfloat16")
    return tvm_ffi.from_dlpack(array)


def to_device(tensor: Any, device: int) -> Any:
    """The tensor itself on the CPU, a copy of it on a GPU."""
    return _copied_to(tvm_ffi.device("cuda", 0), tensor) if device == CUDA else tensor


def clone(tensor: Any) -> Any:
    """The tensor in memory of its own, on its device."""
    return _copied_to(tensor.device, tensor)


def to_numpy(tensor: Any, dtype: str, device: int) -> np.ndarray:
    """The tensor as an array: on the CPU its memory itself, from a GPU a copy."""
    if device == CUDA:
        array = np.empty(tensor.shape, np.uint16 if dtype == "bfloat16" else dtype)
        _function("runtime.TVMTensorCopyToBytes")(tensor, ctypes.c_void_p(array.ctypes.data), array.nbytes)
    elif dtype == "bfloat16":
        array = np.from_dlpack(_view(tensor, "uint16"))
    else:
        return np.from_dlpack(tensor)
    if dtype == "bfloat16":
        import ml_dtypes

        return array.view(ml_dtypes.bfloat16)
    return array


@functools.cache
def _load(part: str) -> None:
    spec = importlib.util.find_spec("tvm")
    folders = [Path(place) / "lib" for place in (spec and spec.submodule_search_locations) or ()]
    files = [folder / f"lib{part}.so" for folder in folders if (folder / f"lib{part}.so").exists()]
    if not files:
        raise SetupError(
            f"lib{part}.so of TVM's run time is not here",
            "install apache-tvm, or what `python scripts/make_runtime.py` writes",
        )
    ctypes.CDLL(str(files[0]), ctypes.RTLD_GLOBAL)


@functools.cache
def _function(name: str) -> Any:
    return tvm_ffi.get_global_func(name)


def _empty(shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    return _function("runtime.TVMTensorAllocWithScope")(tvm_ffi.Shape(shape), tvm_ffi.dtype(dtype), device, None)


def _copied_to(device: Any, tensor: Any) -> Any:
    copy = _empty(tensor.shape, tensor.dtype, device)
    _function("runtime.TVMTensorCopyFromTo")(tensor, copy)
    return copy


def _view(tensor: Any, dtype: str) -> Any:
    return _function("runtime.TVMTensorCreateView")(tensor, tvm_ffi.Shape(tensor.shape), tvm_ffi.dtype(dtype), 0)
