"""A loaded artifact with buckets: requests of any sizes are padded to the smallest bucket that fits, or split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tvmflow.errors import ArtifactError
from tvmflow.manifest import Bundle, Signature, TensorSpec
from tvmflow.runtime import bucket_selection, vm
from tvmflow.runtime import inputs as inputs_
from tvmflow.runtime.bucket_selection import Chooser, Piece
from tvmflow.runtime.session import Into, Session, as_array


class BucketSession:
    """The loaded libraries of all buckets, which share their weights. Any number of threads may run it at once."""

    def __init__(self, manifest: Bundle, sessions: Sequence[Session]) -> None:
        """`sessions` are those of the buckets, in their order; raises ArtifactError where they do not fit."""
        _check_sizes(manifest, sessions)
        self.manifest = manifest
        self.sessions = tuple(sessions)
        self.threads = sessions[0].threads
        self._device = vm.CUDA if manifest.target.kind == "cuda" else vm.CPU
        self._dims = tuple(manifest.buckets[0].dims)
        self._places = {dim: _place(manifest.signature, dim) for dim in self._dims}
        self._chooser = Chooser([bucket.dims for bucket in manifest.buckets], manifest.padding)
        self._by_sizes = {tuple(bucket.dims.values()): index for index, bucket in enumerate(manifest.buckets)}
        self._output_sizes = bucket_selection.output_sizes(self.signature)

    @property
    def signature(self) -> Signature:
        return self.manifest.signature

    def run(self, inputs: Mapping[str, Any], into: Into | None = None) -> dict[str, Any]:
        """Like `Session.run`, for any sizes that buckets serve.

        What does not fill a bucket is padded with the config's values and the outputs are cut to their own sizes;
        what is larger than the largest bucket is split where rows are independent. Raises InputError, naming the
        dimension, for sizes that can be neither padded nor split.
        """
        names = (spec.name for spec in self.signature.outputs)
        return dict(zip(names, self.run_list(inputs, into), strict=True))

    def run_list(self, inputs: Mapping[str, Any], into: Into | None = None) -> list[Any]:
        """Like `run`, with the outputs as a list in the signature's order."""
        inputs_.check_named(self.signature, inputs)
        values = {name: as_array(name, value, self._device) for name, value in inputs.items()}
        inputs_.check(self.signature, values)
        sizes = {dim: int(values[name].shape[axis]) for dim, (name, axis) in self._places.items()}
        exact = self._by_sizes.get(tuple(sizes.values()))
        if exact is not None:
            return self.sessions[exact].run_list(values, into)
        pieces = self._chooser.pieces(sizes)
        bucket_selection.check_outputs(self.signature, self._output_sizes, sizes)
        arrays = {name: self._on_cpu(value) for name, value in values.items()}
        outputs = self._joined(pieces, sizes, [self._run_piece(piece, arrays) for piece in pieces])
        return outputs if into is None else [into(vm.to_device(vm.to_tensor(out), self._device)) for out in outputs]

    def run_in(self, index: int, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Runs one bucket, given by its index, on arrays that it holds, padded to it; the outputs are cut likewise."""
        sizes = {dim: int(inputs[name].shape[axis]) for dim, (name, axis) in self._places.items()}
        return self._run_piece(Piece(index, {}, sizes), inputs)

    def _run_piece(self, piece: Piece, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """The outputs of one piece, cut to the sizes that follow from its own."""
        held = self.manifest.buckets[piece.bucket].dims
        feeds = {spec.name: self._part(spec, arrays[spec.name], piece, held) for spec in self.signature.inputs}
        outputs = self.sessions[piece.bucket].run_list(feeds)
        return bucket_selection.cut(outputs, self._output_sizes, piece.sizes)

    def _part(self, spec: TensorSpec, array: np.ndarray, piece: Piece, held: Mapping[str, int]) -> np.ndarray:
        """A piece of one input, padded to the bucket."""
        spans = tuple(_span(size, piece) for size in spec.shape)
        return inputs_.padded_to(spec, array[spans], held, self.manifest.pad.get(spec.name, 0))

    def _joined(
        self, pieces: Sequence[Piece], sizes: Mapping[str, int], parts: Sequence[list[np.ndarray]]
    ) -> list[np.ndarray]:
        """The outputs of the whole request from those of its pieces."""
        if len(pieces) == 1:
            return parts[0]
        outputs = []
        for index, spec in enumerate(self.signature.outputs):
            whole = np.empty([size(sizes) for size in self._output_sizes[index]], parts[0][index].dtype)
            for piece, part in zip(pieces, parts, strict=True):
                whole[tuple(_span(size, piece) for size in spec.shape)] = part[index]
            outputs.append(whole)
        return outputs

    def _on_cpu(self, value: Any) -> np.ndarray:
        if isinstance(value, np.ndarray):
            return value
        return vm.to_numpy(value, str(value.dtype), value.device.dlpack_device_type())


def _check_sizes(manifest: Bundle, sessions: Sequence[Session]) -> None:
    """Raises ArtifactError where a bucket's library has other inputs and outputs than follow from its sizes."""
    for bucket, session in zip(manifest.buckets, sessions, strict=True):
        for kind in ("inputs", "outputs"):
            stated, own = getattr(manifest.signature, kind), getattr(session.signature, kind)
            if [_of_size(spec, bucket.dims) for spec in stated] != [(one.name, one.dtype, one.shape) for one in own]:
                raise ArtifactError(
                    f"{manifest.name}: manifest.json: signature.{kind}: the library of {bucket.folder} has others",
                    "compile the model again",
                )


def _of_size(spec: TensorSpec, dims: Mapping[str, int]) -> tuple[str, str, tuple[int, ...]] | None:
    """A name, dtype and shape at some sizes; None where the shape cannot be computed."""
    try:
        return spec.name, spec.dtype, tuple(bucket_selection.size_of(size)(dims) for size in spec.shape)
    except (ValueError, KeyError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _place(signature: Signature, dim: str) -> tuple[str, int]:
    """The first input, and its axis, that has a dimension."""
    return next((spec.name, axis) for spec in signature.inputs for axis, size in enumerate(spec.shape) if size == dim)


def _span(size: int | str, piece: Piece) -> slice:
    """Where a piece lies along an axis of a size: in the dimensions that are split, else all of it."""
    if not isinstance(size, str) or size not in piece.start:
        return slice(None)
    return slice(piece.start[size], piece.start[size] + piece.sizes[size])
