"""Brace patterns in names of files: ``data-{000..012}.tar`` is the thirteen names from ``data-000.tar`` on.

**The rules**, which are those of a shell. ``{first..last}`` and ``{first..last..step}`` are ints, with the zeros in
front that one of the two has; ``{a,b}`` are alternatives, which may have braces themselves. The names come in the order
as written, the last braces changing fastest. Other braces stay as they are: ``{}``, ``{a}``. ``[{]`` stands for a brace
itself, as ``[*]`` does for a star.

Braces are expanded before anything is looked up, so they name remote files without listing a folder.
"""

from __future__ import annotations

import re
from itertools import product
from typing import Final

MOST_NAMES: Final = 1 << 20

_HIDDEN: Final = {"[{]": "\0(", "[}]": "\0)"}  # no name has a zero byte
_RANGE: Final = re.compile(r"(-?\d{1,18})\.\.(-?\d{1,18})(?:\.\.(-?\d{1,18}))?")


def expand_braces(pattern: str) -> list[str]:
    """The names or patterns that a brace pattern stands for; the pattern alone if it has no braces to expand.

    Raises:
      ValueError: they are more than ``MOST_NAMES``.
    """
    if "{" not in pattern:
        return [pattern]
    for plain, hidden in _HIDDEN.items():
        pattern = pattern.replace(plain, hidden)
    names = _expanded(pattern)
    for plain, hidden in _HIDDEN.items():
        names = [name.replace(hidden, plain) for name in names]
    return names


def _expanded(pattern: str) -> list[str]:
    choices: list[list[str]] = []
    start = at = 0
    count = 1
    while (opening := pattern.find("{", at)) >= 0:
        end = _end_of_group(pattern, opening)
        if end:
            choices += [pattern[start:opening]], _alternatives(pattern[opening + 1 : end - 1], pattern)
            count *= len(choices[-1])
            _check(count, pattern)
            start = end
        at = end or opening + 1
    return list(map("".join, product(*choices, [pattern[start:]])))


def _end_of_group(pattern: str, opening: int) -> int:
    """The end of the group that the brace at ``opening`` begins; 0 if it begins none."""
    depth = 0
    for at in range(opening, len(pattern)):
        depth += (pattern[at] == "{") - (pattern[at] == "}")
        if not depth:
            return at + 1
    return 0


def _alternatives(inside: str, pattern: str) -> list[str]:
    """The texts that a group of the pattern stands for."""
    if found := _RANGE.fullmatch(inside):
        return _numbers(pattern, *found.groups())
    pieces, depth = [""], 0
    for character in inside:
        depth += (character == "{") - (character == "}")
        if character == "," and not depth:
            pieces.append("")
        else:
            pieces[-1] += character
    if len(pieces) == 1:
        return ["{" + each + "}" for each in _expanded(inside)]
    return [text for piece in pieces for text in _expanded(piece)]


def _numbers(pattern: str, first: str, last: str, step: str | None) -> list[str]:
    low, high, by = int(first), int(last), abs(int(step or 1)) or 1
    numbers = range(low, high + 1, by) if low <= high else range(low, high - 1, -by)
    _check(len(numbers), pattern)
    padded = any(text.lstrip("-").startswith("0") and len(text.lstrip("-")) > 1 for text in (first, last))
    width = max(len(first), len(last)) if padded else 0
    return [f"{number:0{width}d}" for number in numbers]


def _check(count: int, pattern: str) -> None:
    if count > MOST_NAMES:
        raise ValueError(
            f"the braces of {pattern!r:.200} stand for {count} names or more; at most {MOST_NAMES} are made"
        )
