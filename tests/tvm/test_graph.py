"""Graph stage: exact folding, layout choice, constants taken out, default schedules, each against what it must keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import relax, te, topi

from tvmflow.artifact import ALIGNMENT
from tvmflow.graph.passes import cancel_transposes, fold_exactly
from tvmflow.graph.passes.take_weights_out import SMALLEST_BYTES, take_weights_out
from tvmflow.kernels.rewrites import compare_exactly
from tvmflow.kernels.schedules import default_schedule
from tvmflow.pipeline import layouts, plan
from tvmflow.pipeline.context import Context

TARGET = {"kind": "llvm", "num-cores": 2}


PACKED = Context("llvm", prepack=True)


def module(build: Callable[[relax.BlockBuilder, relax.Var], relax.Expr], shape: tuple[int, ...]) -> tvm.IRModule:
    """A module whose main(x: float32[shape]) returns what `build` makes of x."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(build(builder, x))
        builder.emit_func_output(result)
    return builder.get()


def evaluate(mod: tvm.IRModule, *arrays: np.ndarray) -> np.ndarray:
    """Runs a module through the whole pipeline."""
    with tvm.target.Target(TARGET):
        weights: list[tvm.runtime.Tensor] = []
        context = dataclasses.replace(PACKED, on_weights=weights.extend)
        later = ("fuse", "schedule", "rewrite", "pack", "prefetch", "weights", "lower")
        mod = plan.run(mod, plan.steps_of(context, *later))
        built = relax.vm_build.build(mod, tvm.target.Target(TARGET), relax_pipeline=None)
    machine = relax.VirtualMachine(built, tvm.cpu())
    return np.asarray(machine["main"](*map(tvm.runtime.tensor, arrays), *weights).numpy())


def convolution(builder: relax.BlockBuilder, x: relax.Expr, out: int, kernel: int, seed: int = 0) -> relax.Var:
    channels = int(x.ty.shape[1])
    weight = np.random.default_rng(seed).standard_normal((out, channels, kernel, kernel)).astype("f4")
    return builder.emit(relax.op.nn.conv2d(x, relax.const(weight), padding=kernel // 2))


def ops(mod: tvm.IRModule) -> list[str]:
    names: list[str] = []
    relax.analysis.post_order_visit(
        mod["main"], lambda node: names.append(node.op.name) if isinstance(node, relax.Call) else None
    )
    return names


def test_exact_folding_is_exact_and_total() -> None:
    rng = np.random.default_rng(0)
    variance, gamma = rng.random((2, 64), "f4")

    def scale(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        shifted = builder.emit(relax.op.add(relax.const(variance), relax.const(np.float32(1e-5))))
        root = builder.emit(relax.op.sqrt(shifted))
        ratio = builder.emit(relax.op.divide(relax.const(gamma), root))
        shaped = builder.emit(relax.op.permute_dims(builder.emit(relax.op.reshape(ratio, (8, 8)))))
        return builder.emit(relax.op.multiply(x, shaped))

    mod = fold_exactly.FoldExactly()(module(scale, (8, 8)))
    mod = tvm.relax.transform.DeadCodeElimination()(mod)
    assert ops(mod) == ["relax.multiply"]
    x = rng.standard_normal((8, 8)).astype("f4")
    want = x * (gamma / np.sqrt(variance + np.float32(1e-5))).reshape(8, 8).T
    np.testing.assert_array_equal(evaluate(mod, x), want)


def test_transposes_that_undo_each_other_go() -> None:
    def there_and_back(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        there = builder.emit(relax.op.permute_dims(x, [0, 2, 3, 1]))
        back = builder.emit(relax.op.permute_dims(there, [0, 3, 1, 2]))
        further = builder.emit(relax.op.permute_dims(there, [0, 2, 3, 1]))
        return builder.emit(relax.op.multiply(back, builder.emit(relax.op.permute_dims(further, [0, 2, 3, 1]))))

    mod = cancel_transposes.CancelTransposes()(module(there_and_back, (2, 3, 3, 3)))
    mod = tvm.relax.transform.DeadCodeElimination()(mod)
    assert ops(mod).count("relax.permute_dims") == 3
    x = np.random.default_rng(0).standard_normal((2, 3, 3, 3)).astype("f4")
    np.testing.assert_array_equal(evaluate(mod, x), x * x)


@pytest.mark.parametrize(
    "reader",
    [
        lambda y: relax.op.squeeze(y, [-1]),
        lambda y: relax.op.squeeze(y, [-1, -2]),
        lambda y: relax.op.permute_dims(y, [0, 2, 3, -3]),
        lambda y: relax.op.stack([y, y], -1),
        lambda y: relax.op.stack([relax.op.squeeze(y, [2, 3])], 0),
    ],
)
def test_layouts_change_around_stacks_and_axes_counted_from_behind(reader: Callable[[relax.Expr], relax.Expr]) -> None:
    mod = module(lambda b, x: b.emit(reader(convolution(b, x, 8, 1))), (2, 8, 1, 1))
    changed = plan.run(mod, plan.steps_of(Context("llvm", nhwc=True), "layout"))
    (binding,) = [
        binding
        for block in changed["main"].body.blocks
        for binding in block.bindings
        if getattr(getattr(binding.value, "op", None), "name", "") == "relax.nn.conv2d"
    ]
    assert binding.value.attrs.data_layout == "NHWC"
    x = np.random.default_rng(0).standard_normal((2, 8, 1, 1)).astype("f4")
    np.testing.assert_allclose(evaluate(changed, x), evaluate(mod, x), rtol=1e-5, atol=1e-6)


def test_constants_leave_the_library() -> None:
    mod = module(
        lambda b, x: b.emit(
            relax.op.add(b.emit(relax.op.multiply(x, relax.const(np.ones((4, 64), "f4")))), relax.const(np.float32(3)))
        ),
        (4, 64),
    )
    stripped, weights = take_weights_out(mod)
    assert [w.shape for w in weights] == [(4, 64)]
    assert len(stripped["main"].params) == 2
    assert SMALLEST_BYTES <= ALIGNMENT


def test_equal_constants_leave_the_library_once() -> None:
    ones, flat, twos = (np.full(shape, value, "f4") for shape, value in (((4, 64), 1), ((256,), 1), ((4, 64), 2)))

    def build(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        for weight in (ones, twos, ones.copy(), ones.view("i4")):
            operand = b.emit(relax.op.astype(relax.const(weight), "float32"))
            x = b.emit(relax.op.add(b.emit(relax.op.multiply(x, operand)), relax.const(weight.astype("f4"))))
        return b.emit(relax.op.add(x, b.emit(relax.op.reshape(relax.const(flat), (4, 64)))))

    stripped, weights = take_weights_out(module(build, (4, 64)))
    kinds = [(weight.shape, str(weight.dtype), float(weight.numpy().flat[0])) for weight in weights]
    bits = float(ones.view("i4")[0, 0])
    assert kinds == [
        ((4, 64), "float32", 1),
        ((4, 64), "float32", 2),
        ((4, 64), "int32", bits),
        ((4, 64), "float32", bits),
        ((256,), "float32", 1),
    ]
    assert len(stripped["main"].params) == 1 + len(weights)


def chain(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
    """Two convolutions with an activation between: NHWC costs one transpose at each end."""
    hidden = builder.emit(relax.op.nn.relu(convolution(builder, x, 64, 3)))
    return convolution(builder, hidden, 64, 3, 1)


def broken_chain(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
    """A reshape, which no layout passes through, before and behind each of several convolutions."""
    shape = [int(d) for d in x.ty.shape]
    for seed in range(4):
        x = builder.emit(relax.op.reshape(convolution(builder, x, shape[1], 3, seed), [shape[1], -1]))
        x = builder.emit(relax.op.reshape(builder.emit(relax.op.nn.softmax(x)), shape))
    return x


@pytest.mark.parametrize(
    ("build", "size", "choice"),
    [(chain, 12, "nhwc"), (chain, 16, "keep"), (broken_chain, 16, "keep")],
)
def test_auto_takes_the_layout_whose_vectors_fill_registers(
    build: Callable[..., relax.Expr], size: int, choice: str
) -> None:
    shape = (1, 16, size, size)
    mod = module(build, shape)
    with tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v4", "mtriple": "x86_64-linux-gnu"}):
        taken = layouts.choose(mod, "auto", Context("llvm"))
    assert taken.layout == choice
    kept, converted = (layouts.choose(mod, wanted, Context("llvm")) for wanted in ("keep", "nhwc"))
    assert len(kept.transforms) == 0
    assert len(converted.transforms) > 0
    x = np.random.default_rng(5).standard_normal(shape).astype("f4")
    want = evaluate(kept.mod, x)
    for other in (taken, converted):
        np.testing.assert_allclose(evaluate(other.mod, x), want, rtol=1e-4, atol=1e-3)


def test_transposes_of_unit_axes_do_not_count() -> None:
    def build(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        free = builder.emit(relax.op.permute_dims(x, [0, 2, 3, 1]))  # 1x1x5x6 -> 1x5x6x1: nothing moves
        return builder.emit(relax.op.permute_dims(free, [0, 2, 1, 3]))

    (found,) = layouts.transforms_of(module(build, (1, 1, 5, 6)))
    assert (found.place, found.shape, found.size_bytes) == ("permute_dims -> permute_dims -> output", (1, 6, 5, 1), 120)


# --- default schedules: the same values as the loops they replace -----------------------------------------------------


def matmul(m: int, n: int, k: int) -> list[te.Tensor]:
    a, b = te.placeholder((m, k), name="A"), te.placeholder((k, n), name="B")
    r = te.reduce_axis((0, k), name="r")
    return [a, b, te.compute((m, n), lambda i, j: te.sum(a[i, r] * b[r, j], axis=r), name="C")]


def conv(channels: int, size: int, out: int, stride: int, groups: int = 1) -> list[te.Tensor]:
    a = te.placeholder((1, channels, size, size), name="A")
    b = te.placeholder((out, channels // groups, 3, 3), name="B")
    layer = topi.nn.group_conv2d_nchw(a, b, stride, 1, 1, groups) if groups > 1 else topi.nn.conv2d(a, b, stride, 1, 1)
    return [a, b, topi.nn.relu(layer)]


def row_sum(rows: int, columns: int) -> list[te.Tensor]:
    a = te.placeholder((rows, columns), name="A")
    r = te.reduce_axis((0, columns), name="r")
    return [a, te.compute((rows,), lambda i: te.sum(a[i, r], axis=r), name="C")]


def unequal(size: int) -> list[te.Tensor]:
    """Whether x is not 1, with NaN among x: an ordered comparison would say no."""
    x = te.placeholder((size,), name="X")
    same = te.compute((size,), lambda i: x[i] == 1.0, name="S")
    other = te.compute((size,), lambda i: tvm.tirx.Not(same[i]), name="N")
    return [x, te.compute((size,), lambda i: other[i].astype("float32"), name="Y")]


def masked(rows: int, columns: int) -> list[te.Tensor]:
    """x where it is neither below -1 nor above 1, else 0: booleans in buffers of their own."""
    x = te.placeholder((rows, columns), name="X")
    low = te.compute((rows, columns), lambda i, j: x[i, j] < -1.0, name="L")
    high = te.compute((rows, columns), lambda i, j: x[i, j] > 1.0, name="H")
    either = te.compute((rows, columns), lambda i, j: tvm.tirx.Or(low[i, j], high[i, j]), name="E")
    inside = te.compute((rows, columns), lambda i, j: tvm.tirx.Not(either[i, j]).astype("float32"), name="I")
    return [x, te.compute((rows, columns), lambda i, j: x[i, j] * inside[i, j], name="Y")]


KERNELS = {
    "unequal to": (unequal(6), "elementwise"),
    "masks": (masked(7, 10), "elementwise"),
    "masks of whole vectors": (masked(4, 64), "elementwise"),
    "matmul 64x64x64": (matmul(64, 64, 64), "product blocking"),
    "matmul with odd sizes": (matmul(7, 13, 17), "product blocking"),
    "matmul by a prime": (matmul(1, 31, 9), None),
    "matmul to one column": (matmul(33, 1, 65), None),
    "convolution": (conv(16, 28, 32, 1), "product blocking"),
    "strided convolution": (conv(3, 15, 8, 2), None),
    "depthwise convolution": (conv(32, 14, 32, 1, 32), None),
    "row sums": (row_sum(100, 37), "parallel rows"),
}


@pytest.mark.parametrize("name", KERNELS)
def test_default_schedule_keeps_the_values(name: str) -> None:
    tensors, rule = KERNELS[name]
    function = te.create_prim_func(tensors)
    with tvm.target.Target(TARGET):
        changed = default_schedule.scheduled(function)
    assert changed.attrs[default_schedule.RULE_ATTR] != default_schedule.UNSCHEDULED
    assert rule is None or changed.attrs[default_schedule.RULE_ATTR] == rule
    rng = np.random.default_rng(0)
    *shapes, shape = [[int(d) for d in tensor.shape] for tensor in tensors]
    values = [rng.standard_normal(s).astype("f4") for s in shapes]
    if name == "unequal to":
        values[0][::2] = np.nan
    arrays = [tvm.runtime.tensor(value) for value in values]
    results = []
    for version in (function, changed):
        out = tvm.runtime.tensor(np.full(shape, np.nan, "f4"))
        main = tvm.IRModule({"main": version.with_attr("global_symbol", "main")})
        main = compare_exactly.exact(main, "llvm") if version is changed else main
        tvm.compile(main, target=tvm.target.Target(TARGET))["main"](*arrays, out)
        results.append(out.numpy())
    np.testing.assert_allclose(results[1], results[0], rtol=1e-4, atol=1e-4)


def test_a_tuned_kernel_is_left_alone() -> None:
    function = te.create_prim_func(matmul(8, 16, 8)).with_attr("tirx.is_scheduled", True)
    with tvm.target.Target(TARGET):
        mod = default_schedule.DefaultSchedule()(tvm.IRModule({"main": function}))
    tvm.ir.assert_structural_equal(mod["main"], function)


def test_weights_are_repacked_to_what_their_kernel_reads() -> None:
    """The whole path: blocking asks for a layout, numpy repacks, and the product is numpy's."""
    weights = np.random.default_rng(0).standard_normal((48, 96)).astype("f4")
    mod = module(lambda builder, x: relax.op.matmul(x, relax.const(weights)), (7, 48))
    with tvm.target.Target(TARGET):
        packed = plan.run(mod, plan.steps_of(PACKED, "fuse", "schedule", "rewrite", "pack", "prefetch"))
    assert not [var for var in packed.functions if "weight_prepack" in var.name_hint], "nothing is left to repack"
    x = np.random.default_rng(1).standard_normal((7, 48)).astype("f4")
    np.testing.assert_allclose(evaluate(packed, x), x @ weights, rtol=1e-4, atol=1e-4)
