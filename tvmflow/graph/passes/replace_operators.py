"""Puts the user's kernels in place of the operators that their patterns match.

A pattern lists operators in the order in which they run; each takes a result of one before it or shares an input with
it, and only the last one's result is used elsewhere. So a chain matches, and so does a diamond like x * sigmoid(x).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import tvm
import tvm_ffi
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.tirx import FloatImm, IntImm, PrimFunc

from tvmflow.config import KernelSection
from tvmflow.errors import ConfigError
from tvmflow.kernels import user
from tvmflow.kernels.user import Call, Pattern, UserKernel

Consumers = Mapping[relax.Var, Sequence[relax.VarBinding | None]]


@dataclass(frozen=True)
class Replacement:
    """A kernel of the user's for one distinct call; `reference` computes the same with the operators it replaces."""

    kernel: UserKernel
    call: Call
    function: PrimFunc
    reference: relax.Function


OnReplaced = Callable[[Replacement], None]  # called once for each place in the graph


@dataclass(frozen=True)
class ReplaceOperators:
    """The pass: asks each kernel of a config, in its order, for every place that its pattern matches.

    A plain callable, so that errors of the user's functions keep their type. Raises ConfigError for a kernel that
    replaces nothing, and those of `user.load` and `user.function_for`.
    """

    sections: Mapping[str, KernelSection]
    on_replaced: OnReplaced

    def __call__(self, mod: tvm.IRModule) -> tvm.IRModule:
        replacing = _Replacing(mod, self.on_replaced)
        for name, section in self.sections.items():
            kernel = user.load(name, section)
            tally = _Tally()
            for function in mod.functions.values():
                if isinstance(function, relax.Function):
                    for sequence in _sequences(function.body):
                        replacing.ask(kernel, sequence, tally)
            if not tally.replaced:
                raise _replaces_nothing(kernel, tally, mod)
        return replacing.replaced()


@dataclass(frozen=True)
class _Site:
    """The bindings that a pattern matched, in the pattern's order, and the values they take from outside."""

    bindings: tuple[relax.VarBinding, ...]
    args: tuple[relax.Expr, ...]
    scalars: tuple[float, ...]


@dataclass
class _Tally:
    """What became of the places that a kernel's pattern matched."""

    replaced: int = 0
    declined: list[Call] = field(default_factory=list)
    open_dims: int = 0


class _Replacing:
    """The sites taken so far, each with its kernel; distinct calls are asked for once."""

    def __init__(self, mod: tvm.IRModule, on_replaced: OnReplaced) -> None:
        self._mutator = _Mutator(mod)
        self._mod = mod
        self._on_replaced = on_replaced
        self._taken: set[relax.Var] = set()
        self._answers: dict[tuple[str, int], Replacement | None] = {}

    def ask(self, kernel: UserKernel, sequence: relax.SeqExpr, tally: _Tally) -> None:
        """Takes every site of a sequence that the kernel's pattern matches and its function accepts."""
        for pattern in kernel.patterns:
            for site in _sites(sequence, pattern, self._taken):
                call = _call(site)
                if call is None:
                    tally.open_dims += 1
                    continue
                found = self._answer(kernel, site, call)
                if found is None:
                    tally.declined.append(call)
                    continue
                tally.replaced += 1
                self._taken.update(binding.var for binding in site.bindings)
                self._mutator.take(site, found)
                self._on_replaced(found)

    def replaced(self) -> tvm.IRModule:
        for var, function in self._mod.functions.items():
            if isinstance(function, relax.Function):
                self._mutator.builder_.update_func(var, self._mutator.visit_expr(function))
        return self._mutator.builder_.get()

    def _answer(self, kernel: UserKernel, site: _Site, call: Call) -> Replacement | None:
        reference = _reference(site)
        key = kernel.name, int(tvm_ffi.structural_hash(reference, map_free_vars=True))
        if key not in self._answers:
            function = user.function_for(kernel, call)
            self._answers[key] = Replacement(kernel, call, function, reference) if function is not None else None
        return self._answers[key]


@mutator
class _Mutator(PyExprMutator):  # type: ignore[misc] # TVM has no types
    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self._calls: dict[relax.Var, relax.Call] = {}

    def take(self, site: _Site, found: Replacement) -> None:
        var = site.bindings[-1].var
        target = self.builder_.add_func(found.function, f"user_{found.kernel.name}")
        self._calls[var] = relax.call_tir(target, list(site.args), var.ty)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        call = self._calls.get(binding.var)
        super().visit_var_binding_(binding if call is None else relax.VarBinding(binding.var, call))


def _sequences(body: relax.SeqExpr) -> Iterator[relax.SeqExpr]:
    """A function's body and the branches in it."""
    yield body
    for block in body.blocks:
        for binding in block.bindings:
            if isinstance(binding.value, relax.If):
                yield from _sequences(binding.value.true_branch)
                yield from _sequences(binding.value.false_branch)


def _sites(sequence: relax.SeqExpr, pattern: Pattern, taken: set[relax.Var]) -> Iterator[_Site]:
    """The places that a pattern matches, in order, none overlapping another that was taken."""
    consumers = _consumers(sequence)
    for block in sequence.blocks:
        for binding in block.bindings:
            if _operator(binding) == pattern.operators[0] and binding.var not in taken:
                chosen = _grown((binding,), pattern.operators[1:], consumers, taken)
                site = _site(chosen) if chosen is not None else None
                if site is not None and _same(site.scalars, pattern.scalars):
                    yield site


def _grown(
    chosen: tuple[relax.VarBinding, ...], rest: tuple[str, ...], consumers: Consumers, taken: set[relax.Var]
) -> tuple[relax.VarBinding, ...] | None:
    """The first way to extend `chosen` by the operators `rest` to a region with one result, or None."""
    inside = {binding.var for binding in chosen}
    if not rest:
        closed = all(c is not None and c.var in inside for b in chosen[:-1] for c in consumers[b.var])
        return chosen if closed else None
    near = [var for binding in chosen for var in (binding.var, *relax.analysis.free_vars(binding.value))]
    for candidate in (consumer for var in near for consumer in consumers[var]):
        if candidate is None or _operator(candidate) != rest[0] or candidate.var in inside | taken:
            continue
        grown = _grown((*chosen, candidate), rest[1:], consumers, taken)
        if grown is not None:
            return grown
    return None


def _consumers(sequence: relax.SeqExpr) -> Consumers:
    """Per value the bindings that use it; None stands for a use other than a plain binding of this sequence."""
    found: defaultdict[relax.Var, list[relax.VarBinding | None]] = defaultdict(list)
    for block in sequence.blocks:
        for binding in block.bindings:
            for var in relax.analysis.free_vars(binding.value):
                found[var].append(binding if isinstance(binding, relax.VarBinding) else None)
    for var in relax.analysis.free_vars(sequence.body):
        found[var].append(None)
    return found


def _operator(binding: relax.Binding) -> str:
    call = binding.value
    is_plain = isinstance(binding, relax.VarBinding) and isinstance(call, relax.Call)
    return str(getattr(call.op, "name", "")) if is_plain else ""


def _site(chosen: tuple[relax.VarBinding, ...]) -> _Site:
    inside = {binding.var for binding in chosen}
    args: list[relax.Expr] = []
    scalars: list[float] = []
    for operand in (operand for binding in chosen for operand in _operands(binding.value.args)):
        scalar = _scalar(operand)
        if scalar is not None:
            scalars.append(scalar)
        elif _is_tensor(operand) and not any(operand.same_as(known) for known in [*inside, *args]):
            args.append(operand)
    return _Site(chosen, tuple(args), tuple(scalars))


def _is_tensor(operand: relax.Expr) -> bool:
    return isinstance(operand, tvm.ir.GenericConst | relax.Var)


def _operands(values: Sequence[relax.Expr]) -> Iterator[relax.Expr]:
    for value in values:
        if isinstance(value, relax.Tuple):
            yield from _operands(value.fields)
        else:
            yield value


def _scalar(operand: relax.Expr) -> float | None:
    """The value of a constant of one element."""
    if isinstance(operand, FloatImm | IntImm):
        return float(operand.value)
    if isinstance(operand, tvm.ir.GenericConst) and math.prod(map(int, operand.value.shape)) == 1:
        return float(operand.value.numpy().reshape(()).astype("float64"))
    return None


def _same(scalars: tuple[float, ...], wanted: tuple[float, ...] | None) -> bool:
    if wanted is None:
        return True
    pairs = zip(sorted(scalars), wanted, strict=False)
    return len(scalars) == len(wanted) and all(math.isclose(a, b, rel_tol=1e-3) for a, b in pairs)


def _call(site: _Site) -> Call | None:
    """The site as its kernel sees it; None where a shape is open or a value is no tensor."""
    args = [user.tensor_of(arg) for arg in site.args]
    output = user.tensor_of(site.bindings[-1].var)
    known = tuple(arg for arg in args if arg is not None)
    if output is None or len(known) < len(args):
        return None
    calls = [binding.value for binding in site.bindings]
    return Call(tuple(str(c.op.name) for c in calls), known, output, tuple(c.attrs for c in calls), site.scalars)


def _reference(site: _Site) -> relax.Function:
    """A function of the site's arguments that computes its result with its own operators."""
    builder = relax.BlockBuilder()
    params = [relax.Var(f"a{index}", arg.ty) for index, arg in enumerate(site.args)]
    known: list[tuple[relax.Expr, relax.Expr]] = list(zip(site.args, params, strict=True))

    def local(expr: relax.Expr) -> relax.Expr:
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([local(item) for item in expr.fields])
        return next((mine for theirs, mine in known if theirs.same_as(expr)), expr)

    pending = list(site.bindings)
    with builder.function("main", params):
        with builder.dataflow():
            while pending:  # in an order in which each finds its operands
                vars_ = [binding.var for binding in pending]
                ready = next(
                    b
                    for b in pending
                    if not any(operand.same_as(var) for operand in _operands(b.value.args) for var in vars_)
                )
                pending.remove(ready)
                call = ready.value
                made = builder.emit(relax.Call(call.op, [local(a) for a in call.args], call.attrs, call.ty_args))
                known.append((ready.var, made))
            result = builder.emit_output(known[-1][1])
        builder.emit_func_output(result)
    return builder.get()["main"]


def _replaces_nothing(kernel: UserKernel, tally: _Tally, mod: tvm.IRModule) -> ConfigError:
    message = f"{kernel} replaces nothing: "
    if tally.declined:
        message += f"its function declined {len(tally.declined)} of the places that match, first {tally.declined[0]}"
        return ConfigError(message, "let it accept what the graph holds, or drop it")
    if tally.open_dims:
        message += f"each of the {tally.open_dims} places that match has open dimensions"
        return ConfigError(message, "fix them with --dim, --shape or [shapes.dims]")
    counts: Counter[str] = Counter()
    for function in mod.functions.values():
        if isinstance(function, relax.Function):
            counts.update(_operator(b) for s in _sequences(function.body) for block in s.blocks for b in block.bindings)
    named = [(name.removeprefix("relax."), count) for name, count in counts.most_common() if name]
    held = ", ".join(f"{name} x {count}" for name, count in named) or "no operators"
    wanted = " + ".join(name.removeprefix("relax.") for name in kernel.patterns[0].operators)
    return ConfigError(
        f"{message}the graph has no {wanted} left for it; it holds {held}",
        "each takes a result or shares an input of one before it; only the last one's is used elsewhere",
    )
