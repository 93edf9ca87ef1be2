"""`tvmflow buckets` on real models: estimated and measured costs, the whole command, and what it refuses."""

from __future__ import annotations

import csv
import itertools
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tvmflow import bucket_search, config
from tvmflow.bucket_search import call_costs
from tvmflow.config import Config
from tvmflow.errors import ConfigError, InputError, UnsupportedError, UsageError
from tvmflow.process import Child

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / ".cache" / "models" / "onnx"


def model(name: str, shapes: dict[str, list[int | str]]) -> Config:
    path = MODELS / f"{name}.onnx"
    if not path.exists():
        pytest.skip(f"model is not fetched: python scripts/get_models.py .cache/models {name}")
    inputs = {key: {"shape": shape} for key, shape in shapes.items()}
    return config.of_model(str(path), [{"model": {"inputs": inputs}}])


def minilm(*shape: int | str) -> Config:
    return model("minilm_l6", {"ids": list(shape), "mask": list(shape)})


def written(folder: Path, text: str) -> Path:
    (folder / "trace.csv").write_text(text)
    return folder / "trace.csv"


def proposed(cfg: Config, request: bucket_search.Request) -> bucket_search.Found:
    return bucket_search.propose(cfg, request, lambda event: None)


def test_operations_are_those_of_the_model() -> None:
    """A transformer's layer takes 24 s d^2 + 4 s^2 d operations; and all weights but the embeddings are read."""
    sizes = [{"batch": 1, "sequence": 16}, {"batch": 2, "sequence": 256}]
    works = Child("estimating").call(call_costs.estimated, minilm("batch", "sequence"), sizes)
    layers, width = 6, 384
    weights = 4 * layers * 12 * width**2
    for work, one in zip(works, sizes, strict=True):
        length = one["sequence"]
        want = one["batch"] * layers * (24 * length * width**2 + 4 * length**2 * width)
        assert work.flop == pytest.approx(want, rel=0.03)
        assert weights < work.size_bytes
    table = 4 * 30522 * width  # of which 16 rows are looked up
    assert works[0].size_bytes < weights + table / 4
    assert works[1].seconds > 3 * works[0].seconds


def test_the_whole_command(tmp_path: Path) -> None:
    minilm("batch", "sequence")
    shapes = ("--shape", "ids=batchxsequence", "--shape", "mask=batchxsequence")
    command = [
        sys.executable,
        "-m",
        "tvmflow.cli",
        "buckets",
        str(MODELS / "minilm_l6.onnx"),
        *shapes,
        "--trace",
        str(ROOT / "examples" / "lengths.csv"),
        "--most",
        "5",
        "--align",
        "sequence=8",
        "--plot",
        str(tmp_path / "p.svg"),
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    with (ROOT / "examples" / "lengths.csv").open() as stream:
        rows = [{name: int(value) for name, value in row.items()} for row in csv.DictReader(stream)]
    total = sum(row["count"] for row in rows)
    buckets = [tuple(bucket["sizes"]) for bucket in found["buckets"]]
    assert found["dims"] == ["batch", "sequence"]
    assert found["requests"] == total
    assert len(buckets) == 5
    assert all(length % 8 == 0 for _, length in buckets)
    assert buckets[-1] == (8, 128)
    served = [next(b for b in buckets if row["batch"] <= b[0] and row["sequence"] <= b[1]) for row in rows]
    seconds = {tuple(bucket["sizes"]): bucket["seconds"] for bucket in found["buckets"]}
    expected = sum(row["count"] * seconds[b] for row, b in zip(rows, served, strict=True)) / total
    assert found["seconds"] == pytest.approx(expected)
    needed = sum(row["count"] * row["batch"] * row["sequence"] for row in rows)
    computed = sum(row["count"] * b[0] * b[1] for row, b in zip(rows, served, strict=True))
    assert found["waste"] == pytest.approx(1 - needed / computed)
    assert found["exact_s"] < found["seconds"] < found["single_s"]
    assert [len(choice["buckets"]) for choice in found["curve"]] == [1, 2, 3, 4, 5]
    costs = found["costs"]
    assert not costs["measured"]
    assert costs["basis"].startswith("estimated from the kernels of")
    assert abs(costs["check"]["error"]) < 0.02  # operations and bytes are nearly polynomials of the sizes
    value = tomllib.loads(found["toml"])["shapes"]["buckets"]
    if isinstance(value, dict):
        value = [dict(zip(value, sizes, strict=True)) for sizes in itertools.product(*value.values())]
    assert sorted((one["batch"], one["sequence"]) for one in value) == sorted(buckets)
    assert (tmp_path / "p.svg").read_text().startswith("<svg ")


def test_measured(tmp_path: Path) -> None:
    """On a model that can be imported at static sizes alone: a Reshape in it follows its inputs' data otherwise."""
    trace = written(tmp_path, "unk__214,count\n1,3\n4,1\n")
    found = proposed(model("magika", {}), bucket_search.Request(trace, most=2, measure=True))
    assert found.measured
    assert found.basis == "measured on this machine with libraries of 2 sizes"
    assert list(found.known) == [(1,), (4,)]
    assert found.check is None
    assert [bucket.sizes for bucket in found.proposal.buckets] == [(1,), (4,)]
    assert found.proposal.buckets[0].seconds == found.known[(1,)] > 0
    assert found.proposal.exact_s == found.proposal.seconds
    assert found.proposal.seconds == pytest.approx((3 * found.known[(1,)] + found.known[(4,)]) / 4)


def test_refusals(tmp_path: Path) -> None:
    cfg = minilm("batch", "sequence")
    fixed = minilm(1, 128)
    with pytest.raises(ConfigError, match="minilm_l6: all sizes of its inputs are fixed"):
        proposed(fixed, bucket_search.Request(written(tmp_path, "batch\n1\n")))
    with pytest.raises(InputError, match=r"trace.csv, line 1: no column `sequence`") as caught:
        proposed(cfg, bucket_search.Request(written(tmp_path, "batch\n1\n")))
    assert "--dim NAME=SIZE fixes one" in caught.value.hint
    with pytest.raises(UsageError, match="--align length=8: the model has no open dimension `length`") as usage:
        proposed(cfg, bucket_search.Request(written(tmp_path, "batch,sequence\n1,2\n"), align={"length": 8}))
    assert usage.value.hint == "it has: batch, sequence"
    with pytest.raises(UnsupportedError, match=r"at batch 1, sequence 600: .*index 512 is out of range") as too_large:
        proposed(cfg, bucket_search.Request(written(tmp_path, "batch,sequence\n1,16\n1,600\n")))
    assert too_large.value.hint.startswith("leave such sizes out of the trace, or ")


def test_sizes_are_put_in_place_of_buckets() -> None:
    cfg = call_costs.static(minilm("batch", "sequence"), {"batch": 2, "sequence": 16})
    assert cfg.shapes.dims == {"batch": 2, "sequence": 16}
