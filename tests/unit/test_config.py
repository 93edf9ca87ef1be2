"""Config files: what is accepted, what is refused and in which words."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

import jsonschema
import pytest

from tvmflow import config
from tvmflow.errors import ConfigError
from tvmflow.frozen import evolve

ROOT = Path(__file__).resolve().parents[2]
ENTRY = '[model]\nentry = "m:f"\n'

BAD = {
    "unknown key": (ENTRY + "[numerics]\nfastmath = true", "numerics.fastmath: unknown key, did you mean `fast_math`?"),
    "unknown section": (ENTRY + "[tragt]", "tragt: unknown key, did you mean `target`?"),
    "far from any key": (ENTRY + "[target]\nzzz = 1", "target.zzz: unknown key"),
    "a string is no boolean": (
        ENTRY + '[numerics]\nfast_math = "off"',
        'numerics.fast_math: input should be a valid boolean (it is "off")',
    ),
    "an integer is no boolean": (
        ENTRY + "[numerics]\nfast_math = 1",
        "numerics.fast_math: input should be a valid boolean (it is 1)",
    ),
    "unknown target": (
        ENTRY + '[target]\nkind = "llmv"',
        "target.kind: input should be 'llvm' or 'cuda' (it is \"llmv\")",
    ),
    "no model": ("", "model: missing"),
    "two models": (ENTRY + 'path = "x.onnx"', "model: give exactly one of `path` and `entry`"),
    "missing file": ('[model]\npath = "nothing.onnx"', "model.path: no such file: {folder}/nothing.onnx"),
    "arch without cuda": (
        ENTRY + '[target]\narch = "sm_90"',
        'target: `arch` belongs to kind = "cuda"; name a CPU with `mcpu`',
    ),
    "malformed arch": (
        ENTRY + '[target]\nkind = "cuda"\narch = "hopper"',
        "target.arch: string should match pattern '^sm_\\d+[af]?$' (it is \"hopper\")",
    ),
    "cross build of native": (
        ENTRY + '[target]\nmtriple = "aarch64-linux-gnu"\nthreads = 2',
        'target: a cross build (`mtriple`) cannot use mcpu = "native"; name the CPU, e.g. "generic"',
    ),
    "tf32 on a CPU": (
        ENTRY + "[numerics]\ntf32 = true",
        'config: numerics.tf32 = true needs target.kind = "cuda"; CPUs have no TF32',
    ),
    "tf32 on an old GPU": (
        ENTRY + '[numerics]\ntf32 = true\n[target]\nkind = "cuda"\narch = "sm_75"',
        "config: numerics.tf32 = true needs sm_80 or later, target.arch is sm_75",
    ),
    "negative size": (
        ENTRY + "[shapes.dims]\nb = -1",
        "shapes.dims.b: input should be greater than 0 (it is -1)",
    ),
    "a range upside down": (
        ENTRY + "[verify.ranges]\ni = [9, 2]",
        "verify.ranges.i: the lowest value 9 is above the highest 2",
    ),
    "no such folder": (ENTRY + 'folder = "nowhere"', "model.folder: no such file: {folder}/nowhere"),
    "a kernel without an entry": (ENTRY + '[kernels.a]\nreplaces = "matmul"', "kernels.a.entry: missing"),
    "unknown key of a kernel": (
        ENTRY + '[kernels.a]\nentry = "m:f"\nreplaces = ["matmul"]\nreplace = 1',
        "kernels.a.replace: unknown key, did you mean `replaces`?",
    ),
    "a kernel that replaces nothing": (
        ENTRY + '[kernels.a]\nentry = "m:f"\nreplaces = []',
        "kernels.a.replaces: name at least one operator",
    ),
    "a kernel that replaces numbers": (
        ENTRY + '[kernels.a]\nentry = "m:f"\nreplaces = [3]',
        "kernels.a.replaces.0: input should be a valid string (it is 3)",
    ),
    "rpc without its tracker": (
        ENTRY + '[tuning]\nmeasure = "rpc"\ndevice_key = "pi4"',
        'tuning: measure = "rpc" needs `tracker`',
    ),
    "rpc without anything": (
        ENTRY + '[tuning]\nmeasure = "rpc"',
        'tuning: measure = "rpc" needs `tracker` and `device_key`',
    ),
    "a tracker without a port": (
        ENTRY + '[tuning]\nmeasure = "rpc"\ntracker = "lab"\ndevice_key = "pi4"',
        "tuning.tracker: string should match pattern '^\\S+:\\d+$' (it is \"lab\")",
    ),
    "measuring somewhere else": (
        ENTRY + '[tuning]\nmeasure = "remote"',
        "tuning.measure: input should be 'local' or 'rpc' (it is \"remote\")",
    ),
    "no seeds": (
        ENTRY + "[verify]\nseeds = []",
        "verify.seeds: tuple should have at least 1 item after validation, not 0",
    ),
}


def fault(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        config.load(path)
    return caught.value.message


@pytest.mark.parametrize("kind", BAD)
def test_bad_config_is_refused_in_these_words(kind: str, tmp_path: Path) -> None:
    text, message = BAD[kind]
    path = tmp_path / "x.toml"
    path.write_text(text)
    assert fault(path) == f"{path}: {message.format(folder=tmp_path)}"


def test_all_faults_of_a_file_come_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(ENTRY + '[target]\nkind = "cpu"\nmpcu = "x"\n[numerics]\ntf32 = 3')
    lines = fault(path).splitlines()
    assert lines[0].endswith("3 errors")
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["target.kind", "target.mpcu", "numerics.tf32"]


def test_limits_are_no_part_of_what_a_library_is_made_of() -> None:
    made = config.from_dict({"model": {"entry": "m:f"}, "limits": {"memory_gib": 2, "minutes": 5.5}})
    assert (made.limits.memory_gib, made.limits.minutes) == (2, 5.5)
    assert "limits" not in config.to_json(made)
    assert config.from_json(config.to_json(made)).limits == config.LimitsSection()
    assert tomllib.loads(config.to_toml(made))["limits"] == {"memory_gib": 2, "minutes": 5.5}
    assert tomllib.loads(config.shown(made))["limits"] == {"memory_gib": 2, "minutes": 5.5}


def test_files_that_are_no_configs(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.toml")
    assert fault(tmp_path / "x.toml") == f"{tmp_path}/x.toml: is a named pipe, not a file"
    os.mkfifo(tmp_path / "m.onnx")
    (tmp_path / "y.toml").write_text('[model]\npath = "m.onnx"')
    assert fault(tmp_path / "y.toml").endswith(f"model.path: is a named pipe, not a file: {tmp_path}/m.onnx")
    (tmp_path / "y.toml").write_text("x = " + "9" * 5000)
    assert "not valid TOML: Exceeds the limit" in fault(tmp_path / "y.toml")
    (tmp_path / "y.toml").write_text("x = " + "[" * 5000)
    assert "not valid TOML" in fault(tmp_path / "y.toml")


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such config file"), (b"[model", "not valid TOML"), (b"\xff\xfe", "cannot be read")],
)
def test_unreadable_file(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    if content is not None:
        path.write_bytes(content)
    assert message in fault(path)


def test_relative_paths_start_at_the_files_folder(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").touch()
    (tmp_path / "configs").mkdir()
    path = tmp_path / "configs" / "x.toml"
    path.write_text('[model]\npath = "../m.onnx"')
    loaded = config.load(path).model
    assert loaded.path is not None
    assert loaded.path.samefile(tmp_path / "m.onnx")
    assert loaded.folder == tmp_path / "configs"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("numerics.fast_math=true", {"numerics": {"fast_math": True}}),
        ("verify.seeds=[7, 8]", {"verify": {"seeds": [7, 8]}}),
        ("target.mcpu=x86-64-v3", {"target": {"mcpu": "x86-64-v3"}}),
        ('model.inputs."a.b".shape=[1, "n"]', {"model": {"inputs": {"a.b": {"shape": [1, "n"]}}}}),
    ],
)
def test_overrides(text: str, expected: object) -> None:
    assert config.parse_override(text) == expected


@pytest.mark.parametrize("text", ["numerics.fast_math", "=1", "a b=1", "verify.rtol=1\nverify.atol=2"])
def test_malformed_override(text: str) -> None:
    with pytest.raises(ConfigError, match=r"not of the form section\.key=value"):
        config.parse_override(text)


def test_a_kernel_may_replace_one_operator_or_several(tmp_path: Path) -> None:
    path = tmp_path / "configs" / "x.toml"
    path.parent.mkdir()
    path.write_text(
        ENTRY + '[kernels.a]\nentry = "m:f"\nreplaces = "matmul"\n'
        '[kernels.b]\nentry = "m:f"\nreplaces = ["matmul", "add"]\nfolder = ".."'
    )
    kernels = config.load(path).kernels
    assert [kernel.replaces for kernel in kernels.values()] == [("matmul",), ("matmul", "add")]
    assert [kernel.folder.resolve() for kernel in kernels.values()] == [path.parent, tmp_path]


def test_overrides_win_and_merge(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(ENTRY + "[verify]\nseeds = [1]\nrtol = 0.5")
    loaded = config.load(path, [config.parse_override("verify.seeds=[2]")])
    assert (loaded.verify.seeds, loaded.verify.rtol) == ((2,), 0.5)


def test_toml_round_trip(tmp_path: Path) -> None:
    original = config.from_dict(
        {
            "model": {"entry": "m:f", "inputs": {"a.b/c": {"shape": [1, "n"], "dtype": "int64"}}},
            "verify": {"ranges": {"ids": [0, 10]}, "outputs": {"y": {"rtol": 0.1, "atol": 1e-9}}},
            "graph": {"max_layout_transforms": 3},
        }
    )
    path = tmp_path / "x.toml"
    path.write_text(config.to_toml(original))
    again = config.load(path)
    assert evolve(again, model=original.model) == original
    assert again.model.inputs == original.model.inputs


def test_what_is_shown_of_a_config_leaves_out_only_tvmflows_own_patterns() -> None:
    raw = {"model": {"entry": "m:f"}, "audit": {"allow": {"mine_*": "my code", "libc.so.*": "another reason"}}}
    changed = config.from_dict(raw)
    shown = config.shown(changed)
    assert tomllib.loads(shown)["audit"] == {"allow": {"libc.so.*": "another reason", "mine_*": "my code"}}
    assert "fast_math = false\ntf32 = false\n" in shown
    whole = tomllib.loads(config.to_toml(changed))
    assert {**whole, "audit": {}} == {**tomllib.loads(shown), "audit": {}}
    assert "audit" not in tomllib.loads(config.shown(config.from_dict({"model": {"entry": "m:f"}})))


def test_a_config_cannot_be_changed() -> None:
    loaded = config.from_dict({"model": {"entry": "m:f"}})
    with pytest.raises(ValueError, match="frozen"):
        loaded.target.kind = "cuda"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_configs_follow_the_schema(path: Path) -> None:
    jsonschema.validate(json.loads(json.dumps(tomllib.loads(path.read_text()))), config.schema())


def test_schema_refuses_what_load_refuses() -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"model": {"entry": "m:f"}, "numerics": {"fastmath": True}}, config.schema())
