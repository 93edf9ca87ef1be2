"""PyTorch -> Model: torch.export, decompositions, TVM's importer, and names that stay.

`source` says what a source is, `shapes` what is dynamic, `checks` what is refused; `decompositions` and `operators`
hold what is done otherwise than in TVM's importer, `conversion` holds every conversion against PyTorch's types.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
import tvm
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree
from tvm import relax
from tvm.relax.frontend.torch import from_exported_program

from tvmflow.config import ModelInput
from tvmflow.errors import ModelError, TvmflowError, UnsupportedError, last_line
from tvmflow.frontend.model import Model
from tvmflow.frontend.sizes import shape_text
from tvmflow.frontend.torch.checks import operator_name, refuse
from tvmflow.frontend.torch.conversion import convert_map, known_operators
from tvmflow.frontend.torch.decompositions import table
from tvmflow.frontend.torch.shapes import export_arguments, export_shapes, resized, symbol_names
from tvmflow.frontend.torch.source import Source, named_outputs, said, tensor_placeholders
from tvmflow.manifest import Signature, TensorSpec

ASSERTIONS = {"_assert_async.msg", "_assert_async.default"}
SIZE_CHECKS = {
    "_assert_scalar.default",
    "_assert_tensor_metadata.default",
    "sym_constrain_range.default",
    "sym_constrain_range_for_size.default",
}
# Operators through which an index reaches its table unchanged.
CARRIERS = {"alias", "clone", "expand", "permute", "select", "slice", "squeeze", "_to_copy", "unsqueeze", "view"}


def load(source: Source, model_inputs: Mapping[str, ModelInput], dims: Mapping[str, int]) -> Model:
    """Imports `source`; weights, buffers and inputs that are no tensors become constants.

    `model_inputs` renames or fixes the axes of inputs, `dims` fixes dynamic dimensions by name; the others stay
    symbolic. Raises ConfigError for names that the model does not have, ModelError when torch.export refuses the
    module, UnsupportedError with everything that cannot be compiled.
    """
    source = resized(source, model_inputs, dims)
    program = _decomposed(source)
    names = symbol_names(source, program)
    notes = _drop_assertions(program)
    refuse(program, source.where, known_operators())
    outputs = _keep_tensors(program, source.where)
    mod = _renamed(_imported(source, program), names)
    return Model(mod, _signature(source, program, mod["main"], outputs), notes)


def _decomposed(source: Source) -> ExportedProgram:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's advice to authors of modules; what matters is raised
        try:
            program = source.program
            if program is None:
                args, kwargs = export_arguments(source)
                program = torch.export.export(
                    source.module, args, kwargs, dynamic_shapes=export_shapes(source), strict=False
                )
            return program.run_decompositions(table())
        except Exception as exc:
            raise ModelError(
                f"{source.where}: torch.export failed: {said(exc)}",
                "torch.export needs code whose control flow does not depend on values, and a dimension that the code"
                " fixes cannot be dynamic",
                traceback.format_exc(),
            ) from exc


def _drop_assertions(program: ExportedProgram) -> tuple[str, ...]:
    """Takes out run-time checks: those of values are noted, those of sizes hold by the signature."""
    dropped = 0
    for node in list(program.graph.nodes):
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name in ASSERTIONS | SIZE_CHECKS:
            dropped += name in ASSERTIONS
            program.graph.erase_node(node)
    program.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    return (f"{dropped} run-time assertions on values were left out",) if dropped else ()


def _keep_tensors(program: ExportedProgram, where: str) -> list[str]:
    """Drops inputs and outputs that are no tensors from the graph; returns the names of the outputs that stay."""
    signature, graph = program.graph_signature, program.graph
    tensors = {node.name for node in tensor_placeholders(program)}
    dropped = set(signature.user_inputs) - tensors
    for node in list(graph.nodes):
        if node.op == "placeholder" and node.name in dropped:
            graph.erase_node(node)
    signature.input_specs[:] = [
        spec for spec in signature.input_specs if spec.kind.name != "USER_INPUT" or spec.arg.name in tensors
    ]
    values = list(graph.output_node().args[0])
    named = named_outputs(pytree.tree_unflatten(list(range(len(values))), program.call_spec.out_spec))
    stay = [i for i, value in enumerate(values) if isinstance(value, torch.fx.Node)]
    if not stay:
        raise UnsupportedError(f"{where}: the module returns no tensor", "return at least one tensor")
    graph.output_node().args = (tuple(values[i] for i in stay),)
    signature.output_specs[:] = [signature.output_specs[i] for i in stay]
    return [named[i][0] for i in stay]


def _imported(source: Source, program: ExportedProgram) -> tvm.IRModule:
    for tensors in (program.state_dict, program.constants):
        for name, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor):
                tensors[name] = tensor.detach().contiguous()
    operators = {node.target.__name__ for node in program.graph.nodes if node.op == "call_function"}
    try:
        return from_exported_program(
            program,
            unwrap_unit_return_tuple=True,
            run_ep_decomposition=False,
            custom_convert_map=convert_map(operators),
        )
    except TvmflowError as exc:
        raise exc.within(f"{source.where}: ") from exc
    except Exception as exc:
        reason = last_line(exc)
        raise UnsupportedError(
            f"{source.where}: TVM's importer fails: {reason}", "--debug shows the whole trace", traceback.format_exc()
        ) from exc


def _renamed(mod: tvm.IRModule, names: Mapping[str, str]) -> tvm.IRModule:
    """Gives PyTorch's symbols their stable names; symbols of one name become one dimension.

    PyTorch's lower bound of 2 is left out: it means "not traced at 0 or 1", and TVM would simplify by it.
    """
    variables = {name: tvm.tirx.Var(name, "int64") for name in sorted(set(names.values()))}
    binding = {symbol: variables[name] for symbol, name in names.items()}
    limits = (mod["main"].attrs or {}).get("tir_var_upper_bound", {})
    upper = {names[symbol]: int(limit) for symbol, limit in limits.items() if symbol in names}
    main = relax.transform.BindSymbolicVars(binding, "main")(mod)["main"]
    for key in ("tir_var_lower_bound", "tir_var_upper_bound"):
        main = main.without_attr(key)
    return tvm.IRModule({"main": main.with_attr("tir_var_upper_bound", upper) if upper else main})


def _signature(source: Source, program: ExportedProgram, main: relax.Function, outputs: Sequence[str]) -> Signature:
    names = {
        size.name
        for parameter in main.params[: len(source.inputs)]
        for size in parameter.ty.shape
        if isinstance(size, tvm.tirx.Var)
    }
    inputs = [
        _spec(name, parameter.ty, names, _index_range(node) or _example_range(example))
        for (name, example), parameter, node in zip(
            source.inputs.items(), main.params, tensor_placeholders(program), strict=True
        )
    ]
    types = list(main.ret_ty.fields) if isinstance(main.ret_ty, relax.TupleType) else [main.ret_ty]
    specs = [_spec(name, typed, names) for name, typed in zip(_unique(outputs), types, strict=True)]
    return Signature(inputs=tuple(inputs), outputs=tuple(specs))


def _spec(name: str, typed: relax.TensorType, names: Set[str], limits: tuple[float, float] | None = None) -> TensorSpec:
    return TensorSpec(name=name, dtype=str(typed.dtype), shape=shape_text(typed, names), range=limits)


def _unique(names: Sequence[str]) -> list[str]:
    seen: dict[str, int] = {}
    unique = []
    for name in names:
        count = seen.get(name, 0)
        seen[name] = count + 1
        unique.append(f"{name}_{count}" if count else name)
    return unique


def _example_range(example: torch.Tensor) -> tuple[float, float] | None:
    """For integers: those of the example, and flags where it holds nothing else."""
    if example.is_floating_point() or example.dtype == torch.bool or not example.numel():
        return None
    low, high = int(example.min()), int(example.max())
    return (0, 1) if low >= 0 and high <= 1 else (low, high)


def _index_range(node: Any) -> tuple[float, float] | None:
    """For an input that picks rows of a table: the rows there are."""
    for user in node.users:
        name = operator_name(user).removeprefix("aten.").split(".")[0]
        if name == "embedding" and user.args[1] is node:
            return 0, int(user.args[0].meta["val"].shape[0]) - 1
        if name in CARRIERS and (found := _index_range(user)):
            return found
    return None
