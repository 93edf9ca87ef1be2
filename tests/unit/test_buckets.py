"""Which bucket serves which sizes, what sizes texts stand for, and what a config may say of buckets."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvmflow import config
from tvmflow.errors import ConfigError, InputError
from tvmflow.flow import tuning
from tvmflow.manifest import Padding
from tvmflow.runtime.bucket_selection import Chooser, dims_of, size_of

BATCHES, LENGTHS = (1, 2, 4, 8), (16, 32, 64)
PRODUCT = [{"batch": batch, "length": length} for batch in BATCHES for length in LENGTHS]


def seen(kind: str, allowed: bool = False) -> Padding:
    return Padding.model_validate({"kind": kind, "allowed": allowed, "reason": "as seen", "runs": 1})


def chooser(batch: str = "independent", length: str = "masked", allowed: bool = False) -> Chooser:
    return Chooser(PRODUCT, {"batch": seen(batch), "length": seen(length, allowed)})


@given(st.integers(0, 40), st.integers(1, 64))
def test_pieces_cover_a_request_once_and_fit_their_buckets(batch: int, length: int) -> None:
    pieces = chooser().pieces({"batch": batch, "length": length})
    rows = [
        row
        for piece in pieces
        for row in range(piece.start.get("batch", 0), piece.start.get("batch", 0) + piece.sizes["batch"])
    ]
    assert rows == list(range(batch))
    for piece in pieces:
        assert piece.sizes["length"] == length
        assert all(piece.sizes[dim] <= size for dim, size in PRODUCT[piece.bucket].items())


@given(st.integers(1, 8), st.integers(1, 64))
def test_the_bucket_with_the_fewest_elements_that_fits_is_taken(batch: int, length: int) -> None:
    (piece,) = chooser().pieces({"batch": batch, "length": length})
    fitting = [bucket for bucket in PRODUCT if bucket["batch"] >= batch and bucket["length"] >= length]
    fewest = min(bucket["batch"] * bucket["length"] for bucket in fitting)
    assert PRODUCT[piece.bucket]["batch"] * PRODUCT[piece.bucket]["length"] == fewest


@given(st.integers(1, 50), st.integers(1, 50))
def test_two_independent_dimensions_are_both_split(first: int, second: int) -> None:
    buckets = [{"a": 4, "b": 8}, {"a": 1, "b": 3}]
    pieces = Chooser(buckets, {"a": seen("independent"), "b": seen("independent")}).pieces({"a": first, "b": second})
    cells = [
        cell
        for piece in pieces
        for cell in itertools.product(
            *(range(piece.start.get(dim, 0), piece.start.get(dim, 0) + piece.sizes[dim]) for dim in "ab")
        )
    ]
    assert sorted(cells) == list(itertools.product(range(first), range(second)))


@pytest.mark.parametrize(
    ("kinds", "sizes", "message"),
    [
        ({}, (1, 65), "`length` = 65 is above the largest bucket, 64, and cannot be split"),
        ({}, (1, 0), "`length` is 0"),
        ({"length": "mixes"}, (1, 20), r"`length` cannot be padded \(as seen\); give one of \[16, 32, 64\]"),
        ({"length": "unproven"}, (1, 20), "`length` cannot be padded"),
        ({"batch": "masked"}, (9, 16), "`batch` = 9 is above the largest bucket, 8"),
        ({"length": "mixes", "allowed": True}, (1, 65), "`length` = 65 is above"),
    ],
)
def test_what_no_bucket_serves_is_refused(kinds: dict[str, object], sizes: tuple[int, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        chooser(**kinds).pieces({"batch": sizes[0], "length": sizes[1]})  # type: ignore[arg-type]


def test_what_mixes_runs_at_the_buckets_own_sizes_and_padded_where_allowed() -> None:
    assert len(chooser(length="mixes").pieces({"batch": 3, "length": 32})) == 1
    (piece,) = chooser(length="mixes", allowed=True).pieces({"batch": 3, "length": 20})
    assert PRODUCT[piece.bucket] == {"batch": 4, "length": 32}


def test_a_pruned_list_splits_where_no_bucket_holds_both() -> None:
    buckets = [{"batch": 1, "length": 128}, {"batch": 8, "length": 16}]
    pieces = Chooser(buckets, {"batch": seen("independent"), "length": seen("masked")}).pieces(
        {"batch": 3, "length": 100}
    )
    assert [(piece.bucket, piece.start["batch"]) for piece in pieces] == [(0, 0), (0, 1), (0, 2)]
    with pytest.raises(InputError, match="`length` = 129"):
        Chooser(buckets, {"batch": seen("independent"), "length": seen("masked")}).pieces({"batch": 1, "length": 129})


@given(st.integers(1, 4000))
def test_texts_of_sizes_are_computed_with_floors(width: int) -> None:
    assert size_of("((width - 5) // 8 + 1)")({"width": width}) == (width - 5) // 8 + 1
    assert size_of("max(width * 2 - 7, 3) % 5")({"width": width}) == max(width * 2 - 7, 3) % 5
    assert size_of("min(width, 12)")({"width": width, "other": 1}) == min(width, 12)
    assert size_of("width")({"width": width}) == width
    assert size_of(7)({}) == 7


@pytest.mark.parametrize("text", ["?", "__import__('os').getcwd()", "width.real", "pow(width, 2)", "w ** 9", "(", ""])
def test_a_text_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        size_of(text)


def test_the_dimensions_of_a_size() -> None:
    assert dims_of("max(width // 2, height)") == {"width", "height"}
    assert dims_of(3) == frozenset()


def written(folder: Path, shapes: str) -> Path:
    file = folder / "c.toml"
    file.write_text(f'[model]\nentry = "m:f"\n[shapes]\n{shapes}\n')
    return file


def test_buckets_are_a_product_or_a_list(tmp_path: Path) -> None:
    product = config.load(written(tmp_path, "buckets = { batch = [4, 1], length = [16, 8] }"))
    assert product.shapes.bucket_sizes() == (
        {"batch": 1, "length": 8},
        {"batch": 1, "length": 16},
        {"batch": 4, "length": 8},
        {"batch": 4, "length": 16},
    )
    listed = config.load(written(tmp_path, "buckets = [{ batch = 4, length = 8 }, { length = 16, batch = 1 }]"))
    assert listed.shapes.bucket_sizes() == ({"length": 16, "batch": 1}, {"batch": 4, "length": 8})
    again = tmp_path / "again.toml"
    again.write_text(config.to_toml(listed))
    assert config.load(again) == listed
    assert config.load(written(tmp_path, "buckets = []")).shapes.bucket_sizes() == ()


def test_each_bucket_has_the_config_of_a_static_library(tmp_path: Path) -> None:
    cfg = config.load(written(tmp_path, "buckets = { batch = [1, 4] }\ndims = { length = 8 }"))
    small, large = config.per_bucket(cfg)
    assert small.shapes.dims == {"batch": 1, "length": 8}
    assert large.shapes.dims == {"batch": 4, "length": 8}
    assert small.shapes.buckets == ()
    assert config.per_bucket(small) == (small,)
    assert config.symbolic(cfg).shapes.dims == {"length": 8}


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ("buckets = { batch = [] }", "shapes.buckets.batch: tuple should have at least 1 item"),
        ("buckets = { batch = [0] }", "shapes.buckets.batch.0: input should be greater than 0"),
        ("buckets = {}", "names no dimension"),
        ("buckets = [{ a = 1 }, { b = 2 }]", "does not give all of a, b"),
        ("buckets = { a = [1] }\ndims = { a = 2 }", "`a` has both a size in dims and buckets"),
        ('buckets = { a = [1] }\nallow_padding = ["b"]', "allow_padding: `b` has no buckets"),
        ("bucket = { a = [1] }", "shapes.bucket: unknown key, did you mean `buckets`"),
    ],
)
def test_buckets_that_make_no_sense_are_refused(shapes: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(written(tmp_path, shapes))
    assert message in caught.value.message


def test_two_configs_of_one_model_are_two_models(tmp_path: Path) -> None:
    small, large = (config.load(written(tmp_path, f"dims = {{ batch = {size} }}")) for size in (1, 4))
    listed = tuning.per_bucket([small, large, config.load(written(tmp_path, "buckets = { batch = [2, 8] }"))])
    assert [cfg.shapes.dims["batch"] for _, cfg in listed] == [1, 4, 2, 8]
    assert [name for name, _ in listed] == ["f", "f", "f batch-2", "f batch-8"]
