"""Relax's operators as functions that bind what they make to a variable at once."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from tvm import relax


class Emitter:
    """Relax's operators as functions that bind their result to a variable at once, so that its type is known.

    `Emitter(builder).nn.relu(x)` is `builder.emit(relax.op.nn.relu(x))`.
    """

    def __init__(self, builder: relax.BlockBuilder, operators: Any = relax.op) -> None:
        self._builder = builder
        self._operators = operators

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._operators, name)
        if isinstance(member, ModuleType):
            return Emitter(self._builder, member)
        return lambda *args, **kwargs: self._builder.emit(member(*args, **kwargs))
