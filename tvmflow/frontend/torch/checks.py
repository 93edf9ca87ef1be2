"""What in an exported program cannot be compiled: all of it at once, with the place in the user's code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from tvmflow.errors import UnsupportedError

TRAINING = {
    "dropout.default",
    "native_dropout.default",
    "_native_batch_norm_legit.default",
    "_native_batch_norm_legit_functional.default",
    "rrelu_with_noise_functional.default",
}
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
POOLS_WITH_POSITIONS = {"max_pool2d_with_indices.default", "max_pool3d_with_indices.default"}
PLAIN_MODULES = {"_operator", "math", "torch"}
# Our decompositions leave these only where they cannot say it otherwise.
LEFT_OVER = {
    "_upsample_bilinear2d_aa.default": "antialias=True needs fixed sizes and align_corners=False",
    "_local_scalar_dense.default": "a number that depends on values: leave out .item() and compute with the tensor",
    "adaptive_max_pool2d.default": "the size must be a multiple of the output size",
    "as_strided.default": "the tensor must be contiguous",
    "index.Tensor": "a mask selects a number of elements that depends on values; use torch.where",
    "index_put.default": "assignment to a mask takes one value; use torch.where for several",
}


def refuse(program: ExportedProgram, where: str, known: Set[str]) -> None:
    """Raises one UnsupportedError that lists everything in `program` that cannot be compiled.

    `program` is decomposed; `known` holds the names of the operators that have a converter ("add.Tensor").
    """
    faults = [*_mutations(program), *_edges(program)]
    for node in program.graph.nodes:
        if node.op == "call_function":
            reason = next(filter(None, (check(node, known) for check in NODE_CHECKS)), None)
            if reason:
                faults.append(f"{operator_name(node)} (node `{node.name}`{place(node)}): {reason}")
    unique = list(dict.fromkeys(faults))
    if unique:
        count = "cannot be compiled" if len(unique) == 1 else f"{len(unique)} things cannot be compiled"
        raise UnsupportedError(f"{where}: {count}:", "change the model's code at the places named", items=unique)


def operator_name(node: Any) -> str:
    """ "aten.add.Tensor", or a Python function's name."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    return getattr(node.target, "__name__", str(node.target))


def place(node: Any) -> str:
    """ ", model.py:12 `x = torch.foo(x)`", where PyTorch kept the line."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    starts = [i for i, line in enumerate(lines) if line.startswith('File "') and "site-packages/torch" not in line]
    if not starts:
        return ""
    file, line, *_ = lines[starts[-1]].removeprefix("File ").split(", ")
    code = lines[starts[-1] + 1] if starts[-1] + 1 < len(lines) else ""
    return f", {file.strip(chr(34)).rsplit('/', 1)[-1]}:{line.removeprefix('line ')} `{code}`"


def _mutations(program: ExportedProgram) -> Iterator[str]:
    signature = program.graph_signature
    buffers = set(signature.buffers_to_mutate.values())
    statistics = {name for name in buffers if name.endswith(STATISTICS)}
    if statistics:
        yield "a normalisation layer is in training mode and updates its statistics: call .eval() on the module"
    for name in sorted(buffers - statistics):
        yield (
            f"the module writes to its buffer `{name}`, but a library keeps no state: take it as an input and return it"
        )
    for name in signature.user_inputs_to_mutate.values():
        yield f"the module writes into its input `{name}`; return a new tensor instead"


def _edges(program: ExportedProgram) -> Iterator[str]:
    names = set(program.graph_signature.user_inputs)
    inputs = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in names]
    outputs = [node for node in program.graph.output_node().args[0] if isinstance(node, torch.fx.Node)]
    for kind, nodes in (("input", inputs), ("output", outputs)):
        for node in nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
                yield f"{kind} `{node.name}` is a number that depends on a size; return tensors"
            elif isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
                yield f"{kind} `{node.name}` is bfloat16, which arrays do not have: cast to float32 at the edge"


def _random(node: Any, _: Set[str]) -> str | None:
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    if node.target.__name__ in TRAINING:
        return "a layer in training mode; call .eval() on the module"
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return "a random operator has no reference to compare with; take the random numbers as an input"
    return None


def _sized_by_values(node: Any, _: Set[str]) -> str | None:
    values = node.meta.get("val")
    for value in values if isinstance(values, tuple | list) else [values]:
        if isinstance(value, torch.Tensor | torch.SymInt) and free_unbacked_symbols(value):
            return "its size depends on values; use torch.where or a fixed size"
    return None


def _odd_tensor(node: Any, _: Set[str]) -> str | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    if value.dtype.is_complex:
        return "complex numbers cannot be compiled; compute real and imaginary part apart"
    if value.layout != torch.strided:
        return "sparse tensors cannot be compiled; call .to_dense()"
    if value.is_quantized:
        return "quantised tensors cannot be compiled; export the model to ONNX with QDQ instead"
    return None


def _wrong_argument(node: Any, _: Set[str]) -> str | None:
    name = getattr(node.target, "__name__", "")
    if name == "getitem" and node.args[1] == 1 and node.args[0].target.__name__ in POOLS_WITH_POSITIONS:
        return "the positions of a maximum pool cannot be compiled; only its values"
    if name == "scatter_reduce.two" and (node.args[4] == "mean" or not node.kwargs.get("include_self", True)):
        return 'reduce="mean" and include_self=False cannot be compiled'
    return LEFT_OVER.get(name)


def _unknown(node: Any, known: Set[str]) -> str | None:
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return "control flow that depends on values; compute both sides and choose with torch.where"
    if isinstance(target, torch._ops.OpOverload):
        if target.namespace not in ("aten", "tvmflow"):
            return "an operator of a library of its own; write it with PyTorch's operators"
        return None if target.__name__ in known else "there is no converter for it; write it with other operators"
    if getattr(target, "__module__", "") not in PLAIN_MODULES or target.__name__ not in known:
        return "there is no converter for it; keep arithmetic on sizes to + - * // %"
    return None


NODE_CHECKS: tuple[Callable[[Any, Set[str]], str | None], ...] = (
    _random,
    _sized_by_values,
    _odd_tensor,
    _wrong_argument,
    _unknown,
)
