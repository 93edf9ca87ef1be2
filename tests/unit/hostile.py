"""Names that try to be more than names."""

from __future__ import annotations

import re

MARKUP = "tokens[ids][bold][/][link=http://example.org]x[/link]"
UNBALANCED = "state[/h]"
LINES = "y\n  next: do this\r\n\ttabbed"
CONTROLS = "y\x1b[2J\x1b]0;title\x07\x7f\x9b31m\x85"
DIRECTIONS = "a\u202eb\u2066c\u2069\u200f\u05d0\u05d1"
MARKDOWN = "a|b`c`*d*_e_<i>~~f~~$g$\\"
LONG = "long" * 2500
NAMES = (MARKUP, UNBALANCED, LINES, CONTROLS, DIRECTIONS, MARKDOWN, LONG)


def assert_plain(output: str) -> None:
    """Nothing but characters that can be seen and line breaks, and no line beyond reason."""
    bad = {char for char in output if not (char.isprintable() or char == "\n")}
    assert not bad, bad
    assert max(map(len, output.splitlines()), default=0) < 5000


def without_colours(output: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", output)
