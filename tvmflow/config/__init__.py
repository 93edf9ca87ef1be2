"""The typed, frozen configuration of one model on one target, and the only reader of config files.

`load` reads a TOML file, applies overrides, and either returns a Config or raises one ConfigError that lists every
fault of the file with its dotted place and, where one is near, the name that was probably meant.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    FiniteFloat,
    PositiveInt,
    Tag,
    ValidationError,
    model_validator,
)

from tvmflow.config import external
from tvmflow.errors import ConfigError


def _ordered(limits: tuple[float, float]) -> tuple[float, float]:
    if limits[0] > limits[1]:
        raise ValueError(f"the lowest value {limits[0]:g} is above the highest {limits[1]:g}")
    return limits


def _as_tuple(value: object) -> object:
    """A text alone is a list of one; JSON's lists are tuples here."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _not_empty(operators: tuple[str, ...]) -> tuple[str, ...]:
    if not operators:
        raise ValueError("name at least one operator")
    return operators


def _with_defaults(allow: dict[str, str]) -> dict[str, str]:
    """The resolved config states every pattern."""
    return {**external.ALLOWED, **allow}


DType = Literal[
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
]
Dim = Annotated[int, Field(ge=0, le=1 << 48)] | Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]
Range = Annotated[tuple[FiniteFloat, FiniteFloat], AfterValidator(_ordered)]
Operators = Annotated[
    tuple[Annotated[str, Field(pattern=r"^[a-z][\w.]*$")], ...],
    BeforeValidator(_as_tuple, json_schema_input_type=str | list[str]), AfterValidator(_not_empty),
]  # fmt: skip
Sizes = Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
# The tags are in angle brackets, so that messages leave them out.
Buckets = Annotated[
    Annotated[dict[str, Sizes], Tag("<product>")] | Annotated[tuple[dict[str, PositiveInt], ...], Tag("<list>")],
    Discriminator(lambda value: "<product>" if isinstance(value, dict) else "<list>"),
]  # fmt: skip
# Each override is a nested table, as TOML would read it; later ones win.
Overrides = Sequence[Mapping[str, Any]]


class Section(BaseModel):
    """Frozen, and strict about names and types: nothing is ignored, nothing is converted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class ModelInput(Section):
    shape: tuple[Dim, ...] | None = None
    """One integer or dimension name per axis; a name stays symbolic unless [shapes.dims] gives it a size."""
    dtype: DType | None = None


class ModelSection(Section):
    path: Path | None = None
    """An ONNX file, or a torch.export program (.pt2). A relative path starts at the config file's folder."""
    entry: str | None = Field(default=None, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """"package.module:function" that returns (torch.nn.Module, example inputs[, dynamic shapes])."""
    folder: Path = Path()
    """Where `entry`'s package is looked for, beside Python's own path; the config file's folder unless stated."""
    inputs: dict[str, ModelInput] = {}
    """Shapes and dtypes by input name, where the model leaves them open."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        if (self.path is None) == (self.entry is None):
            raise ValueError("give exactly one of `path` and `entry`")
        return self


class ShapesSection(Section):
    dims: dict[str, PositiveInt] = {}
    """Sizes for symbolic dimensions; what is not listed stays dynamic, or has buckets."""
    buckets: Buckets = ()
    """A static library per bucket: sizes by dimension, of which every combination is one, or a list of combinations."""
    pad: dict[str, bool | int | FiniteFloat] = {}
    """What stands in the padding of an input, by name, where values rest on it, e.g. an attention mask's 0."""
    allow_padding: tuple[str, ...] = ()
    """Dimensions to pad although that changes values: results are then those of the padded inputs."""
    one_layout: bool = True
    """Keep each weight once for all buckets; false lets tuned kernels of a bucket have a copy in another layout."""

    def bucket_sizes(self) -> tuple[dict[str, int], ...]:
        """The sizes of every bucket, each once, the fewest elements first; nothing where the config has no buckets."""
        if isinstance(self.buckets, dict):
            rows = itertools.product(*self.buckets.values())
            given = [dict(zip(self.buckets, row, strict=True)) for row in rows]
        else:
            given = [dict(bucket) for bucket in self.buckets]
        unique = {tuple(sorted(bucket.items())): bucket for bucket in given}.values()
        return tuple(sorted(unique, key=lambda bucket: (math.prod(bucket.values()), tuple(bucket.values()))))

    @model_validator(mode="after")
    def _buckets_are_whole(self) -> ShapesSection:
        given = self.bucket_sizes()
        names = set().union(*given)
        if isinstance(self.buckets, dict) and not self.buckets:
            raise ValueError("buckets = {} names no dimension; buckets = [] stands for none")
        for bucket in given:
            if bucket.keys() != names:
                raise ValueError(f"buckets: {bucket} does not give all of {', '.join(sorted(names))}")
        if twice := sorted(names & self.dims.keys()):
            raise ValueError(f"`{twice[0]}` has both a size in dims and buckets")
        if unknown := sorted(set(self.allow_padding) - names):
            raise ValueError(f"allow_padding: `{unknown[0]}` has no buckets")
        return self


class TargetSection(Section):
    kind: Literal["llvm", "cuda"] = "llvm"
    """A CPU, or an NVIDIA GPU."""
    mcpu: str = "native"
    """The CPU to generate code for: "native", a portable level ("x86-64-v3") or any name LLVM knows."""
    mtriple: str | None = None
    """For cross builds, e.g. "aarch64-linux-gnu"; the default is this machine."""
    arch: str | None = Field(default=None, pattern=r"^sm_\d+[af]?$")
    """The CUDA architecture, e.g. "sm_90"; needed on a machine without a GPU."""
    threads: PositiveInt | Literal["native"] = "native"
    """CPU threads that the library is planned for and runs with; "native" means this machine's cores."""

    @model_validator(mode="after")
    def _kind_fits(self) -> TargetSection:
        if self.kind == "llvm" and self.arch is not None:
            raise ValueError('`arch` belongs to kind = "cuda"; name a CPU with `mcpu`')
        if self.mtriple is not None and self.mcpu == "native":
            raise ValueError('a cross build (`mtriple`) cannot use mcpu = "native"; name the CPU, e.g. "generic"')
        if self.mtriple is not None and self.threads == "native":
            raise ValueError('a cross build (`mtriple`) cannot use threads = "native"; give a number')
        return self


class NumericsSection(Section):
    fast_math: bool = False
    """Allow approximate division, square roots and functions, reassociation, and flushing denormals to zero."""
    tf32: bool = False
    """Allow TF32 tensor cores for float32 matrix products (CUDA, sm_80 and later)."""
    winograd: Literal["auto", "off"] = "auto"
    """Compute float32 3 x 3 convolutions of stride 1 on a CPU by Winograd's method where that is faster, or never."""
    widen_half: bool = True
    """On a CPU, compute float16 and bfloat16 in float32: faster, rounded less. Inputs and outputs keep their dtypes."""
    fp16_accumulate: bool = False
    """Reserved: whether float16 products may be added up in float16. Only false is accepted."""
    denormals: str = "keep"
    """Reserved: what becomes of denormal numbers. Only "keep" is accepted; fast_math may flush them."""

    @model_validator(mode="after")
    def _reserved_are_precise(self) -> NumericsSection:
        if self.fp16_accumulate:
            raise ValueError("fp16_accumulate = true is reserved: float16 products are added up in float32")
        if self.denormals != "keep":
            raise ValueError(f'denormals = "{self.denormals}" is reserved: they are kept, unless fast_math = true')
        return self


class GraphSection(Section):
    layout: Literal["auto", "keep", "nhwc"] = "auto"
    """Layout of convolutions: as imported, NHWC, or whichever should take less time, transposes included."""
    prepack: bool | Literal["shared"] = True
    """Store weights in the layouts that kernels want; "shared": a tuned kernel only where that is the default's too."""
    guards: bool = False
    """Stop a run with an error at indices out of range and integer division by zero, whatever the model came from."""
    max_layout_transforms: Annotated[int, Field(ge=0)] | None = None
    """More transposes and layout transforms than this in the finished graph are an error."""


class KernelSection(Section):
    entry: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """"package.module:function" that returns a PrimFunc, a Schedule, or None for a call that it does not take."""
    folder: Path = Path()
    """Where `entry`'s package is looked for, beside Python's own path; the config file's folder unless stated."""
    replaces: Operators
    """An operator, e.g. "matmul", or several in the order in which they run, e.g. ["matmul", "add", "gelu"]."""


class TuningSection(Section):
    database: Path | None = None
    """The folder of tuning records: `tune` adds to it, `compile` builds from it. Without one, nothing is tuned."""
    trials_per_task: PositiveInt = 256
    """Candidates measured for one kernel, over all sessions."""
    minutes: Annotated[float, Field(gt=0)] = 15.0
    """How long one session of `tune` may take."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of everything random in the search."""
    require_tuned: Annotated[float, Field(ge=0, le=1)] | None = None
    """The share of a run's time that kernels from tuning records must take; less is an error of `compile`."""
    measure: Literal["local", "rpc"] = "local"
    """Where candidates run: on this machine, or on a device whose TVM RPC server a tracker knows."""
    tracker: str | None = Field(default=None, pattern=r"^\S+:\d+$")
    """The TVM RPC tracker that lends devices, as "host:port"; for measure = "rpc"."""
    device_key: str | None = Field(default=None, pattern=r"^[\w.-]+$")
    """The key under which the devices' RPC servers registered with the tracker; for measure = "rpc"."""

    @model_validator(mode="after")
    def _rpc_is_whole(self) -> TuningSection:
        missing = [f"`{key}`" for key in ("tracker", "device_key") if getattr(self, key) is None]
        if self.measure == "rpc" and missing:
            raise ValueError(f'measure = "rpc" needs {" and ".join(missing)}')
        return self


class Tolerance(Section):
    rtol: Annotated[float, Field(ge=0)]
    atol: Annotated[float, Field(ge=0)]


class VerifySection(Section):
    enabled: bool = True
    """Run the library against the reference before it is kept."""
    reference: Literal["auto", "onnxruntime", "onnx", "torch"] = "auto"
    """What the library's values are held against; "auto" is ONNX Runtime for ONNX and eager PyTorch for PyTorch."""
    rtol: Annotated[float, Field(ge=0)] | None = None
    """Relative tolerance of all outputs; unset, it follows each output's dtype."""
    atol: Annotated[float, Field(ge=0)] | None = None
    """|got - want| <= atol + rtol * |want|; unset values follow each output's dtype and are in the manifest."""
    outputs: dict[str, Tolerance] = {}
    """Tolerances of single outputs, by name."""
    seeds: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = (0, 1, 2)
    """One run with inputs drawn from each."""
    ranges: dict[str, Range] = {}
    """Lowest and highest value drawn for an input, by name; e.g. ids = [0, 30521], sample_rate = [16000, 16000]."""
    dims: dict[str, Sizes] = {}
    """Sizes to try for dimensions that stay symbolic; the i-th sizes of all dimensions belong together."""
    inputs: Path | None = None
    """An .npz of inputs by name to verify with, instead of drawn ones."""


class AuditSection(Section):
    allow: Annotated[dict[str, Annotated[str, Field(min_length=1)]], AfterValidator(_with_defaults)] = external.ALLOWED
    """External functions, symbols and libraries: a pattern with `*`, and the reason. Added to what TVM itself needs."""


class Config(Section):
    """One model on one target: everything that changes the result."""

    model: ModelSection
    shapes: ShapesSection = ShapesSection()
    target: TargetSection = TargetSection()
    numerics: NumericsSection = NumericsSection()
    graph: GraphSection = GraphSection()
    kernels: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], KernelSection] = {}
    tuning: TuningSection = TuningSection()
    verify: VerifySection = VerifySection()
    audit: AuditSection = AuditSection()

    @model_validator(mode="after")
    def _sections_fit(self) -> Config:
        if self.numerics.tf32 and self.target.kind != "cuda":
            raise ValueError('numerics.tf32 = true needs target.kind = "cuda"; CPUs have no TF32')
        if self.numerics.tf32 and self.target.arch and not has_tf32(self.target.arch):
            raise ValueError(f"numerics.tf32 = true needs sm_80 or later, target.arch is {self.target.arch}")
        return self


def has_tf32(arch: str) -> bool:
    """Whether a CUDA architecture, e.g. "sm_90a", has TF32 tensor cores."""
    return int(arch.strip("smaf_")) >= 80


def load(path: Path, overrides: Overrides = ()) -> Config:
    """Reads a config file; `overrides` win over it. Paths in it are taken from the file's folder.

    Raises ConfigError with all faults at once.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file", "check the path; `configs/` holds examples") from None
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: cannot be read: {exc}", "give a readable TOML file") from None
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"{path}: not valid TOML: {exc}", "mend the line named above") from None
    return from_dict(raw, overrides, source=str(path), folder=path.parent)


def from_dict(
    raw: Mapping[str, Any], overrides: Overrides = (), *, source: str = "command line", folder: Path = Path()
) -> Config:
    """Builds a Config from plain values. `source` names their origin in messages, relative paths start at `folder`."""
    merged = json.loads(json.dumps(raw, default=str))
    for table, key in _path_keys(merged):
        if isinstance(table, dict) and isinstance(table.get(key, ""), str) and (key in table or key == "folder"):
            table[key] = str(folder.absolute() / table.get(key, ""))
    for override in overrides:
        _merge(merged, override)
    try:
        config = from_json(merged)
    except ValidationError as exc:
        faults = [_fault(merged, error) for error in exc.errors()]
        raise ConfigError(f"{source}: " + _joined(faults), "`tvmflow config schema` lists every key") from None
    missing = list(_missing_files(config))
    if missing:
        raise ConfigError(f"{source}: " + _joined(missing), "paths in a config file start at the file's folder")
    return config


def of_model(model: str, overrides: Overrides = (), defaults: Mapping[str, Any] | None = None) -> Config:
    """The Config of what a user may name: a config file (.toml), a model file, or a PyTorch entry "module:function".

    `defaults` hold where neither a file nor `overrides` say otherwise.
    """
    if model.endswith(".toml"):
        return load(Path(model), overrides)
    is_entry = ":" in model and not Path(model).exists()
    source = {"entry": model} if is_entry else {"path": str(Path(model).absolute())}
    return from_dict({**(defaults or {}), "model": source}, overrides)


def per_bucket(config: Config) -> tuple[Config, ...]:
    """The config of each bucket's library, in their order; the config itself where it has none."""
    return tuple(_of_bucket(config, sizes) for sizes in config.shapes.bucket_sizes()) or (config,)


def symbolic(config: Config) -> Config:
    """The config without its buckets: their dimensions stay open."""
    return config.model_copy(update={"shapes": config.shapes.model_copy(update={"buckets": (), "allow_padding": ()})})


def _of_bucket(config: Config, sizes: Mapping[str, int]) -> Config:
    open_ = symbolic(config)
    shapes = open_.shapes.model_copy(update={"dims": {**config.shapes.dims, **sizes}})
    dims = {name: tried for name, tried in config.verify.dims.items() if name not in sizes}
    prepack = "shared" if config.shapes.one_layout and config.graph.prepack else config.graph.prepack
    return open_.model_copy(update={
        "shapes": shapes, "graph": config.graph.model_copy(update={"prepack": prepack}),
        "verify": config.verify.model_copy(update={"dims": dims, "inputs": None}),
    })  # fmt: skip


def name(config: Config) -> str:
    """What the model is called: its file's name without the ending, or its function's."""
    return config.model.path.stem if config.model.path else str(config.model.entry).partition(":")[2]


def parse_override(text: str) -> dict[str, Any]:
    """`numerics.fast_math=true` -> {"numerics": {"fast_math": True}}; a value that is no TOML is taken as a string."""
    key, separator, value = text.partition("=")
    for candidate in (value, json.dumps(value.strip())):
        with contextlib.suppress(tomllib.TOMLDecodeError):
            if separator and "\n" not in text:
                return tomllib.loads(f"{key} = {candidate}")
    raise ConfigError(f"--set {text}: not of the form section.key=value", "e.g. --set numerics.fast_math=true")


def from_json(values: Mapping[str, Any]) -> Config:
    """The config that `to_json` wrote, e.g. a manifest's; raises pydantic's ValidationError for anything else."""
    return Config.model_validate_json(json.dumps(values))


def stated(modes: Mapping[str, Any]) -> str:
    """A section's values as a config file states them, on one line."""
    return ", ".join(f"{name} = {str(value).lower()}" for name, value in modes.items())


def to_json(config: Config) -> dict[str, Any]:
    """The config as plain JSON values, every default stated."""
    values: dict[str, Any] = config.model_dump(mode="json")
    return values


def to_toml(config: Config) -> str:
    """The config as a TOML text that `load` reads back to an equal Config; unset keys are left out."""
    return tomli_w.dumps(_without_unset(to_json(config)))


def shown(config: Config) -> str:
    """The same text for a reader: without the patterns of [audit] allow that every config has."""
    values = to_json(config)
    own = {pattern: why for pattern, why in config.audit.allow.items() if external.ALLOWED.get(pattern) != why}
    return tomli_w.dumps(_without_unset({**values, "audit": {**values["audit"], "allow": own}}))


def schema() -> dict[str, Any]:
    """The JSON Schema of config files, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}


def _path_keys(raw: Mapping[str, Any]) -> Iterator[tuple[Any, str]]:
    """Every table of a config file that may hold a path, and the path's key in it."""
    for section, key in (("model", "path"), ("model", "folder"), ("verify", "inputs"), ("tuning", "database")):
        yield raw.get(section), key
    kernels = raw.get("kernels")
    for kernel in kernels.values() if isinstance(kernels, dict) else ():
        yield kernel, "folder"


def _merge(values: dict[str, Any], override: Mapping[str, Any]) -> None:
    for key, value in override.items():
        if isinstance(value, Mapping) and isinstance(values.get(key), dict):
            _merge(values[key], value)
        else:
            values[key] = value


def _without_unset(value: Any) -> Any:
    """TOML has no null: what is unset is left out, and so are tables that hold nothing."""
    if not isinstance(value, dict):
        return value
    kept = {key: _without_unset(item) for key, item in value.items() if item is not None}
    return {key: item for key, item in kept.items() if item != {}}


def _joined(faults: list[str]) -> str:
    return faults[0] if len(faults) == 1 else f"{len(faults)} errors\n" + "\n".join(f"  {f}" for f in faults)


def _fault(raw: Mapping[str, Any], error: Any) -> str:
    """One line for one of pydantic's errors: place, what is wrong, what was probably meant."""
    loc = tuple(part for part in error["loc"] if not str(part).startswith("<"))
    place = [part for part in loc if not _is_union_tag(raw, loc, part)]
    dotted = ".".join(map(str, place)) or "config"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(place[-1]), _known_names(place[:-1]), n=1)
        return f"{dotted}: unknown key" + (f", did you mean `{near[0]}`?" if near else "")
    if error["type"] == "missing":
        return f"{dotted}: missing"
    given = error.get("input")
    shown = f" (it is {json.dumps(given)})" if isinstance(given, str | int | float | bool) else ""
    return f"{dotted}: {message[0].lower()}{message[1:]}{shown}"


def _is_union_tag(raw: Mapping[str, Any], loc: tuple[Any, ...], part: Any) -> bool:
    """Pydantic adds the name of the tried alternative to a place; it is none of the file's own keys."""
    value: Any = raw
    for step in loc[: loc.index(part)]:
        value = value.get(step) if isinstance(value, dict) else value[step] if isinstance(value, list) else None
    known = part in value if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int)
    return not known and not isinstance(value, dict)


def _known_names(place: list[Any]) -> list[str]:
    def is_section(annotation: object) -> bool:
        return isinstance(annotation, type) and issubclass(annotation, BaseModel)

    section: Any = Config
    for step in place:
        if get_origin(section) is dict:  # a table of sections, whose names are the user's
            section = get_args(section)[1]
        elif is_section(section) and step in section.model_fields:
            section = section.model_fields[step].annotation
        else:
            return []
    return list(section.model_fields) if is_section(section) else []


def _missing_files(config: Config) -> Iterator[str]:
    given = (("model.path", config.model.path), ("model.folder", config.model.folder))
    for place, path in (*given, ("verify.inputs", config.verify.inputs)):
        if path is not None and not path.exists():
            yield f"{place}: no such file: {path}"
