"""What a config holds: one frozen section per table of a config file, with its defaults and contradictions."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Annotated, Literal

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
    model_validator,
)

from tvmflow.config import external


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
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
]
Dim = Annotated[int, Field(ge=0, le=1 << 48)] | Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]
Range = Annotated[tuple[FiniteFloat, FiniteFloat], AfterValidator(_ordered)]
Operators = Annotated[
    tuple[Annotated[str, Field(pattern=r"^[a-z][\w.]*$")], ...],
    BeforeValidator(_as_tuple, json_schema_input_type=str | list[str]),
    AfterValidator(_not_empty),
]
Sizes = Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
# The tags are in angle brackets, so that messages leave them out.
Buckets = Annotated[
    Annotated[dict[str, Sizes], Tag("<product>")] | Annotated[tuple[dict[str, PositiveInt], ...], Tag("<list>")],
    Discriminator(lambda value: "<product>" if isinstance(value, dict) else "<list>"),
]


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
    trust: bool = False
    """Load a .pt2 file although it runs code of its own, e.g. unpickles Python objects. Only for files of your own."""
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


class LimitsSection(Section):
    memory_gib: Annotated[FiniteFloat, Field(gt=0)] | None = None
    """The most memory, in GiB, that the processes of a command may take together; unset, 90 % of the machine's."""
    minutes: Annotated[FiniteFloat, Field(gt=0)] = 120.0
    """How long one process may take. `tune` and `bench`, which are told how long to take, are not stopped by it."""


class Config(Section):
    """One model on one target: everything that changes the result, and the limits of the work, which do not."""

    model: ModelSection
    shapes: ShapesSection = ShapesSection()
    target: TargetSection = TargetSection()
    numerics: NumericsSection = NumericsSection()
    graph: GraphSection = GraphSection()
    kernels: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], KernelSection] = {}
    tuning: TuningSection = TuningSection()
    verify: VerifySection = VerifySection()
    audit: AuditSection = AuditSection()
    limits: LimitsSection = Field(default=LimitsSection(), exclude=True)

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
