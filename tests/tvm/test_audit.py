"""Audits of CPU libraries: what is planted is found and explained, what is clean passes in silence."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import audit_builds
import pytest

from tvmflow import artifact, audit, flow, process
from tvmflow.audit import library, listing, machine
from tvmflow.config import external
from tvmflow.errors import ArtifactError, AuditError, NumericsError, SetupError
from tvmflow.frozen import evolve
from tvmflow.process import Child
from tvmflow.report import audit as report_audit
from tvmflow.verification import child

PATHS = {"PYTHONPATH": f"{process.PACKAGE_PARENT}:{Path(__file__).parent}"}
KEPT = {"graph": {"layout": "keep"}}
FAST = {"numerics": {"fast_math": True}}
ON_X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="plants instructions of x86")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit")


@pytest.fixture(scope="module")
def messages(folder: Path) -> dict[str, str]:
    """Everything built, in one process; what the checks of a build say by name."""
    functions, plain = audit_builds.functions(folder), audit_builds.plain(folder)
    transposed = audit_builds.transposed(folder)
    jobs = {
        "clean": (functions, folder / "clean", "", {}),
        "symbolic": (audit_builds.symbolic(folder), folder / "symbolic", "", {}),
        "single": (audit_builds.single(folder), folder / "single", "no schedules", {}),
        "fast": (functions, folder / "fast", "", FAST),
        "target": (functions, folder / "target", "target", {}),
        "linker": (functions, folder / "linker", "linker", {}),
        "user": (functions, folder / "user", "", audit_builds.user_kernel("reciprocal", "sqrt")),
        "unscheduled": (plain, folder / "unscheduled", "no schedules", {}),
        "transposed": (transposed, folder / "transposed", "", KEPT),
        "nhwc": (transposed, folder / "nhwc", "", {"graph": {"layout": "nhwc"}}),
    }
    builder = Child("building", env=PATHS)
    said = builder.call(audit_builds.build_all, list(jobs.values()))
    builder.call(audit_builds.partitioned, plain, folder / "partitioned")
    return dict(zip(jobs, said, strict=True))


def audited(path: Path) -> audit.Audit:
    return flow.audit_artifact(path, False, None)[""]


def test_a_clean_library_has_no_findings(messages: dict[str, str], folder: Path) -> None:
    found = audited(folder / "clean")
    assert messages["clean"] == ""
    assert found.findings == ()
    audit.check({"": found})
    assert {use.kernel.operators for use in found.kernels} == {("exp", "sqrt", "tanh", "add", "divide")}
    assert {e.reason for e in found.external} <= {*external.ALLOWED.values()}
    assert found.numerics.llvm_flags == {}


def test_functions_of_shapes_are_the_librarys_own(messages: dict[str, str], folder: Path) -> None:
    manifest = artifact.read_manifest(folder / "symbolic")
    assert manifest.evidence is not None
    assert manifest.evidence.shape_functions
    assert audited(folder / "symbolic").findings == ()


def test_a_partitioned_subgraph_is_found(messages: dict[str, str], folder: Path) -> None:
    found = audited(folder / "partitioned")
    with pytest.raises(AuditError, match="fused_relax_matmul_elsewhere") as caught:
        audit.check({"": found})
    assert caught.value.exit_code == 16
    (fault,) = found.faults
    assert "; computes matmul; called" in fault.what
    assert "called from: main, between the inputs and softmax" in fault.what


def test_the_config_allows_by_pattern_with_a_reason(messages: dict[str, str], folder: Path) -> None:
    manifest = artifact.read_manifest(folder / "partitioned")
    allow = {"audit": {"allow": {"fused_*_elsewhere": "our own code generator"}}}
    with_reason = evolve(manifest, config={**manifest.config, **allow})
    libraries = [(folder / "partitioned", with_reason)]
    (found,) = Child("audit").call(child.audit_libraries, libraries, None)
    assert found.findings == ()
    assert "our own code generator" in report_audit.markdown(found)


def test_an_unscheduled_kernel_is_found(messages: dict[str, str], folder: Path) -> None:
    faults = audited(folder / "unscheduled").faults
    assert [(fault.check, fault.place) for fault in faults] == [("kernels", "matmul1"), ("kernels", "softmax1")]
    assert "no schedule: matmul runs on one thread" in faults[0].what
    assert audited(folder / "single").faults == ()


def test_operators_are_those_that_were_fused_however_their_names_join(messages: dict[str, str], folder: Path) -> None:
    fused = {use.kernel.name: use.kernel.operators for use in audited(folder / "nhwc").kernels}
    assert ("conv2d", "transpose", "maximum") in fused.values()
    assert not any("conv2d_transpose" in operators for operators in fused.values())


def test_two_needless_transposes_are_found(messages: dict[str, str], folder: Path) -> None:
    found = audited(folder / "transposed")
    assert [fault.check for fault in found.faults] == ["layouts", "layouts"]
    first, second = found.faults
    assert first.place == "nn.conv2d -> permute_dims -> maximum"
    assert second.place == "maximum -> permute_dims -> nn.conv2d"
    assert "8,192 bytes (1x16x16x8)" in first.what
    assert "undo each other, only maximum between" in first.what
    assert len(found.layout.before) == 2


@pytest.mark.parametrize(
    ("name", "place", "what"),
    [
        ("target", "LLVM's IR", "x fast"),
        pytest.param("linker", "code outside all kernels", "may flush denormals or round", marks=ON_X86),
        pytest.param("user", "user_planted", "rcpps", marks=ON_X86),
    ],
)
def test_a_build_that_breaks_the_numerics_fails(messages: dict[str, str], name: str, place: str, what: str) -> None:
    assert "fast_math = false" in messages[name]
    assert place in messages[name]
    assert what in messages[name]
    assert NumericsError.exit_code == 17


def test_fast_math_may_do_what_it_states(messages: dict[str, str], folder: Path) -> None:
    found = audited(folder / "fast")
    assert messages["fast"] == ""
    assert found.faults == ()
    assert found.numerics.llvm_flags
    assert set(found.numerics.llvm_flags) <= {"arcp", "contract", "nsz", "reassoc"}


def test_the_command_and_its_forms(messages: dict[str, str], folder: Path, tmp_path: Path) -> None:
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tvmflow.cli", "audit", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    clean = run(folder / "clean", "--time", "--json")
    assert (clean.returncode, clean.stderr) == (0, "")
    (kernel,) = json.loads(clean.stdout)["kernels"]
    assert kernel["share"] == 1.0
    faulty = run(folder / "transposed", "--markdown", tmp_path / "audit.md")
    assert faulty.returncode == 16
    assert "the audit found 2 faults" in faulty.stderr
    assert "| fault | layouts | nn.conv2d -> permute_dims -> maximum |" in (tmp_path / "audit.md").read_text()


def test_the_manifest_keeps_a_summary(messages: dict[str, str], folder: Path) -> None:
    manifest = artifact.read_manifest(folder / "transposed")
    assert manifest.audit is not None
    assert report_audit.line(manifest, manifest.audit) == (
        "2 faults, 0 warnings; calls nothing outside; arithmetic is precise"
    )


def test_what_is_no_library_of_tvms(tmp_path: Path) -> None:
    (tmp_path / "library.so").write_bytes(b"no library")
    with pytest.raises(ArtifactError, match="not a shared library of TVM's"):
        library.read(tmp_path / "library.so")


def test_a_missing_disassembler_is_named(messages: dict[str, str], folder: Path) -> None:
    with pytest.raises(SetupError, match="needs riscv64-linux-gnu-objdump"):
        listing.read(folder / "clean" / "library.so", "riscv64")


LISTING = """
0000000000001000 <__tvm_ffi_one1>:
    1000:\tbl\t2000 <one1_compute_>
    1004:\tbl\t3000 <cblas_sgemm@plt>

0000000000002000 <one1_compute_>:
    2000:\tfrecpe\tv0.4s, v1.4s
    2004:\tfmul\tv0.4s, v1.4s, v2.4s
    2008:\tmsr\tfpcr, x0
    200c:\tmrs\tx1, fpcr
"""


def test_code_of_arm_is_read_alike() -> None:
    code = machine.parse(listing.parse(LISTING), "aarch64")
    assert code.approximate == {"one1": {"frecpe": 1}}
    assert code.control == {"one1": {"msr": 1}}
    assert code.callers == {"cblas_sgemm": ("one1",)}
