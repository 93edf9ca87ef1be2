"""One audit: every check of a library, its findings together, and which of them are errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tvmflow import config, text
from tvmflow.artifact import LIBRARY
from tvmflow.audit import (
    bytecode,
    differences,
    kernels,
    layouts,
    library,
    listing,
    machine,
    numerics,
    resources,
    sass,
    structure,
    symbols,
)
from tvmflow.config import Config
from tvmflow.errors import AuditError, NumericsError
from tvmflow.frozen import evolve
from tvmflow.manifest import AuditSummary, Finding, Layout, Manifest, Noun, TargetInfo

# The run time itself and C's: no news in a summary.
OWN = ("vm.builtin.", "TVMFFI", "TVMBackend", "_ITM_", "__", "libgcc_s", "libstdc++", "ld-linux")
OWN_REASON = "the C library"


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


def examine(
    folder: Path, manifest: Manifest, seconds: Mapping[str, float] | None = None, given: Config | None = None
) -> Audit:
    """Audits the artifact in `folder`; needs TVM, which prints the virtual machine's code.

    What is allowed is `given`'s, else what the artifact's own config says. `seconds` are those of one run by kernel, if
    they were measured. Raises SetupError where a tool that reads code is missing or cannot read it, ArtifactError for a
    library that is none of TVM's.
    """
    stated = given or config.from_json(manifest.config)
    built = library.read(folder / LIBRARY)
    code = listing.read(built.path, built.machine)
    parsed = machine.parse(code, built.machine)
    device = sass.read(built.path) if manifest.target.kind == "cuda" else ()
    called = bytecode.parse(bytecode.as_text(built.bytecode))
    external = symbols.externals(
        symbols.Sources(
            built,
            called,
            manifest.kernels,
            frozenset(kernel.name for kernel in device),
            frozenset(manifest.evidence.shape_functions if manifest.evidence else ()),
            parsed.callers,
        ),
        stated.audit.allow,
    )
    uses = kernels.kernels(manifest, seconds)
    taken = resources.resources(device, manifest)
    numbers = numerics.numerics(stated.numerics, manifest.evidence, parsed, device, built.image.undefined)
    made = (
        *structure.findings(built, code, parsed, manifest),
        *structure.kernel_findings(built, parsed, device, manifest),
    )
    found = [
        *(differences.findings(manifest, given) if given else ()),
        *(finding for finding in made if symbols.reason_for(finding.place, stated.audit.allow) is None),
        *symbols.findings(external, built),
        *kernels.findings(uses),
        *layouts.findings(manifest.layout),
        *numerics.findings(numbers, stated.numerics, device, manifest),
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
        external=tuple(external.name for external in audit.external if not _is_own(external)),
        tf32_kernels=audit.numerics.tf32_kernels,
        lowest_occupancy=min(shares, default=None),
    )


def _is_own(external: symbols.External) -> bool:
    return external.name.startswith(OWN) or (external.reason or "").startswith(OWN_REASON)


def check_numerics(audit: Audit) -> None:
    """Raises NumericsError where the code breaks the numerics that the config states."""
    breaches = [finding for finding in audit.faults if finding.check == "numerics"]
    if breaches:
        stated = config.stated(audit.numerics.contract)
        raise NumericsError(
            f"the built code is not what [numerics] states ({stated}):", breaches[0].action, items=_lines(breaches)
        )


def check_library(audit: Audit) -> None:
    """Raises AuditError where the library holds or calls what no compiler of TVM's makes: it is never loaded."""
    unknown = {e.name for e in audit.external if e.reason is None and e.kind == symbols.UNDEFINED}
    foreign = [f for f in audit.faults if f.check == "library" or (f.check == "external calls" and f.place in unknown)]
    if foreign:
        raise AuditError(f"the library holds what no compiler of TVM's makes:{_lines(foreign)}", foreign[0].action)


def check(audits: Mapping[str, Audit]) -> None:
    """Raises AuditError where there is a fault; audits are by bucket, or one under an empty name."""
    faults = [
        evolve(fault, place=f"{name}: {fault.place}" if name else fault.place)
        for name, audit in audits.items()
        for fault in audit.faults
    ]
    if faults:
        count = len(faults)
        summary = f"the audit found {count} fault{'s' if count > 1 else ''}:"
        raise AuditError(summary, faults[0].action, items=_lines(faults))


def _lines(found: Sequence[Finding]) -> list[str]:
    return text.listed([f"{finding.place}: {finding.what}" for finding in found], 6)
