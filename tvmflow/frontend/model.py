"""What every frontend produces."""

from __future__ import annotations

from dataclasses import dataclass

import tvm

from tvmflow.artifact import Signature


@dataclass(frozen=True)
class Model:
    """An imported model.

    `mod` holds one Relax function `main` whose parameters are exactly `signature.inputs`, in that order, and whose
    result is `signature.outputs`, in that order (a tuple when there are several); weights are constants in it.
    `notes` says in plain words what was rewritten on the way in.
    """

    mod: tvm.IRModule
    signature: Signature
    notes: tuple[str, ...] = ()
