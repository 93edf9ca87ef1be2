"""Artifacts appear whole or not at all, and damage is seen before anything is loaded."""

from __future__ import annotations

import contextlib
import errno
import json
import platform
import zipfile
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
        format_version=artifact.FORMAT_VERSION,
        name="m",
        signature=Signature(inputs=(), outputs=()),
        narrowest_float="float32",
        config={},
        source=None,
        target=TargetInfo(kind="llvm", machine=machine, mcpu="c", mtriple="t", features=("avx",), threads=1, arch=None),
        versions={"apache-tvm": "1"},
        files={name: artifact.file_entry(folder / name) for name in (LIBRARY, CONSTANTS)},
        constants=(),
        kernels=(),
        layout=Layout(choice="keep", reason="", transforms=()),
        planned_bytes=0,
        stages=(),
        peak_rss_bytes=0,
        cuda=None,
        notes=(),
        verdict=None,
    )
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
    (tmp_path / "webapp").mkdir()
    (tmp_path / "webapp" / MANIFEST).write_text('{"name": "of something else"}')
    with zipfile.ZipFile(tmp_path / "data.npz", "w") as archive:
        archive.writestr("x.npy", b"")
    for name in ("thesis", "webapp", "data.npz"):
        zipped = name.endswith(".npz")
        with pytest.raises(OutputError, match="exists and is no artifact"), artifact.staging(tmp_path / name, zipped):
            pass
    assert (tmp_path / "thesis" / "chapter1").exists()
    assert (tmp_path / "webapp" / MANIFEST).exists()


def test_an_artifact_with_something_else_in_it_is_not_replaced(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(OutputError, match="exists and is no artifact"), artifact.staging(tmp_path, False):
        pass


def test_a_folder_is_not_replaced_by_a_zip_nor_the_other_way(made: Path) -> None:
    with pytest.raises(OutputError, match="is a f"), artifact.staging(made, made.is_dir()):
        pass


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with artifact.staging(tmp_path / "link", False) as folder:
        write(folder)
    assert (tmp_path / "link").is_symlink()
    assert artifact.read_manifest(tmp_path / "real").name == "m"


@pytest.mark.parametrize("damage", ["flip", "drop"])
def test_a_damaged_zip_is_refused(damage: str, tmp_path: Path) -> None:
    out = tmp_path / "m.zip"
    with artifact.staging(out, True) as folder:
        write(folder)
    if damage == "flip":
        out.write_bytes(out.read_bytes().replace(b"weights", b"weighty"))
    else:
        with zipfile.ZipFile(out) as archive:
            manifest = archive.read(MANIFEST)
        with zipfile.ZipFile(out, "w") as archive:
            archive.writestr(MANIFEST, manifest)
    with pytest.raises(ArtifactError, match="damaged"), artifact.opened(out):
        pass


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
    {
        "flip": lambda: file.write_bytes(b"x" + file.read_bytes()[1:]),
        "cut": lambda: file.write_bytes(b""),
        "remove": file.unlink,
    }[damage]()
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
