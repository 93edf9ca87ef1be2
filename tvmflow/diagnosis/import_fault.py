"""Finds the first node of an ONNX model whose value the import gets wrong, and writes it as a model of its own."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tvmflow import frontend, npz
from tvmflow.config import Config
from tvmflow.diagnosis import parts, reproduction
from tvmflow.errors import ReferenceRunError, UnsupportedError, VerifyError
from tvmflow.frontend.onnx import probe as probes
from tvmflow.frozen import evolve
from tvmflow.manifest import Manifest
from tvmflow.pipeline import building
from tvmflow.pipeline.partial import Part
from tvmflow.process import Child
from tvmflow.verification import compare, running
from tvmflow.verification.reference import Truth

NODE = "node.onnx"
CHILD = Child("looking between the model's nodes", ReferenceRunError)


def locate(cfg: Config, whole: Manifest, truth: Truth, out: Path) -> tuple[str, str] | None:
    """The node and what is wrong with its value on the truth's first inputs; None where each alone is right.

    The reproducer goes to `out`. Raises what the reference, the frontend and the build raise of a model of which every
    value is an output.
    """
    if frontend.is_torch(cfg) or cfg.model.path is None:
        raise UnsupportedError("the nodes of a PyTorch model cannot be looked at one by one", "export it to ONNX")
    feeds = truth.feeds[0].inputs
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as name:
        probe, folder = Path(name) / cfg.model.path.name, Path(name) / "library"
        folder.mkdir()
        names = CHILD.call(probes.expose, cfg.model.path, probe)
        exposed = evolve(cfg, model=evolve(cfg.model, path=probe))
        _, (want,) = CHILD.call(frontend.run_reference, exposed, [feeds])
        signature, _ = CHILD.call(building.inspect, exposed)
        built = parts.build_part(Part(exposed, whole.layout.choice, 0), folder, evolve(whole, signature=signature))
        (got,) = running.run(folder, built, [feeds], None, VerifyError)
    values = dict(zip(names, want, strict=True))
    for result, g, w in zip(names, got, want, strict=True):
        tolerance = compare.tolerance(result, w, cfg.verify, whole.narrowest_float)
        verdict = compare.compare_output(result, g, w, tolerance)
        if not verdict.ok:
            return _written(cfg.model.path, result, {**values, **feeds}, out), f"`{result}`: {verdict.reason}"
    return None


def _written(model: Path, result: str, values: dict[str, Any], out: Path) -> str:
    """The reproducer of a node; returns what the node is called."""
    out.mkdir(parents=True, exist_ok=True)
    node, inputs = CHILD.call(probes.isolate, model, result, values, out / NODE)
    npz.write(out / reproduction.INPUTS, {name: values[name] for name in inputs})
    reproduction.write_case(out, "node", {"summary": f"the import of {node} is wrong"})
    return node
