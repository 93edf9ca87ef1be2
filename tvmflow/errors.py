"""Every error tvmflow raises on purpose, each with its exit code and its next action.

TvmflowError                  1
├── UsageError                2   the command line cannot be understood
├── ConfigError               3   the config file or an override is wrong
├── ModelError                4   the model file cannot be read
│   └── UnsupportedError      5   the model holds what cannot be compiled
├── TargetError               6   the target does not exist or cannot be built for here
├── BudgetError               7   a limit of the config is exceeded
├── CompileError              8   the compiler failed or crashed
├── ArtifactError             9   an artifact is damaged or not for this machine
├── VerifyError              10   the library's values are not the reference's
├── ReferenceRunError        11   the reference itself cannot be run, so nothing can be verified
├── InputError               12   arrays handed to a library do not fit its inputs
├── OutputError              13   a result cannot be written
├── SetupError               14   this installation cannot work
├── DatabaseError            15   the tuning database cannot be read or written, or holds faulty lines
├── AuditError               16   an audit found what must not be in a library
└── NumericsError            17   the built code breaks the numerics that the config states

An error says what is wrong and where, where it is about several things with a line for each; `hint` says what to do
next. They are shown without a traceback.
An exception that is none of these is a bug of tvmflow and is shown whole, with exit code 70.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

from tvmflow import text

EXIT_BUG = 70
EXIT_INTERRUPTED = 130


class TvmflowError(Exception):
    """What is wrong and where, what to do next, and (for logs) what lies beneath it.

    `items` are the single things that are wrong, where there are several. `message` holds them as well, a line each.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "", details: str = "", items: Sequence[str] = ()) -> None:
        self.summary = message
        self.hint = hint
        self.details = details
        self.items = tuple(items)
        self.message = "".join([message, *(f"\n  {text.visible(item)}" for item in self.items)])
        self.crashed = False  # whether the process that did the work died of it
        super().__init__(self.message)

    def __reduce__(self) -> tuple[type[TvmflowError], tuple[str, str, str, tuple[str, ...]]]:
        return type(self), (self.summary, self.hint, self.details, self.items)

    def on_one_line(self) -> str:
        """The whole message, its items one behind the other."""
        return "; ".join([self.summary, *self.items]).replace(":; ", ": ", 1)

    def within(self, place: str, hint: str | None = None) -> Self:
        """The same error, said of a place in which it happened."""
        return type(self)(f"{place}{self.summary}", self.hint if hint is None else hint, self.details, self.items)


def first_line(exc: BaseException) -> str:
    """The first line of an exception's message that says anything; its type's name where there is none."""
    return _lines(exc)[0]


def last_line(exc: BaseException) -> str:
    """The last such line, where TVM says what is wrong."""
    return _lines(exc)[-1]


def innermost(exc: BaseException) -> BaseException:
    """What an exception was made of in the first place."""
    while exc.__cause__ is not None:
        exc = exc.__cause__
    return exc


def _lines(exc: BaseException) -> list[str]:
    return [line.strip() for line in str(exc).splitlines() if line.strip()] or [type(exc).__name__]


def did_you_mean(name: str, known: Iterable[str], most: int = 1, cutoff: float = 0.6) -> str:
    """A "did you mean `a` or `b`?" for the `most` nearest known names; "" where none is at least `cutoff` alike.

    Likeness is difflib's ratio, from 0 to 1.
    """
    import difflib

    near = difflib.get_close_matches(name, list(known), n=most, cutoff=cutoff)
    return f"did you mean {' or '.join(f'`{n}`' for n in near)}?" if near else ""


class UsageError(TvmflowError):
    exit_code = 2


class ConfigError(TvmflowError):
    exit_code = 3


class ModelError(TvmflowError):
    exit_code = 4


class UnsupportedError(ModelError):
    exit_code = 5


class TargetError(TvmflowError):
    exit_code = 6


class BudgetError(TvmflowError):
    exit_code = 7


class CompileError(TvmflowError):
    exit_code = 8


class ArtifactError(TvmflowError):
    exit_code = 9


class VerifyError(TvmflowError):
    exit_code = 10


class ReferenceRunError(TvmflowError):
    exit_code = 11


class InputError(TvmflowError):
    exit_code = 12


class OutputError(TvmflowError):
    exit_code = 13


class SetupError(TvmflowError):
    exit_code = 14


class DatabaseError(TvmflowError):
    exit_code = 15


class AuditError(TvmflowError):
    exit_code = 16


class NumericsError(TvmflowError):
    exit_code = 17
