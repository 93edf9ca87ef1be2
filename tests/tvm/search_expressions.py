"""Draws expressions until time is up and prints those whose values are wrong, for the property test's long runs.

python tests/tvm/search_expressions.py [SECONDS] [FIRST SEED]
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from elementwise_cuda_on_cpu import outputs
from expression_models import batch
from test_arithmetic import HOMES, cfg_of, values
from test_comparisons import drawn_records

import tvmflow
from tvmflow.database import Store
from tvmflow.errors import TvmflowError
from tvmflow.flow import compile_model
from tvmflow.process import Child

COUNT = 60


def default(seed: int, folder: Path) -> Iterator[str]:
    made = batch(seed, HOMES, COUNT)
    return made.wrong(values(cfg_of(made, folder), made, folder))


def narrow(seed: int, folder: Path) -> Iterator[str]:
    made = batch(seed, ("float16", "bfloat16", "float32"), COUNT)
    cfg = cfg_of(made, folder, numerics={"widen_half": False})
    return made.wrong(values(cfg, made, folder), widen_half=False)


def drawn(seed: int, folder: Path) -> Iterator[str]:
    made = batch(seed, HOMES, COUNT // 3)
    cfg = cfg_of(made, folder, tuning={"database": str(folder / "db")})
    records = Child("drawing schedules").call(drawn_records, cfg, seed)
    Store(folder / "db").add(records)
    compile_model(cfg, folder / "artifact")
    return made.wrong(tvmflow.load(folder / "artifact").run(made.feeds))


def cuda(seed: int, folder: Path) -> Iterator[str]:
    made = batch(seed, ("float32", "float64", "float16", "int32", "int64", "uint8"), COUNT, without="bfloat16")
    cfg = cfg_of(made, folder, {"kind": "cuda", "arch": "sm_90"})
    return made.wrong(outputs(cfg, made.feeds, folder), widen_half=False)


WAYS: tuple[Callable[[int, Path], Iterator[str]], ...] = (default, narrow, drawn, cuda)


def main(seconds: float = 600, first: int = 1000) -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    end = time.monotonic() + seconds
    drawn_count = wrong = 0
    for seed, way in zip(itertools.count(first), itertools.cycle(WAYS), strict=False):
        if time.monotonic() > end:
            break
        with tempfile.TemporaryDirectory() as folder:
            try:
                lines = list(way(seed, Path(folder)))
            except TvmflowError as exc:
                lines = [f"does not compile: {exc}"]
        drawn_count += COUNT // 3 if way is drawn else COUNT
        wrong += len(lines)
        for line in lines:
            print(f"{way.__name__} {seed}: {line}", flush=True)
    print(f"{drawn_count} expressions, {wrong} wrong")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
