"""Denormal numbers are kept in threads that flush them to zero, and such threads stay as they are."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import pytest
from ops_runs import one_node

import tvmflow
from tvmflow import config
from tvmflow.errors import SetupError
from tvmflow.flow import compile_model
from tvmflow.runtime import denormals

SIZE = 1 << 18  # enough for both threads to take a part
RESULTS, OPERANDS = {"x86_64": (0x8000, 0x40)}.get(platform.machine(), (0x1000000, 0x1000000))


@contextmanager
def flushing(bits: int) -> Iterator[None]:
    """Sets bits of the register that denormals.py reads, and puts it back."""
    library = ctypes.CDLL("libm.so.6")
    before, changed = ctypes.create_string_buffer(256), ctypes.create_string_buffer(256)
    library.fegetenv(before)
    ctypes.memmove(changed, before, 256)
    place, _ = denormals.REGISTERS[platform.machine()]
    ctypes.c_uint32.from_buffer(changed, place).value |= bits
    library.fesetenv(changed)
    try:
        yield
    finally:
        library.fesetenv(before)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("halving")
    onnx.save(one_node("Mul", {"x": np.zeros(SIZE, "f4")}, {"half": np.array(0.5, "f4")}), folder / "halving.onnx")
    cfg = config.of_model(str(folder / "halving.onnx"), [{"target": {"threads": 2}, "verify": {"enabled": False}}])
    compile_model(cfg, folder / "artifact")
    return folder / "artifact"


@pytest.mark.parametrize("bits", [RESULTS, OPERANDS, RESULTS | OPERANDS])
def test_a_call_keeps_denormals_and_leaves_the_thread_as_it_was(artifact: Path, bits: int) -> None:
    session = tvmflow.load(artifact)
    x = np.full(SIZE, 3e-39, "f4")
    halved = np.float32(3e-39) * np.float32(0.5)
    assert not denormals.are_flushed()
    with flushing(bits):
        assert denormals.are_flushed()
        got = session.run_list({"x": x})[0]
        assert denormals.are_flushed()
    assert not denormals.are_flushed()
    assert got.tobytes() == np.full(SIZE, halved, "f4").tobytes()


def test_an_unknown_machine_is_an_error(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = tvmflow.load(artifact)
    denormals._library.cache_clear()
    with flushing(RESULTS), monkeypatch.context() as patch:
        patch.setattr(denormals, "REGISTERS", {})
        with pytest.raises(SetupError, match="this thread flushes denormal numbers to zero"):
            session.run_list({"x": np.zeros(SIZE, "f4")})
    denormals._library.cache_clear()
