"""External calls: everything a library reaches outside itself, against the list of what it may."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tvmflow.audit.bytecode import Bytecode
from tvmflow.audit.library import Library
from tvmflow.manifest import Finding, Kernel, Noun

UNDEFINED = "an undefined symbol, resolved by the loader"
ALLOW_HINT = "keep the operator in the library, or add a pattern with its reason to [audit.allow]"


class External(Noun):
    """Something outside the library's own kernels that it calls or needs.

    `reason` is the allow-list's, None where no pattern fits; `places` say from where it is called; `operators` are
    those of the graph that it stands for.
    """

    name: str
    kind: str
    reason: str | None
    places: tuple[str, ...]
    operators: tuple[str, ...]


@dataclass(frozen=True)
class Sources:
    """What externals are collected from.

    `parts` are the kernels of its code for the GPU. `callers` names, by function called,
    the kernels in whose code that is.
    """

    library: Library
    bytecode: Bytecode
    kernels: Sequence[Kernel]
    parts: frozenset[str]
    shape_functions: frozenset[str]
    callers: Mapping[str, tuple[str, ...]]


def externals(sources: Sources, allow: Mapping[str, str]) -> tuple[External, ...]:
    """Every name outside the library's own kernels, each once."""
    places: dict[str, list[str]] = defaultdict(list)
    for call in sources.bytecode.calls:
        places[call.name].append(call.place)
    # A kernel that calls the run time is the library's own code; a bare call of the run time is not.
    known = {kernel.name for kernel in sources.kernels if kernel.origin != "external" or kernel.rule != kernel.name}
    own = (sources.library.defined & (known | sources.shape_functions)) | sources.parts
    operators = {kernel.name: kernel.operators for kernel in sources.kernels}
    found = []
    for kind, name in _names(sources):
        if name in own:
            continue
        reason = reason_for(name, allow)
        within = [_kernel_place(caller, operators) for caller in sources.callers.get(name, ())]
        everywhere = tuple(dict.fromkeys([*places.get(name, []), *within]))
        found.append(
            External(name=name, kind=kind, reason=reason, places=everywhere, operators=operators.get(name, ()))
        )
    return tuple({external.name: external for external in reversed(found)}.values())[::-1]


def reason_for(name: str, allow: Mapping[str, str]) -> str | None:
    """The reason for which `allow` lets a name be there, None where it does not."""
    fits = (why for patterns, why in allow.items() if any(fnmatchcase(name, one) for one in patterns.split("|")))
    return next(fits, None)


def findings(found: Sequence[External], library: Library) -> Iterator[Finding]:
    """A fault for each external without a reason, for packed code of a foreign kind, and a warning for what hides."""
    for external in found:
        if external.reason is None:
            where = "; ".join(external.places[:3]) or "not called from the virtual machine's code"
            more = f" and {len(external.places) - 3} more places" if len(external.places) > 3 else ""
            computes = f"; computes {' + '.join(external.operators)}" if external.operators else ""
            yield Finding(
                check="external calls",
                level="fault",
                place=external.name,
                what=f"{external.kind}{computes}; called from: {where}{more}",
                action=ALLOW_HINT,
            )
    for kind in library.foreign_modules:
        yield Finding(
            check="external calls",
            level="fault",
            place=f"module {kind}",
            what=f"the library holds a module of another code generator, `{kind}`",
            action=ALLOW_HINT,
        )
    if library.asked is None:
        yield Finding(
            check="external calls",
            level="warning",
            place=library.path.name,
            what="its symbol table was stripped, so the functions that kernels ask TVM's run time for, and "
            "code that no kernel reaches, cannot be listed",
            action="audit it before it is stripped",
        )


def _names(sources: Sources) -> Iterator[tuple[str, str]]:
    library = sources.library
    for name in sources.bytecode.called:
        outside = "the library holds it, but it is no kernel of TVM's code generators"
        yield (outside if name in library.defined else "looked up when the library is loaded"), name
    for name in library.asked or ():
        yield "a kernel asks TVM's run time for it", name
    for name in library.image.undefined:
        yield UNDEFINED, name
    for name in library.needed:
        yield "a shared library that must be there", name


def _kernel_place(caller: str, operators: Mapping[str, tuple[str, ...]]) -> str:
    computes = " + ".join(operators.get(caller, ()))
    return f"kernel {caller}" + (f" ({computes})" if computes else "")
