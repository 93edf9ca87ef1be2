"""Converters for the ONNX operators that TVM's importer lacks or gets wrong, one file per family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvmflow.frontend.ops import activation, arithmetic, indexing, linear, normalisation, pooling, reduction, resize, shaping
from tvmflow.frontend.ops.node import UPSTREAM, Converters, converter_class

FAMILIES: tuple[Converters, ...] = (activation.CONVERTERS, arithmetic.CONVERTERS, indexing.CONVERTERS, shaping.CONVERTERS, reduction.CONVERTERS, normalisation.CONVERTERS, pooling.CONVERTERS, linear.CONVERTERS, resize.CONVERTERS)
INLINE: frozenset[str] = frozenset()
FOREIGN: frozenset[tuple[str, str]] = frozenset()


def convert_map() -> Mapping[str, Any]:
    """TVM's converters with ours laid over them; operators of other domains have keys of the form "domain::Name"."""
    ours = {name: converter_class(name, versions) for family in FAMILIES for name, versions in family.items()}
    return {**UPSTREAM, **ours}


def refusals(node: Any, opset: int) -> str | None:
    return None
