"""The story: one function per command, each stage call on its own line.

    compiling    a config -> a verified artifact
    tuning       configs -> tasks -> records of the tuning database
    artifacts    an artifact -> outputs, verdicts, audits, samples; what makes its values wrong

What may crash (importing, compiling, running a library, running a reference) is called through `process.Child`.
"""

from __future__ import annotations

from tvmflow.flow.artifacts import (
    attribute_artifact,
    audit_artifact,
    bench_artifact,
    bisect_artifact,
    bisect_config,
    run_artifact,
    verify_artifact,
)
from tvmflow.flow.compiling import Options, compile_model, inspect_model, passes
from tvmflow.flow.tuning import Selection, Tuned, compare_methods, tasks, tune

__all__ = [
    "Options",
    "Selection",
    "Tuned",
    "attribute_artifact",
    "audit_artifact",
    "bench_artifact",
    "bisect_artifact",
    "bisect_config",
    "compare_methods",
    "compile_model",
    "inspect_model",
    "passes",
    "run_artifact",
    "tasks",
    "tune",
    "verify_artifact",
]
