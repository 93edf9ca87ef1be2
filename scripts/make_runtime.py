"""Copies what running an artifact takes, and nothing of the compiler, from this Python's packages into a folder.

    python scripts/make_runtime.py FOLDER [--cuda]
    PYTHONPATH=FOLDER python3 -c 'import tvmflow; ...'

The Python that runs it must have the version of this one; numpy stays out where that one has it: --without numpy.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from importlib.metadata import distribution
from pathlib import Path

# Package -> beginnings of the files that stay out; of apache-tvm only what is named is taken.
PACKAGES = {
    "apache-tvm-ffi": ("tvm_ffi/src", "tvm_ffi/3rdparty", "tvm_ffi/cython", "tvm_ffi/share"),
    "numpy": ("numpy/f2py",),
    "pydantic": (),
    "pydantic-core": (),
    "annotated-types": (),
    "typing-extensions": (),
    "typing-inspection": (),
}
RUNTIME = ("tvm/lib/libtvm_runtime.so", "tvm/lib/libtvm_runtime_extra.so")
CUDA = ("tvm/lib/libtvm_runtime_cuda.so",)
SKIPPED = ("tests", "include")  # folders


def copy(folder: Path, cuda: bool, without: frozenset[str]) -> dict[str, int]:
    """Fills `folder` and returns the bytes of each package."""
    sizes = {}
    for name, left_out in PACKAGES.items():
        if name not in without:
            files = [str(file) for file in distribution(name).files or ()]
            sizes[name] = _copied(name, [f for f in files if not f.startswith(("..", *left_out))], folder)
    metadata = [str(file) for file in distribution("apache-tvm").files or () if file.name == "METADATA"]
    sizes["apache-tvm"] = _copied("apache-tvm", [*RUNTIME, *(CUDA if cuda else ()), *metadata], folder)
    source = Path(__file__).resolve().parents[1] / "tvmflow"
    shutil.copytree(source, folder / "tvmflow", dirs_exist_ok=True)
    sizes["tvmflow"] = sum(file.stat().st_size for file in (folder / "tvmflow").rglob("*") if file.is_file())
    return sizes


def _copied(package: str, files: list[str], folder: Path) -> int:
    size = 0
    for file in files:
        source = Path(str(distribution(package).locate_file(file)))
        if not set(SKIPPED) & set(Path(file).parts) and source.is_file():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / file)
            size += source.stat().st_size
    return size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cuda", action="store_true", help="with the part that drives NVIDIA's GPUs")
    parser.add_argument("--without", action="append", default=[], choices=list(PACKAGES), help="a package to leave out")
    arguments = parser.parse_args()
    if arguments.folder.exists() and any(arguments.folder.iterdir()):
        sys.exit(f"error: {arguments.folder} is not empty; name a new folder")
    sizes = copy(arguments.folder, arguments.cuda, frozenset(arguments.without))
    for name, size in sorted({**sizes, "together": sum(sizes.values())}.items(), key=lambda item: item[1]):
        print(f"{name:20} {size / 1e6:6.1f} MB")


if __name__ == "__main__":
    main()
