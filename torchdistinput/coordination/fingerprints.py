"""Comparison of arguments across ranks: a collective call fails on all ranks if one rank was given other arguments.

Each rank sends the facts that must be equal everywhere, or the error that keeps it from going on. All ranks receive the
same facts and errors, so all raise the same error, or none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from types import MappingProxyType
from typing import Any

from torchdistinput import errors
from torchdistinput.coordination.channel import plain_message
from torchdistinput.coordination.failures import OF_RANKS, words_of
from torchdistinput.coordination.process_group import Ranks
from torchdistinput.errors import InputError, RankDisagreement

_BUILTIN = {"TypeError": TypeError, "ValueError": ValueError}


def agree(
    ranks: Ranks | None,
    what: str,
    facts: Mapping[str, Any],
    *,
    error: Exception | None = None,
    extra: Any = None,
    hints: Mapping[str, str] = MappingProxyType({}),
    lists: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> list[Any]:
    """Compares the facts of all ranks. Collective: every rank calls this.

    Args:
      ranks: the ranks; ``None`` where there is only one.
      what: the name of the public call, for messages.
      facts: plain values that must be equal everywhere.
      error: the error that keeps this rank from going on, if any.
      extra: a plain value that every rank receives; it is not compared.
      hints: by the name of a fact, more advice for the error where this fact differs.
      lists: more facts, of any size. Their digests are compared; the error names the first entry that differs.

    Returns:
      The ``extra`` of every rank, by rank.

    Raises:
      RankDisagreement: facts differ; the message names the facts, the values and the ranks.
      Exception: this rank's error, or an equal one if another rank has an error.
    """
    if ranks is None:
        if error is not None:
            raise error
        return [extra]
    facts = {**facts, **{name: digest_of_list(entries) for name, entries in lists.items()}}
    problem = None if error is None else [type(error).__name__, words_of(error)]
    text = json.dumps({"what": what, "facts": facts, "problem": problem, "extra": extra}, default=str)
    try:
        texts = ranks.gather_texts(text, what)
    except OF_RANKS as failure:
        raise failure.with_traceback(None) from failure.__cause__
    read = {each: _message(each) for each in dict.fromkeys(texts)}
    answers = [read[each] for each in texts]
    if len(read) == 1 and error is None:  # mostly
        return [each["extra"] for each in answers]
    try:
        compare(ranks, "calls", [each["what"] for each in answers])
    except RankDisagreement as disagreement:
        raise disagreement from error
    problems = {ranks.name(rank): each["problem"] for rank, each in enumerate(answers) if each["problem"]}
    if error is not None and len(problems) == len(answers) and len({tuple(each) for each in problems.values()}) == 1:
        raise error  # the same error on all ranks: raised unchanged
    if problems:
        raise _like(what, problems) from error
    # In the order in which the facts were given: a fact on which others depend comes first.
    for fact in dict.fromkeys(fact for each in answers for fact in each["facts"]):
        values = [each["facts"].get(fact) for each in answers]
        if len(set(map(json.dumps, values))) > 1 and fact in lists and None not in values:  # the same on all ranks
            place, values = _first_difference(ranks, lists[fact], what)
            compare(ranks, f"{fact}, first in entry {place}", values, hints.get(fact, ""))
        compare(ranks, fact, values, hints.get(fact, ""))
    return [each["extra"] for each in answers]


def _first_difference(ranks: Ranks, entries: Sequence[str], what: str) -> tuple[int, list[str]]:
    """The first entry in which the lists of the ranks differ, and that of each rank. Collective.

    The place is found by halves: the messages stay small for lists of any size.
    """
    low, high = 0, max(map(int, ranks.gather_texts(str(len(entries)), what)))
    while high - low > 1:
        middle = (low + high) // 2
        if len(set(ranks.gather_texts(digest_of_list(entries[low:middle]), what))) > 1:
            high = middle
        else:
            low = middle
    return low, ranks.gather_texts(entries[low] if low < len(entries) else "(none)", what)


def digest_of_list(entries: Sequence[str]) -> str:
    """A short text that is equal for equal lists, and for different ones hardly ever. Local."""
    return sha256(json.dumps(entries).encode()).hexdigest()[:16]  # an entry may have any separator in it


def agree_on(ranks: Ranks | None, what: str, make: Callable[[], Any]) -> list[Any]:
    """``agree``, with the result of ``make()`` as ``extra``, or with its error. Collective: every rank calls this."""
    try:
        made = make()
    except Exception as error:  # of any kind: without a message the other ranks would wait for this one
        return agree(ranks, what, {}, error=error)
    return agree(ranks, what, {}, extra=made)


def _message(text: str) -> dict[str, Any]:
    match message := plain_message(text):
        case {"what": str(), "facts": dict(), "problem": None | [str(), str()], "extra": _}:
            return message
        case _:
            raise InputError(f"another rank sent {text!r:.100}, which is no message of torchdistinput's.")


def _like(what: str, problems: Mapping[int, tuple[str, str]]) -> Exception:
    """One error for all ranks, of the class of the failing ranks' errors if all have one class of this library."""
    kinds = {kind for kind, _ in problems.values()}
    kind = kinds.pop() if len(kinds) == 1 else ""
    ours = kind in _BUILTIN or kind in errors.__all__
    lines = (f"rank {rank}: {text if ours else f'{name}: {text}'}" for rank, (name, text) in problems.items())
    message = f"{what}: " + "\n".join(lines)
    if kind in _BUILTIN:
        return _BUILTIN[kind](message)
    found: Exception = (getattr(errors, kind) if ours else InputError)(message)
    return found


def compare(ranks: Ranks, fact: str, values: Sequence[Any], hint: str = "") -> None:
    """Compares a fact of all ranks that every rank knows already. Local: every rank passes the same values.

    Raises:
      RankDisagreement: they differ; the message names the fact, the values and the ranks.
    """
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(json.dumps(value), []).append(ranks.name(rank))
    if len(groups) > 1:
        found = "; ".join(f"rank {', '.join(map(str, members))}: {value}" for value, members in groups.items())
        raise RankDisagreement(
            f"the ranks differ in {fact}: {found}. Every rank must make the same calls, with the same data, options "
            "and seeds." + (hint and f" {hint}")
        )
