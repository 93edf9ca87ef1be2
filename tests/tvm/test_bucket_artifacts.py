"""Artifacts with buckets: values at any size, what padding does, what is refused, weights once, every command."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

import tvmflow
from tvmflow import artifact, config, flow
from tvmflow.cli import cli
from tvmflow.errors import ConfigError, InputError, TvmflowError, UnsupportedError
from tvmflow.manifest import Bundle

RNG = np.random.default_rng(0)
WORDS, WIDTH = 50, 32
TABLE = RNG.standard_normal((WORDS, WIDTH)).astype("f4")
DENSE = (RNG.standard_normal((WIDTH, 2 * WIDTH)) / 6).astype("f4")


def saved(
    folder: Path, nodes: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], **weights: np.ndarray
) -> Path:
    made = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, made)
    file = folder / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), file)
    return file


def value(name: str, dtype: int, *shape: int | str) -> Any:
    return helper.make_tensor_value_info(name, dtype, list(shape))


def sentence_model(folder: Path) -> Path:
    """Words attend to those that the mask lets them see: per word its mixture, per sentence the mean of them."""
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["words"]),
        helper.make_node("Transpose", ["words"], ["turned"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["words", "turned"], ["likeness"]),
        helper.make_node("Cast", ["mask"], ["seen"], to=TensorProto.FLOAT),
        helper.make_node("Sub", ["seen", "one"], ["hidden"]),
        helper.make_node("Mul", ["hidden", "huge"], ["bias"]),
        helper.make_node("Unsqueeze", ["bias", "first"], ["row"]),
        helper.make_node("Add", ["likeness", "row"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["weights"], axis=-1),
        helper.make_node("MatMul", ["weights", "words"], ["mixed"]),
        helper.make_node("MatMul", ["mixed", "dense"], ["mixture"]),
        helper.make_node("Unsqueeze", ["seen", "last"], ["column"]),
        helper.make_node("Mul", ["mixture", "column"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "first"], ["sum"], keepdims=0),
        helper.make_node("ReduceSum", ["seen", "first"], ["count"], keepdims=1),
        helper.make_node("Div", ["sum", "count"], ["mean"]),
    ]
    inputs = [value("ids", TensorProto.INT64, "batch", "words"), value("mask", TensorProto.INT64, "batch", "words")]
    outputs = [
        value("mixture", TensorProto.FLOAT, "batch", "words", 2 * WIDTH),
        value("mean", TensorProto.FLOAT, "batch", 2 * WIDTH),
    ]
    return saved(
        folder,
        nodes,
        inputs,
        outputs,
        table=TABLE,
        dense=DENSE,
        one=np.float32(1),
        huge=np.float32(1e30),
        first=np.array([1]),
        last=np.array([2]),
    )


def compiled(model: Path, out: Path, shapes: dict[str, Any], **sections: Any) -> Bundle:
    cfg = config.from_dict({"model": {"path": str(model)}, "shapes": shapes, **sections})
    manifest = flow.compile_model(cfg, out)
    assert isinstance(manifest, Bundle)
    return manifest


SENTENCES: dict[str, Any] = {"buckets": {"batch": [1, 4], "words": [8, 16]}, "pad": {"mask": 0}}
FLAGS = {"ranges": {"mask": [0, 1]}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sentences")
    compiled(sentence_model(folder), folder / "s.tvmflow", SENTENCES, verify=FLAGS)
    return folder


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Bundle:
    manifest = artifact.read(folder / "s.tvmflow")
    assert isinstance(manifest, Bundle)
    return manifest


@pytest.fixture(scope="module")
def alone_bytes(folder: Path) -> int:
    """What the weights of a library without buckets take."""
    cfg = config.from_dict(
        {
            "model": {"path": str(folder / "m.onnx")},
            "shapes": {"dims": {"batch": 4, "words": 16}},
            "verify": {"enabled": False},
        }
    )
    return flow.compile_model(cfg, folder / "alone.tvmflow").files["constants.bin"].size_bytes


def drawn(batch: int, words: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    mask = rng.integers(0, 2, (batch, words))
    mask[:, :1] = 1
    return {"ids": rng.integers(0, WORDS, (batch, words)), "mask": mask}


def of_onnxruntime(model: Path, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(model)
    return list(session.run(None, feeds))


@pytest.mark.parametrize(
    ("batch", "words"),
    [(1, 8), (4, 16), (1, 1), (2, 3), (3, 16), (4, 9), (5, 16), (9, 7), (23, 1), (1000, 5), (0, 8), (0, 3)],
)
def test_any_size_gives_the_references_values(folder: Path, batch: int, words: int) -> None:
    feeds = drawn(batch, words)
    got = tvmflow.load(folder / "s.tvmflow").run(feeds)
    want = of_onnxruntime(folder / "m.onnx", feeds)
    for (name, array), expected in zip(got.items(), want, strict=True):
        assert array.shape == expected.shape, name
        assert array.flags.c_contiguous
        np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("batch", "words", "message"),
    [(1, 17, "`words` = 17 is above the largest bucket, 16"), (2, 0, "`words` is 0")],
)
def test_a_size_that_no_bucket_serves_is_refused(folder: Path, batch: int, words: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        tvmflow.load(folder / "s.tvmflow").run(drawn(batch, words))


def test_inputs_that_contradict_each_other_are_refused(folder: Path) -> None:
    feeds = drawn(2, 8) | {"mask": np.ones((2, 9), "i8")}
    with pytest.raises(InputError, match="`mask`: axis 1 has size 9, expected 8"):
        tvmflow.load(folder / "s.tvmflow").run(feeds)


def test_what_padding_does_is_seen(bundle: Bundle) -> None:
    assert bundle.padding["batch"].kind == "independent"
    assert bundle.padding["words"].kind == "masked"
    assert "`mask` = 0" in bundle.padding["words"].reason
    assert all(one.runs for one in bundle.padding.values())
    assert bundle.verdict is not None
    assert bundle.verdict.ok
    assert {tuple(run.dims.values()) for run in bundle.verdict.runs} > {(1, 8), (1, 16), (4, 8), (4, 16), (5, 16)}
    assert bundle.agreement is not None
    assert bundle.agreement.ok
    assert len(bundle.agreement.runs) == 3


def test_weights_are_kept_once(bundle: Bundle, alone_bytes: int) -> None:
    size = bundle.files["constants.bin"].size_bytes
    assert size <= alone_bytes * 1.05
    assert sum(bucket.weight_bytes for bucket in bundle.buckets) > 3 * alone_bytes
    assert all(bucket.planned_bytes > 0 for bucket in bundle.buckets)


def test_the_same_config_gives_the_same_bytes(bundle: Bundle, folder: Path) -> None:
    unchecked = compiled(folder / "m.onnx", folder / "again.tvmflow", SENTENCES, verify={"enabled": False})
    built = {name: entry for name, entry in bundle.files.items() if not name.endswith("manifest.json")}
    assert built == {name: unchecked.files[name] for name in built}
    assert {one.kind for one in unchecked.padding.values()} == {"unproven"}
    with pytest.raises(InputError, match=r"`batch` cannot be padded \(the library was not run\)"):
        tvmflow.load(folder / "again.tvmflow").run(drawn(3, 8))


def test_threads_share_one_artifact(folder: Path) -> None:
    session = tvmflow.load(folder / "s.tvmflow")
    feeds = [drawn(batch, words, seed) for seed, (batch, words) in enumerate([(1, 8), (3, 5), (4, 16), (6, 11)])]
    wants = [session.run(one) for one in feeds]
    barrier = threading.Barrier(8)

    def work(number: int) -> None:
        barrier.wait()
        for step in range(50):
            index = (number + step) % len(feeds)
            for name, array in session.run(feeds[index]).items():
                np.testing.assert_array_equal(array, wants[index][name])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_a_zip_is_the_same_artifact(folder: Path) -> None:
    out = folder / "s.zip"
    shapes = {**SENTENCES, "buckets": {"batch": [4], "words": [8, 16]}, "allow_padding": ["batch", "words"]}
    cfg = config.from_dict({"model": {"path": str(folder / "m.onnx")}, "shapes": shapes, "verify": {"enabled": False}})
    flow.compile_model(cfg, out, flow.Options(zipped=True))
    feeds = drawn(3, 10)
    for got, want in zip(tvmflow.load(out).run_list(feeds), of_onnxruntime(folder / "m.onnx", feeds), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_damaged_bucket_is_noticed(folder: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(folder / "s.tvmflow", copy)
    with (copy / "batch-4_words-16" / "library.so").open("r+b") as stream:
        stream.seek(5000)
        stream.write(b"x")
    with pytest.raises(TvmflowError, match=r"batch-4_words-16/library.so: changed or damaged"):
        tvmflow.load(copy)


def ran(*words: str) -> Any:
    result = CliRunner().invoke(cli, [*map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_command_knows_buckets(folder: Path) -> None:
    path = str(folder / "s.tvmflow")
    listed = json.loads(ran("run", path, "--seed", "0", "--dim", "batch=3", "--dim", "words=5", "--json"))
    assert listed["mixture"]["shape"] == [3, 5, 2 * WIDTH]
    assert json.loads(ran("verify", path, "--json"))["ok"]
    assert set(json.loads(ran("audit", path, "--json"))["buckets"]) == {
        "batch-1_words-8",
        "batch-1_words-16",
        "batch-4_words-8",
        "batch-4_words-16",
    }
    assert "batch-4_words-8" in ran("inspect", path)
    measured = json.loads(ran("bench", path, "--seconds", "1", "--json"))
    assert all(len(samples) == 2 for samples in measured["buckets"].values())
    sizes = "shapes.buckets={batch=[1,4],words=[8]}"
    rows = json.loads(ran("tasks", str(folder / "m.onnx"), "--set", sizes, "--json"))
    assert {row["bucket"] for row in rows} == {"batch-1_words-8", "batch-4_words-8"}
    assert "ok" in ran("verify", f"{path}/batch-1_words-8", "--attribute")


def test_what_is_done_for_one_library_asks_for_a_bucket(folder: Path) -> None:
    with pytest.raises(TvmflowError, match="has 4 buckets") as caught:
        flow.bisect_artifact(folder / "s.tvmflow", None, [], folder / "out", lambda event: None)
    assert "batch-1_words-8" in caught.value.hint


MEAN = [
    helper.make_node("ReduceMean", ["x"], ["mean"], axes=[1], keepdims=1),
    helper.make_node("Sub", ["x", "mean"], ["y"]),
]


def test_a_dimension_that_mixes_is_found_and_only_exact_sizes_run(tmp_path: Path) -> None:
    model = saved(
        tmp_path, MEAN, [value("x", TensorProto.FLOAT, 2, "length", 4)], [value("y", TensorProto.FLOAT, 2, "length", 4)]
    )
    bundle = compiled(model, tmp_path / "m.tvmflow", {"buckets": {"length": [4, 8]}})
    assert bundle.padding["length"].kind == "mixes"
    assert "output `y` changes with" in bundle.padding["length"].reason
    session = tvmflow.load(tmp_path / "m.tvmflow")
    exact = RNG.standard_normal((2, 8, 4)).astype("f4")
    np.testing.assert_allclose(session.run({"x": exact})["y"], of_onnxruntime(model, {"x": exact})[0], atol=1e-6)
    with pytest.raises(InputError, match=r"`length` cannot be padded \(output `y` changes with .*allow_padding"):
        session.run({"x": exact[:, :5]})


def test_an_allowed_dimension_gives_the_values_of_the_padded_inputs(tmp_path: Path) -> None:
    model = saved(
        tmp_path, MEAN, [value("x", TensorProto.FLOAT, 2, "length", 4)], [value("y", TensorProto.FLOAT, 2, "length", 4)]
    )
    shapes = {"buckets": {"length": [4, 8]}, "allow_padding": ["length"], "pad": {"x": 0.5}}
    bundle = compiled(model, tmp_path / "m.tvmflow", shapes)
    assert bundle.verdict is not None
    assert bundle.verdict.ok
    x = RNG.standard_normal((2, 5, 4)).astype("f4")
    padded = np.concatenate([x, np.full((2, 3, 4), 0.5, "f4")], axis=1)
    got = tvmflow.load(tmp_path / "m.tvmflow").run({"x": x})["y"]
    np.testing.assert_allclose(got, of_onnxruntime(model, {"x": padded})[0][:, :5], atol=1e-6)


def test_nan_in_the_padding_of_a_masked_product_is_found_unless_its_value_is_stated(tmp_path: Path) -> None:
    """0 x NaN is NaN: features must be held at a value too, not their mask alone."""
    nodes = [
        helper.make_node("Mul", ["x", "mask"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "axes"], ["y"], keepdims=0),
    ]
    inputs = [value("x", TensorProto.FLOAT, 1, "length"), value("mask", TensorProto.FLOAT, 1, "length")]
    model = saved(tmp_path, nodes, inputs, [value("y", TensorProto.FLOAT, 1)], axes=np.array([1]))
    ranges = {"ranges": {"mask": [0.5, 1.0]}}
    leaking = compiled(model, tmp_path / "a.tvmflow", {"buckets": {"length": [8]}, "pad": {"mask": 0}}, verify=ranges)
    assert leaking.padding["length"].kind == "mixes"
    assert "NaN in the padding" in leaking.padding["length"].reason
    stated = {"buckets": {"length": [8]}, "pad": {"mask": 0, "x": 0}}
    assert compiled(model, tmp_path / "b.tvmflow", stated, verify=ranges).padding["length"].kind == "masked"


def test_outputs_are_cut_where_relax_says(tmp_path: Path) -> None:
    """A strided convolution: rows of a batch are independent, columns are not; sizes follow from both."""
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], strides=[2, 2], pads=[1, 1, 1, 1])]
    model = saved(
        tmp_path,
        nodes,
        [value("x", TensorProto.FLOAT, "batch", 3, 8, "width")],
        [value("y", TensorProto.FLOAT, "batch", 4, 4, "columns")],
        w=RNG.standard_normal((4, 3, 3, 3)).astype("f4"),
    )
    shapes = {"buckets": {"batch": [2], "width": [6, 16]}, "allow_padding": ["width"]}
    bundle = compiled(model, tmp_path / "m.tvmflow", shapes)
    assert bundle.padding["batch"].kind == "independent"
    session = tvmflow.load(tmp_path / "m.tvmflow")
    for batch, width in ((1, 6), (3, 16), (2, 9), (5, 3)):
        x = RNG.standard_normal((batch, 3, 8, width)).astype("f4")
        (want,) = of_onnxruntime(model, {"x": x})
        got = session.run({"x": x})["y"]
        # Zeros behind the columns are what the convolution itself pads with.
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shapes", "error", "message"),
    [
        ({"buckets": {"bach": [1], "words": [8]}}, ConfigError, "no open dimension `bach`, did you mean `batch`"),
        ({"buckets": {"batch": [1]}}, ConfigError, "`words` has neither buckets nor a size"),
        ({"buckets": {"batch": [1], "words": [8]}, "pad": {"msk": 0}}, ConfigError, "no open input `msk`, did you"),
    ],
)
def test_names_that_the_model_does_not_have(
    shapes: dict[str, Any], error: type[TvmflowError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        compiled(sentence_model(tmp_path), tmp_path / "x.tvmflow", shapes)
    assert not (tmp_path / "x.tvmflow").exists()


def test_an_output_of_a_size_that_only_the_run_knows_is_refused(tmp_path: Path) -> None:
    nodes = [helper.make_node("NonZero", ["x"], ["y"])]
    model = saved(tmp_path, nodes, [value("x", TensorProto.FLOAT, "batch", 3)], [value("y", TensorProto.INT64, 2, "n")])
    with pytest.raises(UnsupportedError):
        compiled(model, tmp_path / "x.tvmflow", {"buckets": {"batch": [1, 2]}})


def test_records_of_buckets_leave_the_weights_in_one_layout(folder: Path, alone_bytes: int, tmp_path: Path) -> None:
    """Kernels of each bucket are tuned on their own, and all of them read the same weights."""
    shapes = {"buckets": {"batch": [4, 16], "words": [16]}, "pad": {"mask": 0}}
    cfg = config.from_dict(
        {
            "model": {"path": str(folder / "m.onnx")},
            "shapes": shapes,
            "verify": FLAGS,
            "tuning": {"database": str(tmp_path / "db"), "trials_per_task": 8, "minutes": 2},
        }
    )
    done = flow.tune([cfg], flow.Selection("*matmul*", (1, 1)), lambda event: None)
    assert done.trials > 0
    bundle = flow.compile_model(cfg, tmp_path / "tuned.tvmflow")
    assert isinstance(bundle, Bundle)
    assert all(bucket.kernels.get("tuned", 0) for bucket in bundle.buckets)
    assert bundle.files["constants.bin"].size_bytes <= alone_bytes * 1.05
