"""Proposes buckets: what requests are observed, what each size costs, and which buckets serve them fastest."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tvmflow import artifact, config, flow, frontend
from tvmflow.bucket_search import call_costs, choice, observed, size_costs
from tvmflow.bucket_search.choice import Proposal
from tvmflow.bucket_search.observed import Observed
from tvmflow.config import Config
from tvmflow.errors import ArtifactError, ConfigError, UsageError
from tvmflow.frozen import evolve
from tvmflow.process import Child
from tvmflow.target import FLOP_PER_S
from tvmflow.verification import reference, running
from tvmflow.verification.running import OnEvent


@dataclass(frozen=True)
class Request:
    """What is asked for: the file of observed sizes, at most how many buckets, of which multiples ("" for all dims)."""

    trace: Path
    most: int = 8
    align: Mapping[str, int] | None = None
    measure: bool = False


@dataclass(frozen=True)
class Check:
    """A size between those whose costs are known: its seconds, and what the others say they are."""

    sizes: tuple[int, ...]
    seconds: float
    interpolated_s: float

    @property
    def error(self) -> float:
        return self.interpolated_s / self.seconds - 1


@dataclass(frozen=True)
class Found:
    """A proposal and what it rests on. `known` holds seconds by sizes; `basis` says where they come from."""

    observed: Observed
    proposal: Proposal
    known: Mapping[tuple[int, ...], float]
    check: Check | None
    measured: bool
    basis: str


def propose(cfg: Config, request: Request, on_event: OnEvent) -> Found:
    """The buckets for a config's model; nothing is written.

    Raises InputError for a file that does not hold sizes of the model's open dimensions, ConfigError for a model that
    has none, UsageError for an alignment of what is no dimension, and what building or timing raises.
    """
    specs = Child("reading the model", torch=frontend.needs_torch(cfg)).call(frontend.inputs, cfg)
    dims = tuple(dict.fromkeys(size for spec in specs for size in spec.shape if isinstance(size, str)))
    if not dims:
        raise ConfigError(
            f"{config.name(cfg)}: all sizes of its inputs are fixed, so that there is nothing to choose",
            observed.SHAPE_HINT,
        )
    align = _align(request.align or {}, dims)
    seen = observed.read(request.trace, dims)
    known, check = size_costs.chosen(choice.aligned(seen.sizes, align))
    wanted = [*known, *([check] if check else [])]
    measured = request.measure
    seconds, basis = (_measured if measured else _estimated)(cfg, dims, wanted, on_event)
    costs = size_costs.of_known(dict(zip(known, seconds, strict=False)))
    on_event("choosing buckets")
    proposal = choice.propose(seen, align, costs.at, request.most)
    checked = Check(check, seconds[-1], float(costs.at(np.array([check]))[0])) if check else None
    return Found(seen, proposal, dict(zip(wanted, seconds, strict=True)), checked, measured, basis)


def toml(proposal: Proposal) -> str:
    """The section of a config file that asks for the buckets."""
    buckets = tuple(bucket.sizes for bucket in proposal.buckets)
    names = [config.toml_key(name) for name in proposal.dims]
    axes = choice.axes_of(buckets)
    if axes is not None:
        lists = ", ".join(f"{name} = {list(sizes)}" for name, sizes in zip(names, axes, strict=True))
        return f"[shapes]\nbuckets = {{ {lists} }}\n"
    tables = (", ".join(f"{name} = {size}" for name, size in zip(names, sizes, strict=True)) for sizes in buckets)
    return "[shapes]\nbuckets = [\n" + "".join(f"  {{ {table} }},\n" for table in tables) + "]\n"


def plain(found: Found) -> dict[str, Any]:
    """Everything as JSON values."""
    known = [{"sizes": list(sizes), "seconds": seconds} for sizes, seconds in found.known.items()]
    return {
        **asdict(found.proposal),
        "requests": int(found.observed.counts.sum()),
        "toml": toml(found.proposal),
        "costs": {
            "measured": found.measured,
            "basis": found.basis,
            "known": known,
            "check": asdict(found.check) | {"error": found.check.error} if found.check else None,
        },
    }


def _align(given: Mapping[str, int], dims: Sequence[str]) -> tuple[int, ...]:
    for name in given:
        if name and name not in dims:
            raise UsageError(
                f"--align {name}={given[name]}: the model has no open dimension `{name}`", f"it has: {', '.join(dims)}"
            )
    return tuple(given.get(dim, given.get("", 1)) for dim in dims)


Seconds = tuple[list[float], str]  # by size, and where they come from


def _estimated(
    cfg: Config, dims: Sequence[str], wanted: Sequence[tuple[int, ...]], on_event: Callable[[str], None]
) -> Seconds:
    sizes = [dict(zip(dims, one, strict=True)) for one in wanted]
    with running.cuda_env(cfg.target.kind) as env:
        estimator = Child("estimating costs", env=env, torch=frontend.needs_torch(cfg), on_event=on_event)
        works = estimator.call(call_costs.estimated, cfg, sizes)
    kind = cfg.target.kind
    rates = f"{FLOP_PER_S[kind] / 1e9:g} GFLOP/s and {call_costs.BYTES_PER_S[kind] / 1e9:g} GB/s"
    basis = (
        f"estimated from the kernels of {len(wanted)} sizes, by {rates}"
        + (" per thread" if kind == "llvm" else "")
        + f", {call_costs.KERNEL_S * 1e6:g} us per kernel and "
        f"{call_costs.CALL_S * 1e6:g} per call; --measure times them"
    )
    return [work.seconds for work in works], basis


def _measured(
    cfg: Config, dims: Sequence[str], wanted: Sequence[tuple[int, ...]], on_event: Callable[[str], None]
) -> Seconds:
    seconds = [
        _timed(
            call_costs.static(cfg, dict(zip(dims, one, strict=True))),
            on_event,
            f"{call_costs.shown(dict(zip(dims, one, strict=True)))} ({number} of {len(wanted)})",
        )
        for number, one in enumerate(wanted, start=1)
    ]
    return seconds, f"measured on this machine with libraries of {len(wanted)} sizes"


def _timed(cfg: Config, on_event: Callable[[str], None], place: str) -> float:
    unchecked = evolve(cfg, verify=evolve(cfg.verify, enabled=False), tuning=evolve(cfg.tuning, require_tuned=None))
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as name, running.cuda_env(cfg.target.kind) as env:
        folder = Path(name) / "library"
        on_event(f"compiling {place}")
        flow.compile_model(unchecked, folder)
        on_event(f"timing {place}")
        feeds = reference.draw_accepted(unchecked, artifact.read_manifest(folder))
        return Child(f"timing {place}", ArtifactError, running.RUN_ENV | env).call(call_costs.timed, folder, feeds)
