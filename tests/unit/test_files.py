"""Only regular files are opened, at once, and no more of them is read than may be."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tvmflow import files
from tvmflow.errors import InputError


def refusal(path: Path, most_bytes: int = 100) -> str:
    with pytest.raises(InputError) as caught:
        files.read_regular(path, InputError, most_bytes)
    assert caught.value.hint
    assert caught.value.message.startswith(f"{path}: ")
    return caught.value.message.removeprefix(f"{path}: ")


def test_a_regular_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a b\nü").write_bytes(b"text")
    assert files.read_regular(tmp_path / "a b\nü", InputError, 4) == b"text"
    (tmp_path / "link").symlink_to("a b\nü")
    assert files.fault_of(tmp_path / "link") == ""


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "zero").symlink_to("/dev/zero")
    kinds = {
        "pipe": "is a named pipe, not a file",
        "socket": "is a socket, not a file",
        ".": "is a directory, not a file",
        "zero": "is a device, not a file",
        "none": "no such file",
        "n" * 300: "cannot be opened: File name too long",
        "a\0b": "no path: it holds a null character",
        "loop": "is a symbolic link that is not followed",
    }
    for name, message in kinds.items():
        assert refusal(tmp_path / name) == message
        assert files.fault_of(tmp_path / name) == message


def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.touch(0)
    if os.getuid():
        assert refusal(path) == "no permission to read it"


def test_a_file_that_is_too_large_or_grows(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(bytes(101))
    assert refusal(path) == "101 bytes are more than the 100 that such a file may have"
    # The files of /proc state no size, and are as long as they turn out to be.
    assert refusal(Path("/proc/self/environ"), 1) == "2 bytes are more than the 1 that such a file may have"


def test_names_that_are_no_text() -> None:
    assert files.is_text("päth/模型.onnx")
    assert not files.is_text(os.fsdecode(b"\xff\xfe.onnx"))
