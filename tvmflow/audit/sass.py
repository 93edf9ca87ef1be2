"""The GPU's machine code in a library: NVIDIA's nvdisasm and cuobjdump read it, without a GPU.

What precise code looks like was measured with nvcc 13 and NVRTC for sm_80 and sm_90, function by function: division,
square roots and reciprocals refine an approximation (MUFU.RCP, MUFU.RSQ) with a step or two that flush denormals
(FADD.FTZ, FMUL.FTZ), and leave rare operands to functions of their own; expf and tanhf hold MUFU.EX2 and MUFU.RCP. No
function of float32 is made of MUFU.SIN, MUFU.COS or MUFU.TANH, and nothing precise flushes in a fused multiply-add or
in a maximum: --use_fast_math does that everywhere.
"""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tvmflow.codegen import cubin, cuda
from tvmflow.errors import SetupError

_SECTION = re.compile(r"^\s*\.section\s+\.text\.([\w$]+)")
_OTHER_SECTION = re.compile(r"^\s*\.section\s")
_SLOW_PATH = re.compile(r"^\s*\$\S*__internal_\S*:")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
_FUNCTION = re.compile(r"^\s*Function (\S+):")
_USAGE = re.compile(r"(REG|STACK|SHARED|LOCAL):(\d+)")
_INFO = re.compile(r"^\s*\.section\s+\.nv\.info\.([\w$]+)")
_WORD = re.compile(r"\.word\s+(0x[0-9a-f]+)")
_APPROXIMATE = re.compile(r"MUFU\.(?:SIN|COS|TANH)\b|(?:FFMA2?|FMNMX3?)\S*\.FTZ\b")
_REFINING = re.compile(r"(?:FADD2?|FMUL2?)\S*\.FTZ\b")
_PRODUCT = re.compile(r"[A-Z]*(?:HMMA|IMMA|DMMA|QMMA|OMMA|HGMMA|IGMMA|QGMMA|UTC\w*MMA)\b\S*")
_FP16_SUM = re.compile(r"(?:HMMA|HGMMA)\.\w+\.F16\b(?!\.F32)")


@dataclass(frozen=True)
class KernelCode:
    """One kernel's instructions by full name, the slow paths of divisions and roots aside, and what ptxas gave it."""

    name: str
    instructions: Mapping[str, int]
    registers: int = 0
    stack_bytes: int = 0
    static_shared_bytes: int = 0
    local_bytes: int = 0
    max_threads: int | None = None
    """Of a block, as the kernel's launch bounds say."""
    products: tuple[str, ...] = field(default=())
    """Its tensor-core instructions, each name once."""

    @property
    def approximate(self) -> dict[str, int]:
        """Instructions that no precise code holds; flushing additions beyond what roots and reciprocals need."""
        found = {name: count for name, count in self.instructions.items() if _APPROXIMATE.match(name)}
        flushing = sum(count for name, count in self.instructions.items() if _REFINING.match(name))
        needed = 2 * self._count("MUFU.RSQ") + self._count("MUFU.RCP")
        return found | ({"FADD.FTZ, FMUL.FTZ": flushing - needed} if flushing > needed else {})

    @property
    def uses_tf32(self) -> bool:
        return any("TF32" in name for name in self.products)

    @property
    def fp16_sums(self) -> tuple[str, ...]:
        """Tensor-core instructions that add up in float16."""
        return tuple(name for name in self.products if _FP16_SUM.match(name))

    @property
    def local_accesses(self) -> tuple[int, int]:
        """Loads and stores of local memory: spilled registers, and arrays indexed at run time."""
        return self._count("LDL"), self._count("STL")

    def _count(self, prefix: str) -> int:
        return sum(n for name, n in self.instructions.items() if name == prefix or name.startswith(f"{prefix}."))


def read(library: Path) -> tuple[KernelCode, ...]:
    """The kernels of a library's cubins; raises SetupError where NVIDIA's tools are not installed."""
    nvdisasm, cuobjdump = cuda.tool("nvdisasm"), cuda.tool("cuobjdump")
    found: list[KernelCode] = []
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as name:
        for image in cubin.images(library):
            file = Path(name) / "image.cubin"
            file.write_bytes(image)
            listing, usage = _output(nvdisasm, file), _output(cuobjdump, "--dump-resource-usage", file)
            found += parse(listing, usage)
    return tuple(found)


def parse(listing: str, usage: str) -> Iterator[KernelCode]:
    """The kernels in the texts of `nvdisasm` and `cuobjdump --dump-resource-usage`."""
    resources = dict(_resources(usage))
    bounds = dict(_launch_bounds(listing))
    for name, counts in _instructions(listing).items():
        has = resources.get(name, {})
        yield KernelCode(
            name,
            dict(counts),
            has.get("REG", 0),
            has.get("STACK", 0),
            has.get("SHARED", 0),
            has.get("LOCAL", 0),
            bounds.get(name),
            tuple(sorted(instruction for instruction in counts if _PRODUCT.fullmatch(instruction))),
        )


def _instructions(listing: str) -> dict[str, Counter[str]]:
    kernels: dict[str, Counter[str]] = {}
    counts: Counter[str] | None = None
    for line in listing.splitlines():
        if match := _SECTION.match(line):
            counts = kernels.setdefault(match[1], Counter())
        elif _OTHER_SECTION.match(line) or _SLOW_PATH.match(line):
            counts = None
        elif counts is not None and (match := _INSTRUCTION.search(line)):
            counts[match[1]] += 1
    return kernels


def _launch_bounds(listing: str) -> Iterator[tuple[str, int]]:
    """By kernel, the threads of its largest block: the product of three words behind their name."""
    name = ""
    words: list[int] | None = None
    for line in listing.splitlines():
        if match := _INFO.match(line):
            name, words = match[1], None
        elif "EIATTR_MAX_THREADS" in line:
            words = []
        elif words is not None and (match := _WORD.search(line)):
            words.append(int(match[1], 16))
            if len(words) == 3:
                yield name, math.prod(words)
                words = None


def _resources(usage: str) -> Iterator[tuple[str, dict[str, int]]]:
    name = ""
    for line in usage.splitlines():
        if match := _FUNCTION.match(line):
            name = match[1]
        elif name and (found := _USAGE.findall(line)):
            yield name, {key: int(value) for key, value in found}


def _output(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode or not done.stdout.strip():
        said = done.stderr.strip().partition("\n")[0] or "it printed nothing"
        raise SetupError(
            f"{command[0]} cannot read a cubin of the library: {said}",
            "install the tool of CUDA 13; what cannot be read cannot be audited",
        )
    return done.stdout
