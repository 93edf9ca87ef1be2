"""From a trained model to a tuned, verified, auditable library.

artifact = tvmflow.compile("model.onnx", shapes={"x": (1, 3, 224, 224)})
outputs = tvmflow.load(artifact).run({"x": array})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvmflow.runtime.bucket_session import BucketSession
    from tvmflow.runtime.session import Session

__all__ = ["compile", "load"]
__version__ = "0.1.0"


def compile(  # noqa: A001 # the verb of the project
    model: str | Path,
    *,
    target: str = "llvm",
    shapes: Mapping[str, Sequence[int | str]] | None = None,
    out: str | Path | None = None,
    overrides: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Compiles and verifies a model, and returns the artifact's path.

    `model` is what the command line takes: an ONNX file, a .pt2 program, a PyTorch entry "module:function", or a
    config file. `target` is "llvm" or "cuda" (a config file's own wins). `shapes` maps inputs to sizes or dimension
    names. `out` defaults to ./NAME.tvmflow. `overrides` are nested tables like {"numerics": {"fast_math": True}}.
    Raises the errors of tvmflow.errors; a wrong value is a VerifyError.
    """
    from tvmflow import config, flow

    inputs = {name: {"shape": list(shape)} for name, shape in (shapes or {}).items()}
    tables = [{"model": {"inputs": inputs}}, *overrides]
    cfg = config.of_model(str(model), tables, defaults={"target": {"kind": target}})
    path = Path(out) if out is not None else Path(f"{config.name(cfg)}.tvmflow")
    flow.compile_model(cfg, path)
    return path


def load(path: str | Path, threads: int | None = None) -> Session | BucketSession:
    """Loads an artifact; `.run({name: array})` returns {name: array}. `threads` overrides the manifest's."""
    from tvmflow import runtime

    return runtime.load(path, threads)
