"""Schedules of tuned kernels carried to kernels of other sizes, with the values of numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm import te

from tvmflow import target as targets
from tvmflow import tasks
from tvmflow.config import NumericsSection, TargetSection
from tvmflow.database import Provenance, Record, pack
from tvmflow.frozen import evolve
from tvmflow.tuning import search, space
from tvmflow.tuning.transfer import NEAREST, Experience, fitted

TARGET = targets.to_tvm(targets.resolve(TargetSection(threads=2)), {})


def canonical(m: int, n: int, k: int) -> tuple[tvm.IRModule, str]:
    a, b = te.placeholder((m, k), name="A"), te.placeholder((k, n), name="B")
    r = te.reduce_axis((0, k), name="r")
    product = te.compute((m, n), lambda i, j: te.sum(a[i, r] * b[r, j], axis=r), name="C")
    shifted = te.compute((m, n), lambda i, j: te.max(product[i, j] - 1.0, 0.0), name="D")
    return tasks.canonical(te.create_prim_func([a, b, shifted]))


def records(m: int, n: int, k: int, count: int) -> list[Record]:
    """Records of the first schedules that the search would try: which one is fast does not matter here."""
    mod, workload = canonical(m, n, k)
    context = space.context(mod, TARGET, "task", seed=1)
    model, database = tvm.s_tir.meta_schedule.cost_model.RandomModel(seed=1), tvm.s_tir.meta_schedule.database
    context.pre_tuning(count, count, space.designs(context), database.MemoryDatabase(), model)
    parts = tasks.key_parts(workload, targets.resolve(TargetSection(threads=2)), NumericsSection())
    provenance = Provenance(
        versions={},
        machine="x",
        cpu="x",
        threads=2,
        date="2026-01-01T00:00:00Z",
        seed=1,
        trials=1,
        protocol="none",
        tvmflow="0",
    )
    return [
        Record(
            parts=parts,
            name="matmul",
            workload_json=pack(tvm.ir.save_json(mod)),
            flop=1.0,
            trace=search.trace_json(candidate.sch),
            timings_s=(1.0,),
            provenance=provenance,
        )
        for candidate in list(context.generate_measure_candidates())[:count]
    ]


@pytest.mark.parametrize("shape", [(48, 96, 80), (64, 64, 64), (7, 130, 33)])
def test_carried_schedules_compute_the_same(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    mod, _ = canonical(*shape)
    starts = Experience(records(32, 64, 128, 6)).starts(mod, space.context(mod, TARGET, "task", seed=0))
    assert len(starts) == NEAREST
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((m, k)).astype("float32"), rng.standard_normal((k, n)).astype("float32")
    want = np.maximum(a.astype("float64") @ b - 1, 0)
    for schedule in starts:
        assert any(kind == "SamplePerfectTile" for kind in kinds_of(schedule))
        got = tvm.runtime.tensor(np.zeros((m, n), "float32"))
        tvm.tirx.build(schedule.mod, target=TARGET)["main"](tvm.runtime.tensor(a), tvm.runtime.tensor(b), got)
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=1e-4)


def kinds_of(schedule: tvm.s_tir.Schedule) -> list[str]:
    return [str(instruction.kind.name) for instruction in schedule.trace.insts]


def test_the_nearest_relatives_come_first_and_strangers_never() -> None:
    mod, _ = canonical(64, 64, 60)
    context = space.context(mod, TARGET, "task", seed=0)
    near, far = records(64, 64, 64, 1), records(4, 512, 8, 1)
    (first, second) = Experience([*far, *near]).starts(mod, context)
    (alone,) = Experience(near).starts(mod, context)
    tvm.ir.assert_structural_equal(first.mod, alone.mod)
    assert second.mod.script() != alone.mod.script()
    stranger = te.placeholder((8, 8), name="A")
    other, _ = tasks.canonical(te.create_prim_func([stranger, te.compute((8, 8), lambda i, j: stranger[i, j] * 2.0)]))
    assert Experience(near).starts(other, space.context(other, TARGET, "task", seed=0)) == []


def test_what_cannot_be_read_or_carried_is_left_out() -> None:
    mod, _ = canonical(64, 64, 60)
    context = space.context(mod, TARGET, "task", seed=0)
    (good,) = records(64, 64, 64, 1)
    damaged = evolve(good, workload_json=pack('{"not": "a module"}'))
    foreign = evolve(good, trace=[["nonsense"], []])
    rigid = evolve(good, trace=[[], []])  # no decision in it
    assert len(Experience([damaged, foreign, rigid]).starts(mod, context)) == 0
    assert len(Experience([damaged, foreign, rigid, good]).starts(mod, context)) <= 1


@given(st.integers(1, 5000), st.lists(st.integers(1, 64), min_size=2, max_size=5))
def test_fitted_factors_make_the_extent(extent: int, factors: list[int]) -> None:
    found = fitted(extent, factors)
    assert math.prod(found) == extent
    assert len(found) == len(factors)


def test_fitted_factors_stay_where_they_divide() -> None:
    assert fitted(960, [5, 2, 4, 16]) == [5, 3, 4, 16]
    assert fitted(256, [2, 4, 16]) == [4, 4, 16]
    assert fitted(7, [2, 4, 16]) == [1, 1, 7]
