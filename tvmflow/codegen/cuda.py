"""The CUDA compile step, with or without a GPU: TVM's CUDA C++ becomes machine code for one architecture.

TVM's own step adds --use_fast_math, reads environment variables, and without a driver puts CUDA source into
the library. Ours takes its place: `loader_env` lets TVM's CUDA run time load without a driver, `compile_step`
compiles with exactly the options stated here and in numerics.py, whatever the environment says.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from tvmflow.codegen import nvrtc
from tvmflow.codegen.numerics import cuda_options
from tvmflow.config import NumericsSection
from tvmflow.errors import CompileError, SetupError, TargetError, TvmflowError
from tvmflow.kernels.rewrites import cuda_nan
from tvmflow.process import Child

INSTALL_HINT = "pip install 'tvmflow[cuda]', or install the CUDA 13 toolkit"
_CALLBACK = "tvm_callback_cuda_compile"
# TVM's generated code needs the first of these always, the second for float16.
_HEADERS = ("cuda/std/cstdint", "cuda_fp16.h")
_CUDA_ERROR_NO_DEVICE = 100


@dataclass(frozen=True)
class CudaCompiler:
    """The compiler that turns CUDA C++ into machine code: part of a build's identity."""

    kind: Literal["nvrtc", "nvcc"]
    version: str
    path: Path


def compiler() -> CudaCompiler:
    """NVRTC of a Python package or a toolkit, with its headers; else nvcc from PATH or one of these.

    Raises SetupError where there is none.
    """
    roots = _roots()
    for root in roots:
        libraries = sorted([*root.glob("lib/libnvrtc.so.*"), *root.glob("lib64/libnvrtc.so.*")])
        if libraries and _include_dirs(root):
            return CudaCompiler("nvrtc", nvrtc.version(libraries[-1]), libraries[-1])
    candidates = [shutil.which("nvcc"), *(shutil.which("nvcc", path=str(root / "bin")) for root in roots)]
    for path in filter(None, candidates):
        release = re.search(r"release .*, V([\d.]+)", _nvcc(path, "--version", cwd=Path.cwd()))
        return CudaCompiler("nvcc", release[1] if release else "unknown", Path(path))
    raise SetupError("no CUDA compiler: neither NVRTC with its headers nor nvcc is installed", INSTALL_HINT)


def supported_archs() -> tuple[str, ...]:
    """The architectures that `compiler()` makes machine code for, e.g. ("sm_80", ..., "sm_90", "sm_90a")."""
    found = compiler()
    if found.kind == "nvrtc":
        numbers = nvrtc.architectures(found.path)
    else:
        listed = _nvcc(str(found.path), "--list-gpu-code", cwd=Path.cwd())
        numbers = tuple(sorted({int(n) for n in re.findall(r"sm_(\d+)", listed)}))
    # Variants are not listed: arch-specific ("a") from sm_90, family-specific ("f") from sm_100.
    return tuple(f"sm_{n}{v}" for n in numbers for v in ("", "a", "f")[: 1 + (n >= 90) + (n >= 100)])


def tool(name: str) -> Path:
    """One of NVIDIA's programs, e.g. "nvdisasm": of a Python package, a toolkit, or on PATH; SetupError without it."""
    folders = [str(root / "bin") for root in _roots()]
    found = shutil.which(name, path=os.pathsep.join(folders)) or shutil.which(name)
    if found is None:
        raise SetupError(f"reading a GPU's machine code needs {name}, which is not installed", INSTALL_HINT)
    return Path(found)


def detect_arch() -> str | None:
    """The architecture of this machine's first GPU, e.g. "sm_90"; None where there is no working one."""
    # In a process of its own, because one that has used the driver cannot fork workers that use it.
    return Child("asking the CUDA driver for its GPU").call(_driver_arch)


def _driver_arch() -> str | None:
    if not _loads("libcuda.so.1"):
        return None
    driver = ctypes.CDLL("libcuda.so.1")
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    compute_capability_major, compute_capability_minor = 75, 76  # CUdevice_attribute in cuda.h
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    driver.cuDeviceGetAttribute(ctypes.byref(major), compute_capability_major, device)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), compute_capability_minor, device)
    return f"sm_{major.value}{minor.value}"


def loader_env(cache_dir: Path) -> dict[str, str]:
    """The variables with which a process must be started so that TVM's CUDA run time loads, driver or not.

    Empty where the loader finds the driver and libcudart as it is. Where there is no driver, a stub takes its
    place, built into `cache_dir`, in which every function reports that there is no device: TVM then compiles
    for a GPU without seeing one. Raises SetupError where libcudart, or a C compiler for the stub, is missing.
    """
    runtime = _tvm_cuda_runtime()
    folders = []
    if not _loads("libcuda.so.1"):
        folders.append(_driver_stub(runtime, cache_dir))
    for soname in _needed(runtime):
        if soname.startswith("libcudart.") and not _loads(soname):
            folders.append(_folder_of(soname))
    if not folders:
        return {}
    inherited = os.environ.get("LD_LIBRARY_PATH")
    return {"LD_LIBRARY_PATH": os.pathsep.join([*map(str, folders), *filter(None, [inherited])])}


@contextmanager
def compile_step(arch: str, numerics: NumericsSection, keep: Path | None = None) -> Iterator[None]:
    """Within it, `tvm.compile` for CUDA makes machine code for `arch` under `numerics`.

    `keep` is a folder that receives each cubin's source and PTX, as <sha256 of the cubin>.cu and .ptx.
    Raises TargetError for an arch that the compiler does not know, SetupError where TVM's CUDA run time is
    not loaded (`loader_env`), and CompileError where the generated code does not compile.
    """
    import tvm_ffi

    check_arch(arch)
    importlib.import_module("tvm.support.nvcc")  # registers TVM's own step, which is put back afterwards
    if tvm_ffi.get_global_func("ffi.Module.create.cuda", allow_missing=True) is None:
        raise SetupError(
            "TVM's CUDA run time is not loaded, so it would put source into the library",
            "start the process with the variables of `loader_env`",
        )
    failures: list[TvmflowError] = []

    def compile_kernels(source: str) -> bytes:
        source = cuda_nan.propagate(source)
        try:
            compiled = compile_source(source, arch, numerics)
        except TvmflowError as exc:
            failures.append(exc)  # on its way through TVM the exception would lose its type
            raise
        if keep is not None:
            kept = keep / hashlib.sha256(compiled.cubin).hexdigest()
            kept.with_suffix(".ptx").write_text(compiled.ptx)
            kept.with_suffix(".cu").write_text(source)
        return compiled.cubin

    previous = tvm_ffi.get_global_func(_CALLBACK)
    tvm_ffi.register_global_func(_CALLBACK, compile_kernels, override=True)
    try:
        yield
    except Exception:
        if failures:
            raise failures[0] from None
        raise
    finally:
        tvm_ffi.register_global_func(_CALLBACK, previous, override=True)


def check_arch(arch: str) -> None:
    """Raises TargetError, with the known ones, for an architecture that `compiler()` does not know."""
    known = supported_archs()
    if arch not in known:
        found = compiler()
        raise TargetError(
            f"target.arch: {found.kind} {found.version} does not know {arch}", f"it knows {', '.join(known)}"
        )


def compile_source(source: str, arch: str, numerics: NumericsSection) -> nvrtc.Compiled:
    """Compiles CUDA C++ to machine code for `arch`. The same input gives the same bytes.

    Raises CompileError with the compiler's first error; its whole log is in the details.
    """
    found = compiler()
    options = [f"-arch={arch}", "-std=c++17", *cuda_options(numerics)]
    try:
        if found.kind == "nvcc":
            return _compile_with_nvcc(str(found.path), source, options)
        options += ["-default-device", "--device-int128"]
        options += [f"-I{folder}" for folder in _include_dirs(found.path.parent.parent)]
        return nvrtc.compile_source(found.path, source, options)
    except CompileError as exc:
        first = next((line for line in exc.details.splitlines() if "error" in line), exc.message)
        hint = "the generated CUDA code is wrong; --debug shows the compiler's log"
        message = f"{found.kind} {found.version} for {arch}: {first.strip()}"
        raise CompileError(message, hint, exc.details) from None


def _compile_with_nvcc(nvcc: str, source: str, options: list[str]) -> nvrtc.Compiled:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "kernels.cu").write_text(source)
        # --keep leaves the PTX beside the cubin.
        _nvcc(nvcc, *options, "--cubin", "--keep", "-o", "kernels.cubin", "kernels.cu", cwd=folder)
        return nvrtc.Compiled((folder / "kernels.cubin").read_bytes(), (folder / "kernels.ptx").read_text())


def _nvcc(nvcc: str, *arguments: str, cwd: Path) -> str:
    """Runs nvcc with none of the variables that it or its host compiler would take options from."""
    env = {"PATH": os.environ.get("PATH", os.defpath), "TMPDIR": str(cwd)}
    done = subprocess.run(
        [nvcc, *arguments], cwd=cwd, env=env, text=True, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        raise CompileError("nvcc rejects the source", details=done.stdout)
    return done.stdout


def _roots() -> tuple[Path, ...]:
    """Folders laid out like a CUDA toolkit: NVIDIA's Python packages first, then toolkits."""
    packages = importlib.util.find_spec("nvidia")
    wheels = [
        root
        for place in (packages and packages.submodule_search_locations) or ()
        for root in sorted(Path(place).glob("cu[0-9]*"), reverse=True)
    ]
    stated = [Path(root) for root in map(os.environ.get, ("CUDA_HOME", "CUDA_PATH")) if root]
    nvcc = shutil.which("nvcc")
    on_path = [Path(nvcc).resolve().parent.parent] if nvcc else []
    return tuple(dict.fromkeys([*wheels, *stated, *on_path, Path("/usr/local/cuda")]))


def _include_dirs(root: Path) -> tuple[Path, ...]:
    """The folders of `root` that hold the headers of TVM's generated code; empty where one is missing."""
    found = []
    for header in _HEADERS:
        folders = [root / "include" / "cccl", root / "include", *root.glob("targets/*/include")]
        folder = next((folder for folder in folders if (folder / header).exists()), None)
        if folder is None:
            return ()
        found.append(folder)
    return tuple(dict.fromkeys(found))


def _tvm_cuda_runtime() -> Path:
    package = importlib.util.find_spec("tvm")
    library = Path((package and package.origin) or "").parent / "lib" / "libtvm_runtime_cuda.so"
    if not library.exists():
        raise SetupError("the installed TVM has no CUDA run time", "install apache-tvm from PyPI")
    return library


def _needed(library: Path) -> list[str]:
    with library.open("rb") as file:
        sections = [s for s in ELFFile(file).iter_sections() if isinstance(s, DynamicSection)]
        return [str(vars(tag)["needed"]) for section in sections for tag in section.iter_tags("DT_NEEDED")]


def _undefined(library: Path) -> list[str]:
    with library.open("rb") as file:
        sections = [s for s in ELFFile(file).iter_sections("SHT_DYNSYM") if isinstance(s, SymbolTableSection)]
        symbols = [symbol for section in sections for symbol in section.iter_symbols()]
        return sorted(symbol.name for symbol in symbols if symbol["st_shndx"] == "SHN_UNDEF")


def _loads(soname: str) -> bool:
    try:
        ctypes.CDLL(soname)
    except OSError:
        return False
    return True


def _folder_of(soname: str) -> Path:
    for root in _roots():
        for folder in (root / "lib", root / "lib64"):
            if (folder / soname).exists():
                return folder
    raise SetupError(f"{soname} is not installed, which TVM's CUDA run time needs", INSTALL_HINT)


def _driver_stub(runtime: Path, cache_dir: Path) -> Path:
    """A folder with a libcuda.so.1 that has what TVM's run time links to, and no device."""
    linked = [name for name in _undefined(runtime) if re.match("cu[A-Z]", name)]  # libcudart's: cuda[A-Z]
    names = [*linked, "cuInit"]  # what `detect_arch` asks first
    source = "".join(f"int {name}(void) {{ return {_CUDA_ERROR_NO_DEVICE}; }}\n" for name in names)
    folder = cache_dir / f"cuda-driver-stub-{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    if (folder / "libcuda.so.1").exists():
        return folder
    cc = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if cc is None:
        raise SetupError(
            "no CUDA driver on this machine, and no C compiler to build a stub of it",
            "install a C compiler (apt install gcc), or the NVIDIA driver",
        )
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{os.getpid()}.so"
    subprocess.run(
        [cc, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-", "-o", str(partial)],
        input=source,
        text=True,
        check=True,
        capture_output=True,
    )
    partial.replace(folder / "libcuda.so.1")
    return folder
