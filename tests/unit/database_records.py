"""Records for the tests of the tuning database."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from click.testing import CliRunner

from tvmflow.cli.db import db
from tvmflow.database import KeyParts, Provenance, Record, pack
from tvmflow.errors import TvmflowError

V2 = ("popcnt", "sse3", "sse4.2")
V3 = (*V2, "avx2", "fma")
V4 = (*V3, "avx512f", "avx512vl")
NATIVE = (*V4, "avx512vnni", "gfni")


def parts_of(
    workload: int = 0, mcpu: str = "x86-64-v4", features: Sequence[str] = V4, threads: int = 2, fast_math: bool = False
) -> KeyParts:
    return KeyParts(
        workload=hashlib.sha256(str(workload).encode()).hexdigest(),
        target={
            "kind": "llvm",
            "machine": "x86_64",
            "mcpu": mcpu,
            "features": tuple(features),
            "threads": threads,
            "arch": None,
        },
        numerics={"fast_math": fast_math, "tf32": False},
        preparation=1,
    )


def record_of(
    workload: int = 0, median_s: float = 1e-3, parts: KeyParts | None = None, tvm: str = "0.27.0.post1", seed: int = 0
) -> Record:
    return Record(
        parts=parts or parts_of(workload),
        name=f"matmul {workload}x64x64",
        workload_json=pack(json.dumps({"nodes": list(range(100))})),
        trace=[[["GetSBlock", [], ["matmul", "main"], ["b0"]], ["SamplePerfectTile", ["l1"], [4, 64], [0.25]]], []],
        timings_s=(median_s * 1.1, median_s, median_s * 0.9),
        flop=2.0 * 64**3,
        provenance=Provenance(
            versions={"apache-tvm": tvm},
            machine="box",
            cpu="some CPU",
            threads=2,
            date="2025-01-31T12:00:00Z",
            seed=seed,
            trials=64,
            protocol="local 3x",
            tvmflow="0.1.0",
        ),
    )


def tvmflow_db(*arguments: object) -> str:
    """What `tvmflow db` prints; its errors are raised."""
    result = CliRunner().invoke(db, [*map(str, arguments)])
    if isinstance(result.exception, TvmflowError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout
