"""Writers that replace an artifact without pause, and readers that load it meanwhile.

    python tests/tvm/replacing.py write|read OUT SECONDS VERSION...

A writer publishes copies of the versions in turns; it prints how many. A reader loads and runs, and prints how many
loads it made, how many failed, and how many gave values of none of the versions.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import numpy as np

from tvmflow import artifact, runtime
from tvmflow.errors import TvmflowError

X = np.random.default_rng(0).standard_normal((4, 8)).astype("f4")


def values(path: Path) -> bytes:
    return bytes(runtime.load(path, threads=1).run_list({"x": X})[0].tobytes())


def write(out: Path, seconds: float, versions: list[Path]) -> None:
    deadline, count = time.monotonic() + seconds, 0
    while time.monotonic() < deadline:
        with artifact.staging(out, out.suffix == ".zip") as folder:
            shutil.copytree(versions[count % len(versions)], folder, dirs_exist_ok=True)
        count += 1
    print(count)


def read(out: Path, seconds: float, versions: list[Path]) -> None:
    known = {values(version) for version in versions}
    deadline, count, failed, wrong = time.monotonic() + seconds, 0, 0, 0
    while time.monotonic() < deadline:
        count += 1
        try:
            wrong += values(out) not in known
        except TvmflowError as exc:
            failed += 1
            print(exc, file=sys.stderr)
    print(count, failed, wrong)


if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment] # tvm-ffi would import it, which takes seconds
    {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]), float(sys.argv[3]), [Path(a) for a in sys.argv[4:]])
