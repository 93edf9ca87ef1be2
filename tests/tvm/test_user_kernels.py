"""Kernels of the user's: what their patterns match, what is refused in which words, that wrong values are caught."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import relax
from tvm.script import relax as R  # noqa: N812 # TVMScript's own name

from tvmflow import config, flow, tasks
from tvmflow.codegen import library, tuned
from tvmflow.database import Provenance, Record, Store, pack
from tvmflow.errors import CompileError, ConfigError, VerifyError
from tvmflow.graph.passes.replace_operators import Replacement
from tvmflow.host import host_features
from tvmflow.pipeline import plan, prepare, user_kernel_check
from tvmflow.pipeline.context import Context

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "kernels"

# --- what matches: graphs built by hand -------------------------------------------------------------------------------

SOURCE = """
import math
import tvm
from tvm import te, tirx
from tvm.s_tir import Schedule

asked = []

def matmul(call, factor=1.0):
    asked.append(call)
    a, b = (te.placeholder(t.shape, t.dtype) for t in call.args)
    r = te.reduce_axis((0, a.shape[1]))
    return te.create_prim_func([a, b, te.compute(
        call.output.shape, lambda i, j: te.sum(a[i, r] * b[r, j] * tirx.const(factor, "float32"), axis=r))])

def elementwise(function):
    def kernel(call):
        asked.append(call)
        args = [te.placeholder(t.shape, t.dtype) for t in call.args]
        return te.create_prim_func([*args, te.compute(call.output.shape, lambda *i: function(*(a[i] for a in args)))])
    return kernel

silu = elementwise(lambda x: x * tirx.sigmoid(x))
gelu = elementwise(lambda x: 0.5 * x * (1.0 + tirx.erf(x * 0.5**0.5)))
tanh_plus_exp = elementwise(lambda x: tirx.tanh(x) + tirx.exp(x))
gather = lambda call: te.create_prim_func([
    x := te.placeholder(call.args[0].shape, "float32"), i := te.placeholder(call.args[1].shape, call.args[1].dtype),
    te.compute(call.output.shape, lambda a, b: x[i[a], b])])
scheduled = lambda call: Schedule(matmul(call))
wrong = lambda call: matmul(call, 1.01)
none = lambda call: None
number = lambda call: 5
fails = lambda call: call.args[7]
of_two = lambda call: Schedule(tvm.IRModule({"a": matmul(call), "b": matmul(call)}))
missing_output = lambda call: te.create_prim_func([te.placeholder(call.args[0].shape), te.placeholder((3,))])
other_shape = lambda call: te.create_prim_func([
    te.placeholder((2, 3)), te.placeholder(call.args[1].shape), te.compute(call.output.shape, lambda *i: 1.0)])
other_dtype = lambda call: te.create_prim_func([
    *(te.placeholder(t.shape) for t in call.args), te.compute(call.output.shape, lambda *i: tirx.const(1, "int8"))])
no_buffer = lambda call: tirx.PrimFunc([tirx.Var("n", "int32")] * 3, tirx.Evaluate(0))
aborts = lambda call: tvm.tirx.PrimFunc(matmul(call).params, tirx.Evaluate(tirx.call_extern("int32", "abort")))
"""

Body = Callable[[relax.BlockBuilder, relax.Var], relax.Expr]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("kernels")
    (made / "sample_kernels.py").write_text(SOURCE)
    (made / "broken_kernels.py").write_text("import json\nvalue = json.nonsense\n")
    (made / "importing_kernels.py").write_text("import no_such_package\n")
    return made


def module(body: Body, shape: tuple[object, ...] = (8, 16)) -> tvm.IRModule:
    """A module whose main(x: float32[shape]) returns what `body` makes of x."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(body(builder, x))
        builder.emit_func_output(result)
    return builder.get()


def weight(*shape: int, seed: int = 0) -> relax.Expr:
    return relax.const(np.random.default_rng(seed).standard_normal(shape).astype("f4"))


def two_matmuls(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
    hidden = builder.emit(relax.op.nn.relu(builder.emit(relax.op.matmul(x, weight(16, 16)))))
    return builder.emit(relax.op.matmul(hidden, weight(16, 16, seed=1)))


def silu(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
    return builder.emit(relax.op.multiply(x, builder.emit(relax.op.sigmoid(x))))


def erf_gelu(half: float, root: Callable[[relax.Var], relax.Expr]) -> Body:
    def body(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        shifted = builder.emit(relax.op.add(builder.emit(relax.op.erf(builder.emit(root(x)))), relax.const(1.0)))
        return builder.emit(relax.op.multiply(builder.emit(relax.op.multiply(x, relax.const(half))), shifted))

    return body


def branches(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
    """Used twice: the sigmoid's own value is asked for as well."""
    gate = builder.emit(relax.op.sigmoid(x))
    return builder.emit(relax.op.add(builder.emit(relax.op.multiply(x, gate)), gate))


def taken_rows(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
    return builder.emit(relax.op.take(x, relax.const(np.array([3, 0, 7], "i8")), axis=0))


def section(folder: Path, function: str, replaces: object, source: str = "sample_kernels") -> dict[str, object]:
    return {"entry": f"{source}:{function}", "folder": str(folder), "replaces": replaces}


def cfg_of(**kernels: dict[str, object]) -> config.Config:
    return config.from_dict({"model": {"entry": "m:f"}, "kernels": kernels})


def replaced(cfg: config.Config, mod: tvm.IRModule) -> tuple[tvm.IRModule, list[Replacement]]:
    """The module behind the replacing pass, and one entry per place."""
    found: list[Replacement] = []
    context = Context("llvm", kernels=cfg.kernels, on_replaced=found.append)
    with prepare.setting(cfg).entered():
        return plan.run(mod, plan.steps_of(context, "replace")), found


def checked(cfg: config.Config, mod: tvm.IRModule) -> tuple[str, ...]:
    _, found = replaced(cfg, mod)
    setting = prepare.setting(cfg)
    with setting.entered():
        return user_kernel_check.notes(cfg, found, setting)


def operators(mod: tvm.IRModule) -> list[str]:
    names: list[str] = []
    relax.analysis.post_order_visit(
        mod["main"], lambda node: names.append(node.op.name) if isinstance(node, relax.Call) else None
    )
    return names


def test_equal_calls_are_asked_for_once_and_checked(folder: Path) -> None:
    cfg = cfg_of(mine=section(folder, "matmul", "matmul"))
    mod, found = replaced(cfg, module(two_matmuls))
    assert operators(mod) == ["relax.call_tir", "relax.nn.relu", "relax.call_tir"]
    assert len(found) == 2
    assert found[0] is found[1]
    source, outcome = checked(cfg, module(two_matmuls))
    assert source.startswith("user kernel mine: sample_kernels:matmul, source sha256 ")
    assert outcome.startswith(
        "user kernel mine replaces matmul (float32[8, 16], float32[16, 16] -> float32[8, 16]) in "
        "2 places: verified, max error "
    )


MATCHES = {
    "one whose branches meet": (
        lambda b, x: b.emit(relax.op.add(b.emit(relax.op.tanh(x)), b.emit(relax.op.exp(x)))),
        "tanh_plus_exp",
        ["tanh", "exp", "add"],
    ),
    "a diamond": (silu, "silu", ["sigmoid", "multiply"]),
    "GELU divided by a root": (erf_gelu(0.5, lambda x: relax.op.divide(x, relax.const(2**0.5))), "gelu", "gelu"),
    "GELU times a root": (erf_gelu(0.5, lambda x: relax.op.multiply(x, relax.const(0.5**0.5))), "gelu", "gelu"),
    "GELU itself": (lambda b, x: b.emit(relax.op.nn.gelu(x)), "gelu", ["relax.nn.gelu"]),
    "indices": (taken_rows, "gather", "take"),
    "a schedule": (lambda b, x: b.emit(relax.op.matmul(x, weight(16, 4))), "scheduled", "matmul"),
}


@pytest.mark.parametrize("name", MATCHES)
def test_matches_and_has_the_operators_values(name: str, folder: Path) -> None:
    body, function, pattern = MATCHES[name]
    cfg = cfg_of(mine=section(folder, function, pattern))
    mod, _ = replaced(cfg, module(body))
    assert operators(mod) == ["relax.call_tir"]
    assert "verified, max error" in checked(cfg, module(body))[-1]


@R.function
def branching(x: R.Tensor((8, 16), "float32"), c: R.Tensor((), "bool")) -> R.Tensor((8, 16), "float32"):
    if c:
        gate = R.sigmoid(x)
        y = R.multiply(x, gate)
    else:
        y = R.nn.relu(x)
    outer = R.sigmoid(y)
    return R.multiply(y, outer)


def test_branches_are_looked_into(folder: Path) -> None:
    cfg = cfg_of(mine=section(folder, "silu", ["sigmoid", "multiply"]))
    mod, found = replaced(cfg, tvm.IRModule({"main": branching}))
    assert sorted(operators(mod)) == ["relax.call_tir", "relax.call_tir", "relax.nn.relu"]
    assert len(found) == 2


def test_the_first_kernel_of_a_config_wins(folder: Path) -> None:
    cfg = cfg_of(one=section(folder, "none", "matmul"), two=section(folder, "matmul", "matmul"))
    with pytest.raises(ConfigError, match="user kernel one replaces nothing: its function declined 2 of the places"):
        replaced(cfg, module(two_matmuls))
    cfg = cfg_of(one=section(folder, "matmul", "matmul"), two=section(folder, "matmul", "matmul"))
    with pytest.raises(ConfigError, match="user kernel two replaces nothing: the graph has no matmul left for it"):
        replaced(cfg, module(two_matmuls))


# --- what is refused --------------------------------------------------------------------------------------------------

CALL = r"matmul \(float32\[8, 16\], float32\[16, 16\] -> float32\[8, 16\]\)"
REFUSED = {
    "no module": (("f", "matmul", "nowhere"), r"kernels.mine.entry: no module `nowhere` in .* or on the Python path"),
    "a module that fails": (
        ("f", "matmul", "broken_kernels"),
        r"importing `broken_kernels` failed: AttributeError: .*nonsense.* \(broken_kernels.py, line 2\)",
    ),
    "a module that lacks another": (
        ("f", "matmul", "importing_kernels"),
        "importing `importing_kernels` failed: ModuleNotFoundError",
    ),
    "no function": (("matmull", "matmul"), "sample_kernels.py has no function `matmull`"),
    "unknown operator": (("matmul", "matmull"), "kernels.mine.replaces: Relax has no operator `matmull`"),
    "raises": (("fails", "matmul"), rf"failed for {CALL}: IndexError: .* \(sample_kernels.py, line \d+\)"),
    "returns a number": (("number", "matmul"), "user kernel mine: its function returned a int"),
    "a schedule on two": (("of_two", "matmul"), "its schedule is on a module of 2 functions"),
    "too few parameters": (("missing_output", "matmul"), f"has 2 parameters, {CALL} needs 3"),
    "wrong shape": (("other_shape", ["matmul"]), rf"argument 0 is float32\[2, 3\], {CALL} needs float32\[8, 16\]"),
    "wrong dtype": (("other_dtype", "matmul"), rf"the output is int8\[8, 16\], {CALL} needs float32\[8, 16\]"),
    "no buffers": (("no_buffer", "matmul"), "argument 0 is no buffer of fixed shape"),
    "nothing to replace": (
        ("matmul", "nn.conv2d"),
        "the graph has no nn.conv2d left for it; it holds matmul x 2, nn.relu x 1",
    ),
    "a value used elsewhere": (("matmul", ["nn.relu", "matmul", "add"]), "has no nn.relu \\+ matmul \\+ add left"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_these_words(name: str, folder: Path) -> None:
    arguments, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message) as caught:
        replaced(cfg_of(mine=section(folder, *arguments)), module(two_matmuls))
    assert caught.value.hint


@pytest.mark.parametrize(
    ("function", "pattern", "near"),
    [("matmull", "matmul", "`matmul`"), ("matmul", "matmull", "`matmul`"), ("matmul", ["matmul", "gelo"], "`gelu`")],
)
def test_the_nearest_name_is_suggested(function: str, pattern: object, near: str, folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        replaced(cfg_of(mine=section(folder, function, pattern)), module(two_matmuls))
    assert near in caught.value.hint


def test_other_scalars_are_no_gelu(folder: Path) -> None:
    body = erf_gelu(0.25, lambda x: relax.op.divide(x, relax.const(2**0.5)))
    with pytest.raises(ConfigError, match=r"the graph has no nn\.gelu left"):
        replaced(cfg_of(mine=section(folder, "gelu", "gelu")), module(body))


def test_a_value_that_is_used_elsewhere_stays(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"the graph has no sigmoid \+ multiply left"):
        replaced(cfg_of(mine=section(folder, "silu", ["sigmoid", "multiply"])), module(branches))


def test_open_dimensions_are_not_replaced(folder: Path) -> None:
    mod = module(silu, (tvm.tirx.Var("n", "int64"), 16))
    with pytest.raises(ConfigError, match="each of the 1 places that match has open dimensions"):
        replaced(cfg_of(mine=section(folder, "silu", ["sigmoid", "multiply"])), mod)


def test_wrong_values_name_kernel_place_and_error(folder: Path) -> None:
    with pytest.raises(
        VerifyError,
        match=rf"user kernel mine is wrong for {CALL}, seed 0: 1\d\d of 128 values differ.*"
        "max error 0.*, allowed ",
    ):
        checked(cfg_of(mine=section(folder, "wrong", "matmul")), module(two_matmuls))


def test_what_cannot_run_here_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = {"mine": section(folder, "matmul", "matmul")}
    raw = {"model": {"entry": "m:f"}, "kernels": kernels}
    (_, unchecked) = checked(config.from_dict(raw, [{"verify": {"enabled": False}}]), module(two_matmuls))
    assert unchecked.endswith("not verified: verify.enabled = false")
    monkeypatch.setattr("tvmflow.codegen.cuda.detect_arch", lambda: None)
    cuda = config.from_dict(raw, [{"target": {"kind": "cuda", "arch": "sm_90"}}])
    assert checked(cuda, module(two_matmuls))[-1].endswith("not verified: no GPU is here")
    cross = {"target": {"mtriple": "aarch64-linux-gnu", "mcpu": "generic", "threads": 2}}
    assert checked(config.from_dict(raw, [cross]), module(two_matmuls))[-1].endswith("it is built for aarch64")


def test_a_kernel_has_a_task_and_is_built_from_its_record(folder: Path, tmp_path: Path) -> None:
    cfg = cfg_of(mine=section(folder, "matmul", "matmul"))
    setting = prepare.setting(cfg)
    with setting.entered():
        mod = plan.run(replaced(cfg, module(two_matmuls))[0], plan.steps_of(Context("llvm", prepack=True), "fuse"))
        found = tasks.extract(mod, library.calls(mod), setting.target, cfg.numerics)
        (task,) = (task for task in found if task.name.startswith("user_mine"))
        assert task.weight == 2
        Store(tmp_path).keep(recorded(task))
        mod = tuned.apply(mod, Store(tmp_path).read(), setting.target, cfg.numerics, host_features()).mod
        kernels = library.contents(mod, plan.run(mod, plan.steps_of(Context("llvm"), "lower"))).kernels
    (mine,) = (kernel for kernel in kernels if kernel.name.startswith("user_mine"))
    assert (mine.origin, mine.calls) == ("tuned", 2)
    assert mine.rule.startswith(f"user kernel mine: record {task.key[:12]}, ")


def recorded(task: tasks.Task) -> Record:
    """A record for a task, with its first loop in parallel."""
    schedule = tvm.s_tir.Schedule(task.mod)
    (block,) = schedule.get_child_blocks(schedule.get_sblock("root"))
    schedule.parallel(schedule.get_loops(block)[0])
    provenance = Provenance(
        versions={"apache-tvm": tvm.__version__},
        machine="box",
        cpu="some CPU",
        threads=2,
        seed=0,
        date="2025-01-31T12:00:00Z",
        trials=1,
        protocol="none",
        tvmflow="0.1.0",
    )
    return Record(
        parts=task.parts,
        name=task.name,
        workload_json=pack(tvm.ir.save_json(task.mod)),
        timings_s=(1e-3,),
        trace=json.loads(json.dumps(schedule.trace.as_json(), default=int)),
        flop=task.flop,
        provenance=provenance,
    )


# --- whole models -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples with their model, where their configs expect it."""
    made = tmp_path_factory.mktemp("clone") / "examples" / "kernels"
    made.mkdir(parents=True)
    for file in EXAMPLES.iterdir():
        if file.is_file():
            (made / file.name).write_bytes(file.read_bytes())
    out = made.parents[1] / "out" / "feed_forward.onnx"
    subprocess.run([sys.executable, str(made / "make_model.py"), str(out)], check=True)
    return made


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("matmul", "user kernel packed_matmul: schedule of its own"),
        ("fused", "user kernel feed_forward: product blocking"),
    ],
)
def test_the_examples_compile_to_the_models_values(name: str, rule: str, examples: Path) -> None:
    manifest = flow.compile_model(config.load(examples / f"{name}.toml"), examples / f"{name}.tvmflow")
    (kernel,) = (kernel for kernel in manifest.kernels if kernel.origin == "user")
    assert (kernel.rule, kernel.calls) == (rule, 1)
    assert manifest.verdict is not None
    assert manifest.verdict.ok
    assert manifest.verdict.reference.startswith("ONNX Runtime")
    assert any("in one place: verified, max error " in note for note in manifest.notes)


@pytest.fixture
def model(folder: Path, tmp_path: Path) -> Path:
    """A model of one matmul, float32[8, 16] @ float32[16, 16]."""
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    w = numpy_helper.from_array(np.ones((16, 16), "f4"), "w")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [8, 16]) for name in "xy")
    graph = helper.make_graph([node], "g", [x], [y], [w])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def test_a_kernel_that_crashes_is_named(model: Path, folder: Path, tmp_path: Path) -> None:
    raw = {"model": {"path": str(model)}, "kernels": {"mine": section(folder, "aborts", "matmul")}}
    with pytest.raises(
        CompileError,
        match=rf"^compiling \(user kernel mine: checking it for {CALL}\) crashed "
        r"\(signal 6, SIGABRT\)",
    ):
        flow.compile_model(config.from_dict(raw), tmp_path / "out")
