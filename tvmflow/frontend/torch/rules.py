"""What a decomposition is, and how several become one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# A function with the signature of an ATen overload. It returns an equal value, or NotImplemented where the operator
# may stay as it is; what it calls is decomposed again.
Decomposition = Callable[..., Any]
HALF = (torch.float16, torch.bfloat16)


def first_of(*steps: Decomposition) -> Decomposition:
    """The first of `steps` that applies."""

    def decompose(*args: Any, **kwargs: Any) -> Any:
        for step in steps:
            result = step(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return NotImplemented

    return decompose


def wide(op: Any) -> Decomposition:
    """float16 and bfloat16 are summed in float32, as PyTorch does, and rounded once at the end."""

    def decompose(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dtype not in HALF:
            return NotImplemented
        dtype = kwargs.pop("dtype", None) or x.dtype
        others = [arg.float() if isinstance(arg, Tensor) and arg.dtype in HALF else arg for arg in args]
        result = op(x.float(), *others, **kwargs)
        if isinstance(result, tuple):
            return tuple(part.to(dtype) for part in result)
        return result.to(dtype)

    return decompose
