"""doctor finds what is planted and says how to mend it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tvmflow import doctor
from tvmflow.doctor import Finding


def found(name: str) -> Finding:
    return next(finding for finding in doctor.examine() if finding.name == name)


def test_a_sound_installation_has_no_fault() -> None:
    assert [finding for finding in doctor.examine() if finding.state == "fault"] == []


@pytest.mark.parametrize("present", ["0.1.15.post2", None])
def test_a_wrong_or_missing_pin(present: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[[str], str] = doctor.version

    def fake(name: str) -> str:
        if name != "apache-tvm-ffi":
            return real(name)
        if present is None:
            raise doctor.PackageNotFoundError(name)
        return present

    monkeypatch.setattr(doctor, "version", fake)
    finding = found("apache-tvm-ffi")
    assert finding.state == "fault"
    assert finding.found == ("not installed" if present is None else "0.1.15.post2, needs ==0.1.14.post1")
    assert finding.fix == 'pip install "apache-tvm-ffi==0.1.14.post1"'


def test_a_local_folder_that_hides_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    finding = found("imports")
    assert (finding.state, finding.found) == ("fault", "a local folder hides: onnx")


def test_variables_that_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_CUDA_NVCC_NO_FAST_MATH", "1")
    assert "TVM_CUDA_NVCC_NO_FAST_MATH" in found("environment").found


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert found("C compiler").fix == "apt-get install g++"
