"""CUDA builds through TVM: machine code for the stated arch with the stated precision, and nothing else."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import cuda_compiler
import pytest

from tvmflow import process
from tvmflow.codegen import cubin, cuda
from tvmflow.codegen.numerics import pass_config
from tvmflow.config import NumericsSection
from tvmflow.errors import CompileError, SetupError, TargetError
from tvmflow.process import Child

# exp(a) / (sqrt(a) + tanh(a)), written by hand as CUDA's documentation would have it.
REFERENCE = """extern "C" __global__ void reference(float* y, const float* a) {
  float x = a[threadIdx.x];
  y[threadIdx.x] = expf(x) / (sqrtf(x) + tanhf(x));
}"""
# Variables that the child gets although a Child would not have passed them on.
STEERING = {
    "TVM_CUDA_NVCC_NO_FAST_MATH": "1",
    "TVM_CUDA_PTXAS_REG_LEVEL": "0",
    "TVM_CUDA_PTXAS_EXTRA_OPTS": "-O0",
    "TVM_CUDA_NVRTC_EXTRA_OPTS": "--use_fast_math",
    "TVM_CUDA_COMPILE_MODE": "nvcc",
    "TVM_KERNEL_DEBUG": "1",
    "TVM_KERNEL_DUMP": "/nowhere",
    "NVCC_APPEND_FLAGS": "-use_fast_math",
    "NVCC_PREPEND_FLAGS": "-O0 -G",
    "NVRTC_DISABLE_PCH": "1",
    "CUDA_PATH": "/nowhere",
    "LLVM_OVERRIDE_PRODUCER": "someone",
}


def tool(name: str) -> str | None:
    """One of NVIDIA's programs: on PATH, or in its Python package."""
    package = find_spec("nvidia")
    places = list(package.submodule_search_locations or ()) if package else []
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(f"{p}/cu13/bin" for p in places))


pytestmark = cuda_compiler.needed


@dataclass(frozen=True)
class Built:
    library: Path
    ptx: str
    image: Path


@pytest.fixture(scope="session")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a child needs: TVM's CUDA run time loadable, and this module importable."""
    paths = os.pathsep.join([process.PACKAGE_PARENT, str(Path(__file__).parent)])
    return {"PYTHONPATH": paths, **cuda.loader_env(tmp_path_factory.mktemp("cache"))}


def build(folder: str, variants: tuple[tuple[str, bool], ...], source: str = "") -> None:
    """Called in a process of its own: a library and its PTX for each (arch, fast_math), in a folder for each.

    A `source` takes the place of the CUDA code that TVM generates.
    """
    import tvm
    from tvm import relax

    x = relax.Var("x", relax.TensorType((4096,), "float32"))
    block = relax.BlockBuilder()
    with block.function("main", [x]):
        with block.dataflow():
            divisor = block.emit(relax.op.add(relax.op.sqrt(x), relax.op.tanh(x)))
            quotient = block.emit_output(relax.op.divide(relax.op.exp(x), divisor))
        block.emit_func_output(quotient)
    for arch, fast_math in variants:
        numerics = NumericsSection(fast_math=fast_math)
        target = tvm.target.Target({"kind": "cuda", "arch": arch, "max_threads_per_block": 1024})
        out = Path(folder) / f"{arch}-{'fast' if fast_math else 'precise'}"
        out.mkdir(parents=True)
        if source:
            tvm.register_global_func("tvm_callback_cuda_postproc", lambda _code, _target: source)
        with (
            target,
            tvm.transform.PassContext(opt_level=3, config=pass_config(numerics)),
            cuda.compile_step(arch, numerics, keep=out),
        ):
            tvm.compile(block.get(), target).export_library(str(out / "library.so"))


def build_maxima(folder: str) -> None:
    """Called in a process of its own: Relu, Max, Min; ReduceMax and Softmax across threads; two dtypes."""
    import tvm
    from tvm import relax

    target = tvm.target.Target({"kind": "cuda", "arch": "sm_80", "max_threads_per_block": 1024})
    for dtype in ("float32", "float16"):
        x, y = (relax.Var(name, relax.TensorType((64, 4096), dtype)) for name in "xy")
        block = relax.BlockBuilder()
        with block.function("main", [x, y]):
            with block.dataflow():
                bounded = relax.op.minimum(relax.op.maximum(relax.op.nn.relu(x), y), relax.op.multiply(y, y))
                found = [bounded, relax.op.max(x, axis=1), relax.op.nn.softmax(y)]
                outputs = block.emit_output(relax.Tuple([block.emit(value) for value in found]))
            block.emit_func_output(outputs)
        kept = Path(folder) / dtype
        kept.mkdir()
        with target, cuda.compile_step("sm_80", NumericsSection(), keep=kept):
            tvm.compile(block.get(), target)


def build_from_infinity(folder: str) -> None:
    """Called in a process of its own: maxima and minima by DLight's schedules, across threads and within one."""
    import tvm
    from tvm import relax
    from tvm.s_tir import dlight

    from tvmflow.kernels.rewrites.compare_exactly import CompareExactly
    from tvmflow.kernels.rewrites.start_from_infinity import StartFromInfinity
    from tvmflow.pipeline.plan import gpu_rules

    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90", "max_threads_per_block": 1024})
    x = relax.Var("x", relax.TensorType((1, 4, 64, 256), "float32"))
    block = relax.BlockBuilder()
    with block.function("main", [x]):
        with block.dataflow():
            found = [
                relax.op.max(x, 3),
                relax.op.min(x, None),
                relax.op.max(x, 2),
                relax.op.nn.max_pool2d(x, (3, 3)),
                relax.op.nn.softmax(x),
            ]
            outputs = block.emit_output(relax.Tuple([block.emit(value) for value in found]))
        block.emit_func_output(outputs)
    with target, cuda.compile_step("sm_90", NumericsSection(), keep=Path(folder)):
        mod = dlight.ApplyDefaultSchedule(*gpu_rules())(relax.transform.LegalizeOps()(block.get()))
        tvm.compile(CompareExactly("cuda")(StartFromInfinity()(mod)), target)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, env: dict[str, str]) -> dict[tuple[str, bool], Built]:
    folder = tmp_path_factory.mktemp("built")
    variants = tuple((arch, fast) for arch in ("sm_80", "sm_90") for fast in (False, True))
    Child("building", env=env).call(build, str(folder), variants)
    return {(arch, fast): read(folder, arch, fast) for arch, fast in variants}


def read(folder: Path, arch: str, fast: bool) -> Built:
    out = folder / f"{arch}-{'fast' if fast else 'precise'}"
    (image,) = cubin.images(out / "library.so")
    (out / "image.cubin").write_bytes(image)
    ptx = (out / f"{hashlib.sha256(image).hexdigest()}.ptx").read_text()
    return Built(out / "library.so", ptx, out / "image.cubin")


def inexact(ptx: str) -> Counter[str]:
    """The instructions of a PTX text that approximate or flush denormals."""
    instructions = re.findall(r"[a-z0-9]+(?:\.[a-z0-9]+)+", ptx)
    return Counter(name for name in instructions if {"approx", "ftz"} & {*name.split(".")})


ARCHS = pytest.mark.parametrize("arch", ["sm_80", "sm_90"])


@ARCHS
@pytest.mark.parametrize("fast", [False, True])
def test_library_holds_machine_code_of_the_arch_only(
    built: dict[tuple[str, bool], Built], arch: str, fast: bool
) -> None:
    library = built[arch, fast].library
    (found,) = cubin.assert_machine_code(library, arch)
    assert len(found.kernels) == 1
    assert b"__global__" not in library.read_bytes()
    with pytest.raises(CompileError, match=f"for {arch} instead of sm_75"):
        cubin.assert_machine_code(library, "sm_75")


@ARCHS
def test_precise_code_is_as_precise_as_a_hand_written_kernel(
    built: dict[tuple[str, bool], Built], arch: str, tmp_path: Path
) -> None:
    nvcc = tool("nvcc")
    if nvcc is None:
        pytest.skip("nvcc, the reference, is not installed")
    (tmp_path / "reference.cu").write_text(REFERENCE)
    # nvcc's own defaults are IEEE division and square root, denormals kept.
    command = [nvcc, "--ptx", f"-arch={arch}", "-o", "reference.ptx", "reference.cu"]
    subprocess.run(command, cwd=tmp_path, check=True)
    reference = (tmp_path / "reference.ptx").read_text()
    ptx = built[arch, False].ptx
    for instruction in ("div.rn.f32", "sqrt.rn.f32", "fma.rn.f32"):
        assert instruction in reference
        assert instruction in ptx
    assert inexact(ptx) == inexact(reference)
    assert "tanh.approx.f32" not in ptx


@ARCHS
def test_fast_code_uses_the_approximate_instructions(built: dict[tuple[str, bool], Built], arch: str) -> None:
    ptx = built[arch, True].ptx
    for instruction in ("div.approx.ftz.f32", "sqrt.approx.ftz.f32", "tanh.approx.f32", "ex2.approx.ftz.f32"):
        assert instruction in ptx
    assert not re.search(r"(div|sqrt)\.rn", ptx)


@ARCHS
def test_machine_instructions_agree(built: dict[tuple[str, bool], Built], arch: str) -> None:
    nvdisasm = tool("nvdisasm")
    if nvdisasm is None:
        pytest.skip("nvdisasm is not installed")
    precise, fast = (
        subprocess.run([nvdisasm, built[arch, mode].image], capture_output=True, text=True, check=True).stdout
        for mode in (False, True)
    )
    assert "MUFU.TANH" in fast
    assert "MUFU.TANH" not in precise
    # .FTZ instructions prove nothing here: the exact division and square root are made of some.
    assert "TF32" not in precise + fast


def test_maxima_and_minima_keep_nan(env: dict[str, str], tmp_path: Path) -> None:
    Child("building", env=env).call(build_maxima, str(tmp_path))
    for dtype, size in (("float32", "f32"), ("float16", "f16")):
        (ptx,) = (path.read_text() for path in (tmp_path / dtype).glob("*.ptx"))
        assert f"max.NaN.{size}" in ptx
        assert f"min.NaN.{size}" in ptx
        assert "shfl.sync" in ptx  # the reductions are still shared among threads
        assert not re.search(r"(max|min)\.f(16|32)", ptx)


def test_two_processes_make_the_same_bytes_whatever_the_environment(
    built: dict[tuple[str, bool], Built], env: dict[str, str], tmp_path: Path
) -> None:
    variants = (("sm_80", False), ("sm_90", True))
    Child("building", env={**env, **STEERING}).call(build, str(tmp_path), variants)
    for arch, fast in variants:
        assert read(tmp_path, arch, fast).library.read_bytes() == built[arch, fast].library.read_bytes()


def test_variables_of_tvm_that_would_store_source_are_not_passed_on(
    env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TVM_COMPILE_FORCE_FALLBACK", "1")
    Child("building", env=env).call(build, str(tmp_path), (("sm_80", False),))
    cubin.assert_machine_code(read(tmp_path, "sm_80", False).library, "sm_80")


def test_source_in_a_library_is_found(env: dict[str, str], tmp_path: Path) -> None:
    forced = {**env, "TVM_COMPILE_FORCE_FALLBACK": "1"}
    Child("building", env=forced).call(build, str(tmp_path), (("sm_80", False),))
    with pytest.raises(CompileError, match="holds CUDA source"):
        cubin.assert_machine_code(tmp_path / "sm_80-precise" / "library.so", "sm_80")


def test_unknown_arch(env: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="does not know sm_50") as caught:
        Child("building", env=env).call(build, str(tmp_path), (("sm_50", False),))
    assert "sm_80" in caught.value.hint


def test_code_that_does_not_compile(env: dict[str, str], tmp_path: Path) -> None:
    source = "__global__ void k() { nothing(); }"
    with pytest.raises(CompileError, match=r'error: identifier "nothing" is undefined') as caught:
        Child("building", env=env).call(build, str(tmp_path), (("sm_80", False),), source)
    assert "1 error detected" in caught.value.details


def test_a_process_without_the_cuda_run_time_is_refused(env: dict[str, str], tmp_path: Path) -> None:
    if "LD_LIBRARY_PATH" not in env:
        pytest.skip("TVM's CUDA run time loads here as it is")
    bare = {"PYTHONPATH": env["PYTHONPATH"]}
    with pytest.raises(SetupError, match="run time is not loaded"):
        Child("building", env=bare).call(build, str(tmp_path), (("sm_80", False),))


def test_tvm_sees_no_gpu_through_the_stub(env: dict[str, str]) -> None:
    if "LD_LIBRARY_PATH" not in env:
        pytest.skip("this machine has a driver")
    code = "import sys, tvm; sys.exit(tvm.cuda(0).exist)"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}, check=True)


def test_maxima_of_nothing_but_minus_infinity_start_from_it(env: dict[str, str], tmp_path: Path) -> None:
    """The text of the code, for there is no GPU: the lowest and the largest finite number are nowhere in it."""
    Child("building", env=env).call(build_from_infinity, str(tmp_path))
    (source,) = [file.read_text() for file in tmp_path.glob("*.cu")]
    kernels = source.split('extern "C" __global__')[1:]
    kernels = [text for text in kernels if "max(" in text or "min(" in text]
    assert len(kernels) == 5
    assert all("CUDART_INF_F" in text and "3.402" not in text for text in kernels)
