"""Artifacts changed by somebody who makes the digests anew: each is refused, at once, with the place that is wrong."""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
import time
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_artifact import write

from tvmflow import artifact
from tvmflow.artifact import CONSTANTS, LIBRARY, LOG, MANIFEST
from tvmflow.artifact.parsing import digest
from tvmflow.errors import ArtifactError
from tvmflow.frozen import evolve
from tvmflow.manifest import Constant

Body = dict[str, Any]
INPUT = {"name": "x", "dtype": "float32", "shape": []}
DEEP = b"[" * 100_000


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Two weights, of 16 and of 8 bytes, in an artifact folder."""
    folder = tmp_path / "m.tvmflow"
    folder.mkdir()
    manifest = write(folder)
    (folder / CONSTANTS).write_bytes(np.arange(18, dtype="f4").tobytes())
    files = {name: artifact.file_entry(folder / name) for name in (LIBRARY, CONSTANTS)}
    constants = (Constant(offset=0, dtype="float32", shape=(2, 2)), Constant(offset=64, dtype="float32", shape=(2,)))
    artifact.write_manifest(folder, evolve(manifest, files=files, constants=constants))
    return folder


def rewritten(folder: Path, change: Callable[[Body], object]) -> None:
    body = json.loads((folder / MANIFEST).read_text())
    del body["manifest_sha256"]
    change(body)
    (folder / MANIFEST).write_text(json.dumps({**body, "manifest_sha256": digest(body)}))


def put(*place: Any, value: Any) -> Callable[[Body], None]:
    def change(body: Body) -> None:
        holder: Any = body
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] = value

    return change


def refusal(path: Path) -> str:
    """The message, which is one line and names the artifact; `read` and `opened_any` agree."""
    started = time.monotonic()
    with pytest.raises(ArtifactError) as raised, artifact.opened_any(path):
        pass
    assert time.monotonic() - started < 30  # no hang
    assert "\n" not in raised.value.message
    assert raised.value.message.isprintable()
    assert str(path) in raised.value.message
    assert raised.value.hint
    return raised.value.message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body["files"].pop(LIBRARY), "files: does not list library.so"),
        (put("files", "more", value={"sha256": "0" * 64, "size_bytes": 1}), "files.more: is not a file of an artifact"),
        (put("files", "../x", value={"sha256": "0" * 64, "size_bytes": 1}), "files.../x: is not a file"),
        (put("files", "/etc/passwd", value={"sha256": "0" * 64, "size_bytes": 1}), "files./etc/passwd: is not a file"),
        (put("files", LIBRARY, "size_bytes", value=-1), "files.library.so.size_bytes: Input should be greater"),
        (put("files", LIBRARY, "sha256", value="0"), "files.library.so.sha256: String should match"),
        (put("weights", value="/etc/passwd"), "weights: is `/etc/passwd`"),
        (put("weights", value="../../x"), "weights: is `../../x`"),
        (put("constants", 1, "offset", value=128), "constants.1.offset: is 128, but what is before it ends at 64"),
        (put("constants", 1, "offset", value=-64), "constants.1.offset: Input should be greater"),
        (put("constants", 1, "offset", value=1 << 62), "constants.1.offset: is 4611686018427387904"),
        (put("constants", 1, "offset", value=1 << 70), "constants.1.offset: Input should be less"),
        (put("constants", 1, "shape", value=[1 << 40, 1 << 40]), "constants: take "),
        (put("constants", 1, "shape", value=[-2]), "constants.1.shape.0: Input should be greater"),
        (put("constants", 1, "shape", value=[True, 2]), "constants.1.shape.0: Input should be a valid integer"),
        (put("constants", 1, "dtype", value="float64"), "constants: take 80 bytes, but constants.bin has 72"),
        (put("constants", 1, "dtype", value="O"), "constants.1.dtype: `O` is none"),
        (lambda body: body["constants"].pop(), "constants: take 16 bytes, but constants.bin has 72"),
        (lambda body: body["constants"].reverse(), "constants.0.offset: is 64, but what is before it ends at 0"),
        (put("target", "threads", value=0), "target.threads: Input should be greater than or equal to 1"),
        (put("target", "threads", value="2"), "target.threads: Input should be a valid integer"),
        (put("target", "threads", value=2.0), "target.threads: Input should be a valid integer"),
        (put("target", "kind", value="rocm"), "target.kind: `rocm` is none"),
        (put("target", "features", value="avx"), "target.features: Input should be a valid array"),
        (put("format_version", value=True), "format version True"),
        (put("format_version", value="1"), "format version '1'"),
        (put("planned_bytes", value=1e308), "planned_bytes: Input should be a valid integer"),
        (put("planned_bytes", value=float("nan")), "not an artifact: NaN is no number"),
        (put("stages", value=[{"name": "x", "seconds": float("inf")}]), "not an artifact: Infinity is no number"),
        (put("name", value="\ud800"), "not an artifact: 'utf-8' codec can't encode"),
        (put("name", value=["x"]), "name: Input should be a valid string"),
        (put("\x1b[2J", value=1), r"\x1b[2J: Extra inputs are not permitted"),
        (put("source_data", value={"../x": {"sha256": "0" * 64, "size_bytes": 1}}), "source_data.../x: does not lie"),
        (put("config", value={"model": 1}), "config.model: is no table"),
        (put("buckets", value=[]), "manifest.json: "),
        (put("signature", "inputs", value=[INPUT, INPUT]), "signature.inputs: has a name twice"),
        (put("signature", "inputs", value=[INPUT | {"dtype": "str"}]), "signature.inputs.0.dtype: `str` is none"),
    ],
)
def test_a_changed_manifest(change: Callable[[Body], object], message: str, made: Path) -> None:
    rewritten(made, change)
    assert message in refusal(made)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an artifact"),
        (b"[]", "no table of names"),
        (DEEP, "nested too deeply"),
        (b"\xff\xfe", "codec"),
        (b'{"a": 1, "a": 2}', "`a` stands twice"),
        (b'{"a": 1e999}', "1e999 is too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not an artifact"),
        (b'{"format_version": 1}', "changed or damaged"),
    ],
)
def test_what_is_no_manifest(content: bytes, message: str, made: Path) -> None:
    (made / MANIFEST).write_bytes(content)
    assert message in refusal(made)


def link(file: Path) -> None:
    real = file.rename(file.parent.parent / "elsewhere")
    file.symlink_to(real)


def unix_socket(file: Path) -> None:
    file.unlink()
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.relpath(file))


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def zero(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


@pytest.mark.parametrize("name", [MANIFEST, LIBRARY, CONSTANTS, LOG])
@pytest.mark.parametrize("change", [link, unix_socket, pipe, folder, zero])
def test_what_is_no_file_in_a_folder(
    change: Callable[[Path], None], name: str, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)  # the path of a socket is short
    if name == LOG:
        (made / LOG).touch()
    change(made / name)
    assert name in refusal(made)


def test_what_is_no_artifact_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for kind in (unix_socket, pipe):
        (tmp_path / "x").touch()
        kind(tmp_path / "x")
        refusal(tmp_path / "x")
        (tmp_path / "x").unlink()
    for path in ("/dev/zero", "/dev/null", "/proc/self/mem", str(tmp_path / ("n" * 300))):
        refusal(Path(path))


def test_files_that_no_manifest_lists(made: Path) -> None:
    (made / ".DS_Store").touch()  # systems leave such behind
    (made / LOG).write_text(json.dumps({"seconds": [], "peak_rss_bytes": 5, "timing": []}))
    with artifact.opened_any(made) as (_, manifest):
        assert manifest.peak_rss_bytes == 5
    (made / "more.so").touch()
    assert "more.so: is not part of the artifact" in refusal(made)


def test_a_build_log_that_is_none(made: Path) -> None:
    (made / LOG).write_text('{"seconds": [-1], "peak_rss_bytes": 0, "timing": []}')
    assert "build.log.json: seconds.0: Input should be greater" in refusal(made)


Change = Callable[[zipfile.ZipInfo, bytes], tuple[zipfile.ZipInfo, bytes]]


def member(**changes: Any) -> Change:
    def change(info: zipfile.ZipInfo, data: bytes) -> tuple[zipfile.ZipInfo, bytes]:
        for name, value in changes.items():
            setattr(info, name, value)
        return info, data

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (member(filename="../library.so"), "'../library.so' in it does not lie inside it"),
        (member(filename="/tmp/library.so"), "'/tmp/library.so' in it does not lie inside it"),
        (member(filename="a\\library.so"), r"'a\\library.so' in it does not lie inside it"),
        (member(filename="x/"), "'x/' in it does not lie inside it"),
        (member(filename="more"), "library.so does not have 7 bytes"),
        (member(external_attr=(stat.S_IFLNK | 0o777) << 16), "is a link or something else"),
        (member(external_attr=stat.S_IFIFO << 16), "is a link or something else"),
        (member(compress_type=zipfile.ZIP_DEFLATED), "is compressed, so another program packed it"),
        (member(filename=MANIFEST), "'manifest.json' twice"),
        (lambda info, data: (info, b"x" * len(data)), "changed or damaged"),
        (lambda info, data: (info, data + b"x"), "library.so does not have 7 bytes"),
    ],
)
def test_a_changed_zip(change: Change, message: str, tmp_path: Path) -> None:
    out, packed = tmp_path / "m.zip", tmp_path / "x.zip"
    with artifact.staging(out, True) as place:
        write(place)
    with zipfile.ZipFile(out) as source, zipfile.ZipFile(packed, "w") as target, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that stand twice
        for info in sorted(source.infolist(), key=lambda one: one.filename == LIBRARY):
            data, fresh = source.read(info), zipfile.ZipInfo(info.filename)
            target.writestr(*(change(fresh, data) if info.filename == LIBRARY else (fresh, data)))
    assert message in refusal(packed)
    assert sorted(os.listdir(tmp_path)) == ["m.zip", "x.zip"]


def test_zips_with_other_bits(tmp_path: Path) -> None:
    out = tmp_path / "m.zip"
    with artifact.staging(out, True) as place:
        write(place)
    whole = out.read_bytes()
    entry = whole.index(b"PK\x01\x02")  # the first of the central directory
    cases = ((8, "<H", 1, "is encrypted"), (20, "<I", 1 << 31, "is compressed"), (24, "<I", 1 << 31, "is compressed"))
    for offset, size, value, message in cases:
        data = bytearray(whole)
        struct.pack_into(size, data, entry + offset, value)
        out.write_bytes(data)
        assert message in refusal(out)
    for length in range(0, len(whole), 97):
        out.write_bytes(whole[:length])
        refusal(out)


def test_equal_contents_make_equal_zips(made: Path, tmp_path: Path) -> None:
    contents = []
    for name in "ab":
        os.utime(made / LIBRARY, (0, time.time()))
        with artifact.staging(tmp_path / f"{name}.zip", True) as place:
            for file in made.iterdir():
                (place / file.name).write_bytes(file.read_bytes())
            (place / LOG).write_text(name)
        contents.append((tmp_path / f"{name}.zip").read_bytes())
    assert contents[0] == contents[1]
