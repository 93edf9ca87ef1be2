"""The C++ example's choice of buckets and its sizes of outputs are Python's, on drawn requests and expressions."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tvmflow.errors import InputError
from tvmflow.manifest import Padding
from tvmflow.runtime.bucket_selection import Chooser, Sizes, size_of

DIMS = {"batch": 3, "größe": 11, "_s2": 0, "in": 4, "max": 6}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++") or pytest.skip("no g++ is here")
    out = tmp_path_factory.mktemp("cpp") / "lines"
    source = Path(__file__).with_name("buckets_lines.cc")
    subprocess.run([compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", source, "-o", out], check=True)
    return out


def answers(program: Path, lines: list[str]) -> list[str]:
    done = subprocess.run([program], input="\n".join(lines) + "\n", capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def drawn_expression(rng: random.Random, depth: int = 0) -> str:
    kind = rng.choice(["number", "name"] if depth > 3 else ["number", "name", *["binary"] * 4, "minus", "call", "()"])
    inner = [] if kind in ("number", "name") else [drawn_expression(rng, depth + 1) for _ in range(rng.randint(2, 3))]
    if kind == "binary":
        return f" {rng.choice(['+', '-', '*', '//', '%'])} ".join(inner)
    if kind == "minus":
        return f"-{inner[0]}"
    if kind == "call":
        return f"{rng.choice(['min', 'max'])}({', '.join(inner)})"
    if kind == "()":
        return f"({inner[0]})"
    return str(rng.randint(0, 9)) if kind == "number" else rng.choice(list(DIMS))


def value(text: str) -> str:
    try:
        return str(size_of(text)(DIMS))
    except ZeroDivisionError:
        return f"`{text}` cannot be computed"


def test_expressions(program: Path) -> None:
    rng = random.Random(0)
    texts = [
        "(batch - 5) // 8 + 1",
        "-7 // 2",
        "-7 % 3",
        "7 % -3",
        "größe-1-1",
        "max(1,_s2)*2",
        "in",
        "max",
        "(in - 4) // max(max, 2)",
    ]
    texts += [drawn_expression(rng) for _ in range(2000)]
    sizes = " ".join(f"{dim}={size}" for dim, size in DIMS.items())
    got = answers(program, [f"size {text};{sizes}" for text in texts])
    want = [value(text) for text in texts]
    kept = [index for index, text in enumerate(want) if len(text) < 18]  # those that 64 bits hold
    assert len(kept) > 1000
    assert [got[index] for index in kept] == [want[index] for index in kept]


@pytest.mark.parametrize("text", ["batch +", "other", "(batch", "batch)", "2batch", "1 / 2", "min()", "", "a.b"])
def test_what_is_no_size(text: str, program: Path) -> None:
    assert answers(program, [f"size {text} ;batch=1"]) == [f"`{text} ` cannot be computed"]


def drawn_requests(rng: random.Random) -> Iterator[tuple[Sizes, dict[str, Padding], list[dict[str, int]]]]:
    for _ in range(1500):
        dims = ["a", "b", "c"][: rng.randint(1, 3)]
        padding = {
            dim: Padding(
                kind=rng.choice(["independent", "independent", "masked", "mixes", "unproven"]),
                allowed=rng.random() < 0.2,
                reason="seen",
                runs=1,
            )
            for dim in dims
        }
        buckets = [{dim: rng.randint(1, 6) for dim in dims} for _ in range(rng.randint(1, 5))]
        yield {dim: rng.randint(0, 9) for dim in dims}, padding, buckets


def shown(sizes: Sizes) -> str:
    return "".join(f" {dim}={size}" for dim, size in sorted(sizes.items()))


def chosen(sizes: Sizes, padding: dict[str, Padding], buckets: list[dict[str, int]]) -> str:
    try:
        pieces = Chooser(buckets, padding).pieces(sizes)
    except InputError as exc:
        return exc.message
    return "".join(f"{piece.bucket} from{shown(piece.start)} of{shown(piece.sizes)}; " for piece in pieces)


def test_choice(program: Path) -> None:
    requests = list(drawn_requests(random.Random(1)))
    lines = [
        f"pieces {shown(sizes)};{' '.join(f'{d}:{p.kind}:{int(p.allowed)}' for d, p in padding.items())};"
        f"{','.join(map(shown, buckets))}"
        for sizes, padding, buckets in requests
    ]
    want = [chosen(*request) for request in requests]
    assert answers(program, lines) == want
    assert 100 < sum("no bucket fits" in text for text in want) < 1400  # of both kinds
    assert sum(text.count(";") > 1 for text in want) > 100  # and in pieces
