"""Artifacts appear whole or not at all, and damage is seen before anything is loaded."""

from __future__ import annotations

import contextlib
import errno
import json
import platform
from pathlib import Path

import pytest

from tvmflow import artifact
from tvmflow.artifact import CONSTANTS, LIBRARY, MANIFEST
from tvmflow.errors import ArtifactError, OutputError
from tvmflow.manifest import Layout, Manifest, Signature, TargetInfo


def write(folder: Path, machine: str = platform.machine()) -> Manifest:
    (folder / LIBRARY).write_bytes(b"library")
    (folder / CONSTANTS).write_bytes(b"weights")
    manifest = Manifest(
        format_version=artifact.FORMAT_VERSION, name="m", signature=Signature(inputs=(), outputs=()),
        narrowest_float="float32", config={},
        source=None,
        target=TargetInfo(kind="llvm", machine=machine, mcpu="c", mtriple="t", features=("avx",), threads=1, arch=None),
        versions={"apache-tvm": "1"},
        files={name: artifact.file_entry(folder / name) for name in (LIBRARY, CONSTANTS)}, constants=(), kernels=(),
        layout=Layout(choice="keep", reason="", transforms=()), planned_bytes=0, stages=(), peak_rss_bytes=0, cuda=None,
        notes=(), verdict=None,
    )  # fmt: skip
    artifact.write_manifest(folder, manifest)
    return manifest


@pytest.fixture(params=[False, True], ids=["folder", "zip"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    out = tmp_path / "m.tvmflow"
    with artifact.staging(out, request.param) as folder:
        write(folder)
    return out


def test_round_trip(made: Path) -> None:
    with artifact.opened(made) as (folder, manifest):
        assert manifest.name == "m"
        assert (folder / LIBRARY).read_bytes() == b"library"
    assert [p.name for p in made.parent.iterdir()] == [made.name]


def test_an_error_leaves_nothing_behind_and_the_old_one_whole(made: Path) -> None:
    before = artifact.read_manifest(made)
    with contextlib.suppress(RuntimeError), artifact.staging(made, made.is_file()) as folder:
        write(folder)
        raise RuntimeError
    assert artifact.read_manifest(made) == before
    assert [p.name for p in made.parent.iterdir()] == [made.name]


def test_it_is_replaced_by_a_new_one(made: Path) -> None:
    with artifact.staging(made, made.is_file()) as folder:
        write(folder, machine="other")
    assert artifact.read_manifest(made).target.machine == "other"
    assert [p.name for p in made.parent.iterdir()] == [made.name]


def test_what_is_no_artifact_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1").touch()
    (tmp_path / "file").write_text("text")
    for name in ("thesis", "file"):
        with pytest.raises(OutputError, match="exists and is no artifact"), artifact.staging(tmp_path / name, False):
            pass
    assert (tmp_path / "thesis" / "chapter1").exists()


def test_a_full_disk_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="No space left"), artifact.staging(tmp_path / "m", False):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert not list(tmp_path.iterdir())


def test_an_unwritable_place_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot be written"), artifact.staging(tmp_path / "file" / "m", False):
        pass


@pytest.mark.parametrize("name", [LIBRARY, CONSTANTS])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_files_are_refused(name: str, damage: str, tmp_path: Path) -> None:
    write(tmp_path)
    file = tmp_path / name
    {"flip": lambda: file.write_bytes(b"x" + file.read_bytes()[1:]), "cut": lambda: file.write_bytes(b""),
     "remove": file.unlink}[damage]()  # fmt: skip
    with pytest.raises(ArtifactError, match=name), artifact.opened(tmp_path):
        pass


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body | {"name": "other"}, "manifest.json was changed or damaged"),
        (lambda body: body | {"format_version": 99}, "format version 99, this tvmflow reads 1"),
        (lambda body: [], "not an artifact"),
        (lambda body: {}, "format version None"),
    ],
)
def test_changed_manifests_are_refused(change: object, message: str, tmp_path: Path) -> None:
    write(tmp_path)
    body = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps(change(body)))  # type: ignore[operator] # a function of the table
    with pytest.raises(ArtifactError, match=message):
        artifact.read_manifest(tmp_path)


def test_what_is_no_artifact(tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_bytes(b"PK\x03\x04 truncated")
    for name, message in [("none", "no artifact"), ("", "no artifact"), ("x.zip", "not an artifact")]:
        with pytest.raises(ArtifactError, match=message):
            artifact.read_manifest(tmp_path / name)


def test_only_a_fitting_machine_may_load_it(tmp_path: Path) -> None:
    manifest = write(tmp_path)
    artifact.check_machine(manifest, frozenset({"avx", "fma"}), {"apache-tvm": "1"})
    with pytest.raises(ArtifactError, match="needs CPU features this machine lacks: avx"):
        artifact.check_machine(manifest, frozenset(), {})
    with pytest.raises(ArtifactError, match="built with apache-tvm 1, here is 2"):
        artifact.check_machine(manifest, frozenset({"avx"}), {"apache-tvm": "2"})
    with pytest.raises(ArtifactError, match="built for riscv64, this machine is"):
        artifact.check_machine(write(tmp_path, "riscv64"), frozenset({"avx"}), {})
