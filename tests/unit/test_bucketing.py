"""Choosing buckets: the optimiser against trying everything, costs between known sizes, traces and their faults."""

from __future__ import annotations

import itertools
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from tvmflow import bucket_search as bucket_proposal
from tvmflow.bucket_search import choice as bucketing
from tvmflow.bucket_search import observed, plot, search, size_costs
from tvmflow.bucket_search.observed import Observed
from tvmflow.bucket_search.search import SizeFunction
from tvmflow.cli import cli
from tvmflow.cli.output import show
from tvmflow.errors import InputError, UsageError
from tvmflow.report import buckets as report_buckets

Sizes = tuple[int, ...]
NAMES = ("batch", "sequence", "width")


def seen(rows: Sequence[Sizes], counts: Sequence[int]) -> Observed:
    return Observed(NAMES[: len(rows[0])], np.array(rows), np.array(counts))


def elements(sizes: np.ndarray) -> np.ndarray:
    return np.asarray(np.prod(sizes.astype(float), axis=1))


def attention(sizes: np.ndarray) -> np.ndarray:
    """Like a transformer's: linear in all sizes but the last, of which it also takes the square; and a fixed part."""
    rest = np.prod(sizes[:, :-1].astype(float), axis=1)
    return np.asarray(1.0 + rest * (sizes[:, -1] + sizes[:, -1] ** 2 / 10))


def least(rows: Sequence[Sizes], counts: Sequence[int], most: int, cost: SizeFunction) -> float:
    """The expected seconds of the best of all sets of at most `most` buckets, the largest corner among them."""
    axes = [sorted(set(column)) for column in zip(*rows, strict=True)]
    *others, corner = itertools.product(*axes)
    seconds = {sizes: float(cost(np.array([sizes]))[0]) for sizes in (*others, corner)}

    def expected(buckets: Sequence[Sizes]) -> float:
        order = sorted(buckets, key=lambda sizes: (np.prod(sizes), sizes))
        served = [next(b for b in order if all(map(int.__le__, row, b))) for row in rows]
        return sum(count * seconds[b] for count, b in zip(counts, served, strict=True)) / sum(counts)

    sets = (chosen for count in range(most) for chosen in itertools.combinations(others, count))
    return min(expected([*chosen, corner]) for chosen in sets)


# --- the choice -------------------------------------------------------------------------------------------------------


@given(
    st.dictionaries(st.integers(1, 60), st.integers(1, 99), min_size=1, max_size=8),
    st.integers(1, 5),
    st.lists(st.floats(0.1, 9.0), min_size=60, max_size=60),
)
@settings(max_examples=60, deadline=None)
def test_with_one_dimension_nothing_is_better(requests: dict[int, int], most: int, steps: list[float]) -> None:
    rising = np.cumsum(steps)
    rows, counts = [(size,) for size in sorted(requests)], [requests[size] for size in sorted(requests)]
    cost = lambda sizes: rising[sizes[:, 0] - 1]  # noqa: E731 # a table of any rising costs
    found = bucketing.propose(seen(rows, counts), (1,), cost, most)
    for number, choice in enumerate(found.curve, start=1):
        assert choice.seconds == pytest.approx(least(rows, counts, number, cost))
    assert found.seconds == pytest.approx(least(rows, counts, most, cost))


@given(
    st.dictionaries(st.tuples(st.integers(1, 3), st.sampled_from([16, 20, 48, 64])), st.integers(1, 99), min_size=1),
    st.integers(1, 3),
)
@settings(max_examples=40, deadline=None)
def test_with_few_combinations_nothing_is_better(requests: dict[Sizes, int], most: int) -> None:
    rows, counts = list(requests), list(requests.values())
    found = bucketing.propose(seen(rows, counts), (1, 1), attention, most)
    assert found.seconds == pytest.approx(least(rows, counts, most, attention))
    assert found.product.seconds >= found.seconds * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_local_search_finds_the_best_of_small_cases(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "EXHAUSTIVE", 0)
    rng = np.random.default_rng(seed)
    rows = sorted({(int(b), int(s)) for b, s in zip(rng.integers(1, 5, 9), 16 * rng.integers(1, 6, 9), strict=True)})
    counts = [int(count) for count in rng.integers(1, 50, len(rows))]
    found = bucketing.propose(seen(rows, counts), (1, 1), attention, 4)
    assert found.seconds == pytest.approx(least(rows, counts, 4, attention))


def many(dims: int) -> Observed:
    rng = np.random.default_rng(1)
    columns = [rng.integers(1, 9, 3000), np.minimum(rng.lognormal(4, 0.7, 3000).astype(int) + 1, 400)]
    columns = [columns[1]] if dims == 1 else [*columns, rng.integers(1, 50, 3000)][:dims]
    rows, counts = np.unique(np.stack(columns, axis=1), axis=0, return_counts=True)
    return Observed(NAMES[:dims], rows, counts)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_what_a_proposal_says_holds(dims: int) -> None:
    requests = many(dims)
    align = (4, 16, 1)[:dims] if dims > 1 else (16,)
    found = bucketing.propose(requests, align, attention, 6)
    buckets = [bucket.sizes for bucket in found.buckets]
    assert len(buckets) <= 6
    assert all(size % step == 0 for sizes in buckets for size, step in zip(sizes, align, strict=True))
    padded = -(-requests.sizes // np.array(align)) * np.array(align)
    assert buckets[-1] == tuple(padded.max(axis=0))
    served = [next(i for i, b in enumerate(buckets) if all(row <= b)) for row in requests.sizes]  # from the smallest on
    total = requests.counts.sum()
    seconds = attention(np.array(buckets))
    assert found.seconds == pytest.approx(float(requests.counts @ seconds[served]) / total)
    for index, bucket in enumerate(found.buckets):
        mine = np.array(served) == index
        assert bucket.share == pytest.approx(requests.counts[mine].sum() / total)
        computed = requests.counts[mine].sum() * np.prod(bucket.sizes)
        needed = float(requests.counts[mine] @ elements(requests.sizes[mine]))
        assert bucket.waste == pytest.approx(1 - needed / computed)
        assert bucket.seconds == pytest.approx(seconds[index])
    times = [choice.seconds for choice in found.curve]
    assert times == sorted(times, reverse=True)
    assert times[0] == found.single_s == pytest.approx(attention(np.array(buckets[-1:]))[0])
    assert found.exact_s == pytest.approx(float(requests.counts @ attention(padded)) / total)
    assert found.exact_s <= found.seconds <= found.product.seconds
    assert found == bucketing.propose(requests, align, attention, 6)


def test_more_sizes_than_can_be_tried_still_cover_the_largest() -> None:
    rows = np.arange(1, 30_001)[:, None]
    found = bucketing.propose(Observed(("length",), rows, np.ones(len(rows), int)), (1,), elements, 4)
    assert found.buckets[-1].sizes == (30_000,)
    assert found.seconds == pytest.approx(30_000 * (1 + 1 / 4) / 2, rel=0.01)  # evenly spread sizes want even steps


def test_no_more_buckets_than_sizes() -> None:
    found = bucketing.propose(seen([(1, 16), (2, 16)], [3, 1]), (1, 1), attention, 8)
    assert [bucket.sizes for bucket in found.buckets] == [(1, 16), (2, 16)]
    assert found.seconds == pytest.approx(found.exact_s)
    assert found.waste == 0


def test_the_smallest_bucket_is_the_one_with_the_fewest_elements() -> None:
    buckets = np.array([(8, 8), (2, 64), (1, 128), (8, 128)])
    sizes = np.array([(1, 8), (1, 60), (1, 100), (3, 9), (2, 64)])
    assert bucketing.served_by(sizes, buckets).tolist() == [0, 2, 2, 3, 1]


# --- costs ------------------------------------------------------------------------------------------------------------


def test_costs_between_known_sizes() -> None:
    sizes = np.array(list(itertools.product(range(1, 17), range(3, 513, 7))))
    known, check = size_costs.chosen(sizes)
    assert len(known) == 15
    assert known[0] == (1, 3)
    assert known[-1] == (16, 507)
    assert check is not None
    assert check not in known
    for of, tolerance in (
        (lambda b, s: 5.0 + b + 0 * s, 1e-12),
        (lambda b, s: 1e-3 + b * (s + s**2 / 400), 0.01),
        (lambda b, s: b * s**2, 0.04),
    ):
        costs = size_costs.of_known({one: float(of(*one)) for one in known})
        got = costs.at(sizes)
        np.testing.assert_allclose(got, of(*sizes.T.astype(float)), rtol=tolerance)
        for axis in (0, 1):
            assert (np.diff(got.reshape(16, -1), axis=axis) >= -1e-12).all()


def test_a_larger_size_never_counts_as_faster() -> None:
    costs = size_costs.of_known({(1, 16): 2.0, (1, 64): 1.0, (4, 16): 1.5, (4, 64): 3.0})
    assert costs.at(np.array([(1, 16), (1, 64), (4, 16), (4, 64)])).tolist() == [2.0, 2.0, 2.0, 3.0]


def test_where_all_sizes_are_known_none_is_left_to_check() -> None:
    assert size_costs.chosen(np.array([(1, 16), (2, 16)])) == ([(1, 16), (2, 16)], None)


def test_known_sizes_are_ones_that_were_seen() -> None:
    known, _ = size_costs.chosen(np.array([[32], [64], [320], [640]]))
    assert {size for (size,) in known} <= {32, 64, 320, 640}


# --- traces -----------------------------------------------------------------------------------------------------------


def read(folder: Path, text: str, dims: Sequence[str] = ("batch", "sequence")) -> Observed:
    (folder / "t.csv").write_bytes(text.encode() if isinstance(text, str) else text)
    return observed.read(folder / "t.csv", dims)


def test_a_trace_is_added_up(tmp_path: Path) -> None:
    found = read(tmp_path, "\ufeffsequence, count,batch\r\n16,2,1\r\n\r\n8,1,3\r\n16,5,1\r\n9,0,9\r\n")
    assert found.sizes.tolist() == [[1, 16], [3, 8]]
    assert found.counts.tolist() == [7, 1]
    assert read(tmp_path, "batch,sequence\n1,16\n1,16\n").counts.tolist() == [2]
    assert read(tmp_path, "count\n3\n3\n5\n", ["count"]).sizes.tolist() == [[3], [5]]  # a dimension of that name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "t.csv: is empty, or its first line is"),
        ("batch,sequence\n", "t.csv: holds no requests"),
        ("batch,sequence,count\n1,2,0\n", "t.csv: holds no requests"),
        (
            "batch,sequnce\n1,2\n",
            "t.csv, line 1: no column `sequence`, a dimension of the model; column `sequnce` is "
            "no dimension of the model, did you mean `sequence`?",
        ),
        ("batch\n1\n", "t.csv, line 1: no column `sequence`, a dimension of the model"),
        ("batch,sequence,user\n1,2,x\n", "t.csv, line 1: column `user` is no dimension of the model"),
        ("batch,sequence,batch\n1,2,1\n", "t.csv, line 1: column `batch` is there twice"),
        ("batch,sequence\n1,2\n\n1,2.5\n", "t.csv, line 4, column `sequence`: `2.5` is no whole number"),
        ("batch,sequence\n1,x\n", "t.csv, line 2, column `sequence`: `x` is no whole number"),
        ("batch,sequence\n1,\n", "t.csv, line 2, column `sequence`: nothing stands there"),
        ("batch,sequence\n-1,4\n", "t.csv, line 2, column `batch`: -1 is too small"),
        ("batch,sequence\n0,4\n", "t.csv, line 2, column `batch`: 0 is too small"),
        ("batch,sequence\n1,4294967296\n", "t.csv, line 2, column `sequence`: 4294967296 is too large"),
        ("batch,sequence,count\n1,4,-2\n", "t.csv, line 2, column `count`: -2 is too small"),
        ("batch,sequence\n1,2,3\n", "t.csv, line 2: 3 values for 2 columns"),
        ("batch,sequence\n1\n", "t.csv, line 2: 1 values for 2 columns"),
    ],
)
def test_faulty_traces(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, text)
    assert caught.value.message == f"{tmp_path}/{message}"
    assert caught.value.hint


def test_files_that_are_no_trace(tmp_path: Path) -> None:
    for path, fault in ((tmp_path / "none.csv", "no such file"), (tmp_path, "is a directory, not a file")):
        with pytest.raises(InputError, match=fault):
            observed.read(path, ["batch"])
    (tmp_path / "b.csv").write_bytes(b"batch\n\xff\xfe\n")
    with pytest.raises(InputError, match="cannot be read as CSV"):
        observed.read(tmp_path / "b.csv", ["batch"])


# --- what is shown ----------------------------------------------------------------------------------------------------


def found_for(dims: int) -> bucket_proposal.Found:
    requests = many(dims)
    proposal = bucketing.propose(requests, (1,) * dims, attention, 5)
    check = bucket_proposal.Check(tuple(requests.sizes[0]), 2.0, 2.1)
    return bucket_proposal.Found(requests, proposal, {}, check, False, "estimated")


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_toml_names_the_buckets(dims: int) -> None:
    found = found_for(dims)
    value = tomllib.loads(bucket_proposal.toml(found.proposal))["shapes"]["buckets"]
    names = found.proposal.dims
    if isinstance(value, dict):
        got = [dict(zip(names, sizes, strict=True)) for sizes in itertools.product(*(value[name] for name in names))]
    else:
        got = value
    want = [dict(zip(names, bucket.sizes, strict=True)) for bucket in found.proposal.buckets]
    assert sorted(map(str, got)) == sorted(map(str, want))


def test_all_combinations_are_named_by_dimension() -> None:
    assert bucketing.axes_of(((1, 16), (2, 16), (1, 32), (2, 32))) == ((1, 2), (16, 32))
    assert bucketing.axes_of(((1, 16), (2, 32))) is None
    found = bucketing.propose(seen([(1, 16), (2, 16)], [1, 1]), (1, 1), attention, 2)
    assert bucket_proposal.toml(found) == "[shapes]\nbuckets = { batch = [1, 2], sequence = [16] }\n"


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_plots_and_tables_show_every_bucket(dims: int, capsys: pytest.CaptureFixture[str]) -> None:
    found = found_for(dims)
    drawn = ElementTree.fromstring(plot.svg(found))
    texts = [node.text for node in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"time per request", *found.proposal.dims} <= set(texts)
    width, height = float(drawn.get("width") or 0), float(drawn.get("height") or 0)
    for node in drawn.iter("{http://www.w3.org/2000/svg}circle"):
        assert 0 < float(node.get("cx") or 0) < width
        assert 0 < float(node.get("cy") or 0) < height
    if dims == 2:
        assert {"x".join(map(str, bucket.sizes)) for bucket in found.proposal.buckets} <= set(texts)
    show(report_buckets.rendered(found))
    out = capsys.readouterr().out
    for bucket in found.proposal.buckets:
        assert any(line.split()[:dims] == [*map(str, bucket.sizes)] for line in out.splitlines())
    assert "estimated; between them interpolated, +5.0% at" in " ".join(out.split())


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("align", ["x", "0", "batch=", "=4", "batch=-1", "1.5"])
def test_alignments_that_are_none(align: str) -> None:
    with pytest.raises(UsageError, match=f"--align {align}: not of the form K or DIM=K"):
        CliRunner().invoke(
            cli,
            ["buckets", "m.onnx", "--trace", "t.csv", "--align", align],
            catch_exceptions=False,
            standalone_mode=False,
        )


def test_only_svg_is_drawn() -> None:
    with pytest.raises(UsageError, match=r"--plot p.png: only SVG is drawn"):
        CliRunner().invoke(
            cli,
            ["buckets", "m.onnx", "--trace", "t.csv", "--plot", "p.png"],
            catch_exceptions=False,
            standalone_mode=False,
        )


def test_at_least_one_bucket() -> None:
    result = CliRunner().invoke(cli, ["buckets", "m.onnx", "--trace", "t.csv", "--most", "0"])
    assert result.exit_code == 2
    assert "--most" in result.output
