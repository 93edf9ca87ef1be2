"""The call table of a library's virtual machine, and where in its code each function is called."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FUNCTION = re.compile(r"^@([^\s:]+):$")
_CALL = re.compile(r"^\s*call\s+(\S+)\s+in:\s*(.*?)\s+dst:")
_DECLARED = re.compile(r"^@(\S+) packed_func;$")
_BUILTIN = "vm.builtin."


@dataclass(frozen=True)
class Call:
    """One call of a function that is none of the virtual machine's own; `place` says between which others."""

    name: str
    place: str


@dataclass(frozen=True)
class Bytecode:
    """`called` are all names of the call table, in their order; `calls` those calls that do the model's work."""

    called: tuple[str, ...]
    calls: tuple[Call, ...]


def as_text(executable: bytes) -> str:
    """What TVM prints of an executable's bytes; nothing of it is run and no device is needed. Needs TVM."""
    import tvm

    load = tvm.get_global_func("ffi.Module.load_from_bytes.relax.VMExecutable")
    return str(load(executable)["as_text"]())


def parse(text: str) -> Bytecode:
    """The calls in the text that `as_text` gives."""
    called: dict[str, None] = {}
    own: set[str] = set()
    found: list[tuple[str, str]] = []
    function = ""
    for line in text.splitlines():
        if match := _FUNCTION.match(line):
            function = match[1]
            own.add(function)
        elif match := _CALL.match(line):
            name = match[1]
            called[name] = None
            if not name.startswith(_BUILTIN):
                found.append((function, name))
        elif match := _DECLARED.match(line):
            called[match[1]] = None
    calls = tuple(_placed(found, index) for index in range(len(found)))
    return Bytecode(tuple(name for name in called if name not in own), calls)


def _placed(found: list[tuple[str, str]], index: int) -> Call:
    function, name = found[index]
    before = found[index - 1][1] if index and found[index - 1][0] == function else "the inputs"
    last = index + 1 == len(found) or found[index + 1][0] != function
    after = "the outputs" if last else found[index + 1][1]
    return Call(name, f"{function}, between {before} and {after}")
