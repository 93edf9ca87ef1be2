"""Decompositions of PyTorch operators, in PyTorch: what TVM's importer gets wrong or lacks, said in what it knows.

Being PyTorch, each can be held against PyTorch without a compiler. What they cure, with apache-tvm 0.27: operands of
unlike dtypes (a scalar is cast to the tensor's dtype: 2.5 becomes 2), `alpha`, `scale`, divisor_override, antialias,
indices below zero, several index tensors, masks, sums of float16 in float16.
"""

from __future__ import annotations

from typing import Any

import torch

from tvmflow.frontend.torch.arithmetic import ARITHMETIC
from tvmflow.frontend.torch.indexing import INDEXING
from tvmflow.frontend.torch.reductions import REDUCTIONS
from tvmflow.frontend.torch.resampling import RESAMPLING
from tvmflow.frontend.torch.rules import Decomposition


def table() -> dict[Any, Decomposition]:
    """PyTorch's own decompositions into Core ATen, and ours over them."""
    decompositions: dict[Any, Decomposition] = torch.export.default_decompositions()
    for ours in (ARITHMETIC, INDEXING, REDUCTIONS, RESAMPLING):
        decompositions.update(ours)
    return decompositions
