"""One audit: every check of a library, its findings together, and which of them are errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tvmflow import config
from tvmflow.artifact import LIBRARY
from tvmflow.audit import bytecode, kernels, layouts, library, machine, numerics, resources, sass, symbols
from tvmflow.errors import AuditError, NumericsError
from tvmflow.frozen import evolve
from tvmflow.manifest import AuditSummary, Finding, Layout, Manifest, Noun, TargetInfo

# The run time itself and C's: no news in a summary.
OWN = ("vm.builtin.", "TVMFFI", "TVMBackend", "_ITM_", "__", "libc.so", "libm.so", "libgcc_s", "libstdc++", "ld-linux")


class Audit(Noun):
    """All that an audit found; faults first among the findings."""

    name: str
    target: TargetInfo
    external: tuple[symbols.External, ...]
    kernels: tuple[kernels.KernelUse, ...]
    layout: Layout
    resources: tuple[resources.Resources, ...]
    numerics: numerics.NumericsAudit
    findings: tuple[Finding, ...]

    @property
    def faults(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.level == "fault")


def examine(folder: Path, manifest: Manifest, seconds: Mapping[str, float] | None = None) -> Audit:
    """Audits the artifact in `folder`; needs TVM, which prints the virtual machine's code.

    `seconds` are those of one run by kernel, if they were measured. Raises SetupError where a disassembler is missing,
    ArtifactError for a library that is none of TVM's.
    """
    stated = config.from_json(manifest.config)
    built = library.read(folder / LIBRARY)
    code = machine.read(built.path, manifest.target.machine)
    on_gpu = manifest.target.kind == "cuda"
    device = sass.read(built.path) if on_gpu else ()
    called = bytecode.parse(bytecode.as_text(built.bytecode))
    shapes = manifest.evidence.shape_functions if manifest.evidence else ()
    parts = frozenset([*(kernel.name for kernel in device), *shapes])
    sources = symbols.Sources(built, called, manifest.kernels, parts, code.callers)
    external = symbols.externals(sources, stated.audit.allow)
    uses = kernels.kernels(manifest, seconds)
    taken = resources.resources(device, manifest)
    numbers = numerics.numerics(stated.numerics, manifest.evidence, code, device)
    found = [
        *symbols.findings(external, built),
        *kernels.findings(uses),
        *layouts.findings(manifest.layout),
        *numerics.findings(numbers, stated.numerics, device, on_gpu),
        *resources.findings(taken, manifest),
    ]
    return Audit(
        name=manifest.name,
        target=manifest.target,
        external=external,
        kernels=uses,
        layout=manifest.layout,
        resources=taken,
        numerics=numbers,
        findings=tuple(sorted(found, key=lambda f: f.level != "fault")),
    )


def summary(audit: Audit) -> AuditSummary:
    """What a manifest keeps."""
    shares = [kernel.occupancy for kernel in audit.resources if kernel.occupancy is not None]
    return AuditSummary(
        findings=audit.findings,
        external=tuple(external.name for external in audit.external if not external.name.startswith(OWN)),
        tf32_kernels=audit.numerics.tf32_kernels,
        lowest_occupancy=min(shares, default=None),
    )


def check_numerics(audit: Audit) -> None:
    """Raises NumericsError where the code breaks the numerics that the config states."""
    breaches = [finding for finding in audit.faults if finding.check == "numerics"]
    if breaches:
        stated = config.stated(audit.numerics.contract)
        raise NumericsError(
            f"the built code is not what [numerics] states ({stated}):{_lines(breaches)}", breaches[0].action
        )


def check(audits: Mapping[str, Audit]) -> None:
    """Raises AuditError where there is a fault; audits are by bucket, or one under an empty name."""
    faults = [
        evolve(fault, place=f"{name}: {fault.place}" if name else fault.place)
        for name, audit in audits.items()
        for fault in audit.faults
    ]
    if faults:
        count = len(faults)
        raise AuditError(f"the audit found {count} fault{'s' if count > 1 else ''}:{_lines(faults)}", faults[0].action)


def _lines(found: Sequence[Finding]) -> str:
    shown = [f"\n  {finding.place}: {finding.what}" for finding in found[:6]]
    return "".join(shown) + (f"\n  and {len(found) - 6} more" if len(found) > 6 else "")
