"""Damaged ONNX files are imported, compiled, or refused in words: never a signal, a trace, a hang, or all of memory."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
FILES = 400


def test_damaged_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import fuzz_onnx

    from tvmflow import process

    monkeypatch.setattr(process, "_limits", process._limits)
    monkeypatch.setenv("PYTHONPATH", "")
    tally = fuzz_onnx.run(seed=1, files=FILES, seconds=0, compile_share=0.05)
    assert [finding.what for finding in tally.findings] == []
    assert tally.outcomes.total() == FILES
    assert min(tally.outcomes[outcome] for outcome in ("imported", "compiled", "refused")) > 0


def test_a_finding_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A trace, a missing hint, a signal and a hang, each told from the others; what comes after is still tried."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import fuzz_onnx

    (tmp_path / "faulty.py").write_text(
        "import os, fuzz_onnx\n"
        "from tvmflow.errors import ModelError\n"
        "fuzz_onnx.SECONDS_EACH = 2\n"
        "def load(cfg):\n"
        "    kind = cfg.model.path.read_bytes()\n"
        "    if kind == b'trace': raise ValueError('first')\n"
        "    if kind == b'words': raise ModelError('no hint')\n"
        "    if kind == b'crash': os.abort()\n"
        "    while kind == b'hang': pass\n"
        "def try_files(files):\n"
        "    from tvmflow import frontend\n"
        "    frontend.load = load\n"
        "    fuzz_onnx.try_files(files)\n"
    )
    kinds = [b"fine", b"trace", b"words", b"crash", b"hang", b"fine"]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{SCRIPTS}")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(fuzz_onnx.onnx_mutations, "mutated", lambda seed, index: kinds[index])
    monkeypatch.setattr(fuzz_onnx, "try_files", importlib.import_module("faulty").try_files)
    tally = fuzz_onnx.Tally()
    left = list(range(len(kinds)))
    while left:
        left = fuzz_onnx._tried(tally, 0, left, 0.0)
    assert [(finding.index, finding.what) for finding in tally.findings] == [
        (1, "ValueError: first"),
        (2, "no hint: no hint"),
        (3, "a file crashed (signal 6, SIGABRT)"),
        (4, "a file crashed (signal 27, SIGPROF)"),
    ]
    assert tally.outcomes == {"imported": 2, "finding": 4}
