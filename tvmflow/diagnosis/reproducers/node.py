"""Compiles one node of a model and verifies it with the inputs that it has there; the error says where it is wrong.

    python reproduce.py

The same as `tvmflow compile node.onnx --verify-inputs inputs.npz`. case.json says what was found.
"""

import sys
from pathlib import Path

import tvmflow
from tvmflow.errors import VerifyError

HERE = Path(__file__).resolve().parent


def main() -> None:
    verify = {"inputs": str(HERE / "inputs.npz")}
    try:
        tvmflow.compile(HERE / "node.onnx", out=HERE / "node.tvmflow", overrides=[{"verify": verify}])
    except VerifyError as exc:
        print(exc.message)
        sys.exit(1)
    sys.exit("no difference")


if __name__ == "__main__":
    main()
