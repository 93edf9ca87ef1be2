"""Builds a kernel both ways, calls both with the arguments that it has in the model, exits with 1 where they differ.

    python reproduce.py

case.json says what was found. good.py and bad.py show the two versions as TVMScript; good.json and bad.json are the
same for TVM to read. arguments.npz holds tensors (a0, a1, ...) and sizes (n2, ...) in the order of the parameters.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from tvmflow.kernels import operations
from tvmflow.kernels.rewrites import compare_exactly

HERE = Path(__file__).resolve().parent


def built(name: str, variant: dict[str, Any]) -> Any:
    """One version, compiled."""
    if variant["vector_math"]:  # functions of tvmflow's in place of libm's, from here on
        from tvmflow.kernels.mathematics import vector_math

        vector_math.register()
    compare_exactly.register()
    operations.register()
    module = tvm.ir.load_json((HERE / f"{name}.json").read_text())
    with tvm.transform.PassContext(opt_level=3, config=variant["options"]):
        return tvm.compile(module, tvm.target.Target(variant["target"]))["main"]


def outcome(kernel: Any, variant: dict[str, Any]) -> list[np.ndarray]:
    """All tensors after a call."""
    device = tvm.cuda() if variant["target"]["kind"] == "cuda" else tvm.cpu()
    with np.load(HERE / "arguments.npz") as kept:
        arguments = [tvm.runtime.tensor(kept[key], device) if key[0] == "a" else int(kept[key]) for key in kept.files]
    kernel(*arguments)
    return [argument.numpy() for argument in arguments if not isinstance(argument, int)]


def main() -> None:
    case = json.loads((HERE / "case.json").read_text())
    variants = case["variants"]
    kernels = {name: built(name, variant) for name, variant in variants.items()}
    results = [outcome(kernels[name], variant) for name, variant in variants.items()]
    differs = False
    for index, (good, bad) in enumerate(zip(*results, strict=True)):
        wrong = ~np.isclose(bad, good, rtol=case["rtol"], atol=case["atol"], equal_nan=good.dtype.kind == "f")
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            print(
                f"argument {index}: {wrong.sum()} of {good.size} values differ, the first at {list(at)}: "
                f"bad {bad[at]}, good {good[at]}"
            )
            differs = True
    sys.exit(1 if differs else "no difference")


if __name__ == "__main__":
    main()
