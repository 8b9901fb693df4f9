"""Other libraries whose ``state_dict`` is known not to restore exactly, found without importing them.

The attributes that are read are the libraries' own, some of them private. If one is missing, the state is assumed to
be exact, and checked like any other when it is restored.
"""

from __future__ import annotations

from typing import Any, Final

_MOST_DEPTH: Final = 64


def _has_shuffle_buffer(dataset: Any) -> bool:
    """Whether examples of a Hugging Face ``IterableDataset`` wait in a buffer, from which they come in random order."""
    left = [vars(dataset).get("_ex_iterable")]
    for _ in range(_MOST_DEPTH):
        found = [each for each in left if each is not None]
        if any(type(each).__name__ == "BufferShuffledExamplesIterable" for each in found):
            return True
        left = [inside for each in found for inside in _inner(each)]
    return False


def _inner(iterable: Any) -> list[Any]:
    held = getattr(iterable, "__dict__", {})
    several = held.get("ex_iterables")
    return [held.get("ex_iterable"), *(several if isinstance(several, list | tuple) else [])]


def why_inexact(data: object) -> str:
    """The reason why the data's own state does not restore it exactly; empty if no reason is known. Local."""
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(data).__mro__}
    if ("datasets", "IterableDataset") not in kinds or not _has_shuffle_buffer(data):
        return ""
    # datasets 2.18 to 5.2.0, whose own documentation says so. With two loader workers its load_state_dict() can also
    # end in an IndexError.
    return (
        "the state of a Hugging Face IterableDataset does not hold its shuffle buffer, whose examples are lost on a "
        "resume"
    )
