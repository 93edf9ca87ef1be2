"""Runs a model built up to a step, and with it, on inputs for which the values differ; exits with 1 where they do.

    python reproduce.py

case.json says what was found. before.tvmflow and after.tvmflow are the two libraries (`tvmflow inspect after.tvmflow`);
config.toml is the model's config and inputs.npz holds its inputs.
"""

import json
import sys
from pathlib import Path

import numpy as np

import tvmflow

HERE = Path(__file__).resolve().parent


def main() -> None:
    case = json.loads((HERE / "case.json").read_text())
    with np.load(HERE / "inputs.npz") as kept:
        inputs = {name: kept[name] for name in kept.files}
    before, after = (tvmflow.load(HERE / f"{name}.tvmflow").run(inputs) for name in ("before", "after"))
    differs = False
    for name, (rtol, atol) in case["tolerances"].items():
        good, bad = before[name], after[name]
        wrong = ~np.isclose(bad, good, rtol=rtol, atol=atol, equal_nan=good.dtype.kind == "f")
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            print(
                f"{name}: {wrong.sum()} of {good.size} values differ, the first at {list(at)}: after {bad[at]}, "
                f"before {good[at]}"
            )
            differs = True
    sys.exit(1 if differs else "no difference")


if __name__ == "__main__":
    main()
