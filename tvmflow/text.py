"""The one policy for showing text that somebody else wrote: names of models, sources of records, messages of tools.

What is shown stays on its line and in its place: no character of it moves the cursor, changes the direction of what
follows or ends a line. JSON needs none of this: it holds every text in full, and escapes by itself.
"""

from __future__ import annotations

import re

LONGEST_IN_TABLE = 60
"""Characters of a word in a table, where a longer one would push the other columns out."""
LONGEST_IN_LINE = 500
"""Characters of a word elsewhere: a path should stand whole."""
LONGEST_TEXT = 4000
"""Characters of a cell, a message or a line: about two screens."""


def visible(text: str) -> str:
    r"""The text on one line, with what cannot be seen escaped as Python's `repr` does: \n, \x1b, \u202e, \udc80.

    That is controls, marks of direction, lone surrogates, spaces other than the plain one, and what Unicode does not
    define.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def shortened(text: str, most: int = LONGEST_TEXT) -> str:
    """The text, or its beginning and end around an ellipsis, of `most` characters together."""
    if len(text) <= most:
        return text
    tail = (most - 1) // 2
    return f"{text[: most - 1 - tail]}…{text[len(text) - tail :]}"


def line(text: str) -> str:
    """What a message or a line of output shows of a text."""
    return _shown(text, LONGEST_IN_LINE)


def cell(text: str) -> str:
    """What a table shows of a text."""
    return _shown(text, LONGEST_IN_TABLE)


def lines(text: str) -> str:
    """A text of many lines, as tools print them: line breaks and tabs stay, everything else is as in `visible`."""
    return re.sub(r"[^\n\t]+", lambda part: visible(part[0]), text)


def listed(items: list[str], most: int) -> list[str]:
    """The first items, and how many more there are."""
    more = len(items) - most
    return [*items[:most], *([f"and {more} more"] if more > 0 else [])]


def _shown(text: str, longest_word: int) -> str:
    words = (shortened(word, longest_word) for word in text.split(" "))
    return visible(shortened(" ".join(words)))
