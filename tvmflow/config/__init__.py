"""The typed, frozen configuration of one model on one target, and the only reader of config files.

`load` reads a TOML file, applies overrides, and either returns a Config or raises one ConfigError that lists every
fault of the file with its dotted place and, where one is near, the name that was probably meant.
"""

from __future__ import annotations

from tvmflow.config.buckets import per_bucket, symbolic
from tvmflow.config.loading import Overrides, from_dict, from_json, load, of_model, parse_override
from tvmflow.config.sections import (
    AuditSection,
    Config,
    DType,
    GraphSection,
    KernelSection,
    LimitsSection,
    ModelInput,
    ModelSection,
    NumericsSection,
    ShapesSection,
    TargetSection,
    Tolerance,
    TuningSection,
    VerifySection,
    has_tf32,
)
from tvmflow.config.text import name, schema, shown, stated, to_json, to_toml, toml_key

__all__ = [
    "AuditSection",
    "Config",
    "DType",
    "GraphSection",
    "KernelSection",
    "LimitsSection",
    "ModelInput",
    "ModelSection",
    "NumericsSection",
    "Overrides",
    "ShapesSection",
    "TargetSection",
    "Tolerance",
    "TuningSection",
    "VerifySection",
    "from_dict",
    "from_json",
    "has_tf32",
    "load",
    "name",
    "of_model",
    "parse_override",
    "per_bucket",
    "schema",
    "shown",
    "stated",
    "symbolic",
    "to_json",
    "to_toml",
    "toml_key",
]
