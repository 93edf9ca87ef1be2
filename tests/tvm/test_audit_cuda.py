"""Audits of CUDA libraries, without a GPU: numerics read from PTX and machine code, resources and occupancy."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import audit_builds
import cuda_compiler
import pytest

from tvmflow import audit, flow, process
from tvmflow.audit import numerics, occupancy, resources, sass
from tvmflow.audit.machine import MachineCode
from tvmflow.audit.occupancy import LIMITS, Use
from tvmflow.codegen import cuda, ptx
from tvmflow.config import NumericsSection
from tvmflow.errors import AuditError, SetupError
from tvmflow.manifest import Evidence, Launch, Manifest, TargetInfo
from tvmflow.process import Child

pytestmark = cuda_compiler.needed
ON_GPU = {"target": {"kind": "cuda", "arch": "sm_80"}}
PRECISE = NumericsSection()
# One warp multiplies a tile of 16 x 8 x 8 or 16 x 8 x 16 on tensor cores: PTX ISA 8, "mma.sync".
MMA = """extern "C" __global__ void %(name)s(unsigned* d, const unsigned* a) {
  unsigned x0 = a[0], x1 = a[1], x2 = a[2], x3 = a[3];
  asm volatile("mma.sync.aligned.%(shape)s.row.col.%(types)s {%%0,%%1%(outs)s}, {%(a)s}, {%(b)s}, {%(c)s};"
    : %(results)s : "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(a[8]), "r"(a[9]));
  d[0] = x0; d[1] = x1; d[2] = x2; d[3] = x3;
}"""
TF32 = MMA % {
    "name": "tf32",
    "shape": "m16n8k8",
    "types": "f32.tf32.tf32.f32",
    "outs": ",%2,%3",
    "a": "%4,%5,%6,%7",
    "b": "%8,%9",
    "c": "%0,%1,%2,%3",
    "results": '"+r"(x0), "+r"(x1), "+r"(x2), "+r"(x3)',
}
HALF_SUMS = MMA % {
    "name": "half_sums",
    "shape": "m16n8k16",
    "types": "f16.f16.f16.f16",
    "outs": "",
    "a": "%2,%3,%4,%5",
    "b": "%6,%7",
    "c": "%0,%1",
    "results": '"+r"(x0), "+r"(x1)',
}
SHARED = """extern "C" __global__ void __launch_bounds__(128) tiles(float* y, const float* x) {
  __shared__ float tile[%d];
  #pragma unroll 1
  for (int i = threadIdx.x; i < %d; i += 128) tile[i] = x[i];
  __syncthreads();
  y[threadIdx.x] = tile[threadIdx.x * 7 %% %d];
}"""
SPILLING = """extern "C" __global__ void spilling(float* y, const int* i) {
  float values[64];
  for (int k = 0; k < 64; ++k) values[k] = y[k];
  for (int k = 0; k < 64; ++k) values[i[k]] += values[i[k + 1]];
  y[threadIdx.x] = values[i[threadIdx.x]];
}"""
UNARY = 'extern "C" __global__ void kernel(%s* y, const %s* x) { y[threadIdx.x] = %s(x[threadIdx.x]); }'
BINARY = 'extern "C" __global__ void kernel(%s* y, const %s* x) { y[threadIdx.x] = %s(x[0], y[threadIdx.x]); }'
OPERATOR = 'extern "C" __global__ void kernel(%s* y, const %s* x) { y[threadIdx.x] = x[threadIdx.x] / y[threadIdx.x]; }'


def codes(source: str, folder: Path, arch: str = "sm_80") -> tuple[sass.KernelCode, ...]:
    """The kernels of a source, read from a file that holds its cubin somewhere, as a library does."""
    (folder / "library.so").write_bytes(b"before" * 100 + cuda.compile_source(source, arch, PRECISE).cubin + b"behind")
    return sass.read(folder / "library.so")


def manifest(arch: str, launches: dict[str, Launch]) -> Manifest:
    """As much of a manifest as resources are read from."""
    target = TargetInfo(kind="cuda", machine="x86_64", mcpu="", mtriple="", features=(), threads=1, arch=arch)
    evidence = Evidence(llvm_flags={}, launches=launches)
    return Manifest.model_construct(target=target, narrowest_float="float32", evidence=evidence)


# --- numerics: what is planted in a build -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit")


@pytest.fixture(scope="module")
def messages(folder: Path) -> dict[str, str]:
    """Everything built, in one process; what the numerics' check says by name."""
    functions = audit_builds.functions(folder)
    jobs = {
        "clean": (functions, folder / "clean", "", ON_GPU),
        "defaults": (functions, folder / "defaults", "TVM's CUDA step", ON_GPU, True),
        "environment": (functions, folder / "environment", "TVM's CUDA step", ON_GPU),
        "PassContext": (functions, folder / "context", "PassContext", ON_GPU),
        "user": (functions, folder / "user", "", ON_GPU | audit_builds.user_kernel("fast_exp", "exp")),
    }
    paths = {"PYTHONPATH": f"{process.PACKAGE_PARENT}:{Path(__file__).parent}"}
    env = paths | cuda.loader_env(folder)
    said = Child("building", env=env).call(audit_builds.build_all, list(jobs.values()))
    steered = env | {"TVM_CUDA_NVCC_NO_FAST_MATH": "1", "TVM_CUDA_PTXAS_EXTRA_OPTS": "-O1"}
    job = (functions, folder / "steered", "TVM's CUDA step", ON_GPU)
    quiet = Child("building", env=steered).call(audit_builds.build, *job)
    return dict(zip(jobs, said, strict=True)) | {"steered": quiet}


def test_a_clean_library_has_no_findings(messages: dict[str, str], folder: Path) -> None:
    found = flow.audit_artifact(folder / "clean", False, None)[""]
    assert messages["clean"] == ""
    assert found.findings == ()
    (kernel,) = found.resources
    assert (kernel.threads, kernel.dynamic_shared_bytes, kernel.occupancy) == (1024, 0, 1.0)
    assert found.numerics.tf32_kernels == ()


def test_tvms_defaults_are_found_in_the_machine_code(messages: dict[str, str], folder: Path) -> None:
    found = flow.audit_artifact(folder / "defaults", False, None)[""]
    (fault,) = found.faults
    assert fault.check == "numerics"
    assert "MUFU.TANH" in fault.what
    assert "FADD.FTZ, FMUL.FTZ" in fault.what
    with pytest.raises(AuditError, match="approximate or flushing instructions"):
        audit.check({"": found})


def test_the_environment_of_tvms_own_step_decides_and_is_seen(messages: dict[str, str]) -> None:
    assert "MUFU.TANH" in messages["environment"]
    assert messages["steered"] == ""  # TVM_CUDA_NVCC_NO_FAST_MATH: precise, and so it is judged


@pytest.mark.parametrize(
    ("name", "what"),
    [("PassContext", "__tanhf"), ("PassContext", "tanh.approx.f32"), ("user", "ex2.approx.f32"), ("user", "__expf")],
)
def test_a_build_that_breaks_the_numerics_fails(messages: dict[str, str], name: str, what: str) -> None:
    assert "fast_math = false" in messages[name]
    assert what in messages[name]


@pytest.mark.skipif(cuda.detect_arch() is not None, reason="a GPU is here")
def test_what_must_be_run_is_refused_where_no_gpu_is(messages: dict[str, str], folder: Path, tmp_path: Path) -> None:
    options = ("--target", "cuda", "--arch", "sm_80")
    for command in (
        ("verify", folder / "clean", "--attribute"),
        ("bisect", folder / "clean"),
        ("bisect", folder / "functions.onnx", *options),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "tvmflow.cli", *map(str, command)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=False,
        )
        assert done.returncode == 9
        assert done.stderr.startswith("error: functions was built for sm_80 and cannot be run here")
        assert "no GPU is here\n  next: do it on a machine that can run it" in done.stderr
    assert not list(tmp_path.iterdir())


# --- numerics: what precise functions are made of ---------------------------------------------------------------------


def functions() -> dict[str, str]:
    """A kernel for every function that ptx.py knows, and for such as need nothing."""
    others = ("logf", "log2f", "log10f", "log1pf", "sinf", "cosf", "sqrtf", "__frcp_rn", "floorf", "roundf")
    binary = {"powf", "fmodf", "remainderf", "pow"}
    doubles = ("log", "pow", "exp", "sqrt", "sin", "asin", "acosh", "atan", "cosh", "log10", "erf", "tanh", "cbrt")
    sources = {}
    for name in (*ptx.NEEDED, *others, *doubles):
        dtype = "double" if name in doubles else "float"
        sources[name] = (BINARY if name in binary else UNARY) % (dtype, dtype, name)
    for name in ("hexp", "hexp2", "hlog", "hsqrt", "hrsqrt", "hrcp"):
        sources[name] = "#include <cuda_fp16.h>\n" + UNARY % ("half", "half", name)
    sources["double /"] = OPERATOR % ("double", "double")
    sources["float /"] = OPERATOR % ("float", "float")
    sources["half /"] = "#include <cuda_fp16.h>\n" + OPERATOR % ("half", "half")
    return sources


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_precise_functions_pass_in_ptx_and_machine_code(arch: str, tmp_path: Path) -> None:
    sources = enumerate(functions().values())
    text = "\n".join(source.replace(" kernel(", f" kernel{index}(") for index, source in sources)
    compiled = cuda.compile_source(text, arch, PRECISE)
    assert ptx.approximations(text, compiled.ptx) == {}
    assert {code.name: code.approximate for code in codes(text, tmp_path, arch) if code.approximate} == {}


@pytest.mark.parametrize("name", ["__expf", "__logf", "__log2f", "__exp10f", "__sinf", "__cosf", "__tanf"])
def test_approximate_functions_do_not(name: str) -> None:
    source = UNARY % ("float", "float", name)
    (found,) = ptx.approximations(source, cuda.compile_source(source, "sm_80", PRECISE).ptx).values()
    assert name in found
    assert any("approx" in instruction for instruction in found)


def test_assembly_of_the_source_is_read() -> None:
    source = """extern "C" __global__ void kernel(float* y) {
      float z = expf(y[0]); asm("{ ex2.approx.ftz.f32 %0, %1; }" : "=f"(y[0]) : "f"(z)); }"""
    (found,) = ptx.approximations(source, cuda.compile_source(source, "sm_80", PRECISE).ptx).values()
    assert found == {"asm ex2.approx.ftz.f32": 1}


@pytest.mark.parametrize(
    ("source", "allowed", "what"),
    [
        (TF32, {"tf32": True}, "multiplies in TF32: HMMA.1688.F32.TF32"),
        (HALF_SUMS, None, "adds up products in float16: HMMA.16816.F16"),
    ],
)
def test_tensor_cores_are_held_against_the_contract(
    source: str, allowed: dict[str, bool] | None, what: str, tmp_path: Path
) -> None:
    found = codes(source, tmp_path)
    nothing = MachineCode({}, {}, {}, {})
    seen = numerics.numerics(PRECISE, Evidence(llvm_flags={}), nothing, found, ())
    built = manifest("sm_80", {})
    (fault,) = numerics.findings(seen, PRECISE, found, built)
    assert what in fault.what
    if allowed is not None:
        assert seen.tf32_kernels == ("tf32",)
        assert not list(numerics.findings(seen, NumericsSection(**allowed), found, built))


# --- resources --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_twice_the_shared_memory_is_half_the_blocks(arch: str, tmp_path: Path) -> None:
    size = {"sm_80": 6 << 10, "sm_90": 12 << 10}[arch]  # words: more than half of the threads, less when doubled
    single, double = (
        resources.resources(codes(SHARED % (words, words, words), tmp_path, arch), manifest(arch, {}))
        for words in (size // 2, size)
    )
    assert double[0].static_shared_bytes == 4 * size == 2 * single[0].static_shared_bytes
    assert (single[0].limiter, double[0].limiter) == ("shared memory", "shared memory")
    assert 2 * double[0].blocks <= single[0].blocks
    assert single[0].threads == 128  # from its launch bounds
    assert not list(resources.findings(single, manifest(arch, {})))
    (warning,) = resources.findings(double, manifest(arch, {}))
    assert warning.level == "warning"
    assert "double buffering or larger tiles cost occupancy" in warning.what


def test_spills_are_counted(tmp_path: Path) -> None:
    launches = {"spilling": Launch(threads=64, dynamic_shared_bytes=1000)}
    (kernel,) = resources.resources(codes(SPILLING, tmp_path), manifest("sm_80", launches))
    assert kernel.local_stores
    assert kernel.stack_bytes >= 256
    assert (kernel.threads, kernel.dynamic_shared_bytes) == (64, 1000)
    (warning,) = resources.findings([kernel], manifest("sm_80", launches))
    assert "stores to local memory" in warning.what


def test_a_missing_tool_is_named() -> None:
    with pytest.raises(SetupError, match="needs nvnothing, which is not installed") as caught:
        cuda.tool("nvnothing")
    assert "pip install 'tvmflow[cuda]'" in caught.value.hint


CALCULATOR = """#include <cuda_occupancy.h>
extern "C" int blocks(int major, int minor, int threads, int blocks, int shared, int reserved, int* use) {
  cudaOccDeviceProp device;
  device.computeMajor = major; device.computeMinor = minor; device.maxThreadsPerBlock = 1024;
  device.maxThreadsPerMultiprocessor = threads; device.regsPerBlock = 65536; device.regsPerMultiprocessor = 65536;
  device.warpSize = 32; device.sharedMemPerBlock = 48 << 10; device.sharedMemPerMultiprocessor = shared;
  device.numSms = 1; device.sharedMemPerBlockOptin = shared - reserved; device.reservedSharedMemPerBlock = reserved;
  cudaOccFuncAttributes function;
  function.maxThreadsPerBlock = 1024; function.numRegs = use[1]; function.sharedSizeBytes = 0;
  function.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN; function.maxDynamicSharedSizeBytes = shared;
  cudaOccDeviceState state; cudaOccResult result;
  if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &function, &state, use[0], use[2])) return -1;
  return result.activeBlocksPerMultiprocessor;
}"""


def test_occupancy_is_that_of_nvidias_calculator(tmp_path: Path) -> None:
    headers = [root / "include" for root in cuda._roots() if (root / "include" / "cuda_occupancy.h").exists()]
    if not headers or shutil.which("g++") is None:
        pytest.skip("cuda_occupancy.h, the reference, is not installed")
    (tmp_path / "calculator.cc").write_text(CALCULATOR)
    command = ["g++", "-shared", "-fPIC", f"-I{headers[0]}", "-o", "calculator.so", "calculator.cc"]
    subprocess.run(command, cwd=tmp_path, check=True)
    calculator = ctypes.CDLL(str(tmp_path / "calculator.so"))
    sizes = itertools.product((32, 96, 128, 256, 544, 1024), (16, 40, 72, 128, 200, 255), (0, 500, 9000, 24000, 48000))
    uses = [Use(*size) for size in sizes]
    for arch, limits in LIMITS.items():
        number = int(arch.removeprefix("sm_"))
        device = (number // 10, number % 10, limits.threads, limits.blocks, limits.shared_bytes, limits.reserved_bytes)
        for use in uses:
            want = calculator.blocks(*device, (ctypes.c_int * 3)(use.threads, use.registers, use.shared_bytes))
            assert occupancy.occupancy(use, limits).blocks == want, (arch, use)
