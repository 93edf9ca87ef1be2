"""Runs an artifact that was cross built for 64-bit ARM Linux, on another machine: QEMU emulates the processor.

    python scripts/run_aarch64.py ARTIFACT --inputs x.npz --outputs y.npz [--cache DIR]

QEMU's user mode runs aarch64/run.cc, which loads the library into TVM's own aarch64 run time, taken from the wheels on
PyPI. It shows that the library loads and what it computes; it says nothing about speed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import ml_dtypes  # noqa: F401 # makes numpy know bfloat16 by name
import numpy as np

from tvmflow import artifact, host, npz
from tvmflow.artifact import CONSTANTS, LIBRARY
from tvmflow.errors import ArtifactError, CompileError, OutputError, SetupError, TvmflowError
from tvmflow.manifest import Manifest
from tvmflow.runtime.inputs import check as check_inputs

COMPILER, EMULATOR, SYSROOT = "aarch64-linux-gnu-g++", "qemu-aarch64", Path("/usr/aarch64-linux-gnu")
RUNNER_SOURCE = Path(__file__).with_name("aarch64") / "run.cc"
CACHE = Path(__file__).resolve().parents[1] / ".cache" / "aarch64"
# libtvm_runtime_extra holds sort and top-k, which a library may call.
LIBRARIES = {"apache-tvm": ("tvm_runtime", "tvm_runtime_extra"), "apache-tvm-ffi": ("tvm_ffi",)}
# pip takes a wheel only under a tag that is named.
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux_2_24_aarch64", "manylinux2014_aarch64")


def run(path: Path, inputs: Path, cache: Path) -> dict[str, np.ndarray]:
    """Runs the artifact at `path` on the arrays of an .npz file; the outputs by name.

    Raises SetupError where a tool or the run time cannot be had, ArtifactError for an artifact that is damaged, not for
    aarch64, or fails, and InputError for inputs that do not fit.
    """
    with artifact.opened(path) as (folder, manifest), tempfile.TemporaryDirectory(prefix="tvmflow-") as name:
        check_target(manifest)
        arrays = npz.read(inputs)
        check_inputs(manifest.signature, arrays)
        check_tools()
        scratch, libraries = Path(name), fetch_runtime(cache)
        compile_runner(libraries, scratch)
        write_arguments(manifest, [arrays[spec.name] for spec in manifest.signature.inputs], scratch)
        shapes = emulate(folder, scratch, libraries, min(manifest.target.threads, host.cores()))
        results = read_outputs(scratch / "outputs", shapes)
    return dict(zip((spec.name for spec in manifest.signature.outputs), results, strict=True))


def check_tools() -> None:
    """Raises SetupError where the cross compiler, its C library or QEMU is missing."""
    missing = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
    if not SYSROOT.is_dir():
        missing.append(str(SYSROOT))
    if missing:
        raise SetupError(f"not installed: {', '.join(missing)}", "apt-get install g++-aarch64-linux-gnu qemu-user")


def check_target(manifest: Manifest) -> None:
    """Raises ArtifactError for a library of another machine, or of another version of the run time."""
    if (manifest.target.kind, manifest.target.machine) != ("llvm", "aarch64"):
        raise ArtifactError(
            f"{manifest.name}: built for {manifest.target.kind} on {manifest.target.machine}, not for an aarch64 CPU",
            "compile it with --set target.mtriple=aarch64-linux-gnu",
        )
    for package in LIBRARIES:
        built, here = manifest.versions.get(package), version(package)
        if built != here:
            raise ArtifactError(
                f"{manifest.name}: built with {package} {built}, here is {here}",
                f"install {package}=={built}, or compile it again",
            )


def fetch_runtime(cache: Path) -> Path:
    """The folder in `cache` with TVM's aarch64 libraries of the installed versions, downloaded at the first call.

    Raises SetupError where PyPI cannot be reached or has no such wheel.
    """
    pins = [f"{package}=={version(package)}" for package in LIBRARIES]
    folder = cache / "+".join(pins)
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise OutputError(f"{cache}: cannot be made: {exc.strerror}", "choose another place with --cache") from None
    with tempfile.TemporaryDirectory(dir=cache) as name:
        wheels, unpacked = Path(name) / "wheels", Path(name) / "unpacked"
        _download(pins, wheels)
        unpacked.mkdir()
        wanted = {f"lib{library}.so" for libraries in LIBRARIES.values() for library in libraries}
        for wheel in wheels.iterdir():
            with zipfile.ZipFile(wheel) as archive:
                for member in archive.namelist():
                    if Path(member).name in wanted:
                        (unpacked / Path(member).name).write_bytes(archive.read(member))
        if missing := wanted - {file.name for file in unpacked.iterdir()}:
            raise SetupError(f"the wheels of {', '.join(pins)} hold no {', '.join(sorted(missing))}")
        unpacked.rename(folder)
    return folder


def compile_runner(libraries: Path, scratch: Path) -> None:
    """Compiles run.cc to `scratch`/run; raises CompileError."""
    from tvm_ffi import libinfo

    includes = [f"-I{folder}" for folder in (libinfo.find_include_path(), libinfo.find_dlpack_include_path())]
    names = [name for group in LIBRARIES.values() for name in group]
    # Nothing in run.cc calls the run time by name: it registers its functions when it is loaded.
    link = ["-Wl,--no-as-needed", f"-L{libraries}", *(f"-l{name}" for name in names)]
    command = [COMPILER, "-std=c++17", "-O1", *includes, str(RUNNER_SOURCE), *link, "-o", str(scratch / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise CompileError(f"{RUNNER_SOURCE.name}: {_last_line(done.stderr)}", f"try it: {' '.join(command)}")


def write_arguments(manifest: Manifest, arrays: Sequence[np.ndarray], scratch: Path) -> None:
    """Writes the inputs' bytes and the plan that says where each argument of `main` lies, as run.cc reads it."""
    lines = []
    with (scratch / "inputs").open("wb") as stream:
        for array in arrays:
            lines.append(_plan_line("inputs", stream.tell(), str(array.dtype), array.shape))
            stream.write(array.tobytes())
    lines += [_plan_line("constants", entry.offset, entry.dtype, entry.shape) for entry in manifest.constants]
    (scratch / "plan").write_text("".join(lines))


def emulate(folder: Path, scratch: Path, libraries: Path, threads: int) -> list[tuple[np.dtype, tuple[int, ...]]]:
    """Runs the runner under QEMU; dtype and shape of each output, whose bytes are then in `scratch`/outputs."""
    files: list[str | Path] = [folder.resolve() / LIBRARY, "plan", "inputs", folder.resolve() / CONSTANTS, "outputs"]
    # -E sets a variable for the emulated program only; QEMU's own loader must not look among aarch64 libraries.
    variables = [f"LD_LIBRARY_PATH={libraries.resolve()}", f"TVM_NUM_THREADS={threads}"]
    emulator: list[str | Path] = [EMULATOR, "-L", SYSROOT, *(word for item in variables for word in ("-E", item))]
    done = subprocess.run([*emulator, "./run", *files], capture_output=True, text=True, cwd=scratch, env=_clean_env())
    if done.returncode != 0:
        raise ArtifactError(
            f"the library failed under QEMU: {_last_line(done.stderr)}",
            "compiled with --set target.mcpu=generic, it asks least of the CPU",
        )
    rows = [line.split() for line in done.stdout.splitlines()]
    return [(np.dtype(dtype), tuple(map(int, sizes))) for dtype, *sizes in rows]


def read_outputs(path: Path, shapes: Sequence[tuple[np.dtype, tuple[int, ...]]]) -> list[np.ndarray]:
    """The arrays that the runner wrote one behind the other."""
    with path.open("rb") as stream:
        return [
            np.frombuffer(stream.read(dtype.itemsize * int(np.prod(shape, dtype=np.int64))), dtype).reshape(shape)
            for dtype, shape in shapes
        ]


def _download(pins: Sequence[str], folder: Path) -> None:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    tags = [f"--platform={tag}" for tag in PLATFORMS]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary=:all:",
        "--python-version",
        python,
        *tags,
        "--dest",
        str(folder),
        *pins,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SetupError(
            f"TVM's aarch64 wheels cannot be downloaded: {_last_line(done.stderr)}",
            "pip must reach PyPI once; --cache may name a folder that was filled elsewhere",
        )


def _plan_line(place: str, offset: int, dtype: str, shape: Sequence[int]) -> str:
    return " ".join([place, str(offset), dtype, *map(str, shape)]) + "\n"


def _clean_env() -> dict[str, str]:
    """The environment without what would change how QEMU or its program runs."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("QEMU_", "LD_", "TVM_"))}


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no message"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--inputs", type=Path, required=True, help=".npz with an array for each input")
    parser.add_argument("--outputs", type=Path, required=True, help=".npz to write")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where TVM's libraries are kept (%(default)s)")
    options = parser.parse_args()
    try:
        npz.write(options.outputs, run(options.artifact, options.inputs, options.cache))
    except TvmflowError as exc:
        sys.stderr.write(f"error: {exc.message}\n" + (f"  next: {exc.hint}\n" if exc.hint else ""))
        sys.exit(exc.exit_code)


if __name__ == "__main__":
    main()
