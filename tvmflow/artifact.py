"""The artifact: a folder (or zip) with a library, its constants and a manifest. No TVM in here."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Noun(BaseModel):
    """A frozen part of the manifest."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TensorSpec(Noun):
    """One input or output: its original name, dtype, and per axis a size or the name of a symbolic dimension."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    range: tuple[float, float] | None = None
    """For an input that is used as an index or condition: the lowest and highest value that makes sense."""


class Signature(Noun):
    """The inputs and outputs of a library, in the order of its `main` function."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
