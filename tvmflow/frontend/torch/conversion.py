"""The check that every conversion of an operator to Relax must pass.

TVM's importer can be wrong without saying so. So each converted value is held against the dtype and the shape that
PyTorch derived for it, and where TVM could not derive a shape, it gets PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import tvm
from tvm import relax
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter as Importer

from tvmflow.errors import TvmflowError, UnsupportedError, last_line
from tvmflow.frontend.torch.checks import place
from tvmflow.frontend.torch.operators import OPERATORS, sizes_of

Converter = Callable[[Any, Importer], relax.Expr]


def known_operators() -> set[str]:
    """Names of all operators that can be converted, e.g. "add.Tensor"."""
    return set(Importer().convert_map) | set(OPERATORS)


def convert_map(names: Iterable[str]) -> dict[str, Converter]:
    """Checked converters for `names`; for TVM's `from_exported_program(custom_convert_map=...)`."""
    return {name: _checked(name) for name in names}


def _checked(name: str) -> Converter:
    def convert(node: Any, importer: Importer) -> relax.Expr:
        try:
            converter = OPERATORS.get(name)
            value = converter(node, importer) if converter else importer.create_convert_map()[name](node)
            if isinstance(value, relax.Call):
                value = importer.block_builder.emit(value)
            return _agreed(node, value, importer)
        except TvmflowError:
            raise
        except Exception as exc:
            reason = last_line(exc)
            raise UnsupportedError(
                f"operator {node.target} (node `{node.name}`): TVM's importer fails: {reason}",
                "write it with other operators, or fix the sizes it depends on in [shapes.dims]",
            ) from exc

    return convert


def _agreed(node: Any, value: Any, importer: Importer) -> Any:
    """`value`, with PyTorch's shape where TVM derived none; UnsupportedError where the two contradict."""
    wanted = node.meta.get("val")
    got = getattr(value, "ty", None)
    if isinstance(got, relax.TupleType) and isinstance(wanted, tuple | list):
        for tensor, field in zip(wanted, got.fields, strict=False):
            _compare(node, tensor, field)
        return value
    tensor = wanted[0] if isinstance(wanted, tuple | list) and wanted else wanted
    if not isinstance(tensor, torch.Tensor) or not isinstance(got, relax.TensorType):
        return value
    _compare(node, tensor, got)
    if all(isinstance(size, int) for size in tensor.shape):
        return value
    if got.shape is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
        raise UnsupportedError(
            f"operator {node.target} (node `{node.name}`{place(node)}): TVM cannot tell that the sizes of its operands"
            " agree",
            "fix the dimensions that they follow from in [shapes.dims]",
        )
    shape = relax.ShapeExpr(sizes_of(node, importer))
    if got.shape is not None and _provably_equal(got.shape, shape):
        return value
    return importer.block_builder.match_cast(value, relax.TensorType(shape, got.dtype))


def _compare(node: Any, tensor: Any, typed: Any) -> None:
    if not isinstance(tensor, torch.Tensor) or not isinstance(typed, relax.TensorType):
        return
    dtype = Importer._convert_data_type(tensor.dtype)
    fixed = (
        []
        if typed.shape is None
        else [
            (a, int(b))
            for a, b in zip(tensor.shape, typed.shape, strict=False)
            if isinstance(a, int) and isinstance(b, tvm.tirx.IntImm)
        ]
    )
    if str(typed.dtype) != dtype or typed.ndim != tensor.ndim or any(a != b for a, b in fixed):
        raise UnsupportedError(
            f"operator {node.target} (node `{node.name}`): imported as {typed}, but PyTorch says"
            f" {dtype}{list(tensor.shape)}",
            "write it with other operators; TVM's importer gets this one wrong",
        )


def _provably_equal(a: Iterable[Any], b: Iterable[Any]) -> bool:
    analyzer = tvm.sym.Analyzer()
    return all(analyzer.can_prove_equal(x, y) for x, y in zip(a, b, strict=True))
