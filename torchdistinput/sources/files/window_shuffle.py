"""The window shuffle: how the records of a file are shuffled.

With ``shuffle_buffer`` every window of that many consecutive records of a file is yielded in a permutation keyed by
(seed, epoch, file, window). A buffer that is refilled record by record, as in TensorFlow, can only be restored by
reading everything before it. A window is restored by reading this window again.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from itertools import count, islice
from typing import Any, final

from torchdistinput.plan.permutation import shuffled

__all__ = ["Window", "windows"]


@final
class Window:
    """The current window of a file: its start, the order of its records, and the order of the window before."""

    __slots__ = ("order", "previous", "start")

    def __init__(self) -> None:
        self.start = 0
        self.order: list[int] = []
        self.previous: list[int] = []


def windows(
    records: Iterator[Any], size: int, key: tuple[int, ...], window: Window, first: int
) -> Generator[list[Any], None, None]:
    """Each window of records in its own order, from number ``first`` on."""
    for number in count(first):
        held = list(islice(records, size))
        if not held:
            return
        window.start = number * size
        window.previous = window.order
        window.order = shuffled(len(held), *key, number)
        held = list(map(held.__getitem__, window.order))
        yield held
        del held  # before the next window is read
