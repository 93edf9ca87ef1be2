"""Artifacts with buckets where they are deployed: from C++, without the compiler, and with inputs of every make."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import tvmflow
from tvmflow import artifact, config, flow
from tvmflow.errors import ArtifactError, InputError
from tvmflow.frozen import evolve
from tvmflow.manifest import Bundle
from tvmflow.runtime.bucket_session import BucketSession

ROOT = Path(__file__).resolve().parents[2]
WORDS, WIDTH = 20, 8
RNG = np.random.default_rng(0)
TABLE, WINDOWS = RNG.standard_normal((WORDS, WIDTH)).astype("f4"), RNG.standard_normal((4, WIDTH, 3)).astype("f4")
# Of (batch, sequence): what a bucket holds, padded in one and both, split, split with a padded end, nothing at all.
SERVED = [(1, 4), (3, 8), (1, 6), (2, 4), (2, 7), (6, 8), (7, 5), (0, 8), (0, 5), (1, 3), (4, 2), (1, 1)]
REFUSED = [(1, 9), (1, 0), (0, 0), (5, 12)]
ALONE = """
import sys
import numpy as np
import tvmflow

session = tvmflow.load(sys.argv[1])
np.savez(sys.argv[2], **session.run(dict(np.load(sys.argv[3]))))
maps = open("/proc/self/maps").read()
print(sorted({"tvm", "onnx", "onnxruntime", "torch", "click", "pandas"} & set(sys.modules)), "libtvm_compiler" in maps)
"""


def model(file: Path) -> Path:
    """mean[batch, 8] over the words that the mask shows, and windows[batch, 4, (sequence - 3) // 2 + 1] over all."""
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["words"]),
        helper.make_node("Cast", ["mask"], ["seen"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["seen", "last"], ["column"]),
        helper.make_node("Mul", ["words", "column"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "middle"], ["sum"], keepdims=0),
        helper.make_node("ReduceSum", ["seen", "middle"], ["count"], keepdims=1),
        helper.make_node("Div", ["sum", "count"], ["mean"]),
        helper.make_node("Transpose", ["words"], ["turned"], perm=[0, 2, 1]),
        helper.make_node("Conv", ["turned", "w"], ["windows"], strides=[2]),
    ]
    graph = helper.make_graph(
        nodes,
        "words",
        [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "sequence"]) for name in ("ids", "mask")],
        [
            helper.make_tensor_value_info("mean", TensorProto.FLOAT, ["batch", WIDTH]),
            helper.make_tensor_value_info("windows", TensorProto.FLOAT, ["batch", 4, "count"]),
        ],
        [
            numpy_helper.from_array(TABLE, "table"),
            numpy_helper.from_array(WINDOWS, "w"),
            numpy_helper.from_array(np.array([1]), "middle"),
            numpy_helper.from_array(np.array([2]), "last"),
        ],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), file)
    return file


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with model.onnx and its artifact."""
    folder = tmp_path_factory.mktemp("words")
    shapes = {"buckets": {"batch": [1, 3], "sequence": [4, 8]}, "pad": {"mask": 0}}
    settings = {"shapes": shapes, "verify": {"ranges": {"mask": [0, 1]}}}
    cfg = config.of_model(str(model(folder / "model.onnx")), [settings])
    flow.compile_model(cfg, folder / "words.tvmflow")
    return folder


@pytest.fixture(scope="module")
def session(built: Path) -> BucketSession:
    loaded = tvmflow.load(built / "words.tvmflow")
    assert isinstance(loaded, BucketSession)
    return loaded


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shutil.which("g++") or pytest.skip("no g++ is here")
    shutil.which("make") or pytest.skip("no make is here")
    out = tmp_path_factory.mktemp("cpp")
    settings = [f"TVM_PYTHON={sys.executable}", f"OUT={out}"]
    subprocess.run(["make", "-C", ROOT / "examples" / "cpp", *settings], check=True, stdout=subprocess.PIPE)
    return out / "run_artifact"


def drawn(batch: int, sequence: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    mask = rng.integers(0, 2, (batch, sequence))
    mask[:, :1] = 1
    return {"ids": rng.integers(0, WORDS, (batch, sequence)), "mask": mask}


def by_cpp(
    program: Path, artifact: Path, feeds: dict[str, np.ndarray], folder: Path
) -> subprocess.CompletedProcess[str]:
    words = []
    for name, array in feeds.items():
        array.tofile(folder / name)
        words.append(f"{name}:{'x'.join(map(str, array.shape))}={folder / name}")
    return subprocess.run([program, artifact, "--runs", "2", *words], capture_output=True, text=True, check=False)


def parsed(text: str) -> dict[str, np.ndarray]:
    outputs = {}
    for line in text.splitlines():
        head, _, values = line.partition("]")
        name, dtype, shape = head.split(" ", 2)
        outputs[name] = np.array(values.split(), dtype).reshape([int(size) for size in shape[1:].split(",")])
    return outputs


@pytest.mark.parametrize(("batch", "sequence"), SERVED)
def test_cpp_gives_pythons_values(
    batch: int, sequence: int, built: Path, session: BucketSession, program: Path, tmp_path: Path
) -> None:
    feeds = drawn(batch, sequence, seed=batch)
    done = by_cpp(program, built / "words.tvmflow", feeds, tmp_path)
    assert done.returncode == 0, done.stderr
    got, want = parsed(done.stdout), session.run(feeds)
    assert got.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array)
        assert got[name].shape == array.shape
    if sequence >= 3:  # ONNX Runtime refuses what leaves no window
        peer = onnxruntime.InferenceSession(built / "model.onnx").run(None, feeds)
        for array, expected in zip(want.values(), peer, strict=True):
            np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "feeds",
    [
        *(drawn(*sizes) for sizes in REFUSED),
        drawn(2, 5) | {"mask": np.ones((2, 4), "i8")},
    ],
    ids=[*map(str, REFUSED), "contradiction"],
)
def test_cpp_refuses_what_python_refuses(
    feeds: dict[str, np.ndarray], built: Path, session: BucketSession, program: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as raised:
        session.run(feeds)
    done = by_cpp(program, built / "words.tvmflow", feeds, tmp_path)
    assert (done.returncode, done.stderr) == (1, f"error: {raised.value.message}\n")


def test_cpp_wants_shapes_that_fit(built: Path, program: Path, tmp_path: Path) -> None:
    feeds = drawn(2, 4)
    open_ = subprocess.run(
        [program, built / "words.tvmflow", "ids=x", "mask=x"], capture_output=True, text=True, check=False
    )
    assert open_.stderr == "error: ids: state its shape, NAME:SHAPE=FILE\n"
    deeper = by_cpp(program, built / "words.tvmflow", feeds | {"ids": feeds["ids"][..., None]}, tmp_path)
    assert deeper.stderr == "error: ids: 2x4x1 does not fit its shape\n"


def test_runs_without_the_compiler_and_without_tvm(built: Path, session: BucketSession, tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    subprocess.run([sys.executable, ROOT / "scripts" / "make_runtime.py", parts], check=True, stdout=subprocess.PIPE)
    feeds = drawn(7, 5)
    np.savez(tmp_path / "x.npz", **feeds)
    python = Path(sys.executable).resolve()  # outside the virtual environment, and without site-packages by -S
    words = [python, "-S", "-c", ALONE, built / "words.tvmflow", tmp_path / "y.npz", tmp_path / "x.npz"]
    done = subprocess.run(words, env={"PYTHONPATH": str(parts)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[] False\n"
    got = np.load(tmp_path / "y.npz")
    for name, array in session.run(feeds).items():
        np.testing.assert_array_equal(got[name], array)


def read_only(array: np.ndarray) -> np.ndarray:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


@pytest.mark.parametrize("sizes", [(3, 8), (2, 7), (7, 5), (0, 5)], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        np.asfortranarray,
        read_only,
        lambda a: np.repeat(a, 2, axis=1)[:, ::2],
        lambda a: a[::-1, ::-1].copy()[::-1, ::-1],
        lambda a: a.tolist() if a.size else a,
        lambda a: np.ma.masked_array(a),
    ],
    ids=["fortran", "read-only", "strided", "backwards", "lists", "masked"],
)
def test_arrays_of_every_make(
    make: Callable[[np.ndarray], Any], sizes: tuple[int, int], session: BucketSession
) -> None:
    feeds = drawn(*sizes)
    got = session.run({name: make(array) for name, array in feeds.items()})
    for name, array in session.run(feeds).items():
        np.testing.assert_array_equal(got[name], array)


@pytest.mark.parametrize("sizes", [(3, 8), (2, 7), (7, 5), (0, 5)], ids=str)
def test_torch_in_and_out(sizes: tuple[int, int], session: BucketSession) -> None:
    torch = pytest.importorskip("torch", reason="the extra `torch` is not installed")
    feeds = drawn(*sizes)
    want = session.run(feeds)
    for tensors in (
        {name: torch.from_numpy(array) for name, array in feeds.items()},
        {name: torch.from_numpy(array.T.copy()).T for name, array in feeds.items()},
    ):
        got = session.run(tensors, into=torch.from_dlpack)
        for name, array in want.items():
            assert isinstance(got[name], torch.Tensor)
            np.testing.assert_array_equal(got[name].numpy(), array)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ids": np.ones((2, 5), "i4")}, "`ids`: dtype int32, expected int64"),
        ({"ids": np.ones((2, 5), ">i8")}, "`ids`: dtype >i8, expected int64"),
        ({"ids": np.int64(1)}, "`ids`: rank 0, expected 2"),
        ({"mask": np.ones((2, 5, 1), "i8")}, "`mask`: rank 3, expected 2"),
        ({"mask": np.ones((3, 5), "i8")}, r"`mask`: axis 0 has size 3, expected 2 \(`ids` axis 0\)"),
        ({"ids": np.full((2, 5), WORDS)}, "an index is out of range"),
        (
            dict.fromkeys(("ids", "mask"), np.broadcast_to(np.int64(1), (1, 10**12))),
            "`sequence` = 1000000000000 is above",
        ),
        ({"more": np.ones(1)}, "`more`: no such input"),
        ({"ids": [[1, 2], [3]]}, "`ids`: not an array"),
        ({"ids": None}, "`ids`: None is no array"),
    ],
)
def test_what_does_not_fit_is_refused_and_the_next_call_runs(
    changed: dict[str, Any], message: str, session: BucketSession
) -> None:
    want = session.run(drawn(2, 5))
    with pytest.raises(InputError, match=message):
        session.run(drawn(2, 5) | changed)
    for name, array in session.run(drawn(2, 5)).items():
        np.testing.assert_array_equal(array, want[name])


def test_threads_of_mixed_sizes_share_a_session(built: Path) -> None:
    session = tvmflow.load(built / "words.tvmflow", threads=1)
    requests = [drawn(*sizes, seed=seed) for seed, sizes in enumerate(SERVED)]
    want = [session.run(feeds) for feeds in requests]

    def calls(thread: int) -> bool:
        turns = [(thread + step) % len(requests) for step in range(100)]
        return all(
            np.array_equal(array, want[turn][name])
            for turn in turns
            for name, array in session.run(requests[turn]).items()
        )

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(calls, range(8))) == [True] * 8


def rewritten(folder: Path, change: dict[str, Any]) -> None:
    """Writes a bundle's manifest anew with some fields changed, into what it may not hold, too."""
    bundle = artifact.read(folder)
    artifact.write_manifest(folder, type(bundle).model_construct(**{**dict(bundle), **change}))


def test_buckets_that_do_not_fit_their_artifact(built: Path, tmp_path: Path) -> None:
    """The digests are those of the changed manifests."""
    original = built / "words.tvmflow"
    bundle = artifact.read(original)
    assert isinstance(bundle, Bundle)
    first, second = bundle.buckets[0], bundle.buckets[1]
    (words, mask), (mean, windows) = bundle.signature.inputs, bundle.signature.outputs
    cases: list[tuple[dict[str, Any], str]] = [
        ({"buckets": (evolve(second, dims=first.dims), *bundle.buckets[2:])}, "files"),
        ({"buckets": tuple(bundle.buckets[:1]) * 4}, "buckets: hold the same sizes twice"),
        ({"buckets": (evolve(first, folder="../x"), *bundle.buckets[1:])}, "buckets.0.folder: is not"),
        ({"buckets": (evolve(first, dims={"batch": 1}), *bundle.buckets[1:])}, "buckets.0.dims: are"),
        (
            {
                "buckets": (
                    evolve(first, dims=second.dims),
                    evolve(second, dims=first.dims),
                    *bundle.buckets[2:],
                )
            },
            "signature.inputs: the library of batch-1_sequence-4 has others",
        ),
        ({"padding": {}}, "padding: does not name the dimensions"),
        ({"pad": {"other": 0.0}}, "pad.other: is not the name of an input"),
        ({"signature": evolve(bundle.signature, inputs=(mask, words))}, "signature.inputs: the library"),
        *(
            (
                {"signature": evolve(bundle.signature, outputs=(mean, evolve(windows, shape=("batch", 4, size))))},
                "signature.outputs: the library",
            )
            for size in ("sequence", "sequence // 0", "(" * 300, "x()", "other")
        ),
    ]
    own = artifact.read(original / first.folder)
    huge = own.files | {artifact.LIBRARY: evolve(own.files[artifact.LIBRARY], size_bytes=(1 << 63) - 1)}
    copy = Path(shutil.copytree(original, tmp_path / "huge"))
    rewritten(copy / first.folder, {"files": huge})
    inside = artifact.file_entry(copy / first.folder / artifact.MANIFEST)
    rewritten(copy, {"files": bundle.files | {f"{first.folder}/{artifact.MANIFEST}": inside}})
    with pytest.raises(ArtifactError, match=r"files\.library\.so: is not the file that the artifact lists"):
        tvmflow.load(copy)
    for number, (change, message) in enumerate(cases):
        copy = Path(shutil.copytree(original, tmp_path / str(number)))
        rewritten(copy, change)
        with pytest.raises(ArtifactError) as raised:
            tvmflow.load(copy)
        assert f"manifest.json: {message}" in raised.value.message


def test_manifests_changed_at_random(built: Path, tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "scripts" / "fuzz_manifests.py", "--rounds", "150", "--keep", tmp_path / "found"]
    done = subprocess.run([*command, built / "words.tvmflow"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "150 manifests" in done.stdout
