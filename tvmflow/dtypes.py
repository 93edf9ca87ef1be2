"""What a dtype's name says, for TVM's names, numpy's and those of a manifest."""

from __future__ import annotations

import ml_dtypes
import numpy as np


def itemsize(name: str) -> int:
    """Bytes of one element; of a type narrower than a byte, the one that it takes alone."""
    size: int = np.dtype(getattr(ml_dtypes, name, name)).itemsize
    return size
