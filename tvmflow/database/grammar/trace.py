"""What the trace of a record may hold: the instructions by which MetaSchedule's rules and ours schedule a kernel.

A trace is a list of instructions [kind, inputs, attributes, outputs] and a list of decisions [instruction, decision].
Its values are blocks, loops and numbers, named b1, l2, v3; an instruction uses what an earlier one made. TVM writes a
decision wherever its index says, reads types loosely, and has instructions that change what a kernel computes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tvmflow.database.grammar import index_map
from tvmflow.database.grammar.annotations import REMOVABLE, THREADS, Where, number, numbers, of_blocks, of_loops
from tvmflow.database.grammar.graph import GrammarError
from tvmflow.database.grammar.workload import is_word

MAX_INSTRUCTIONS = 1000  # real traces on CPUs: 223
MAX_COPIES = 100  # instructions that add a block: each makes all later ones slower
MAX_OUTPUTS = 4096  # of one instruction
MAX_FACTOR = 1 << 20  # of a split loop
MAX_AXES = 64
MAX_ALIGNMENT = 128  # of rows, in elements; ours are 16 at most
MAX_PADDING = 1024  # to which an axis of a product may be padded
COPIES = frozenset({"CacheRead", "CacheWrite", "ReIndex", "RFactor", "Blockize", "DecomposePadding", "AddUnitLoop"})

Check: TypeAlias = Callable[["State", Any], bool]


@dataclass
class State:
    """What is known at an instruction: where it will be used, and the names that earlier instructions gave."""

    where: Where
    names: set[str] = field(default_factory=set)

    def is_value(self, kinds: str, value: object) -> bool:
        """Whether something is the name of a block (b), loop (l) or number (v) that is there."""
        return isinstance(value, str) and value[:1] in tuple(kinds) and value in self.names


@dataclass(frozen=True)
class Instruction:
    """The form of one kind of instruction. Its last input may come any number of times where it is `repeated`.

    `outputs` are the first letters of the names that it gives, and how many there may be.
    """

    inputs: tuple[Check, ...] = ()
    attributes: tuple[Check, ...] = ()
    outputs: tuple[str, int, int] = ("", 0, 0)
    repeated: bool = False
    decision: Callable[[Sequence[Any], Any], bool] | None = None
    """Says of the attributes and the decision whether they fit; None where there is nothing to decide."""
    only: str = ""
    """The kind of target that has it; "" for all."""


def check(trace: object, where: Where) -> None:
    """Raises GrammarError, which names the instruction, where a trace is none of this grammar."""
    if not (isinstance(trace, list) and len(trace) == 2 and all(isinstance(part, list) for part in trace)):
        raise GrammarError("trace: not a list of instructions and one of decisions")
    instructions, decisions = trace
    if len(instructions) > MAX_INSTRUCTIONS:
        raise GrammarError(f"trace: {len(instructions)} instructions, more than {MAX_INSTRUCTIONS}")
    decided = _decisions(decisions, len(instructions))
    state = State(where)
    copies = 0
    for index, instruction in enumerate(instructions):
        kind = instruction[0] if isinstance(instruction, list) and instruction else None
        try:
            _check_instruction(instruction, decided.get(index), index in decided, state)
            copies += kind in COPIES
            if copies > MAX_COPIES:
                raise GrammarError(f"more than {MAX_COPIES} blocks are added")
        except GrammarError as exc:
            raise GrammarError(f"trace, instruction {index} ({str(kind)[:30]}): {exc}") from None


def _decisions(decisions: list[Any], count: int) -> dict[int, Any]:
    """The decisions by instruction."""
    found: dict[int, Any] = {}
    for entry in decisions:
        if not (isinstance(entry, list) and len(entry) == 2 and type(entry[0]) is int and 0 <= entry[0] < count):
            raise GrammarError("trace: a decision for no instruction")
        if entry[0] in found:
            raise GrammarError(f"trace: two decisions for instruction {entry[0]}")
        found[entry[0]] = entry[1]
    return found


def _check_instruction(instruction: Any, decision: Any, is_decided: bool, state: State) -> None:
    if not (
        isinstance(instruction, list)
        and len(instruction) == 4
        and isinstance(instruction[0], str)
        and all(isinstance(part, list) for part in instruction[1:])
    ):
        raise GrammarError("not a kind, inputs, attributes and outputs")
    kind, inputs, attributes, outputs = instruction
    if (form := INSTRUCTIONS.get(kind)) is None:
        raise GrammarError("no instruction that a record may hold")
    if form.only not in ("", state.where.kind):
        raise GrammarError(f"no instruction that a record for {state.where.kind} may hold")
    wanted = form.inputs
    if form.repeated and len(inputs) >= len(wanted):
        wanted = wanted + wanted[-1:] * (len(inputs) - len(wanted))
    for what, values, checks in (("input", inputs, wanted), ("attribute", attributes, form.attributes)):
        if len(values) != len(checks):
            raise GrammarError(f"{len(values)} {what}s, not {len(checks)}")
        for place, (value, fits) in enumerate(zip(values, checks, strict=True)):
            if not fits(state, value):
                raise GrammarError(f"{what} {place}: {_shown(value)} has no place here")
    if kind == "Annotate":
        _check_note(inputs, attributes[0], state)
    if kind == "StorageAlign" and not attributes[3] < attributes[2]:
        raise GrammarError("its offset is not below its factor")
    if kind in ("TransformLayout", "TransformBlockLayout"):
        _check_index_map(kind, inputs, attributes, state)
    if is_decided != (form.decision is not None) or (form.decision and not form.decision(attributes, decision)):
        raise GrammarError(f"its decision {_shown(decision)} has no place here" if is_decided else "nothing is decided")
    _note_outputs(kind, attributes, inputs, outputs, state)


def _check_index_map(kind: str, inputs: list[Any], attributes: list[Any], state: State) -> None:
    text, injective = (inputs[1], attributes[3]) if kind == "TransformLayout" else (attributes[0], True)
    sampled = {name for name in state.names if name.startswith("v")} if state.where.tf32 else ()
    index_map.check(text, state.names | {"None"}, sampled, may_state_inverse=not injective)


def _check_note(inputs: list[Any], key: str, state: State) -> None:
    """Whether a note may stand where it is put."""
    notes = of_blocks(state.where) if inputs[0].startswith("b") else of_loops(state.where)
    value = inputs[1]
    if (fits := notes.get(key)) is None:
        raise GrammarError(f"`{key[:60]}` is no note that a record may make there")
    if isinstance(value, str):
        if state.is_value("v", value) and key.startswith("meta_schedule."):
            return
        value = value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else None
    if not fits(value):
        raise GrammarError(f"`{key}` is {_shown(inputs[1])}, which has no place there")


def _note_outputs(kind: str, attributes: list[Any], inputs: list[Any], outputs: list[Any], state: State) -> None:
    letter, fewest, most = INSTRUCTIONS[kind].outputs
    if kind == "Split":
        fewest = most = len(inputs) - 1
    elif kind == "SamplePerfectTile":
        fewest = most = attributes[0]
    if not fewest <= len(outputs) <= most:
        raise GrammarError(f"{len(outputs)} outputs")
    for name in outputs:
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name[0] != letter or name in state.names:
            raise GrammarError(f"output {_shown(name)}: no new name")
        state.names.add(name)


def _shown(value: object) -> str:
    return f"`{str(value)[:60]}`"


_NAME = re.compile(r"[blv]\d{1,6}")


def _a(kinds: str) -> Check:
    return lambda state, value: state.is_value(kinds, value)


def _plain(check: Callable[[Any], bool]) -> Check:
    return lambda state, value: check(value)


def _factor(state: State, value: Any) -> bool:
    return value == "None" or state.is_value("v", value) or (type(value) is int and 1 <= value <= MAX_FACTOR)


def _sampled(attributes: Sequence[Any], decision: Any) -> bool:
    return numbers(1, 1 << 31)(decision) and len(decision) == attributes[0]


def _chosen(attributes: Sequence[Any], decision: Any) -> bool:
    candidates, shares = attributes
    return len(candidates) == len(shares) and type(decision) is int and 0 <= decision < len(candidates)


def _located(attributes: Sequence[Any], decision: Any) -> bool:
    return type(decision) is int and -2 <= decision < MAX_AXES


def _blocks(state: State, value: Any) -> bool:
    return isinstance(value, list) and all(state.is_value("b", name) for name in value)


def _shares(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= 64
        and all(type(share) in (int, float) and 0 <= share <= 1 for share in value)
    )


def _is_note(state: State, value: Any) -> bool:
    return isinstance(value, str)  # which one, and its value, is looked at together


def _removable(state: State, value: Any) -> bool:
    return isinstance(value, str) and (value in REMOVABLE or value in of_blocks(state.where))


def _scope(state: State, value: Any) -> bool:
    return isinstance(value, str) and value in state.where.scopes


def _intrinsic(state: State, value: Any) -> bool:
    return isinstance(value, str) and value in state.where.intrinsics


def _truth(state: State, value: Any) -> bool:
    return isinstance(value, int) and value in (0, 1)


def _never(state: State, value: Any) -> bool:
    return value is None or (isinstance(value, int) and value == 0)


def _injective(state: State, value: Any) -> bool:
    return _truth(state, value) and (not value or state.where.tf32)  # MetaSchedule's rule for tensor cores says so


_BLOCK, _LOOP, _EITHER = _a("b"), _a("l"), _a("bl")
_INDEX, _AXIS = _plain(number(0, MAX_AXES - 1)), _plain(number(-MAX_AXES, MAX_AXES - 1))
_ONE_BLOCK, _NO_OUTPUT = ("b", 1, 1), ("", 0, 0)
_MAIN: Check = lambda state, value: value == "main"  # noqa: E731  # as short as its neighbours

INSTRUCTIONS: dict[str, Instruction] = {
    "GetSBlock": Instruction((), (_plain(is_word), _MAIN), _ONE_BLOCK),
    "GetLoops": Instruction((_BLOCK,), (), ("l", 0, MAX_AXES)),
    "GetChildBlocks": Instruction((_EITHER,), (), ("b", 0, MAX_OUTPUTS)),
    "GetProducers": Instruction((_BLOCK,), (), ("b", 0, MAX_OUTPUTS)),
    "GetConsumers": Instruction((_BLOCK,), (), ("b", 0, MAX_OUTPUTS)),
    "SamplePerfectTile": Instruction(
        (_LOOP,), (_plain(number(1, 16)), _plain(number(-1, 1024))), ("v", 1, 16), decision=_sampled
    ),
    "SampleCategorical": Instruction((), (_plain(numbers(0, 1024)), _plain(_shares)), ("v", 1, 1), decision=_chosen),
    "SampleComputeLocation": Instruction((_BLOCK,), (), ("l", 1, 1), decision=_located),
    "Split": Instruction((_LOOP, _factor), (_truth, _never), ("l", 1, 16), repeated=True),
    "Fuse": Instruction((_LOOP,), (_truth,), ("l", 1, 1), repeated=True),
    "Reorder": Instruction((_LOOP,), (), repeated=True),
    "AddUnitLoop": Instruction((_EITHER,), (), ("l", 1, 1)),
    "Parallel": Instruction((_LOOP,), only="llvm"),
    "Vectorize": Instruction((_LOOP,)),
    "Unroll": Instruction((_LOOP,)),
    "Bind": Instruction((_LOOP,), (_plain(lambda value: isinstance(value, str) and value in THREADS),), only="cuda"),
    "ComputeInline": Instruction((_BLOCK,)),
    "ReverseComputeInline": Instruction((_BLOCK,)),
    "ComputeAt": Instruction((_BLOCK, _LOOP), (_truth, _AXIS)),
    "ReverseComputeAt": Instruction((_BLOCK, _LOOP), (_truth, _AXIS)),
    "CacheRead": Instruction((_BLOCK, _blocks), (_INDEX, _scope), _ONE_BLOCK),
    "CacheWrite": Instruction((_BLOCK, _blocks), (_INDEX, _scope), _ONE_BLOCK),
    "ReIndex": Instruction((_BLOCK,), (_INDEX, _truth), _ONE_BLOCK, only="cuda"),
    "TransformLayout": Instruction(
        (_BLOCK, lambda state, value: True), (_INDEX, _truth, _plain(lambda v: v is None), _injective)
    ),
    "TransformBlockLayout": Instruction((_BLOCK,), (lambda state, value: True,)),
    "DecomposeReduction": Instruction((_BLOCK, _LOOP), (), _ONE_BLOCK),
    "DecomposePadding": Instruction((_BLOCK, _LOOP), (), _ONE_BLOCK),
    "RFactor": Instruction((_LOOP,), (_AXIS,), _ONE_BLOCK),
    "PadEinsum": Instruction((_BLOCK,), (_plain(numbers(1, MAX_PADDING)),), only="cuda"),
    "Blockize": Instruction((_LOOP,), (_truth,), _ONE_BLOCK),
    "Tensorize": Instruction((_EITHER,), (_intrinsic, _truth)),
    "SetScope": Instruction((_BLOCK,), (_INDEX, _scope), only="cuda"),
    "StorageAlign": Instruction(
        (_BLOCK,), (_INDEX, _AXIS, _plain(number(1, MAX_ALIGNMENT)), _plain(number(0, MAX_ALIGNMENT))), only="cuda"
    ),
    "Annotate": Instruction((_EITHER, lambda state, value: True), (_is_note,)),
    "Unannotate": Instruction((_EITHER,), (_removable,)),
    "EnterPostproc": Instruction(),
}
