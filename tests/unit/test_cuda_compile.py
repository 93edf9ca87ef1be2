"""The CUDA compilers without TVM: CUDA C++ in, machine code out, on a machine with or without a GPU."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tvmflow import process
from tvmflow.codegen import cubin, cuda
from tvmflow.config import NumericsSection
from tvmflow.errors import CompileError, SetupError, TargetError
from tvmflow.process import Child

PRECISE, FAST = NumericsSection(), NumericsSection(fast_math=True)
SOURCE = """extern "C" __global__ void scale(float* a) { a[threadIdx.x] = expf(a[threadIdx.x]) / 3.0f; }
extern "C" __global__ void shift(float* a) { a[threadIdx.x] += 1.0f; }"""
# Every variable by which TVM's own step, nvcc, its host compiler or NVRTC can be steered.
STEERING = {
    "TVM_CUDA_NVCC_NO_FAST_MATH": "1",
    "TVM_CUDA_PTXAS_REG_LEVEL": "0",
    "TVM_CUDA_PTXAS_EXTRA_OPTS": "-O0",
    "TVM_CUDA_NVRTC_EXTRA_OPTS": "--use_fast_math",
    "TVM_CUDA_COMPILE_MODE": "nvcc",
    "TVM_KERNEL_DEBUG": "1",
    "NVCC_APPEND_FLAGS": "-use_fast_math",
    "NVCC_PREPEND_FLAGS": "-O0 -G",
    "CPLUS_INCLUDE_PATH": "/nowhere",
    "NVRTC_DISABLE_PCH": "1",
    "NVRTC_DISABLE_CONCURRENT_NVVM": "1",
    "LIBNVVM_DISABLE_CONCURRENT_API": "1",
    "CUDA_CACHE_DISABLE": "1",
    "LLVM_OVERRIDE_PRODUCER": "someone",
}


def installed() -> list[cuda.CudaCompiler]:
    """Each kind of compiler that this machine has."""
    try:
        first = cuda.compiler()
    except SetupError:
        return []
    nvcc = shutil.which("nvcc")
    second = [cuda.CudaCompiler("nvcc", "any", Path(nvcc))] if nvcc and first.kind != "nvcc" else []
    return [first, *second]


COMPILERS = installed()
needs_compiler = pytest.mark.skipif(not COMPILERS, reason="neither NVRTC nor nvcc is installed")


@pytest.fixture(params=COMPILERS, ids=lambda found: found.kind)
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> cuda.CudaCompiler:
    found: cuda.CudaCompiler = request.param
    monkeypatch.setattr(cuda, "compiler", lambda: found)
    return found


def sha256_in_this_process(arch: str) -> str:
    """Called in a process of its own."""
    return hashlib.sha256(cuda.compile_source(SOURCE, arch, PRECISE).cubin).hexdigest()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a", "sm_100f"])
def test_machine_code_is_for_the_stated_arch(compiler: cuda.CudaCompiler, arch: str, tmp_path: Path) -> None:
    image = cuda.compile_source(SOURCE, arch, PRECISE).cubin
    library = tmp_path / "library.so"
    library.write_bytes(b"\x7fELF host code" + image + b"more host code")
    (found,) = cubin.assert_machine_code(library, arch)
    digest = hashlib.sha256(image).hexdigest()
    assert found == cubin.Cubin(arch, ("scale", "shift"), len(image), digest)


def test_precision_is_what_the_config_says(compiler: cuda.CudaCompiler) -> None:
    precise, fast = (cuda.compile_source(SOURCE, "sm_90", numerics).ptx for numerics in (PRECISE, FAST))
    assert "div.rn.f32" in precise
    assert "div.approx" not in precise
    assert not re.search(r"(add|mul|fma\.rn)\.ftz", precise)
    assert "div.rn.f32" not in fast
    assert "add.ftz.f32" in fast


def test_environment_does_not_change_the_bytes(compiler: cuda.CudaCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = cuda.compile_source(SOURCE, "sm_90", PRECISE)
    for name, value in STEERING.items():
        monkeypatch.setenv(name, value)
    assert cuda.compile_source(SOURCE, "sm_90", PRECISE) == plain


@needs_compiler
def test_environment_of_a_fresh_process_does_not_change_the_bytes() -> None:
    here = {"PYTHONPATH": os.pathsep.join([process.PACKAGE_PARENT, str(Path(__file__).parent)])}
    steered = Child("compiling", env={**here, **STEERING}).call(sha256_in_this_process, "sm_90")
    assert steered == sha256_in_this_process("sm_90")


def test_a_compile_error_shows_the_first_error_line(compiler: cuda.CudaCompiler) -> None:
    with pytest.raises(CompileError, match=r'for sm_80: kernels\.cu\(1\): error: .*"nothing"') as caught:
        cuda.compile_source("__global__ void k() { nothing(); }", "sm_80", PRECISE)
    assert "1 error detected" in caught.value.details


def test_every_supported_arch_compiles(compiler: cuda.CudaCompiler) -> None:
    archs = cuda.supported_archs()
    assert {"sm_80", "sm_90", "sm_90a", "sm_100"} <= set(archs)
    # nvcc takes half a second for each: its first and last must do.
    for arch in archs if compiler.kind == "nvrtc" else (archs[0], archs[-1]):
        cuda.compile_source('extern "C" __global__ void k() {}', arch, PRECISE)


@pytest.mark.parametrize("arch", ["sm_50", "sm_80a", "sm_90f", "sm_999"])
def test_an_unknown_arch_is_named_with_the_known_ones(compiler: cuda.CudaCompiler, arch: str) -> None:
    with pytest.raises(TargetError, match=f"{compiler.kind} .* does not know {arch}") as caught:
        cuda.check_arch(arch)
    assert "sm_80, " in caught.value.hint


@needs_compiler
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'extern "C" __global__ void k(float* a)', "holds CUDA source"),
        (b".version 9.0\n.target sm_90\n.address_size 64", "holds PTX"),
        (b"host code", "holds no machine code"),
    ],
)
def test_anything_but_machine_code_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    library.write_bytes(content)
    with pytest.raises(CompileError, match=message):
        cubin.assert_machine_code(library, "sm_90")


@needs_compiler
def test_machine_code_for_another_arch_is_refused(tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    library.write_bytes(cuda.compile_source(SOURCE, "sm_90", PRECISE).cubin)
    with pytest.raises(CompileError, match="for sm_90 instead of sm_90a"):
        cubin.assert_machine_code(library, "sm_90a")


def test_no_compiler_is_a_setup_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_roots", lambda: ())
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SetupError, match="no CUDA compiler"):
        cuda.compiler()


def test_driver_stub_needs_a_c_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda, "_loads", lambda soname: soname != "libcuda.so.1")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SetupError, match="no C compiler") as caught:
        cuda.loader_env(tmp_path)
    assert "install a C compiler" in caught.value.hint


def test_driver_stub_loads_and_has_no_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda, "_loads", lambda soname: soname != "libcuda.so.1")
    folder = Path(cuda.loader_env(tmp_path)["LD_LIBRARY_PATH"].split(os.pathsep)[0])
    code = "import ctypes, sys; sys.exit(ctypes.CDLL('libcuda.so.1').cuInit(0))"
    done = subprocess.run([sys.executable, "-c", code], env={"LD_LIBRARY_PATH": str(folder)}, check=False)
    assert done.returncode == 100  # CUDA_ERROR_NO_DEVICE
    assert cuda.loader_env(tmp_path)["LD_LIBRARY_PATH"].split(os.pathsep)[0] == str(folder)


def test_nothing_is_added_where_driver_and_run_time_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda, "_loads", lambda soname: True)
    assert cuda.loader_env(tmp_path) == {}


def test_run_time_library_comes_from_a_package_where_the_system_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libcudart.so.13").touch()
    monkeypatch.setattr(cuda, "_loads", lambda soname: soname == "libcuda.so.1")
    monkeypatch.setattr(cuda, "_roots", lambda: (tmp_path,))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/before")
    assert cuda.loader_env(tmp_path) == {"LD_LIBRARY_PATH": f"{tmp_path / 'lib'}:/before"}
    monkeypatch.setattr(cuda, "_roots", lambda: ())
    with pytest.raises(SetupError, match=r"libcudart\.so\.13 is not installed"):
        cuda.loader_env(tmp_path)


def test_detect_arch_agrees_with_nvidia_smi() -> None:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        assert cuda.detect_arch() is None
        return
    query = [smi, "--query-gpu=compute_cap", "--format=csv,noheader", "--id=0"]
    capability = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    assert cuda.detect_arch() == f"sm_{capability.replace('.', '')}"


def test_importing_the_compile_step_does_not_import_tvm() -> None:
    code = "import sys, tvmflow.codegen.cuda; sys.exit('tvm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
