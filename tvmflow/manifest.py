"""What a library says of itself: the frozen nouns of manifest.json. No TVM in here."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

# Bytes of one element, by the dtypes that tensors of a library have.
ITEM_BYTES = {
    "bool": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
}
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Size = Annotated[int, Field(ge=1, lt=1 << 63)]
Seconds = Annotated[float, Field(ge=0)]


class Noun(BaseModel):
    """A frozen part of the manifest. What is read from a file is also held to exactly these types."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TensorSpec(Noun):
    """One input or output: its original name, dtype, and per axis a size or the name of a symbolic dimension."""

    name: str
    dtype: str
    shape: tuple[Count | str, ...]
    range: tuple[float, float] | None = None
    """For an input that is used as an index or condition: the lowest and highest value that makes sense."""


class Signature(Noun):
    """The inputs and outputs of a library, in the order of its `main` function."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class FileEntry(Noun):
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size_bytes: Count


class Constant(Noun):
    """One weight in constants.bin; they are handed to `main` behind the inputs, in this order."""

    offset: Count
    dtype: str
    shape: tuple[Count, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Kernel(Noun):
    """One compiled kernel and where its schedule comes from."""

    name: str
    origin: Literal["tuned", "default schedule", "unscheduled", "external", "user"]
    rule: str
    calls: Count
    """In how many places of the graph it is called; of an If, one run takes one branch."""
    key: str | None = None
    """Under which a tuning database holds or would hold its record; None without one, or where it cannot be tuned."""
    gflops: float | None = None
    """10^9 operations per second when it was tuned, alone on the machine."""
    operators: tuple[str, ...] = ()
    """The operators of the graph that it computes, in their order."""


class LayoutTransform(Noun):
    """A transpose that stayed in the graph: between which operators, the shape it writes, and its bytes."""

    place: str
    shape: tuple[int | str, ...]
    size_bytes: Count
    needless: str = ""
    """Why the graph could do without it; empty where it could not."""
    avoidable: str = ""
    """The same where an operator beside it would have to change its axes for that."""


class Layout(Noun):
    """The layout taken for convolutions, why, the transposes left, and those of the model as it was imported."""

    choice: str
    reason: str
    transforms: tuple[LayoutTransform, ...]
    before: tuple[LayoutTransform, ...] = ()


class Stage(Noun):
    """One step of the compile: its seconds, and TVM's structural hash of the module it made.

    The hash leaves the weights out; None where the step made no module. The seconds are in the build log, not in the
    manifest: None without it."""

    name: str
    seconds: Seconds | None = None
    ir_hash: str | None = None


class TargetInfo(Noun):
    """What the library was built for; `features` are the CPU extensions it needs, in LLVM's names."""

    kind: str
    machine: str
    mcpu: str
    mtriple: str
    features: tuple[str, ...]
    threads: Annotated[int, Field(ge=1, le=1 << 20)]
    arch: str | None


class OutputVerdict(Noun):
    """One output of one run against the reference.

    Errors are absolute unless they say otherwise, over finite values; None where dtype or shape already differ.
    Agreement is the share of rows along the last axis whose largest entries stand where the reference's do.
    """

    name: str
    ok: bool
    reason: str
    rtol: float
    atol: float
    max_error: float | None
    mean_error: float | None
    max_relative_error: float | None
    mismatched: Count
    total: Count
    nan_or_inf_differs: Count
    top1_agreement: float | None
    top5_agreement: float | None


class RunVerdict(Noun):
    """All outputs of one run: the seed its inputs were drawn with ("file" when given), and symbolic sizes."""

    inputs: str
    dims: dict[str, int]
    outputs: tuple[OutputVerdict, ...]


class Verdict(Noun):
    """Whether the library's values are the reference's."""

    ok: bool
    reference: str
    notes: tuple[str, ...]
    runs: tuple[RunVerdict, ...]


class Launch(Noun):
    """How the host starts a CUDA kernel: threads of a block and its dynamic shared memory; None where symbolic."""

    threads: int | None
    dynamic_shared_bytes: int | None


class Evidence(Noun):
    """What was read while building, of what the library itself no longer shows.

    `llvm_flags` counts the fast-math flags and attributes in LLVM's IR. `approximations` counts, per CUDA kernel, the
    PTX instructions that approximate or flush denormals beyond what the functions in its source need. `launches` is by
    CUDA kernel. `cubins` are the sha256 of the images that this is said of. `shape_functions` compute symbolic shapes.
    """

    llvm_flags: dict[str, int]
    approximations: dict[str, dict[str, int]] = {}
    launches: dict[str, Launch] = {}
    cubins: tuple[str, ...] = ()
    shape_functions: tuple[str, ...] = ()


Check = Literal["external calls", "library", "config", "kernels", "layouts", "resources", "numerics"]


class Finding(Noun):
    """One thing that an audit found: where, what, and what to do. A fault fails the audit, a warning does not."""

    check: Check
    level: Literal["fault", "warning"]
    place: str
    what: str
    action: str


class AuditSummary(Noun):
    """What a manifest keeps of an audit; `tvmflow audit` shows all of it."""

    findings: tuple[Finding, ...]
    external: tuple[str, ...]
    """What the library calls beside its own kernels and TVM's virtual machine."""
    tf32_kernels: tuple[str, ...]
    lowest_occupancy: float | None
    """Of all CUDA kernels, the smallest share of a multiprocessor's threads that can be resident."""


class Described(Noun):
    """What every artifact says of itself, with one library or with one per bucket."""

    format_version: int
    name: str
    signature: Signature
    config: dict[str, Any]
    """As `config.to_json` gives it. Paths start at the folder that holds the artifact; those that would only lead there
    through the root of the file system are names alone."""
    source: FileEntry | None
    """The model's file; None for a PyTorch entry."""
    source_data: dict[str, FileEntry] = {}
    """Files beside an ONNX model that hold its weights, by their paths from its folder."""
    target: TargetInfo
    versions: dict[str, str]
    files: dict[str, FileEntry]
    """By path from the artifact's folder: what the artifact needs, beside its manifest."""
    stages: tuple[Stage, ...]
    peak_rss_bytes: Count | None = None
    """While compiling; from the build log, None without it."""
    notes: tuple[str, ...]
    timing: tuple[str, ...] = ()
    """Notes on measured times; from the build log."""
    verdict: Verdict | None


class Manifest(Described):
    """Everything that one library says of itself."""

    narrowest_float: str
    """The narrowest float dtype, or "tf32", that the library computes in; default tolerances follow it."""
    weights: str = "constants.bin"
    """The file of `constants`, by its path from the artifact's folder: that of a bucket lies one folder up."""
    constants: tuple[Constant, ...]
    kernels: tuple[Kernel, ...]
    layout: Layout
    planned_bytes: Count | None
    """Bytes of intermediate buffers that one run plans; None where they depend on symbolic sizes."""
    cuda: dict[str, Any] | None
    evidence: Evidence | None = None
    audit: AuditSummary | None = None


class Bucket(Noun):
    """One size of every open dimension, and the artifact for it."""

    dims: dict[str, Size]
    folder: str
    library_bytes: Count
    weight_bytes: Count
    """Of the weights that it reads, most of which other buckets read too."""
    planned_bytes: Count
    """Of intermediate buffers that one run plans."""
    kernels: dict[str, Count]
    """How many, by origin."""
    transposes: Count
    """Left in the graph."""
    kernel_seconds: Seconds | None = None
    """What the kernels of one run took, all together, when it was compiled; None where it was not run, or without
    the build log."""


class Padding(Noun):
    """What was seen when one dimension was padded within each bucket.

    "independent": no position changes the values of another, wherever it stands: inputs may be padded and split.
    "masked": what stands in the padding changes nothing while the stated inputs hold their stated values there.
    "mixes": it changes values, so that only the buckets' own sizes are right.
    "unproven": nothing was run.
    """

    kind: Literal["independent", "masked", "mixes", "unproven"]
    allowed: bool
    """Whether [shapes] allow_padding names the dimension: then it is padded whatever was seen."""
    reason: str
    runs: Count
    """How many runs this rests on."""


class Bundle(Described):
    """Everything that an artifact with buckets says of itself; each bucket's folder holds a Manifest of its own."""

    buckets: tuple[Bucket, ...]
    padding: dict[str, Padding]
    """By dimension."""
    pad: dict[str, float]
    """The value that padding holds, by input."""
    agreement: Verdict | None = None
    """The same rows in every bucket, held against those of the smallest."""


class BuildLog(Noun):
    """What only holds for one build on one machine: two builds of a config differ in nothing else."""

    seconds: tuple[Seconds | None, ...]
    """Of the manifest's stages, in their order."""
    peak_rss_bytes: Count | None
    timing: tuple[str, ...]
    kernel_seconds: tuple[Seconds | None, ...] = ()
    """By bucket."""
    paths: dict[str, str] = {}
    """By their place in the config: the paths of this machine, which the manifest only has relative to the artifact."""
