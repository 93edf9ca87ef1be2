"""From a model to the fused kernels that keys, tuning and build all start from: one way there, so that keys match."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvmflow.config import Config, has_tf32
from tvmflow.errors import TargetError
from tvmflow.pipeline.context import Context, context_of

if TYPE_CHECKING:
    import tvm

    from tvmflow.frontend.model import Model
    from tvmflow.kernels.winograd.minimal_filtering import Measured, Shape
    from tvmflow.pipeline.layouts import LayoutChoice
    from tvmflow.pipeline.plan import AfterStep
    from tvmflow.target import Target


@dataclass(frozen=True)
class Setting:
    """The target of a config with nothing left open, as we and as TVM describe it."""

    target: Target
    tvm_target: tvm.target.Target
    pass_config: dict[str, bool]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """What every pass must run inside of."""
        import tvm

        from tvmflow.kernels.mathematics import vector_math

        if self.target.kind == "llvm":
            vector_math.register()  # in whichever process builds; nothing undoes it, and no other target is concerned
        with tvm.transform.PassContext(opt_level=3, config=self.pass_config), self.tvm_target:
            yield


def setting(cfg: Config) -> Setting:
    """Resolves the target of a config on this machine; raises TargetError."""
    from tvmflow import target as targets
    from tvmflow.codegen import numerics

    target = targets.resolve(cfg.target, _detected_arch(cfg))
    if cfg.numerics.tf32 and target.arch and not has_tf32(target.arch):
        raise TargetError(
            f"numerics.tf32 = true needs sm_80 or later, the GPU here is {target.arch}",
            "set numerics.tf32 = false, or target.arch for another GPU",
        )
    tvm_target = targets.to_tvm(target, numerics.llvm_attributes(cfg.numerics))
    return Setting(target, tvm_target, numerics.pass_config(cfg.numerics))


def prepare(
    cfg: Config, model: Model, context: Context | None = None, after: AfterStep | None = None
) -> tuple[tvm.IRModule, LayoutChoice]:
    """The module of fused, legal kernels, and the layout chosen on the way. Call it inside `Setting.entered`.

    `context` is that of `build_context`, unless its caller has made one. Raises BudgetError where the layout takes more
    transforms than the config allows, ConfigError where a user's kernel cannot be used.
    """
    from tvmflow.pipeline import layouts, plan

    context, after = context or build_context(cfg), after or plan.ignore_step
    opened = plan.run(model.mod, plan.steps_of(context, "open"), after)
    choice = layouts.choose(opened, cfg.graph.layout, context, after)
    layouts.check_budget(choice.transforms, cfg.graph.max_layout_transforms)
    return plan.run(choice.mod, plan.steps_of(context, "replace", "fuse"), after), choice


def build_context(cfg: Config, **known: Any) -> Context:
    """The pipeline's context for a build of the config, with what its database has on convolutions."""
    return context_of(cfg, measured=measured(cfg), **known)


def measured(cfg: Config) -> Measured:
    """By which method convolutions were measured to be fastest, as the config's tuning database has it for its target.

    A comparison serves the same builds as a record would. Raises DatabaseError where the folder is no database.
    """
    from tvmflow import tasks
    from tvmflow.database import Store
    from tvmflow.database.comparison import EDGES
    from tvmflow.database.lookup import serving
    from tvmflow.host import host_features
    from tvmflow.kernels.winograd.minimal_filtering import unmeasured

    database = cfg.tuning.database
    if cfg.target.kind != "llvm" or cfg.numerics.winograd == "off" or database is None or not database.is_dir():
        return unmeasured
    known = Store(database).comparisons()
    if not known:
        return unmeasured
    target, features = setting(cfg).target, host_features()

    def edge(shape: Shape) -> int | None:
        parts = tasks.key_parts(tasks.convolution_of(shape).workload, target, cfg.numerics)
        found = serving(known, parts, features)
        return EDGES[found.taken] if found is not None else None

    return edge


def _detected_arch(cfg: Config) -> str | None:
    if cfg.target.kind != "cuda" or cfg.target.arch:
        return None
    from tvmflow.codegen import cuda

    return cuda.detect_arch()
