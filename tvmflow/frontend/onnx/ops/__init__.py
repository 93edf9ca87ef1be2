"""Converters for the ONNX operators that TVM's importer lacks or gets wrong, one file per family.

A converter is a function Node -> Relax expression, listed in its family's CONVERTERS under the operator's name and
the first opset version it holds for. Operators of other domains have keys of the form "domain::Name".
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import onnx

from tvmflow.frontend.onnx.ops import (
    activation,
    arithmetic,
    attention,
    contrib,
    indexing,
    linear,
    normalisation,
    pooling,
    quantised,
    recurrent,
    reduction,
    resize,
    shaping,
    signal,
    slicing,
    vision,
)
from tvmflow.frontend.onnx.ops.node import UPSTREAM, Converters, Refusal, converter_class, rounding_class

FAMILIES: tuple[Converters, ...] = (
    activation.CONVERTERS,
    arithmetic.CONVERTERS,
    attention.CONVERTERS,
    contrib.CONVERTERS,
    indexing.CONVERTERS,
    linear.CONVERTERS,
    normalisation.CONVERTERS,
    pooling.CONVERTERS,
    quantised.CONVERTERS,
    recurrent.CONVERTERS,
    reduction.CONVERTERS,
    resize.CONVERTERS,
    shaping.CONVERTERS,
    signal.CONVERTERS,
    slicing.CONVERTERS,
    vision.CONVERTERS,
)
# TVM files these under ai.onnx, though their meaning is com.microsoft's or nobody's.
NOT_STANDARD = frozenset(
    {
        "Attention",
        "FastGelu",
        "BiasGelu",
        "SkipLayerNormalization",
        "EmbedLayerNormalization",
        "AllClassNMS",
        "MatMulInteger16",
    }
)
# Operators that ONNX itself defines by others, and that are better built from those.
INLINE: frozenset[str] = frozenset()
FOREIGN: frozenset[tuple[str, str]] = frozenset(
    (key.partition("::")[0], key.partition("::")[2]) for family in FAMILIES for key in family if "::" in key
)
REFUSALS: Mapping[str, Refusal] = (
    dict(arithmetic.REFUSALS) | contrib.REFUSALS | normalisation.REFUSALS | recurrent.REFUSALS | vision.REFUSALS
)


@functools.cache
def convert_map() -> Mapping[str, Any]:
    """TVM's converters with ours laid over them."""
    standard = {name: converter for name, converter in UPSTREAM.items() if name not in NOT_STANDARD}
    ours = {
        name: converter_class(name, versions, REFUSALS.get(name))
        for family in FAMILIES
        for name, versions in family.items()
    }
    return MappingProxyType(standard | ours | {name: rounding_class(UPSTREAM[name]) for name in ("Cast", "CastLike")})


def refusals(node: onnx.NodeProto, _opset: int) -> str | None:
    """Why this node cannot be compiled though its operator has a converter, as far as its attributes tell.

    What depends on shapes or on which inputs are constant is only found by the converters, which raise it.
    """
    domain = node.domain if node.domain != "ai.onnx" else ""
    refusal = REFUSALS.get(f"{domain}::{node.op_type}" if domain else node.op_type)
    attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    return refusal(attributes) if refusal else None
