"""Measures by which method each convolution is fastest: the direct kernel, or Winograd's with tiles of either size.

What is measured are the kernels that a library would have, with all that is fused into them: the direct one under its
best record, or without one under its default schedule. The three run in turns in a process of their own, with cold
weights and what else they read as warm as the kernel before them leaves it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import tvm
from tvm.tirx import PrimFunc

from tvmflow import tasks
from tvmflow.codegen import library, tuned
from tvmflow.config import Config
from tvmflow.database import Comparison, Reading
from tvmflow.database.comparison import EDGES
from tvmflow.graph.passes.fuse_kernels import operators as operators_of
from tvmflow.graph.passes.mark_direct import unmarked
from tvmflow.graph.passes.winograd import shapes
from tvmflow.host import host_features
from tvmflow.kernels.schedules.default_schedule import RULE_ATTR
from tvmflow.kernels.winograd import minimal_filtering
from tvmflow.kernels.winograd.minimal_filtering import DIRECT, POINTS, Shape
from tvmflow.pipeline import layouts, plan
from tvmflow.pipeline.context import context_of
from tvmflow.tuning import space
from tvmflow.tuning.measure import Measurer
from tvmflow.tuning.search import job_of
from tvmflow.tuning.session import provenance

if TYPE_CHECKING:
    from tvmflow.frontend.model import Model
    from tvmflow.pipeline.prepare import Setting

TURNS = 5


@dataclass(frozen=True)
class Rivals:
    """The kernels of one convolution by method (its tiles' edge), and the operators in them, for people."""

    shape: Shape
    operators: str
    kernels: Mapping[int, PrimFunc]


def rivals(cfg: Config, model: Model, setting: Setting) -> list[Rivals]:
    """The kernels of each convolution of a model that Winograd's method could serve, for a CPU.

    Where different things are fused into equal convolutions, the kernels that are called most often.
    """
    with setting.entered():
        graph = _in_layout(cfg, model)
        found = shapes(graph) if graph is not None else ()
        if graph is None or not found:
            return []
        by_edge = {edge: dict(_kernels(cfg, graph, edge, found)) for edge in (DIRECT, *POINTS)}
    chosen: dict[Shape, Rivals] = {}
    for (shape, operators), direct in by_edge[DIRECT].items():  # the most called first
        kernels = {edge: by_edge[edge][shape, operators] for edge in POINTS if (shape, operators) in by_edge[edge]}
        if kernels and shape not in chosen:
            chosen[shape] = Rivals(shape, operators, {DIRECT: direct, **kernels})
    return list(chosen.values())


def compare(
    one: Rivals, cfg: Config, setting: Setting, measurer: Measurer, reading: Reading, again: bool
) -> Comparison | None:
    """Measures the kernels of a convolution in turns; None where the direct one cannot run.

    What `reading` holds of it already stays unless `again`, or its direct kernel has another record now.
    """
    target = setting.target
    convolution = tasks.convolution_of(one.shape)
    parts = tasks.key_parts(convolution.workload, target, cfg.numerics)
    direct, schedule = _direct(one.kernels[DIRECT], cfg, setting, reading)
    known = {comparison.key: comparison for comparison in reading.comparisons}.get(parts.key)
    if known is not None and known.direct == schedule and not again:
        return known
    modules = {
        edge: tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
        for edge, function in {**one.kernels, DIRECT: direct}.items()
    }
    results = measurer.measure([job_of(mod) for mod in modules.values()], None, TURNS)
    samples = {edge: result.samples_s for edge, result in zip(modules, results, strict=True)}
    if not samples[DIRECT]:
        return None
    protocol = f"{measurer.protocol}; {TURNS} turns beside the other methods"
    return Comparison(
        parts=parts,
        convolution=convolution,
        name=f"{one.operators} {one.shape}",
        direct=schedule,
        timings_s={method: samples[edge] for method, edge in EDGES.items() if samples.get(edge)},
        provenance=provenance(parts, measurer, None, len(modules), protocol),
    )


def by_rule(shape: Shape, setting: Setting) -> str:
    """The method that is taken where nothing was measured."""
    plan = minimal_filtering.best_plan(shape, setting.tvm_target)
    return next(method for method, edge in EDGES.items() if edge == (plan.edge if plan else DIRECT))


def _in_layout(cfg: Config, model: Model) -> tvm.IRModule | None:
    """The simplified graph in NHWC, unless its layout is to stay; None where it cannot be had."""
    context = replace(context_of(cfg), convolutions="direct")
    opened = plan.run(model.mod, plan.steps_of(context, "open"))
    try:
        return layouts.choose(opened, "keep" if cfg.graph.layout == "keep" else "nhwc", context).mod
    except Exception:  # whatever TVM raises, with which `compile` keeps the layout
        if cfg.graph.layout == "nhwc":
            raise
        return None


def _kernels(
    cfg: Config, graph: tvm.IRModule, edge: int, found: tuple[Shape, ...]
) -> Iterator[tuple[tuple[Shape, str], PrimFunc]]:
    """The kernels of the convolutions computed with tiles of `edge`, by shape and operators, the most called first."""
    target = tvm.target.Target.current()
    convolutions: Literal["marked", "winograd"] = "marked" if edge == DIRECT else "winograd"
    context = replace(context_of(cfg, measured=lambda shape: edge), convolutions=convolutions)
    fused = plan.run(graph, plan.steps_of(context, "replace", "fuse"))
    by_text = {str(shape) if edge == DIRECT else _rule(shape, edge, target): shape for shape in found}
    calls = library.calls(fused)
    for var, function in sorted(fused.functions.items(), key=lambda item: -calls[item[0].name_hint]):
        if not isinstance(function, PrimFunc):
            continue
        plain, text = unmarked(function) if edge == DIRECT else (function, str(function.attrs.get(RULE_ATTR)))
        if text in by_text:
            yield (by_text[text], " ".join(operators_of(var.name_hint, function))), plain


def _rule(shape: Shape, edge: int, target: tvm.target.Target) -> str:
    plan = minimal_filtering.best_plan(shape, target, lambda shape: edge)
    assert plan is not None  # `shapes` are those that fit
    return minimal_filtering.rule(plan, shape)


def _direct(function: PrimFunc, cfg: Config, setting: Setting, reading: Reading) -> tuple[PrimFunc, str]:
    """The scheduled direct kernel, and what its schedule is."""
    mod = tvm.IRModule({"main": function})
    made = tuned.apply(mod, reading, setting.target, cfg.numerics, host_features()).mod["main"]
    if RULE_ATTR in made.attrs:
        return made, str(made.attrs[RULE_ATTR])
    return space.default(mod, setting.tvm_target).mod["main"], "default"
