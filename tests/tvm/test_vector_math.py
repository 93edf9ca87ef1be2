"""Vector code of mathematical functions: values against float64, special values, widths, dtypes, and what is called."""

from __future__ import annotations

import functools
import math
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
import tvm
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection
from onnx import TensorProto, helper
from scipy.special import ndtr
from test_cross_build import compile_for_aarch64, needs_linker, run_under_qemu
from tvm import te, tirx
from tvm.s_tir import Schedule

import tvmflow
from tvmflow.artifact import LIBRARY
from tvmflow.codegen import numerics
from tvmflow.config import NumericsSection
from tvmflow.host import host_features
from tvmflow.kernels.mathematics import vector_math
from tvmflow.kernels.rewrites import recognise_gelu

REFERENCES: dict[str, Callable[..., np.ndarray]] = {  # of float64
    "exp": np.exp,
    "exp2": np.exp2,
    "exp10": lambda x: np.power(10.0, x),
    "log": np.log,
    "log2": np.log2,
    "log10": np.log10,
    "log1p": np.log1p,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "erf": np.vectorize(math.erf, otypes=["float64"]),
    "gelu": lambda x: x * ndtr(x),
    "gelu_by_table": lambda x: x * ndtr(x),
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "pow": np.power,
}
# Largest errors in units in the last place, rounded up; with fast_math they are the same or less than 0.2 more.
LARGEST = {
    "exp": 1.0,
    "exp2": 1.1,
    "exp10": 1.2,
    "log": 1.0,
    "log2": 1.8,
    "log10": 2.0,
    "log1p": 2.6,
    "sigmoid": 2.4,
    "tanh": 2.5,
    "sinh": 2.2,
    "cosh": 1.6,
    "erf": 2.5,
    "sin": 1.6,
    "cos": 1.6,
    "tan": 3.4,
    "asin": 2.5,
    "acos": 1.4,
    "atan": 2.0,
    "asinh": 2.9,
    "acosh": 3.3,
    "atanh": 3.3,
    "pow": 0.6,
}
GELU = {  # ranges with their largest errors in units in the last place; x (1 + erf) / 2 has 700,000 in the last
    "gelu": ((-1.3, math.inf, 3.0), (-3, -1.3, 20.0), (-4, -3, 40.0), (-5.3, -4, 160.0)),
    "gelu_by_table": ((-4, math.inf, 1.5), (-5.3, -4, 3.0), (-6, -5.3, 13.0)),
}
UNARY = [name for name in REFERENCES if name not in ("pow", *GELU)]
SPECIAL = np.array(
    [
        0.0,
        1e-45,
        1e-38,
        1.1754942e-38,
        1.1754944e-38,
        1e-20,
        0.5,
        0.9277,
        1.0,
        1.0000001,
        2.0,
        4.0,
        10.0,
        16.0,
        33.0,
        38.53,
        38.54,
        45.2,
        88.72283,
        88.72284,
        89.4159,
        89.416,
        103.97,
        104.0,
        127.99999,
        128.0,
        149.0,
        150.0,
        151.0,
        1e10,
        4194303.5,
        4194304.0,
        8388607.5,
        16777215.0,
        16777216.0,
        3.4028235e38,
        np.inf,
        np.nan,
    ],
    "float32",
)
SPECIAL = np.concatenate([SPECIAL, -SPECIAL])
NATIVE = {"x86_64": "x86-64-v3", "aarch64": "generic"}[platform.machine()]
TARGETS = {  # and what a vector register is called there
    "x86-64-v4": ("x86_64-linux-gnu", r"%zmm\d"),
    "x86-64-v3": ("x86_64-linux-gnu", r"%ymm\d"),
    "generic": ("aarch64-linux-gnu", r"\bv\d+\.4s"),
}


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    vector_math.register()


def build(
    name: str,
    size: int,
    lanes: int,
    dtype: str = "float32",
    mcpu: str = NATIVE,
    fast_math: bool = False,
) -> tvm.runtime.Module:
    """A kernel that applies a function to `size` elements (a pair of tensors for pow), in vectors of `lanes`."""
    own = {"pow": tirx.power, **{gelu: functools.partial(gelu_call, gelu) for gelu in GELU}}
    function = own.get(name) or getattr(tirx, name)
    places = [te.placeholder((size,), dtype, name=f"x{i}") for i in range(2 if name == "pow" else 1)]
    return compiled(places, lambda i: function(*[place[i] for place in places]), lanes, mcpu, fast_math)


def gelu_call(name: str, x: tirx.Expr) -> tirx.Expr:
    return tirx.call_intrin("float32", vector_math.op_name(name), x)


def compiled(
    places: Sequence[te.Tensor],
    element: Callable[[tirx.Var], tirx.Expr],
    lanes: int,
    mcpu: str = NATIVE,
    fast_math: bool = False,
) -> tvm.runtime.Module:
    """A kernel of the tensors `places` whose result has `element` of each index, in vectors of `lanes`."""
    result = te.compute(places[0].shape, element, name="result")
    schedule = Schedule(tvm.IRModule({"main": te.create_prim_func([*places, result])}))
    (loop,) = schedule.get_loops(schedule.get_sblock("result"))
    if lanes > 1:
        schedule.vectorize(schedule.split(loop, [None, lanes])[1])
    section = NumericsSection(fast_math=fast_math)
    target = {"kind": "llvm", "mcpu": mcpu, "mtriple": TARGETS[mcpu][0], **numerics.llvm_attributes(section)}
    with tvm.transform.PassContext(opt_level=3, config=numerics.pass_config(section)):
        return tvm.tirx.build(schedule.mod, target=tvm.target.Target(target))


def run(library: tvm.runtime.Module, *inputs: np.ndarray) -> np.ndarray:
    out = tvm.runtime.tensor(np.empty_like(inputs[0]))
    library["main"](*map(tvm.runtime.tensor, inputs), out)
    return out.numpy()


def want(name: str, *inputs: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return REFERENCES[name](*[x.astype("float64") for x in inputs])


def ulps(got: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Distances in units in the last place of the correctly rounded float32; infinite where only one is a number."""
    with np.errstate(all="ignore"):
        rounded = exact.astype("float32")
        unit = np.spacing(np.maximum(abs(rounded), np.finfo("float32").tiny)).astype("float64")
        distance = abs(got.astype("float64") - exact) / unit
    same = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
    return np.where(same, np.minimum(np.nan_to_num(distance), 0.5), np.nan_to_num(distance, nan=np.inf))


def assert_same_signs(got: np.ndarray, exact: np.ndarray) -> None:
    numbers = ~np.isnan(exact)
    np.testing.assert_array_equal(np.signbit(got[numbers]), np.signbit(exact[numbers]))


def arguments(count: int, seed: int = 0) -> np.ndarray:
    """Special values, float32 of every magnitude, and more of them where functions bend."""
    rng = np.random.default_rng(seed)
    drawn = [rng.integers(0, 1 << 32, count, dtype=np.uint32).view("float32")]
    drawn += [rng.uniform(low, high, count).astype("float32") for low, high in ((-1, 1), (0.4, 1.6), (-110, 110))]
    values = np.concatenate([SPECIAL, *drawn, rng.standard_normal(count).astype("float32")])
    return values[: len(values) // 16 * 16].copy()


@pytest.mark.parametrize("fast_math", [False, True])
@pytest.mark.parametrize("name", UNARY)
def test_a_million_values(name: str, fast_math: bool) -> None:
    x = arguments(1 << 18)
    got, exact = run(build(name, len(x), 16, fast_math=fast_math), x), want(name, x)
    errors = ulps(got, exact)
    worst = int(errors.argmax())
    assert errors[worst] <= LARGEST[name], f"{name}({x[worst]!r}) is {errors[worst]:.2f} units off"
    if not fast_math:  # there LLVM may take -0 for 0
        assert_same_signs(got, exact)


@pytest.mark.parametrize("fast_math", [False, True])
@pytest.mark.parametrize("name", GELU)
def test_a_million_values_of_gelu(name: str, fast_math: bool) -> None:
    mcpu = {"gelu": NATIVE, "gelu_by_table": "x86-64-v4"}[name]
    if mcpu == "x86-64-v4" and "avx512f" not in host_features():
        pytest.skip("this CPU has no AVX-512")
    rng = np.random.default_rng(0)
    x = np.concatenate([arguments(1 << 18), rng.uniform(-9, 9, 1 << 18).astype("float32")])
    got, exact = run(build(name, len(x), 16, mcpu=mcpu, fast_math=fast_math), x), want(name, x)
    errors = ulps(got, exact)
    for low, high, largest in GELU[name]:
        within = (x >= low) & (x < high)
        assert errors[within].max() <= largest, f"{low} to {high}"
    np.testing.assert_array_equal(np.isnan(got), np.isnan(exact))  # also at -inf, as with erf
    far = (x < -4) & np.isfinite(x)
    assert abs(got[far] - exact[far]).max() < 4e-10
    if not fast_math:
        exact[abs(exact) < 1e-45] = 0  # half of the smallest number is rounded to 0 of any sign
        exact[x == 0] = x[x == 0]
        assert_same_signs(got[(exact != 0) | (x == 0)], exact[(exact != 0) | (x == 0)])


ROOT_HALF = 0.5**0.5
SPELLINGS: dict[str, Callable[..., tirx.Expr]] = {
    "TVM's": lambda x: x * (0.5 + tirx.erf(x * ROOT_HALF) * 0.5),
    "divided": lambda x: x * (tirx.erf(x / 2**0.5) + 1.0) * 0.5,
    "halved first": lambda x: x * 0.5 * (1.0 + tirx.erf(ROOT_HALF * x)),
    "half at the end": lambda x: (1.0 + tirx.erf(x * ROOT_HALF)) * x / 2.0,
    "of a sum": lambda x: (x + 1.0) * (0.5 + tirx.erf((x + 1.0) * ROOT_HALF) * 0.5),
    "times another": lambda x: x * (0.5 + tirx.erf(x * ROOT_HALF) * 0.5) * (x - 3.0),
}
LOOKALIKES: dict[str, Callable[..., tirx.Expr]] = {
    "not of x": lambda x: x * (0.5 + tirx.erf((x + 1.0) * ROOT_HALF) * 0.5),
    "no root": lambda x: x * (0.5 + tirx.erf(x * 0.7) * 0.5),
    "other height": lambda x: x * (0.5 + tirx.erf(x * ROOT_HALF) * 0.4),
    "twice as much": lambda x: x * (1.0 + tirx.erf(x * ROOT_HALF)),
    "upside down": lambda x: x / (0.5 + tirx.erf(x * ROOT_HALF) * 0.5),
    "subtracted": lambda x: x * (0.5 - tirx.erf(x * ROOT_HALF) * 0.5),
}


@pytest.mark.parametrize("mcpu", TARGETS)
def test_gelu_is_looked_up_where_one_instruction_does(mcpu: str) -> None:
    place = te.placeholder((1024,), "float32", name="x")
    result = te.compute((1024,), lambda i: SPELLINGS["TVM's"](place[i]), name="result")
    schedule = Schedule(tvm.IRModule({"main": te.create_prim_func([place, result])}))
    (loop,) = schedule.get_loops(schedule.get_sblock("result"))
    schedule.vectorize(schedule.split(loop, [None, 16])[1])
    target = tvm.target.Target({"kind": "llvm", "mcpu": mcpu, "mtriple": TARGETS[mcpu][0]})
    assembly = tvm.tirx.build(recognise_gelu.recognised(schedule.mod, target), target=target).inspect_source("asm")
    assert ("vpermps" in assembly) == (mcpu == "x86-64-v4")
    assert called(assembly) == set()


def recognised(element: Callable[..., tirx.Expr]) -> tuple[str, Callable[[np.ndarray], np.ndarray]]:
    """A kernel after RecogniseGelu as text, and itself."""
    place = te.placeholder((64,), "float32", name="x")
    result = te.compute((64,), lambda i: element(place[i]), name="result")
    target = tvm.target.Target({"kind": "llvm", "mcpu": NATIVE})
    mod = recognise_gelu.recognised(tvm.IRModule({"main": te.create_prim_func([place, result])}), target)
    library = tvm.tirx.build(mod, target=target)
    return mod["main"].script(), lambda x: run(library, x)


@pytest.mark.parametrize("name", [*SPELLINGS, *LOOKALIKES])
def test_gelu_is_found_as_it_is_written(name: str) -> None:
    element = SPELLINGS.get(name) or LOOKALIKES[name]
    text, kernel = recognised(element)
    assert ("erf" in text) == (name in LOOKALIKES)
    x = np.linspace(-5, 5, 64, dtype="float32")
    plain = te.placeholder((64,), "float32", name="x")
    np.testing.assert_allclose(kernel(x), run(compiled([plain], lambda i: element(plain[i]), 1), x), 1e-5, 1e-6)


@pytest.mark.parametrize("fast_math", [False, True])
def test_a_million_powers(fast_math: bool) -> None:
    rng, count = np.random.default_rng(0), 1 << 18
    bits = rng.integers(0, 1 << 32, (2, count), dtype=np.uint32).view("float32")
    pairs = [
        np.stack(np.meshgrid(SPECIAL, SPECIAL)).reshape(2, -1),
        bits,
        np.stack([np.exp(rng.uniform(-20, 20, count)), rng.uniform(-20, 20, count)]),
        np.stack([rng.uniform(0.5, 2, count), rng.uniform(-140, 140, count)]),
        np.stack([rng.uniform(-9, 9, count), rng.integers(-20, 20, count)]),
    ]
    x, y = np.concatenate([pair.astype("float32") for pair in pairs], axis=1)
    got, exact = run(build("pow", len(x), 16, fast_math=fast_math), x, y), want("pow", x, y)
    errors = ulps(got, exact)
    worst = int(errors.argmax())
    assert errors[worst] <= LARGEST["pow"], f"pow({x[worst]!r}, {y[worst]!r}) is {errors[worst]:.2f} units off"
    if not fast_math:
        assert_same_signs(got, exact)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0, 3.0, 4.0, -1.0, -0.5, 2.5])
def test_powers_with_a_constant_exponent(exponent: float, capfd: pytest.CaptureFixture[str]) -> None:
    x = arguments(1 << 14)
    place = te.placeholder(x.shape, "float32", name="x")
    library = compiled([place], lambda i: tirx.power(place[i], tirx.const(exponent, "float32")), 16)
    capfd.readouterr()  # TVM advises against exponents from 3
    got, exact = run(library, x), want("pow", x, np.full_like(x, exponent))
    assert ulps(got, exact).max() <= 2.0
    assert_same_signs(got, exact)


@pytest.mark.parametrize("lanes", [1, 2, 3, 8, 17, 64])
@pytest.mark.parametrize("name", ["exp", "sin", "pow"])
def test_every_width_gives_the_same_bits(name: str, lanes: int) -> None:
    x = arguments(1000)[:1003]  # the last vector is not full for any width from 2
    inputs = [x, x[::-1].copy()] if name == "pow" else [x]
    np.testing.assert_array_equal(run(build(name, len(x), lanes), *inputs), run(build(name, len(x), 4), *inputs))


HALVES = [(name, dtype) for name in ("exp", "log", "erf", "cos") for dtype in ("float16", "bfloat16")]


@pytest.mark.parametrize(("name", "dtype"), [*HALVES, *[(name, "float64") for name in UNARY]])
def test_other_dtypes(name: str, dtype: str) -> None:
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    with np.errstate(all="ignore"):
        x = np.concatenate([SPECIAL, np.linspace(-9, 9, 36)]).astype(kind)
        exact = want(name, x)
        got, rounded = run(build(name, len(x), 8, dtype), x).astype("float64"), exact.astype(kind).astype("float64")
    np.testing.assert_array_equal(np.isnan(got), np.isnan(rounded))
    info = ml_dtypes.finfo(kind)
    np.testing.assert_allclose(got, rounded, rtol=4 * float(info.eps), atol=2 * float(info.smallest_subnormal))


def called(assembly: str) -> set[str]:
    """The functions that the code calls or jumps to, but for TVM's and the kernel itself."""
    names = set(re.findall(r"^\s+(?:callq?|jmpq?|bl|b)\s+([a-z_]\w*)", assembly, re.MULTILINE))
    return {name for name in names if not name.startswith(("__tvm", "TVM", "main"))}


@pytest.mark.parametrize("mcpu", TARGETS)
@pytest.mark.parametrize("name", [name for name in REFERENCES if name != "gelu_by_table"])
def test_nothing_is_called_and_vectors_are_used(name: str, mcpu: str) -> None:
    assembly = build(name, 1024, 16, mcpu=mcpu).inspect_source("asm")
    assert called(assembly) == set()
    assert re.search(TARGETS[mcpu][1], assembly)


def test_the_check_for_calls_finds_them() -> None:
    assert called(build("erf", 64, 16, "float64").inspect_source("asm")) == {"erf"}


def test_functions_of_functions_compile() -> None:
    """Each is a tree of names that build upon names: written out, seven levels would be beyond any memory."""
    place = te.placeholder((64,), "float32", name="x")
    names = ("sin", "exp", "tanh", "erf", "log1p", "sigmoid", "cos")

    def nested(i: tirx.Var) -> tirx.Expr:
        value = place[i]
        for name in names:
            value = getattr(tirx, name)(value)
        return value / (nested_difference(place[i]) + 2.0)

    def nested_difference(value: tirx.Expr) -> tirx.Expr:
        return tirx.exp(tirx.const(1.0, "float32") / (tirx.tanh(value) - tirx.tanh(value + 1.0)))

    x = np.linspace(-3, 3, 64, dtype="float32")
    exact = x.astype("float64")
    for name in names:
        exact = REFERENCES[name](exact)
    exact /= np.exp(1 / (np.tanh(x.astype("float64")) - np.tanh(x.astype("float64") + 1))) + 2
    np.testing.assert_allclose(run(compiled([place], nested, 16), x), exact, rtol=1e-5)


ONNX_NAMES = {
    "Exp": "exp",
    "Log": "log",
    "Tanh": "tanh",
    "Sigmoid": "sigmoid",
    "Erf": "erf",
    "Sin": "sin",
    "Cos": "cos",
    "Tan": "tan",
    "Sinh": "sinh",
    "Cosh": "cosh",
    "Asin": "asin",
    "Acos": "acos",
    "Atan": "atan",
    "Atanh": "atanh",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """x -> one output per function, and x^x."""
    nodes = [helper.make_node(op, ["x"], [name]) for op, name in ONNX_NAMES.items()]
    nodes.append(helper.make_node("Pow", ["x", "x"], ["pow"]))
    outputs = [helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None) for node in nodes]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4000])
    path = tmp_path_factory.mktemp("math") / "math.onnx"
    graph = helper.make_graph(nodes, "math", [x], outputs)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_a_library_needs_no_mathematical_function(model: Path) -> None:
    out = model.parent / "here.tvmflow"
    tvmflow.compile(model, out=out, overrides=[{"verify": {"enabled": False}}])
    with (out / LIBRARY).open("rb") as stream:
        table = ELFFile(stream).get_section_by_name(".dynsym")
        assert isinstance(table, SymbolTableSection)
        needed = {symbol.name for symbol in table.iter_symbols() if symbol["st_shndx"] == "SHN_UNDEF"}
    assert needed - {""} <= {"TVMFFIErrorSetRaisedFromCStrParts", "memcpy", "memset"} | {
        name for name in needed if name.startswith(("_ITM", "__cxa", "__gmon"))
    }


def test_workers_for_candidates_build_the_same() -> None:
    code = """
import tvm
from tvm import te, tirx
from tvmflow.tuning.worker import Job, library
x = te.placeholder((64,), "float32", name="x")
result = te.compute((64,), lambda i: tirx.erf(x[i]), name="result")
mod = tvm.IRModule({"main": te.create_prim_func([x, result]).with_attr("global_symbol", "main")})
built = library(Job(tvm.ir.save_json(mod), (), ()), tvm.target.Target("llvm"))
assert "erff" not in built.inspect_source("asm")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@needs_linker
def test_values_on_aarch64(model: Path) -> None:
    out = model.parent / "there.tvmflow"
    compile_for_aarch64(model, out, "--set", "verify.enabled=false")
    x = arguments(1000)[:4000]
    outputs = run_under_qemu(out, {"x": x})
    for name, got in outputs.items():
        exact = want(name, x, x) if name == "pow" else want(name, x)
        assert ulps(got, exact).max() <= LARGEST[name], name
