"""What the pipeline of passes depends on: everything that a config, or a part of a build, decides about its list."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tvmflow.config import Config, KernelSection

if TYPE_CHECKING:
    import tvm

    from tvmflow.graph.passes.replace_operators import OnReplaced
    from tvmflow.kernels.winograd.minimal_filtering import Measured


def ignore(_value: Any) -> None:
    """Nobody wants to know."""


def _unmeasured(_shape: Any) -> None:
    """No convolution was measured."""


@dataclass(frozen=True)
class Context:
    """What decides which passes there are. The defaults are the plainest pipeline: nothing asked for, nothing known.

    `convolutions` says how they are computed: "winograd" where that pays by `measured`, "direct", or "marked": direct,
    and to be told from one another. `records` puts schedules of a tuning database onto kernels, None where there is
    none. `on_replaced` is called for each place where a user's kernel replaces operators, `on_weights` once with the
    weights that leave the module.
    """

    kind: str
    guards: bool = False
    widen_half: bool = False
    nhwc: bool = False
    kernels: Mapping[str, KernelSection] = field(default_factory=dict)
    convolutions: Literal["winograd", "direct", "marked"] = "direct"
    measured: Measured = _unmeasured
    prepack: bool | str = False
    tf32: bool = False
    records: Callable[[tvm.IRModule], tvm.IRModule] | None = None
    on_replaced: OnReplaced = ignore
    on_weights: Callable[[tuple[tvm.runtime.Tensor, ...]], None] = ignore


def context_of(cfg: Config, **known: Any) -> Context:
    """The context of a config; `known` are the fields of Context that no config states."""
    on_cpu = cfg.target.kind == "llvm"
    fields = {
        "kind": cfg.target.kind,
        "guards": cfg.graph.guards,
        "widen_half": on_cpu and cfg.numerics.widen_half,
        "nhwc": cfg.graph.layout != "keep",
        "kernels": cfg.kernels,
        "convolutions": "winograd" if on_cpu and cfg.numerics.winograd != "off" else "direct",
        "prepack": cfg.graph.prepack if on_cpu else False,
        "tf32": cfg.numerics.tf32,
    }
    return Context(**(fields | known))
