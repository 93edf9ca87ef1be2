"""Which bucket serves which sizes, what is padded and split, and how an output's sizes follow. No TVM in here."""

from __future__ import annotations

import ast
import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tvmflow.errors import InputError
from tvmflow.manifest import Padding, Signature

Sizes = Mapping[str, int]
# What the texts of sizes in a signature may hold, beside names of dimensions and integers.
FUNCTIONS = {"min": min, "max": max}
NODES = (
    ast.Expression,
    ast.BinOp,
    ast.UnaryOp,
    ast.USub,
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.FloorDiv,
    ast.Mod,
    ast.Call,
    ast.Name,
    ast.Load,
    ast.Constant,
)


@dataclass(frozen=True)
class Piece:
    """A part of a request that one bucket serves: where it starts in the dimensions that are split, and its sizes."""

    bucket: int
    start: dict[str, int]
    sizes: dict[str, int]


class Chooser:
    """Chooses among buckets by the sizes of a request; `padding` says which dimensions may be padded and split."""

    def __init__(self, buckets: Sequence[Sizes], padding: Mapping[str, Padding]) -> None:
        self._buckets = [dict(sizes) for sizes in buckets]
        self._padding = padding

    def pieces(self, sizes: Sizes) -> list[Piece]:
        """How buckets serve a request: the one with the fewest elements that fits, or several where it is split.

        What is larger than the largest bucket is split: the largest bucket takes as much as it holds, then what is left
        is served likewise. Raises InputError where no buckets serve it, naming the dimension.
        """
        for dim, size in sizes.items():
            if size == 0 and self._padding[dim].kind != "independent":
                raise InputError(f"`{dim}` is 0, which leaves nothing to compute with", "give at least 1")
        return list(self._pieces(dict(sizes), {}))

    def may_pad(self, dim: str) -> bool:
        padding = self._padding[dim]
        return padding.allowed or padding.kind in ("independent", "masked")

    def _pieces(self, sizes: dict[str, int], start: dict[str, int]) -> Iterator[Piece]:
        fitting = [index for index in range(len(self._buckets)) if not self._misfits(index, sizes)]
        if fitting:
            yield Piece(min(fitting, key=self._elements), start, sizes)
            return
        dim, bucket = self._divided(sizes)
        held = self._buckets[bucket][dim]
        for first in range(0, sizes[dim], held):
            part = sizes | {dim: min(held, sizes[dim] - first)}
            yield from self._pieces(part, start | {dim: start.get(dim, 0) + first})

    def _misfits(self, index: int, sizes: Sizes) -> list[str]:
        """The dimensions for which a request does not fit a bucket, even if it is padded."""
        held = self._buckets[index]
        return [dim for dim, size in sizes.items() if size != held[dim] and (size > held[dim] or not self.may_pad(dim))]

    def _divided(self, sizes: Sizes) -> tuple[str, int]:
        """The dimension to split, and the bucket that takes the first part; raises InputError where there is none."""
        too_large = [
            [dim for dim in self._misfits(index, sizes) if sizes[dim] > held[dim]]
            for index, held in enumerate(self._buckets)
        ]
        for dim in (dim for dim in sizes if self._padding[dim].kind == "independent"):
            # Buckets that the other dimensions fit, or fit once they are split too.
            able = [
                index
                for index, larger in enumerate(too_large)
                if dim in larger and all(self._splits(d, index, sizes) for d in self._misfits(index, sizes))
            ]
            if able:
                return dim, max(able, key=lambda index: (self._buckets[index][dim], -self._elements(index)))
        raise InputError(
            f"no bucket fits {shown(sizes)}: {self._reason(sizes)}", f"buckets: {'; '.join(map(shown, self._buckets))}"
        )

    def _splits(self, dim: str, index: int, sizes: Sizes) -> bool:
        return self._padding[dim].kind == "independent" and sizes[dim] > self._buckets[index][dim]

    def _reason(self, sizes: Sizes) -> str:
        for dim, size in sizes.items():
            held = sorted({bucket[dim] for bucket in self._buckets})
            padding = self._padding[dim]
            if not self.may_pad(dim) and size not in held:
                return (
                    f"`{dim}` cannot be padded ({padding.reason}); give one of {held}, or allow it with "
                    "[shapes] allow_padding"
                )
            if size > held[-1] and padding.kind != "independent":
                return (
                    f"`{dim}` = {size} is above the largest bucket, {held[-1]}, and cannot be split, because its "
                    "positions depend on each other"
                )
        return "there is no bucket for this combination"

    def _elements(self, index: int) -> int:
        return math.prod(self._buckets[index].values())


@functools.cache
def size_of(text: int | str) -> Callable[[Sizes], int]:
    """What computes a size that a signature states: an integer, a dimension's name, or an expression of names.

    Expressions hold +, -, *, // and % of integers, min and max. Raises ValueError for anything else.
    """
    if isinstance(text, int):
        return lambda sizes: text
    try:
        tree = _tree(text)
    except SyntaxError:
        raise ValueError(f"`{text}` is no size") from None
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    if not all(isinstance(node, NODES) for node in ast.walk(tree)) or not called <= FUNCTIONS.keys():
        raise ValueError(f"`{text}` is no size")
    code = compile(tree, "size", "eval")
    dims = dims_of(text)
    return lambda sizes: int(eval(code, {"__builtins__": {}, **FUNCTIONS}, {f"_{dim}": sizes[dim] for dim in dims}))


def output_sizes(signature: Signature) -> list[list[Callable[[Sizes], int]]]:
    """What computes each output's sizes, in the signature's order."""
    return [[size_of(size) for size in spec.shape] for spec in signature.outputs]


def cut(
    outputs: Sequence[np.ndarray], computed: Sequence[Sequence[Callable[[Sizes], int]]], sizes: Sizes
) -> list[np.ndarray]:
    """Outputs without what padding added to them: only what follows from `sizes`; `computed` as of `output_sizes`."""
    return [
        np.asarray(output[tuple(slice(size(sizes)) for size in row)], order="C")
        for output, row in zip(outputs, computed, strict=True)
    ]


def check_outputs(signature: Signature, computed: Sequence[Sequence[Callable[[Sizes], int]]], sizes: Sizes) -> None:
    """Raises InputError where an output's size would be negative, as of a window longer than what it moves over."""
    for spec, row in zip(signature.outputs, computed, strict=True):
        for text, size in zip(spec.shape, row, strict=True):
            if (result := size(sizes)) < 0:
                raise InputError(
                    f"output `{spec.name}` would have the size {text} = {result}",
                    f"give larger inputs than {shown(sizes)}",
                )


def leaves_outputs(signature: Signature, sizes: Sizes) -> bool:
    """Whether every output has something at these sizes; one that only the run knows counts as if it had."""
    for text in (size for spec in signature.outputs for size in spec.shape):
        with contextlib.suppress(ValueError, KeyError):
            if size_of(text)(sizes) < 1:
                return False
    return True


def dims_of(text: int | str) -> frozenset[str]:
    """The dimensions that a size in a signature depends on."""
    if isinstance(text, int):
        return frozenset()
    names = {node.id for node in ast.walk(_tree(text)) if isinstance(node, ast.Name)}
    return frozenset(name[1:] for name in names - FUNCTIONS.keys())


def _tree(text: str) -> ast.Expression:
    """An expression, with `_` before each dimension's name: it may be a word of Python, or `min`."""
    return ast.parse(re.sub(r"\b(?!(?:min|max)\s*\()([^\W\d]\w*)", r"_\1", text), mode="eval")


def shown(sizes: Sizes) -> str:
    """Sizes as an error shows them."""
    return ", ".join(f"{dim} = {size}" for dim, size in sizes.items())
