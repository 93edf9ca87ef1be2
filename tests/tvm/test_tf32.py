"""TF32 tensor cores, as far as they go without a GPU: values of the schedules, lanes of the intrinsics, machine code.

Three things together stand for a run on a GPU. The schedules run on a CPU with the loops that the intrinsics stand for
in their places, threads one after the other, and are held against NumPy and PyTorch in float64. The CUDA text that is
made of them runs on a CPU, thread beside thread, around a tensor core made from the PTX ISA, under ThreadSanitizer.
What the CUDA compiler makes of it holds the instructions that were meant, and no others.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import cuda_compiler
import cuda_on_cpu
import numpy as np
import pytest
import tvm
from tvm import te, topi
from tvm.s_tir import Schedule, TensorIntrin
from tvm.s_tir.schedule import Trace
from tvm.tirx import IntImm

from tvmflow import config, process, tasks
from tvmflow import target as targets
from tvmflow.audit import sass
from tvmflow.codegen import cubin, cuda, numerics, tuned
from tvmflow.config import NumericsSection, TargetSection
from tvmflow.database import Provenance, Reading, Record, pack
from tvmflow.database.grammar import Where
from tvmflow.errors import CompileError, ConfigError, TargetError
from tvmflow.kernels.schedules.default_schedule import RULE_ATTR
from tvmflow.kernels.tf32 import intrinsics, schedule_tf32
from tvmflow.pipeline import plan, prepare
from tvmflow.pipeline.context import Context
from tvmflow.process import Child
from tvmflow.replay import replay
from tvmflow.tuning import search, space

ROOT = Path(__file__).resolve().parents[2]
TF32, FP32 = NumericsSection(tf32=True), NumericsSection()
GPU = targets.to_tvm(targets.resolve(TargetSection(kind="cuda", arch="sm_80")), numerics.llvm_attributes(TF32))
Reference = Callable[..., np.ndarray]
Case = tuple[list[te.Tensor], te.Tensor, Reference]


def tensor(name: str, *shape: int) -> te.Tensor:
    """With the 64-bit sizes that models' kernels have."""
    return te.placeholder([IntImm("int64", size) for size in shape], name=name)


def matmul(m: int, n: int, k: int, transposed: str = "", batch: Sequence[int] = ()) -> Case:
    """x @ y, where `transposed` names those of "xy" that are stored the other way round."""
    x = tensor("x", *batch, *((k, m) if "x" in transposed else (m, k)))
    y = tensor("y", *batch, *((n, k) if "y" in transposed else (k, n)))
    r = te.reduce_axis((IntImm("int64", 0), IntImm("int64", k)), name="r")

    def element(*at: tvm.tirx.Var) -> tvm.tirx.Expr:
        *s, i, j = at
        left = x(*s, r, i) if "x" in transposed else x(*s, i, r)
        return te.sum(left * (y(*s, j, r) if "y" in transposed else y(*s, r, j)), axis=r)

    z = te.compute([IntImm("int64", size) for size in (*batch, m, n)], element, name="matmul")

    def reference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (a.swapaxes(-1, -2) if "x" in transposed else a) @ (b.swapaxes(-1, -2) if "y" in transposed else b)

    return [x, y], z, reference


def convolution(layout: str, sizes: tuple[int, ...], channels: tuple[int, int], window: tuple[int, int, int]) -> Case:
    """ReLU of a convolution of images x height x width; `window` is kernel, stride and padding."""
    (images, height, width), (ci, co), (size, stride, pad) = sizes, channels, window
    nhwc = layout == "NHWC"
    x = tensor("x", images, height, width, ci) if nhwc else tensor("x", images, ci, height, width)
    w = tensor("w", size, size, ci, co) if nhwc else tensor("w", co, ci, size, size)
    kernel = topi.nn.conv2d_nhwc if nhwc else topi.nn.conv2d_nchw

    def reference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        torch = pytest.importorskip("torch")
        a, b = (a.transpose(0, 3, 1, 2), b.transpose(3, 2, 0, 1)) if nhwc else (a, b)
        y = torch.relu(torch.nn.functional.conv2d(torch.tensor(a), torch.tensor(b), stride=stride, padding=pad)).numpy()
        return np.asarray(y.transpose(0, 2, 3, 1) if nhwc else y)

    return [x, w], topi.nn.relu(kernel(x, w, stride, pad, 1, "float32")), reference


def with_epilogue() -> Case:
    """Bias, a gate that reads its input twice, and a residual."""
    (x, y), z, product = matmul(70, 50, 40)
    bias, residual = tensor("bias", 50), tensor("residual", 70, 50)
    biased = te.compute(z.shape, lambda i, j: z[i, j] + bias[j], name="biased")
    gate = te.compute(z.shape, lambda i, j: te.tanh(biased[i, j] * 0.5), name="gate")
    result = te.compute(z.shape, lambda i, j: biased[i, j] * gate[i, j] + residual[i, j], name="result")

    def reference(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray) -> np.ndarray:
        value = product(a, b) + c
        return value * np.tanh(value * 0.5) + d

    return [x, y, bias, residual], result, reference


CASES: dict[str, Callable[[], Case]] = {
    "matmul": lambda: matmul(64, 96, 64),
    "odd sizes": lambda: matmul(50, 33, 27),
    "odd, x transposed": lambda: matmul(50, 33, 27, "x"),
    "odd, y transposed": lambda: matmul(50, 33, 27, "y"),
    "odd, both transposed": lambda: matmul(50, 33, 27, "xy"),
    "large tiles": lambda: matmul(1300, 1290, 33),
    "largest tiles": lambda: matmul(4096, 4096, 48),
    "batch": lambda: matmul(40, 48, 56, batch=[3]),
    "batch, y transposed": lambda: matmul(40, 48, 56, "y", batch=[2, 3]),
    "bias, gate, residual": with_epilogue,
    "3x3": lambda: convolution("NHWC", (1, 14, 14), (32, 48), (3, 1, 1)),
    "stem": lambda: convolution("NHWC", (2, 15, 13), (3, 32), (3, 2, 1)),
    "large stem": lambda: convolution("NHWC", (1, 112, 112), (3, 32), (3, 2, 1)),
    "1x1": lambda: convolution("NHWC", (1, 7, 7), (64, 40), (1, 1, 0)),
    "3x3 NCHW": lambda: convolution("NCHW", (1, 14, 14), (32, 48), (3, 1, 1)),
    "1x1 NCHW": lambda: convolution("NCHW", (1, 7, 7), (64, 40), (1, 1, 0)),
}

# Those whose default schedule runs as CUDA text instead, and of how many thread blocks one is run.
AS_CUDA = {"odd, both transposed": 1, "bias, gate, residual": 1, "stem": 3, "largest tiles": 900}


def prim_func(case: Case) -> tvm.IRModule:
    inputs, output, _ = case
    return tvm.IRModule({"main": te.create_prim_func([*inputs, output], index_dtype_override="int64")})


@pytest.fixture
def described() -> Iterator[None]:
    """Within it, each intrinsic is the loop nest that it stands for."""
    names = {name for a in (False, True) for b in (False, True) for name in intrinsics.group(a, b).values()}
    kept = {name: TensorIntrin.get(name) for name in names}
    for name, intrinsic in kept.items():
        TensorIntrin.register(name, intrinsic.desc, intrinsic.desc, override=True)
    yield
    for name, intrinsic in kept.items():
        TensorIntrin.register(name, intrinsic.desc, intrinsic.impl, override=True)


def run_serially(mod: tvm.IRModule, case: Case) -> None:
    """Runs a GPU's schedule on this CPU, one thread after the other, and holds it against the reference.

    What is left out is how it overlaps: that comes from annotations, which TVM's own passes follow.
    """
    text = mod.script()
    text = re.sub(r'T\.thread_binding\((.+?), thread="[\w.]+"(, annotations=\{.*?\})?\)', r"range(\1)", text)
    text = re.sub(r', annotations=\{"software_pipeline[^}]*\}', "", text)
    overlap = r'"(warp_execution|double_buffer_scope|tirx\.manifest_shared_memory_local_stage)": \d(, )?'
    text = re.sub(overlap, "", text)
    text = re.sub(r', scope="[\w.]+"', "", text)
    library = tvm.compile(tvm.script.from_source(text), target="llvm")
    inputs, output, reference = case
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal([int(size) for size in one.shape]).astype("f4") for one in inputs]
    result = tvm.runtime.tensor(np.full([int(size) for size in output.shape], np.nan, "f4"))
    library["main"](*map(tvm.runtime.tensor, arrays), result)
    want = reference(*(array.astype("f8") for array in arrays))
    np.testing.assert_allclose(result.numpy(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in CASES if name not in AS_CUDA])
def test_default_schedule_computes_the_product(name: str, described: None) -> None:
    case = CASES[name]()
    schedule, rule = schedule_tf32.schedule_of(prim_func(case))
    assert re.fullmatch(r"tf32 (matmul|convolution) \d+x\d+x\d+", rule)
    assert not re.search(r"range\(ax", schedule.mod.script())  # loops of known length: nothing is computed twice
    run_serially(schedule.mod, case)


def candidates(mod: tvm.IRModule, count: int) -> Iterator[Schedule]:
    """Schedules drawn from the space that a search goes through."""
    context = space.context(mod, GPU, "task", 1, tf32=True)
    (design,) = space.designs(context)
    for seed in range(1, 100):
        schedule = Schedule(mod, seed=seed, debug_mask="none")
        Trace(design.trace.insts, {}).apply_to_schedule(schedule, remove_postproc=True)
        schedule.enter_postproc()
        if all(postproc.apply(schedule) for postproc in context.space_generator.postprocs):
            yield schedule
            count -= 1
        if not count:
            return


@pytest.mark.parametrize("name", ["odd, y transposed", "batch", "bias, gate, residual", "stem", "3x3 NCHW"])
def test_candidates_compute_the_product(name: str, described: None) -> None:
    case = CASES[name]()
    mod, _ = tasks.canonical(prim_func(case)["main"])
    for schedule in candidates(mod, 1):
        assert "wmma." not in "".join(re.findall(r'scope="[\w.]+"', schedule.mod.script()))
        run_serially(schedule.mod, case)


def test_traces_replay_without_the_search() -> None:
    mod, _ = tasks.canonical(prim_func(matmul(64, 96, 64))["main"])
    for schedule in [schedule_tf32.schedule_of(mod)[0], *candidates(mod, 1)]:
        assert intrinsics.is_used(search.trace_json(schedule))
        replayed = replay(mod, search.trace_json(schedule), Where("cuda", "x86_64", True))
        tvm.ir.assert_structural_equal(replayed.mod["main"], schedule.mod["main"])


@pytest.mark.parametrize("allowed", [True, False])
def test_search_starts_from_tensor_cores_only_where_allowed(allowed: bool) -> None:
    mod, _ = tasks.canonical(prim_func(matmul(64, 96, 64))["main"])
    assert intrinsics.is_used(space.default(mod, GPU, allowed).trace) == allowed
    rules = [str(type(rule)) for rule in space.context(mod, GPU, "task", 1, allowed).space_generator.sch_rules]
    assert any("TensorCore" in rule for rule in rules) == allowed


def test_small_open_and_other_functions_are_no_products() -> None:
    x, y = te.placeholder((64, 64), name="x"), te.placeholder((64, 64), name="y")
    n = te.var("n", "int64")
    open_x = te.placeholder((n, 64), name="x")
    k = te.reduce_axis((0, 64), name="k")
    functions = {
        "few rows": [*matmul(8, 64, 64)[:2]],
        "open": [[open_x, y], te.compute((n, 64), lambda i, j: te.sum(open_x[i, k] * y[k, j], k), name="z")],
        "max": [[x, y], te.compute((64, 64), lambda i, j: te.max(x[i, k] * y[k, j], k), name="z")],
        "distance": [[x, y], te.compute((64, 64), lambda i, j: te.sum(te.abs(x[i, k] - y[k, j]), k), name="z")],
        "half": [
            [x, y],
            te.compute(
                (64, 64), lambda i, j: te.sum(x[i, k].astype("float16") * y[k, j].astype("float16"), k), name="z"
            ),
        ],
        "depthwise": [*depthwise()],
    }
    for name, (inputs, output) in functions.items():
        mod = tvm.IRModule({"main": te.create_prim_func([*inputs, output], index_dtype_override="int64")})
        assert schedule_tf32.schedule_of(mod)[1] == "", name


def test_what_follows_a_product_may_not_fit() -> None:
    """Neither into our schedule nor into DLight's, which would raise; the kernel has one of its other schedules."""
    (x, y), z, _ = matmul(64, 64, 64)
    mod = tvm.IRModule({"f": te.create_prim_func([x, y, topi.nn.pad(z, [1, 1], [1, 1])])})
    assert schedule_tf32.names(mod) == {"f"}
    with GPU:
        scheduled = plan.run(mod, plan.steps_of(Context("cuda", tf32=True), "schedule", "rewrite"))
    assert scheduled["f"].attrs["tirx.is_scheduled"]
    assert RULE_ATTR not in scheduled["f"].attrs


def depthwise() -> tuple[list[te.Tensor], te.Tensor]:
    x, w = te.placeholder((1, 14, 14, 32), name="x"), te.placeholder((3, 3, 32, 1), name="w")
    return [x, w], topi.nn.depthwise_conv2d_nhwc(x, w, 1, 1, 1)


def cuda_source(schedule: Schedule) -> str:
    options = tvm.transform.PassContext(opt_level=3, config=numerics.pass_config(TF32))
    with GPU, options, cuda.compile_step("sm_80", TF32):
        return str(tvm.compile(schedule.mod, GPU).mod.imports[0].inspect_source())


def run_as_cuda(name: str, drawn: bool, folder: str, every: int) -> tuple[int, int]:
    """Called in a process of its own: compares what a kernel's CUDA text writes when it is run on this CPU.

    Runs each `every`-th thread block. Returns how many elements were written, and of how many.
    """
    case = CASES[name]()
    mod, _ = tasks.canonical(prim_func(case)["main"])
    schedule = next(candidates(mod, 1)) if drawn else schedule_tf32.schedule_of(mod)[0]
    bound = re.findall(r'thread_binding\((?:T\.int64\()?(\d+)\)?, thread="(\w+\.\w)"', schedule.mod.script())
    extents = {axis: int(extent) for extent, axis in bound}
    x, y = extents.get("blockIdx.x", 1), extents.get("blockIdx.y", 1)
    launch = cuda_on_cpu.Launch(x, y, extents.get("threadIdx.y", 1), tuple(range(0, x * y, every)))
    inputs, output, reference = case
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal([int(size) for size in one.shape]).astype("f4") for one in inputs]
    names = [str(schedule.mod["main"].params[place].name) for place in range(len(inputs) + 1)]
    shape = tuple(int(size) for size in output.shape)
    named = dict(zip(names, arrays, strict=False))
    got = cuda_on_cpu.run(cuda_source(schedule), named, (names[-1], shape), launch, Path(folder))
    written = ~np.isnan(got)
    want = reference(*(array.astype("f8") for array in arrays))
    np.testing.assert_allclose(got[written], want[written], rtol=1e-4, atol=1e-4)
    return int(written.sum()), written.size


@cuda_compiler.needed
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler is installed")
@pytest.mark.parametrize(
    ("name", "drawn", "every"),
    [*((name, False, every) for name, every in AS_CUDA.items()), ("batch", True, 3)],
)
def test_cuda_text_computes_the_product_without_races(
    name: str, drawn: bool, every: int, env: dict[str, str], tmp_path: Path
) -> None:
    written, size = Child("running", env=env, torch=True).call(run_as_cuda, name, drawn, str(tmp_path), every)
    assert written == size if every == 1 else 0 < written < size


@cuda_compiler.needed
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler is installed")
def test_a_missing_barrier_is_seen(env: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="returned non-zero exit status 66"):
        Child("running", env=env).call(run_without_barriers, str(tmp_path))


def run_without_barriers(folder: str) -> None:
    """Called in a process of its own."""
    kept = cuda_source

    def without(schedule: Schedule) -> str:
        return kept(schedule).replace("__syncthreads();", "")

    globals()["cuda_source"] = without
    run_as_cuda("odd sizes", False, folder, 1)


def build(folder: str, variants: Sequence[tuple[str, bool]]) -> None:
    """Called in a process of its own: for each (arch, tf32) a library of some products with its PTX in a folder."""
    for arch, allowed in variants:
        section = NumericsSection(tf32=allowed)
        target = targets.to_tvm(
            targets.resolve(TargetSection(kind="cuda", arch=arch)), numerics.llvm_attributes(section)
        )
        out = Path(folder) / f"{arch}-{allowed}"
        out.mkdir()
        names = {"plain": "large tiles", "odd": "odd, both transposed", "fused": "bias, gate, residual", "conv": "3x3"}
        mod = tvm.IRModule(
            {name: prim_func(CASES[case]())["main"].with_attr("global_symbol", name) for name, case in names.items()}
        )
        options = tvm.transform.PassContext(opt_level=3, config=numerics.pass_config(section))
        with target, options, cuda.compile_step(arch, section, keep=out):
            mod = plan.run(mod, plan.steps_of(Context("cuda", tf32=allowed), "schedule", "rewrite"))
            tvm.compile(mod, target).export_library(str(out / "library.so"))


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    paths = os.pathsep.join([process.PACKAGE_PARENT, str(Path(__file__).parent)])
    return {"PYTHONPATH": paths, **cuda.loader_env(tmp_path_factory.mktemp("cache"))}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, env: dict[str, str]) -> Path:
    folder = tmp_path_factory.mktemp("built")
    variants = [("sm_80", True), ("sm_90", True), ("sm_80", False)]
    Child("building", env=env).call(build, str(folder), variants)
    return folder


@cuda_compiler.needed
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_machine_code_multiplies_on_tf32_tensor_cores(arch: str, built: Path) -> None:
    kernels = sass.read(built / f"{arch}-True" / "library.so")
    assert len(kernels) == 4
    for kernel in kernels:
        assert kernel.products == ("HMMA.1688.F32.TF32",)
        assert kernel.local_accesses == (0, 0)  # all fragments are registers
        assert "BAR" in " ".join(kernel.instructions)
    ptx = ptx_of(built / f"{arch}-True")
    assert set(re.findall(r"mma\.sync\S+", ptx)) == {"mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"}
    rounded = set(re.findall(r"cvt\.rna\.tf32\.f32\s+(%r\d+)", ptx))
    operands = re.findall(r"mma\.sync\S+\s*\{[^}]*\},\s*\{([^}]*)\},\s*\{([^}]*)\}", ptx)
    assert operands
    assert not set(re.findall(r"%\w+", str(operands))) - known_copies(ptx, rounded)


def known_copies(ptx: str, registers: set[str]) -> set[str]:
    """The registers, and those that hold copies of them."""
    known, moves = set(registers), re.findall(r"mov\.b32\s+(%\w+),\s*(%\w+)", ptx)
    while more := {to for to, source in moves if source in known} - known:
        known |= more
    return known


def ptx_of(folder: Path) -> str:
    (image,) = cubin.images(folder / "library.so")
    return (folder / f"{hashlib.sha256(image).hexdigest()}.ptx").read_text()


@cuda_compiler.needed
def test_without_tf32_no_tensor_core_is_used(built: Path) -> None:
    assert not any(kernel.products for kernel in sass.read(built / "sm_80-False" / "library.so"))
    assert "tf32" not in ptx_of(built / "sm_80-False")


@cuda_compiler.needed
@pytest.mark.parametrize(("model", "share"), [("minilm_l6", 99), ("effnet_lite0", 89)])
def test_model_is_built_for_tensor_cores(model: str, share: float, tmp_path: Path) -> None:
    if not (ROOT / ".cache" / "models" / "onnx" / f"{model}.onnx").exists():
        pytest.skip(f"the model is not fetched: python scripts/get_models.py .cache/models {model}")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tvmflow.cli",
            "compile",
            ROOT / "configs" / f"{model}.toml",
            "--target",
            "cuda",
            "--set",
            "target.arch=sm_80",
            "--set",
            "numerics.tf32=true",
            "--no-verify",
            "--json",
            "-o",
            "out",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    manifest = json.loads(done.stdout)
    assert manifest["narrowest_float"] == "tf32"
    chosen = {kernel["name"] for kernel in manifest["kernels"] if kernel["rule"].startswith("tf32 ")}
    assert {name.removesuffix("_kernel") for name in manifest["audit"]["tf32_kernels"]} == chosen
    (note,) = [note for note in manifest["notes"] if note.startswith("numerics.tf32: ")]
    assert float(re.findall(r"([\d.]+)% of all", note)[0]) > share


def test_a_record_with_tf32_never_serves_without() -> None:
    function = prim_func(matmul(64, 96, 64))["main"]
    mod, workload = tasks.canonical(function)
    target = targets.resolve(TargetSection(kind="cuda", arch="sm_80"))
    trace = search.trace_json(schedule_tf32.schedule_of(mod)[0])

    def rules(made_with: NumericsSection, asked_for: NumericsSection) -> tuple[str, str]:
        record = Record(
            parts=tasks.key_parts(workload, target, made_with),
            name="matmul",
            trace=trace,
            timings_s=(1e-3,),
            flop=1e6,
            workload_json=pack(tvm.ir.save_json(mod)),
            provenance=Provenance(
                versions={},
                machine="x86_64",
                cpu="a GPU",
                threads=1,
                seed=0,
                trials=1,
                protocol="",
                date="2025-01-31T12:00:00Z",
                tvmflow="0.1.0",
            ),
        )
        applied = tuned.apply(tvm.IRModule({"f": function}), Reading((record,), ()), target, asked_for, ())
        return str(applied.mod["f"].attrs.get(RULE_ATTR, "")), "".join(applied.notes)

    assert rules(TF32, TF32)[0].endswith(", tf32")
    assert rules(TF32, FP32) == ("", "")
    rule, note = rules(FP32, FP32)  # a key that lies
    assert not rule
    assert "uses TF32 against its key" in note


def test_what_has_no_tf32_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = {"model": {"entry": "m:f"}, "numerics": {"tf32": True}}
    with pytest.raises(ConfigError, match="CPUs have no TF32"):
        config.from_dict(raw)
    with pytest.raises(ConfigError, match=r"needs sm_80 or later, target\.arch is sm_75"):
        config.from_dict({**raw, "target": {"kind": "cuda", "arch": "sm_75"}})
    monkeypatch.setattr(prepare, "_detected_arch", lambda cfg: "sm_75")
    with pytest.raises(TargetError, match="needs sm_80 or later, the GPU here is sm_75"):
        prepare.setting(config.from_dict({**raw, "target": {"kind": "cuda"}}))
