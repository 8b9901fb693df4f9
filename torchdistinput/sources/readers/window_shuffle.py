"""The window shuffle: how the records of a file are shuffled.

With ``shuffle_buffer`` every window of that many consecutive records of a file is yielded in a permutation keyed by
(seed, epoch, file, window). A buffer that is refilled record by record, as in TensorFlow, can only be restored by
reading everything before it. A window is restored by reading this window again.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from itertools import count
from typing import final

from torchdistinput.plan.permutation import shuffled
from torchdistinput.sources.formats.columns import Columns, RecordList


@final
class Window:
    """The current window of a file: its start, the order of its records, and the order of the window before."""

    __slots__ = ("order", "previous", "start")

    def __init__(self) -> None:
        self.start = 0
        self.order: list[int] = []
        self.previous: list[int] = []


def windows(
    in_order: Iterator[RecordList], size: int, key: tuple[int, ...], window: Window, first: int
) -> Generator[RecordList, None, None]:
    """Each window of records in its own order, from number ``first`` on.

    Args:
      in_order: the records of each window in the order of the file.
      size: how many records a window has; the last one may have fewer.
      key: determines the orders, with the number of the window.
      window: is set to the current window.
      first: the number of the first window.
    """
    for number in count(first):
        held = next(in_order, None)
        if held is None:
            return
        window.start = number * size
        window.previous = window.order
        window.order = shuffled(len(held), *key, number)
        held = held.take(window.order) if isinstance(held, Columns) else list(map(held.__getitem__, window.order))
        yield held
        del held  # before the next window is read
