"""What the model file itself gives: ONNX Runtime, or onnx's own reference implementation where that cannot run it.

Call these in a process of their own: native code that a bad model can bring down.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from tvmflow.errors import ReferenceRunError, first_line

Feeds = Mapping[str, np.ndarray[Any, Any]]
Arrays = list[np.ndarray[Any, Any]]


def run_onnx(
    path: Path, feeds: Sequence[Feeds], reference: Literal["auto", "onnxruntime", "onnx"]
) -> tuple[str, list[Arrays]]:
    """Runs the file `path`, unchanged, once for each of `feeds` (arrays by input name).

    Returns which reference ran, and why where it is not ONNX Runtime, and for each of `feeds` the outputs in the
    file's order, bit for bit as the reference gives them. Raises ReferenceRunError with the reference's own words.
    """
    if reference == "onnx":
        return _by_onnx(path, feeds, "")
    try:
        session = _onnxruntime(path)
    except ReferenceRunError as exc:
        if reference == "onnxruntime":
            raise
        return _by_onnx(path, feeds, f", because ONNX Runtime cannot load it: {exc.details}")
    return f"ONNX Runtime {importlib.metadata.version('onnxruntime')}", _run(path, session, feeds)


def _run(path: Path, call: Callable[[dict[str, Any]], Arrays], feeds: Sequence[Feeds]) -> list[Arrays]:
    try:
        return [call(dict(feed)) for feed in feeds]
    except Exception as exc:  # a reference raises whatever it likes; all of it is its verdict on these inputs
        raise ReferenceRunError(
            f"{path}: the reference fails on these inputs: {first_line(exc)[:500]}",
            "give inputs that fit the model, e.g. by verify.ranges or verify.inputs",
        ) from exc


def _onnxruntime(path: Path) -> Callable[[dict[str, Any]], Arrays]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.use_deterministic_compute = True
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as exc:  # its exceptions have no base class of their own
        reason = first_line(exc)[:500]
        raise ReferenceRunError(
            f"{path}: ONNX Runtime cannot load the model: {reason}", 'try verify.reference = "onnx"', reason
        ) from exc
    names = [output.name for output in session.get_outputs()]
    unique = list(dict.fromkeys(names))

    def call(feed: dict[str, Any]) -> Arrays:
        values = dict(zip(unique, _values(session, unique, feed), strict=True))
        return [values[name] for name in names]

    return call


def _values(session: Any, names: list[str], feed: dict[str, Any]) -> Arrays:
    """Runs a session so that types which numpy has not, such as bfloat16, can come out of it."""
    import onnxruntime

    make = onnxruntime.OrtValue.ortvalue_from_numpy
    inputs = {name: make(np.asarray(array, order="C")) for name, array in feed.items()}
    return [_array(value) for value in session.run_with_ort_values(names, inputs)]


def _array(value: Any) -> np.ndarray[Any, Any]:
    if value.data_type() == "tensor(bfloat16)":
        data = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
        return np.frombuffer(data, ml_dtypes.bfloat16).reshape(value.shape())
    return np.array(value.numpy())  # a copy: an output that is an input shares memory that ends with this call


def _by_onnx(path: Path, feeds: Sequence[Feeds], why: str) -> tuple[str, list[Arrays]]:
    """By onnx's reference implementation, with stand-ins for operators that it is known to get wrong."""
    from onnx.reference import ReferenceEvaluator

    from tvmflow.frontend.onnx.file import read
    from tvmflow.frontend.onnx.reference_faults import described, faults_of

    try:
        model = read(path)
        faults = faults_of(model)
        evaluator = ReferenceEvaluator(model, new_ops=[fault.stand_in for fault in faults])
    except Exception as exc:  # it raises whatever its parts raise
        reason = first_line(exc)[:500]
        raise ReferenceRunError(
            f"{path}: onnx's reference implementation cannot load the model: {reason}",
            "verify with another reference, or give verify.enabled = false by name",
        ) from exc

    def call(feed: dict[str, Any]) -> Arrays:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return [np.asarray(value) for value in evaluator.run(None, feed)]

    who = f"onnx {importlib.metadata.version('onnx')}'s reference implementation{why}{described(faults)}"
    return who, _run(path, call, feeds)
