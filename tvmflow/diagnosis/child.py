"""What `bisect` runs in processes of their own: kernels of two builds side by side, one at a time, or built alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmflow import npz
from tvmflow.config import VerifySection
from tvmflow.diagnosis.findings import KernelError
from tvmflow.errors import last_line
from tvmflow.pipeline import partial
from tvmflow.pipeline.partial import EXACT, SCHEDULES, Part
from tvmflow.pipeline.records import ApplyRecords
from tvmflow.process import emit
from tvmflow.verification import compare

if TYPE_CHECKING:
    from tvmflow.graph.passes.replace_operators import Replacement

ARGUMENTS = "arguments.npz"


@dataclass(frozen=True)
class Running:
    """Told to the parent before a kernel is run or built, in case that ends the process."""

    kernel: str
    number: int
    """Which of the calls, or of the kernels that are built, it is, from 1."""


def compare_kernels(
    good: Path, bad: Path, feeds: Mapping[str, np.ndarray], narrowest: str, kept: Path
) -> list[KernelError]:
    """Runs the artifact `good` and, before each of its kernels, that of `bad` of the same name on copies.

    So each kernel is seen as it is, fused, on the arguments that it has in the model. Returns one entry per kernel, its
    worst call, in the order in which they first ran. The arguments of the first that is wrong are written to `kept`.
    """
    from tvmflow import runtime

    session = runtime.load_one(good)
    beside = _Beside(bad, narrowest, kept)
    session.watch_kernels(feeds, beside.around)
    return list(beside.found.values())


def keep_arguments(good: Path, feeds: Mapping[str, np.ndarray], number: int, kept: Path) -> None:
    """Writes the arguments of the `number`th kernel call of a run of the artifact `good` to `kept`."""
    from tvmflow import runtime

    session = runtime.load_one(good)
    names = frozenset(kernel.name for kernel in session.manifest.kernels)
    calls = 0

    def around(_function: object, name: str, before: bool, _result: object, *args: Any) -> int:
        nonlocal calls
        calls += name in names and before
        if name in names and before and calls == number:
            npz.write(kept, _named(_given(args)))
        return 0

    session.watch_kernels(feeds, around)


class _Beside:
    """What happens around each kernel of the good run."""

    def __init__(self, bad: Path, narrowest: str, kept: Path) -> None:
        import tvm

        from tvmflow import artifact

        manifest = artifact.read_manifest(bad)
        self._tvm = tvm
        self._device = tvm.cuda(0) if manifest.target.kind == "cuda" else tvm.cpu(0)
        self._module = tvm.runtime.load_module(str(bad / artifact.LIBRARY))
        self._names = frozenset(kernel.name for kernel in manifest.kernels)
        self._narrowest, self._kept = narrowest, kept
        self._calls = 0
        self._arguments: list[Any] = []
        self.found: dict[str, KernelError] = {}

    def around(self, _function: object, name: str, before: bool, _result: object, *args: Any) -> int:
        if name in self._names:
            if before:
                self._arguments = _given(args)
            else:
                self._compare(name, _given(args))
        return 0  # the good one runs

    def _compare(self, name: str, after: Sequence[Any]) -> None:
        """Runs the bad kernel too, with rubbish in what the good one changed: in the outputs, that is."""
        self._calls += 1
        emit(Running(name, self._calls))
        start = [
            _rubbish(arg) if isinstance(arg, np.ndarray) and arg.tobytes() != then.tobytes() else arg
            for arg, then in zip(self._arguments, after, strict=True)
        ]
        copies = [self._tvm.runtime.tensor(arg, self._device) if isinstance(arg, np.ndarray) else arg for arg in start]
        self._module.get_function(name, True)(*copies)
        got = [copy.numpy() for copy in copies if hasattr(copy, "numpy")]
        self._judge(name, start, got, [arg for arg in after if isinstance(arg, np.ndarray)])

    def _judge(self, name: str, start: Sequence[Any], got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> None:
        """All arguments are compared: the outputs, and the inputs, which neither may change."""
        for one, wanted in zip(got, want, strict=True):
            error = _error_of(name, self._calls, one, wanted, self._narrowest)
            known = self.found.get(name)
            if not error.ok and all(one.ok for one in self.found.values()):
                npz.write(self._kept, _named(start))
            if known is None or (known.ok, -known.share) > (error.ok, -error.share):
                self.found[name] = error


def wrong_user_kernels(part: Part, folder: Path, feeds: Mapping[str, np.ndarray], narrowest: str) -> list[KernelError]:
    """The kernels of the user's that are wrong on the arguments that they have in the part's library in `folder`.

    Each is held against the operators that it replaces. Of several of one name and shape the likeliest is taken.
    """
    from tvmflow import runtime
    from tvmflow.pipeline.user_kernel_check import machine_of

    replaced, setting = partial.replacements(part)
    distinct = list({id(one): one for one in replaced}.values())
    calls: list[tuple[list[Replacement], list[Any]]] = []

    def around(_function: object, name: str, before: bool, _result: object, *args: Any) -> int:
        if name.startswith("user_"):
            arrays = _given(args)
            alike = [one for one in distinct if _takes(one, name, arrays)]
            if before:
                emit(Running(str(alike[0].kernel) if alike else name, len(calls) + 1))
            else:
                calls.append((alike, arrays))
        return 0

    runtime.load_one(folder).watch_kernels(feeds, around)
    with setting.entered():
        machines = {id(one): machine_of(one, setting.tvm_target) for one in distinct}
    errors = []
    for number, (alike, arrays) in enumerate(calls, 1):
        judged = [
            _error_of(
                str(one.kernel),
                number,
                arrays[-1],
                machines[id(one)]["reference"](*_tensors(arrays[:-1])).numpy(),
                narrowest,
            )
            for one in alike
        ]
        errors += sorted(judged, key=lambda error: error.share)[:1]
    return [error for error in errors if not error.ok]


def _takes(replacement: Replacement, name: str, arrays: Sequence[np.ndarray]) -> bool:
    shapes = [tuple(tensor.shape) for tensor in (*replacement.call.args, replacement.call.output)]
    return name.startswith(f"user_{replacement.kernel.name}") and shapes == [array.shape for array in arrays]


def _tensors(arrays: Sequence[np.ndarray]) -> list[Any]:
    import tvm

    return [tvm.runtime.tensor(array) for array in arrays]


def overview(whole: Part) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of a build's steps, and what is wrong with the tuning database's records for it, as TVM sees them."""
    names = partial.steps(whole)
    if whole.cfg.tuning.database is None:
        return names, ()
    mod, setting = partial.module(Part(whole.cfg, whole.layout, names.index(SCHEDULES), EXACT))
    records = ApplyRecords(whole.cfg, setting.target)
    records(mod)
    return names, records.notes


def first_unbuildable(part: Part) -> tuple[str, str, str] | None:
    """The first kernel with a record that does not become code, the record, and why; None where all do."""
    import tvm

    from tvmflow.kernels.schedules.default_schedule import RULE_ATTR

    mod, setting = partial.module(part)
    tuned = {
        var.name_hint: function
        for var, function in mod.functions.items()
        if str((function.attrs or {}).get(RULE_ATTR, "")).startswith("record ")
    }
    for number, (name, function) in enumerate(tuned.items(), 1):
        emit(Running(name, number))
        alone = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
        try:
            with setting.entered():
                tvm.compile(alone, setting.tvm_target)
        except Exception as exc:  # whatever TVM raises of a schedule is the finding
            return name, str(function.attrs[RULE_ATTR]), last_line(exc)[:300]
    return None


def _given(args: Sequence[Any]) -> list[Any]:
    """Copies of the arguments of a kernel: tensors as arrays, sizes as they are."""
    import tvm_ffi

    from tvmflow.runtime import vm

    return [
        vm.to_numpy(arg, str(arg.dtype), arg.device.dlpack_device_type()).copy()
        if isinstance(arg, tvm_ffi.Tensor)
        else arg
        for arg in args
    ]


def _rubbish(array: np.ndarray) -> np.ndarray:
    """What uninitialised memory may hold: NaN for floats, the type's largest or -1 for integers."""
    return np.frombuffer(b"\xff" * array.nbytes, array.dtype).reshape(array.shape)


def _named(arguments: Sequence[Any]) -> dict[str, np.ndarray]:
    """The arguments as arrays by name: tensors `a0`, `a1`, ..., sizes `n2`, ..., numbered together."""
    return {
        f"{'a' if isinstance(one, np.ndarray) else 'n'}{index}": np.asarray(one) for index, one in enumerate(arguments)
    }


def _error_of(name: str, call: int, got: np.ndarray, want: np.ndarray, narrowest: str) -> KernelError:
    rtol, atol = compare.tolerance(name, want, VerifySection(), narrowest)
    verdict = compare.compare_output(name, got, want, (rtol, atol))
    finite = np.abs(want[np.isfinite(want)].astype(np.float64))
    largest = float(finite.max(initial=0.0)) or 1.0
    return KernelError(
        kernel=name,
        call=call,
        ok=verdict.ok,
        reason=verdict.reason,
        max_error=verdict.max_error,
        share=(verdict.max_error or 0.0) / largest,
        rtol=rtol,
        atol=atol,
    )
