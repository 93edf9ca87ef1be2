"""PyTorch sources: an entry function of the user's or a saved torch.export program, with names for its edges.

Nothing here knows TVM. Everything runs in a process of its own (tvmflow.process): the user's code is imported and
run, and PyTorch's native code may crash. PyTorch and TVM both bring their thread pools and LLVM along; either order
of importing them works with the pinned versions, and this frontend keeps to one: torch, then tvm.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from tvmflow.errors import InputError, ModelError, ReferenceRunError, UnsupportedError
from tvmflow.files import open_regular
from tvmflow.frontend.torch import archive

Array = np.ndarray[Any, Any]
# One axis of an example input: None = fixed, a name, or one of torch's dynamic dimensions.
Axis = Any


@dataclass(frozen=True)
class Source:
    """A module with example inputs.

    `axes` and `names` hold one entry per tensor input, in flattened order. Inputs that are no tensors (numbers,
    booleans, strings, None) keep their example value for good: they are constants of the compiled model.
    """

    where: str
    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    axes: tuple[tuple[Axis, ...], ...]
    names: tuple[str, ...]
    program: torch.export.ExportedProgram | None = None

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """The tensor inputs by name: forward's parameter name, then the path inside it ("x", "states_0")."""
        leaves = pytree.tree_leaves((self.args, dict(self.kwargs)))
        return dict(zip(self.names, (leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), strict=True))


def load_entry(entry: str, folder: Path) -> Source:
    """Calls `entry` ("package.module:function"), found from `folder`, the working directory or installed packages.

    The function returns (torch.nn.Module, example inputs[, dynamic shapes]); the shapes are torch.export's, in
    which a plain string names a dynamic dimension. Raises ModelError when it cannot be found, fails or returns
    anything else.
    """
    module_name, _, function_name = entry.partition(":")
    for place in (str(Path.cwd()), str(folder.resolve())):
        if place not in sys.path:
            sys.path.insert(0, place)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        if exc.name is None or not f"{module_name}.".startswith(f"{exc.name}."):
            raise _user_error(f"{entry}: importing `{module_name}` failed", exc) from exc
        raise ModelError(
            f"{entry}: there is no module `{exc.name}` in {folder} or on the Python path",
            "give the module as seen from the config file's folder",
        ) from None
    except Exception as exc:
        raise _user_error(f"{entry}: importing `{module_name}` failed", exc) from exc
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ModelError(
            f"{entry}: `{module.__file__}` has no function `{function_name}`",
            "name a function that returns (torch.nn.Module, example inputs[, dynamic shapes])",
        )
    try:
        torch.manual_seed(0)  # the entry is called again for the reference: random weights must be the same ones
        made = function()
    except Exception as exc:
        raise _user_error(f"{entry}: the function failed", exc) from exc
    return source_of(entry, made)


def load_program(path: Path, trusted: bool = False) -> Source:
    """Loads a `.pt2` file of torch.export.save. Raises ModelError when it is damaged, none, or of another torch.

    Unless it is `trusted`, a file that would run code of its own is a ModelError, too.
    """
    try:
        with open_regular(path, ModelError) as stream, contextlib.nullcontext() if trusted else archive.weights_only():
            if not trusted:
                archive.check(path)
            return _source_of_program(str(path), torch.export.load(stream))
    except ModelError:
        raise
    except Exception as exc:
        raise ModelError(
            f"{path}: not a readable torch.export program: {type(exc).__name__}: {_first_lines(exc)}",
            f"write it again with torch.export.save; this is torch {torch.__version__}, which reads programs of"
            " its own and earlier versions",
            traceback.format_exc(),
        ) from exc


def example_inputs(source: Source) -> dict[str, Array]:
    """The example inputs by name, as arrays."""
    return {name: to_array(tensor, f"input {name}") for name, tensor in source.inputs.items()}


def run_eager(source: Source, feeds: Sequence[Mapping[str, Array]]) -> list[list[Array]]:
    """The reference: what eager PyTorch answers to each of `feeds`, in the order of the signature's outputs.

    Raises InputError when a feed does not name exactly the inputs, ReferenceRunError when the module fails.
    """
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.mkldnn.deterministic = True
    return [_run_once(source, feed) for feed in feeds]


def named_outputs(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of what a module returns: "output" for one, "output_0".. for a tuple, the keys of a dict."""
    leaves = pytree.tree_flatten_with_path(tree)[0]
    named = [("_".join(map(_key_text, path)), leaf) for path, leaf in leaves]
    return [(f"output_{name}" if name[:1].isdigit() else name or "output", leaf) for name, leaf in named]


def tensor_placeholders(program: torch.export.ExportedProgram) -> list[torch.fx.Node]:
    """The graph's inputs that are the user's tensors, in order."""
    names = [name for name in program.graph_signature.user_inputs if isinstance(name, str)]
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    return [nodes[name] for name in names if name in nodes and isinstance(nodes[name].meta.get("val"), torch.Tensor)]


def to_array(tensor: torch.Tensor, what: str) -> Array:
    """A contiguous array; UnsupportedError for dtypes that arrays do not have."""
    try:
        array: Array = tensor.detach().cpu().contiguous().resolve_conj().numpy()
    except TypeError:
        raise UnsupportedError(
            f"{what}: {tensor.dtype} cannot go in or out of a library",
            "cast to float32 at the module's edge; inside it may stay",
        ) from None
    return array.copy()


def replace_inputs(source: Source, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The module's arguments with the tensor leaves replaced, in flattened order."""
    leaves, spec = pytree.tree_flatten((source.args, dict(source.kwargs)))
    rest = iter(tensors)
    args, kwargs = pytree.tree_unflatten(
        [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec
    )
    return tuple(args), dict(kwargs)


def _run_once(source: Source, feed: Mapping[str, Array]) -> list[Array]:
    inputs = source.inputs
    if set(feed) != set(inputs):
        raise InputError(
            f"{source.where}: got inputs {sorted(feed)}, the model has {sorted(inputs)}",
            "give each input once, by its name",
        )
    args, kwargs = replace_inputs(source, [torch.from_numpy(np.array(feed[name])) for name in inputs])
    try:
        with torch.no_grad():
            answer = source.module(*args, **kwargs)
    except Exception as exc:
        raise ReferenceRunError(
            f"{source.where}: eager PyTorch failed: {said(exc)}",
            "the module must run with these inputs before it can be verified",
            traceback.format_exc(),
        ) from exc
    return [to_array(leaf, name) for name, leaf in named_outputs(answer) if isinstance(leaf, torch.Tensor)]


def source_of(entry: str, made: Any) -> Source:
    """A Source from what an entry returned; ModelError, naming `entry`, when it is not what it should be."""
    hint = "return (torch.nn.Module, tuple of example inputs[, dynamic shapes])"
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise ModelError(f"{entry}: returned {type(made).__name__}, not a tuple of two or three", hint)
    module, args, *shapes = made
    if not isinstance(module, torch.nn.Module):
        raise ModelError(f"{entry}: the first value is a {type(module).__name__}, not a torch.nn.Module", hint)
    if isinstance(module, torch.jit.ScriptModule):
        raise ModelError(
            f"{entry}: a TorchScript module cannot be exported", "return the torch.nn.Module it was made of"
        )
    if not isinstance(args, tuple | list):
        raise ModelError(f"{entry}: the example inputs are a {type(args).__name__}, not a tuple", hint)
    try:
        bound = inspect.signature(module.forward).bind(*args)
    except TypeError as exc:
        raise ModelError(
            f"{entry}: the example inputs do not fit {type(module).__name__}.forward: {exc}", hint
        ) from None
    axes: list[tuple[Axis, ...]] = []
    spec = shapes[0] if shapes else None
    try:
        if isinstance(spec, Mapping):
            spec = [spec.get(name) for name in bound.arguments]
        _collect_axes(spec, list(bound.arguments.values()), axes)
    except (TypeError, IndexError, KeyError, AttributeError, ValueError):
        raise ModelError(
            f"{entry}: the dynamic shapes do not have the structure of the example inputs",
            "one entry per input: None, or {axis: name or torch.export.Dim}",
        ) from None
    return Source(entry, module, tuple(args), {}, tuple(axes), _input_names(bound))


def _collect_axes(spec: Any, value: Any, axes: list[tuple[Axis, ...]]) -> None:
    """Walks dynamic shapes and example inputs side by side; adds one tuple per tensor, in flattened order."""
    if isinstance(value, torch.Tensor):
        if isinstance(spec, Mapping):
            spec = [spec.get(axis, spec.get(axis - value.ndim)) for axis in range(value.ndim)]
        if spec is not None and len(spec) != value.ndim:
            raise ValueError(spec)
        fixed = (None, torch.export.Dim.STATIC)
        given = [None] * value.ndim if spec is None else spec
        axes.append(tuple(None if axis in fixed or isinstance(axis, int) else axis for axis in given))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _collect_axes(spec[key] if spec is not None else None, item, axes)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _collect_axes(spec[index] if spec is not None else None, item, axes)


def _input_names(bound: inspect.BoundArguments) -> tuple[str, ...]:
    return tuple(
        "_".join([name, *map(_key_text, path)])
        for name, value in bound.arguments.items()
        for path, leaf in pytree.tree_flatten_with_path(value)[0]
        if isinstance(leaf, torch.Tensor)
    )


def _key_text(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _source_of_program(where: str, program: torch.export.ExportedProgram) -> Source:
    placeholders = tensor_placeholders(program)
    axes = tuple(
        tuple(None if isinstance(size, int) else str(size) for size in node.meta["val"].shape) for node in placeholders
    )
    args, kwargs = program.example_inputs or _zeros_like_inputs(program)
    names = tuple(node.name for node in placeholders)
    return Source(where, program.module(), tuple(args), kwargs, axes, names, program)


def _zeros_like_inputs(program: torch.export.ExportedProgram) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs for a program that was saved without any: zeros of the sizes it was traced with."""
    leaves = [
        torch.zeros(
            [
                int(getattr(size, "node", size).hint) if not isinstance(size, int) else size
                for size in node.meta["val"].shape
            ],
            dtype=node.meta["val"].dtype,
        )
        for node in tensor_placeholders(program)
    ]
    args, kwargs = pytree.tree_unflatten(leaves, program.call_spec.in_spec)
    return tuple(args), dict(kwargs)


def _user_error(what: str, exc: BaseException) -> ModelError:
    return ModelError(
        f"{what}: {said(exc)}",
        "mend the model's code; it must run on its own first",
        "".join(traceback.format_exception(exc)),
    )


def said(exc: BaseException) -> str:
    """An exception's kind, message and place in the user's code."""
    return f"{type(exc).__name__}: {_first_lines(exc)}{_user_place(exc)}"


def _user_place(exc: BaseException) -> str:
    """Where the user's own code failed: the innermost line that is not PyTorch's, Python's or ours."""
    ours = str(Path(__file__).parents[1])
    frames = [
        frame
        for frame in traceback.extract_tb(exc.__traceback__)
        if not frame.filename.startswith(("<", ours))
        and "site-packages" not in frame.filename
        and not frame.filename.startswith(sys.base_prefix)
    ]
    return f' (at {frames[-1].filename}:{frames[-1].lineno}: "{frames[-1].line}")' if frames else ""


def _first_lines(exc: BaseException) -> str:
    """The message's first line, or two; PyTorch's own often say what is wrong in the one after it."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return " ".join(lines[:2] if lines and lines[0].endswith(("!", ":", '"+dynamic".')) else lines[:1])[:400]
