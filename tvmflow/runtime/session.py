"""One loaded library: `Session.run({name: array}) -> {name: array}`. TVM's run time is all it needs of TVM."""

from __future__ import annotations

import contextlib
import hashlib
import re
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi

from tvmflow.artifact import ALIGNMENT, LIBRARY
from tvmflow.errors import ArtifactError, InputError, first_line, last_line
from tvmflow.files import read_regular
from tvmflow.manifest import Manifest, Signature, TensorSpec
from tvmflow.runtime import content, denormals, fork, vm
from tvmflow.runtime import inputs as inputs_

COPIED = 1024  # elements; smaller inputs and outputs are copied: that costs less than to hand them over
OUT_OF_MEMORY = ("bad_alloc", "out of memory", "out_of_memory")  # what TVM's allocators say, in lower case
Into = Callable[[Any], Any]


class Session:
    """A loaded library. Any number of threads may run it at once: each call has a virtual machine to itself.

    The machines share code and weights; there are as many as calls were ever in progress at once. Not a context
    manager: the library stays mapped until the process ends.
    """

    def __init__(self, folder: Path, manifest: Manifest, threads: int, weights: vm.Weights) -> None:
        """Loads the library in `folder`, which the manifest says can run here; `threads` are CPU threads.

        Raises SetupError where a part of the run time is not installed, ArtifactError where no GPU can be used, or
        where the library is not what the manifest says of it.
        """
        self.threads = threads
        self.manifest = manifest
        on_gpu = manifest.target.kind == "cuda"
        self._device = vm.CUDA if on_gpu else vm.CPU
        vm.load_parts(on_gpu)
        vm.configure_threads(threads)
        self._library = _library(folder, manifest)
        self._constants = [weights.tensor(entry) for entry in manifest.constants]
        self._constant_places = frozenset(tensor.data_ptr() for tensor in self._constants)
        self._idle = [self._first_machine(on_gpu)]
        self._inputs = tuple(spec.name for spec in self.signature.inputs)
        self._outputs = tuple(spec.name for spec in self.signature.outputs)
        self._output_dtypes = tuple(spec.dtype for spec in self.signature.outputs)
        self._exact = _exact(self.signature)
        self._keeps_denormals = not on_gpu and not manifest.config["numerics"]["fast_math"]
        self._checked = False  # whether outputs were seen that are what the manifest says

    @property
    def signature(self) -> Signature:
        return self.manifest.signature

    def run(self, inputs: Mapping[str, Any], into: Into | None = None) -> dict[str, Any]:
        """Runs the library once.

        `inputs` maps every input's name to a numpy array or anything that speaks DLPack, of exactly its dtype and of a
        shape that fits, on the CPU or where the library runs. Those at a 64-byte boundary are read in place. Returns
        numpy arrays by output name, as many as the signature lists (of outputs that share a name the last); with
        `into`, e.g. torch.from_dlpack, what it makes of each output where it lies, on a GPU too. Raises InputError,
        with all faults at once, for inputs that do not fit.
        """
        return dict(zip(self._outputs, self.run_list(inputs, into), strict=True))

    def run_list(self, inputs: Mapping[str, Any], into: Into | None = None) -> list[Any]:
        """Like `run`, with the outputs as a list in the signature's order."""
        fork.check()
        if self._keeps_denormals and denormals.are_flushed():
            with denormals.kept():
                return self._run_somewhere(inputs, into)
        return self._run_somewhere(inputs, into)

    def _run_somewhere(self, inputs: Mapping[str, Any], into: Into | None) -> list[Any]:
        if self._device == vm.CUDA or vm.use_threads(self.threads):
            return self._run(inputs, into)
        return vm.lasting_threads().submit(self._run_there, inputs, into).result()

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
        machine = vm.Machine(self._library, self._device == vm.CUDA)
        machine.module["set_instrument"](around)
        with denormals.kept() if self._keeps_denormals else contextlib.nullcontext():
            vm.use_threads(self.threads, always=True)
            return self._run_on(machine, self._fitting(inputs), None)

    def _first_machine(self, on_gpu: bool) -> vm.Machine:
        try:
            return vm.Machine(self._library, on_gpu)
        except (AttributeError, RuntimeError) as exc:
            raise ArtifactError(
                f"{self.manifest.name}: {LIBRARY} is not what a compile makes: {last_line(exc)[:200]}",
                "compile the model again",
            ) from None

    def _run_there(self, inputs: Mapping[str, Any], into: Into | None) -> list[Any]:
        vm.use_threads(self.threads, always=True)
        return self._run(inputs, into)

    def _run(self, inputs: Mapping[str, Any], into: Into | None) -> list[Any]:
        values = self._fitting(inputs)
        try:
            machine = self._idle.pop()
        except IndexError:
            machine = vm.Machine(self._library, self._device == vm.CUDA)
        outputs = self._run_on(machine, values, into)
        self._idle.append(machine)  # not after an error, which may leave it in the midst of the call
        return outputs

    def _run_on(self, machine: vm.Machine, values: list[Any], into: Into | None) -> list[Any]:
        args = [self._argument(machine, index, value) for index, value in enumerate(values)]
        return self._results(_flat(self._call(machine, args)), args, into)

    def _fitting(self, inputs: Mapping[str, Any]) -> list[Any]:
        """The inputs in the signature's order, as arrays or tensors of the run time; raises InputError."""
        inputs_.check_named(self.signature, inputs)
        values = [inputs.get(name) for name in self._inputs]
        if self._exact is not None and len(inputs) == len(values):
            for value, (dtype, shape) in zip(values, self._exact, strict=True):
                if type(value) is not np.ndarray or value.dtype != dtype or value.shape != shape:
                    break
            else:
                return values
        arrays = {name: as_array(name, value, self._device) for name, value in inputs.items()}
        inputs_.check(self.signature, arrays)
        return [arrays[name] for name in self._inputs]

    def _argument(self, machine: vm.Machine, index: int, value: Any) -> Any:
        """An input as a tensor: itself where the kernels can read it in place, else a copy."""
        if isinstance(value, np.ndarray):
            if value.size < COPIED or self._device == vm.CUDA:
                return machine.copied(index, value)
            flags = value.flags
            if not flags.c_contiguous or not flags.writeable:
                return machine.copied(index, value)
            tensor = tvm_ffi.from_dlpack(value)
            return tensor if tensor.data_ptr() % ALIGNMENT == 0 else machine.copied(index, value)
        if (
            value.device.dlpack_device_type() == self._device
            and value.data_ptr() % ALIGNMENT == 0
            and value.is_contiguous()
        ):
            return value
        if value.device.dlpack_device_type() == vm.CUDA:
            return vm.clone(value)
        return machine.copied(index, np.from_dlpack(value))

    def _call(self, machine: vm.Machine, args: list[Any]) -> Any:
        try:
            return machine.main(*args, *self._constants)
        except Exception as exc:  # the run time raises many kinds
            if isinstance(exc, MemoryError) or any(said in str(exc).lower() for said in OUT_OF_MEMORY):
                raise InputError(
                    "for these inputs the library needs more memory than there is",
                    "give smaller inputs, or values that do not ask for large outputs",
                ) from exc
            parameter = re.search(r"loc=param\[(\d+)\]", str(exc))
            weight = parameter is not None and int(parameter[1]) >= len(args)
            if weight or "match_cast" not in str(exc):
                raise ArtifactError(
                    f"{self.manifest.name}: its library failed: {last_line(exc)[:300]}",
                    "`tvmflow verify` shows whether it is sound",
                    str(exc),
                ) from exc
            # Indices and divisors are guarded by a cast to a shape that only holds while they are in range.
            guard = re.search(r"R\.Shape\(\[(\w+), \1\]\)", str(exc))
            what = f"{guard[1]} does not hold: " if guard else ""
            raise InputError(
                f"values of the inputs do not fit: {what}an index is out of range, a divisor is 0, or sizes disagree",
                "correct the values: indices lie within the axis that they pick from, divisors are not 0, sizes fit",
            ) from exc

    def _results(self, outputs: list[Any], args: list[Any], into: Into | None) -> list[Any]:
        """The outputs, each in memory of its own.

        A large one is the run time's memory itself, unless that is an input, a weight, or another output too.
        """
        if not self._checked:
            _check_outputs(self.manifest, outputs)
            self._checked = True
        taken: set[int] | None = None  # where the inputs lie, and the large outputs so far
        results = []
        for tensor, dtype in zip(outputs, self._output_dtypes, strict=True):
            own = False
            if tensor.numel() >= COPIED:  # smaller constants of the model are the library's own memory
                if taken is None:
                    taken = {arg.data_ptr() for arg in args}
                place = tensor.data_ptr()
                own = place not in taken and place not in self._constant_places
                taken.add(place)
            if into is None:
                array = vm.to_numpy(tensor, dtype, self._device)
                results.append(array if own or self._device == vm.CUDA else array.copy())
            else:
                results.append(into(tensor if own else vm.clone(tensor)))
        return results


def _check_outputs(manifest: Manifest, outputs: list[Any]) -> None:
    """Raises ArtifactError where a library gives other outputs than its manifest says."""
    specs = manifest.signature.outputs
    if len(specs) != len(outputs) or not all(map(_fits, specs, outputs)):
        found = ", ".join(f"{tensor.dtype}{list(tensor.shape)}" for tensor in outputs)
        raise ArtifactError(
            f"{manifest.name}: manifest.json: signature.outputs: the library gives others: {found}",
            "compile the model again",
        )


def _fits(spec: TensorSpec, tensor: Any) -> bool:
    return (
        str(tensor.dtype) == spec.dtype
        and len(tensor.shape) == len(spec.shape)
        and all(
            size == stated for size, stated in zip(tensor.shape, spec.shape, strict=True) if isinstance(stated, int)
        )
    )


def _library(folder: Path, manifest: Manifest) -> Any:
    """The library that the manifest describes; raises ArtifactError where the file is another."""
    entry, shown = manifest.files[LIBRARY], Path(manifest.name) / LIBRARY
    data = read_regular(folder / LIBRARY, ArtifactError, entry.size_bytes, f"{shown}: ")
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise ArtifactError(f"{shown}: changed or damaged since it was built", "compile the model again")
    return content.load(data, entry.sha256, shown)


def _exact(signature: Signature) -> tuple[tuple[np.dtype, tuple[int | str, ...]], ...] | None:
    """The inputs' dtypes and shapes in order, which those of arrays that fit equal; None where sizes are symbolic."""
    sizes = [size for spec in signature.inputs for size in spec.shape]
    if not all(isinstance(size, int) for size in sizes):
        return None
    return tuple((np.dtype(spec.dtype), spec.shape) for spec in signature.inputs)


def as_array(name: str, value: Any, device: int) -> Any:
    """A numpy array as it is; what speaks DLPack as a tensor of the run time; a number as an array.

    Raises InputError for what is none of them, and for a tensor that neither is on the CPU nor where the library runs.
    """
    value = inputs_.plain(name, value)
    if isinstance(value, np.ndarray):
        return value
    try:
        tensor = tvm_ffi.from_dlpack(value)
        str(tensor.dtype)  # fails for a type that the run time does not know
    except (TypeError, ValueError, RuntimeError, BufferError) as exc:
        raise InputError(f"`{name}`: not an array that can be read: {first_line(exc)}", inputs_.GIVE) from None
    place = tensor.device
    if place.dlpack_device_type() != vm.CPU and (place.dlpack_device_type(), place.index) != (device, 0):
        raise InputError(
            f"`{name}`: lies on {place}, the library runs on {'cuda:0' if device == vm.CUDA else 'cpu'}",
            "give a tensor on the CPU or there",
        )
    if place.dlpack_device_type() == vm.CUDA and not tensor.is_contiguous():
        raise InputError(f"`{name}`: not contiguous on {place}", "give x.contiguous()")
    return tensor


def _flat(result: Any) -> list[Any]:
    """The outputs of `main`: one tensor, or a (nested) tuple of them."""
    if isinstance(result, tvm_ffi.Tensor):
        return [result]
    return [tensor for item in vm.items(result) for tensor in _flat(item)]
