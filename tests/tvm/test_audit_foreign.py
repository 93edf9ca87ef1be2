"""Audits of libraries that hold what no compiler of TVM's makes, and of manifests that say it may be there."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import audit_builds
import pytest

from tvmflow import artifact, audit, config, flow, process
from tvmflow.audit import listing, machine, symbols
from tvmflow.config import external
from tvmflow.errors import AuditError, SetupError
from tvmflow.frozen import evolve
from tvmflow.manifest import Finding, Manifest
from tvmflow.process import Child

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="plants instructions of x86")
PATHS = {"PYTHONPATH": f"{process.PACKAGE_PARENT}:{Path(__file__).parent}"}
ALLOWING = {"audit": {"allow": {"system": "a payload", "libelse*": "another"}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("foreign")


@pytest.fixture(scope="module")
def messages(folder: Path) -> dict[str, str]:
    """Everything built, in one process; what the checks of a build say by name."""
    single = audit_builds.single(folder)
    jobs: dict[str, tuple[Any, ...]] = {
        "clean": (single, folder / "clean", "no schedules", {}),
        "refused": (single, folder / "refused", "foreign code", {}),
        "foreign": (single, folder / "foreign", "foreign code", {}, True),
        "calls": (single, folder / "calls", "", audit_builds.user_kernel("calls_out", "exp")),
        "linked": (single, folder / "linked", "linked elsewhere", ALLOWING, True),
    }
    said = Child("building", env=PATHS).call(audit_builds.build_all, list(jobs.values()))
    return dict(zip(jobs, said, strict=True))


@pytest.fixture(scope="module")
def foreign(messages: dict[str, str], folder: Path) -> tuple[Finding, ...]:
    return flow.audit_artifact(folder / "foreign", False, None)[""].faults


def changed(folder: Path, to: Path, **fields: object) -> Path:
    """A copy of an artifact whose manifest says something else, and says so of itself."""
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    artifact.write_manifest(to, evolve(artifact.read_manifest(folder), **fields))
    return to


@pytest.mark.parametrize(
    ("check", "place", "what"),
    [
        ("external calls", "system", "called from: kernel starting"),
        ("external calls", "fesetround", "called from: kernel ending"),
        ("library", "DT_INIT_ARRAY[1]", "`starting` runs when the library is loaded or unloaded, and is not the C"),
        ("library", "DT_FINI_ARRAY[1]", "`ending` runs when the library is loaded"),
        ("library", "choice", "code that the loader runs to choose a function (IFUNC)"),
        ("library", "section .payload", "code in a section that no linker of TVM's makes"),
        ("library", "hidden", "code that no kernel reaches"),
        ("library", "code outside all kernels", "asks the operating system for something itself: 1 x syscall"),
        ("library", "code outside all kernels", "places hold no instruction that objdump knows"),
        ("numerics", "code outside all kernels", "1 x ldmxcsr"),
        ("numerics", "code outside all kernels", "1 x fxrstor"),
        ("numerics", "code outside all kernels", "1 x fldcw"),
        ("numerics", "code outside all kernels", "1 x xrstor"),
        (
            "numerics",
            "ending",
            "sets the CPU's float control register, which may flush denormals or round otherwise: 1 x fesetround()",
        ),
        ("numerics", "code outside all kernels", "computes in float16, the model has float32: 1 x vaddph, 1 x vfmadd2"),
        ("numerics", "code outside all kernels", "rounds to float16, the model has float32: 1 x vcvtps2ph"),
        (
            "numerics",
            "code outside all kernels",
            "computes in or rounds to bfloat16, the model has float32: 1 x vdpbf16ps, 1 x tdpbf16ps",
        ),
    ],
)
def test_what_is_planted_is_found(foreign: tuple[Finding, ...], check: str, place: str, what: str) -> None:
    assert any((fault.check, fault.place) == (check, place) and what in fault.what for fault in foreign), foreign


def test_products_of_integers_are_exact(foreign: tuple[Finding, ...]) -> None:
    assert not any("tdpbssd" in fault.what for fault in foreign)


def test_such_a_library_is_not_kept(messages: dict[str, str], folder: Path) -> None:
    assert "the built code is not what [numerics] states" in messages["refused"]
    assert messages["clean"] == messages["foreign"] == ""
    with pytest.raises(AuditError, match="holds what no compiler of TVM's makes"):
        audit.check_library(flow.audit_artifact(folder / "foreign", False, None)[""])


def test_a_kernel_that_calls_out_is_not_kept_and_not_run(messages: dict[str, str]) -> None:
    assert "the library holds what no compiler of TVM's makes" in messages["calls"]
    said = "system: an undefined symbol, resolved by the loader; called from: kernel user_planted1 (exp)"
    assert said in messages["calls"]


def test_where_the_loader_looks_is_found(messages: dict[str, str], folder: Path) -> None:
    faults = flow.audit_artifact(folder / "linked", False, None)[""].faults
    found = {fault.place: fault.what for fault in faults}
    assert found == {
        "RUNPATH": "libraries are looked for here: /tmp/elsewhere",
        "AUXILIARY": found["AUXILIARY"],
        "stack": "the library asks for a stack whose bytes may be executed",
    }
    assert found["AUXILIARY"].startswith("a library whose functions go before its own")


def test_a_config_goes_before_the_manifest(messages: dict[str, str], folder: Path, tmp_path: Path) -> None:
    """What an artifact says of itself is what its maker wants; the config is the auditor's."""
    manifest = artifact.read_manifest(folder / "foreign")
    own = {**manifest.config, **ALLOWING, "numerics": {**manifest.config["numerics"], "fast_math": True}}
    lying = changed(folder / "foreign", tmp_path / "lying", config=own)
    given = config.of_model(str(folder / "single.onnx"), [{"target": {"mcpu": "x86-64-v2"}}])
    places = [
        {fault.place: fault for fault in flow.audit_artifact(lying, False, None, one)[""].faults}
        for one in (None, given)
    ]
    assert "system" not in places[0]
    assert "system" in places[1]
    assert places[1]["numerics.fast_math"].what == "the config given says false, the artifact true"
    assert places[1]["audit.allow system"].what == 'the config given says nothing, the artifact "a payload"'
    assert f"the artifact {manifest.target.mcpu}" in places[1]["target.mcpu"].what


def test_the_same_config_changes_nothing(messages: dict[str, str], folder: Path, tmp_path: Path) -> None:
    (tmp_path / "single.toml").write_text(f'[model]\npath = "{folder / "single.onnx"}"\n')
    command = [sys.executable, "-m", "tvmflow.cli", "audit", str(folder / "clean"), "--config", "single.toml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "no fault, 0 warnings" in done.stdout


def test_kernels_that_only_the_manifest_has_are_found(messages: dict[str, str], folder: Path, tmp_path: Path) -> None:
    manifest: Manifest = artifact.read_manifest(folder / "clean")
    (kernel,) = manifest.kernels
    renamed = changed(folder / "clean", tmp_path / "renamed", kernels=(evolve(kernel, name="elsewhere"),))
    found = {(fault.place, fault.what) for fault in flow.audit_artifact(renamed, False, None)[""].faults}
    assert ("elsewhere", "the manifest names this kernel, and the library has none of that name") in found
    assert (kernel.name, "a function that the manifest does not name") in found


@pytest.mark.parametrize(
    ("script", "said"),
    [("exit 0", "it printed no instruction"), ("echo 'objdump: no such machine' >&2; exit 1", "no such machine")],
)
def test_an_objdump_that_reads_nothing_is_an_error(
    messages: dict[str, str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    (tmp_path / "objdump").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "objdump").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(SetupError, match=said):
        listing.read(folder / "clean" / "library.so", "x86_64")


def test_a_kernel_that_objdump_leaves_out_is_found(
    messages: dict[str, str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "objdump").write_text('#!/bin/sh\n/usr/bin/objdump "$@" | sed "/<__tvm_ffi_.*>:$/,/^$/{/\\t/d}"\n')
    (tmp_path / "objdump").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (kernel,) = artifact.read_manifest(folder / "clean").kernels
    faults = flow.audit_artifact(folder / "clean", False, None)[""].faults
    assert [(fault.place, fault.what) for fault in faults if fault.place == kernel.name] == [
        (kernel.name, "no instruction of this kernel could be read")
    ]


@pytest.mark.parametrize(
    "name",
    [
        "system",
        "setenv",
        "dlopen",
        "mprotect",
        "fesetround",
        "runtime.SaveParamsToFile",
        "vm.builtin.call_py_func",
        "vm.builtin.tensor_cache.load",
        "runtime.disco.create_process_pool",
        "runtime.ModuleLoadStaticLibrary",
    ],
)
def test_what_no_library_needs_is_not_allowed_from_the_start(name: str) -> None:
    assert symbols.reason_for(name, external.ALLOWED) is None
    assert symbols.reason_for("expf", external.ALLOWED) == "the C library's mathematics"


LISTING = """
0000000000001000 <__tvm_ffi_one>:
    1000:\tfadd\tv0.8h, v1.8h, v2.8h
    1004:\tfmadd\th0, h1, h2, h3
    1008:\tfmla\tv0.4s, v1.4s, v2.4s
    100c:\tfcvt\th0, s0
    1010:\tfcvt\ts0, h0
    1014:\tbfdot\tv0.4s, v1.8h, v2.8h
    1018:\tbfmmla\tv0.4s, v1.8h, v2.8h
    101c:\tsvc\t#0x0
"""


def test_narrow_arithmetic_of_arm_is_read_alike() -> None:
    code = machine.parse(listing.parse(LISTING), "aarch64")
    assert {kind: counts["one"] for kind, counts in code.found.items() if counts} == {
        "half": {"fadd": 1, "fmadd": 1},
        "to half": {"fcvt": 1},
        "bfloat16": {"bfdot": 1, "bfmmla": 1},
        "system": {"svc": 1},
    }
    assert code.sizes == {"one": 8}
