"""Where the time of each batch goes, measured in the process that reads it: sampler, ``__getitem__``, ``collate_fn``.

In a loader worker the times travel to the main process with the batch (``TimedItem``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, Final, NamedTuple, final

PARTS: Final = ("sampler", "getitem", "collate")
NO_PARTS: Final = (0.0, 0.0, 0.0)
_SAMPLER, _GETITEM, _COLLATE = range(3)


@final
class BatchTimes(NamedTuple):
    """The times of one batch, by ``perf_counter``, which all processes of a host share."""

    began: float
    ended: float
    parts: tuple[float, ...]
    """Seconds in the sampler, in ``__getitem__`` (or in reading and decoding records), and in ``collate_fn``."""
    worker: int | None = None
    """The loader worker that read it; ``None``: the main process."""
    file: str | None = None
    """The file of the sample or records that took longest to read, where there are files."""
    number: int | str | None = None
    """The number of its record in the file; or its index, where it took more than half of the time of the batch."""


@final
class TimedItem(NamedTuple):
    """An item of a loader worker, with its times. A named tuple, so that torch pins its content."""

    item: Any
    times: BatchTimes


@final
class _TimedCall:
    def __init__(self, times: ReadTimes, part: int, function: Callable[..., Any]) -> None:
        self._times = times
        self._part = part
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        began = perf_counter()
        try:
            return self._function(*args, **kwargs)
        finally:
            self._times.parts[self._part] += perf_counter() - began


@final
class TimedSamples:
    """A map-style dataset whose reads are timed.

    Args:
      times: gets the times.
      dataset: the dataset.
    """

    def __init__(self, times: ReadTimes, dataset: Any) -> None:
        self._times = times
        self._dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        began = perf_counter()
        try:
            return self._dataset[index]
        finally:
            self._times.read(perf_counter() - began, None, index)

    def __getitems__(self, indices: Any) -> Any:
        began = perf_counter()
        try:
            return self._dataset.__getitems__(indices)
        finally:
            self._times.read(perf_counter() - began, None, indices[0] if len(indices) == 1 else None)


@final
class ReadTimes:
    """Collects the times of the batch that this process reads now. Each loader worker has a copy of its own."""

    def __init__(self) -> None:
        self.received: deque[BatchTimes] = deque(maxlen=256)
        """In the main process: the times of the items of loader workers, until the step is complete."""
        self._clear()

    def _clear(self) -> None:
        self.parts = [0.0, 0.0, 0.0]
        self._began: float | None = None
        self._longest = 0.0
        self._file: str | None = None
        self._number: Any = None

    def enter(self) -> None:
        """Notes that the reading of a batch begins, unless it has begun."""
        if self._began is None:
            self._began = perf_counter()

    def take(self, worker: int | None = None) -> BatchTimes:
        """The times of the batch that was read; the next one begins."""
        now = perf_counter()
        number = self._number
        if type(number) is not int and number is not None:
            number = f"{number!r:.100}"
        began = now if self._began is None else self._began
        if self._file is None and self._longest <= (now - began) / 2:
            number = None  # it is not to blame for the time of the batch
        times = BatchTimes(began, now, tuple(self.parts), worker, self._file, number)
        self._clear()
        return times

    def read(self, seconds: float, file: str | None, number: Any) -> None:
        """Notes that some samples were read: the first of them, and how long that took."""
        self.parts[_GETITEM] += seconds
        if seconds > self._longest:
            self._longest, self._file, self._number = seconds, file, number

    def of_sampler(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which draws from the sampler, timed."""
        return _TimedCall(self, _SAMPLER, function)

    def of_reading(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which reads samples, timed."""
        return _TimedCall(self, _GETITEM, function)

    def of_collate(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which makes a batch of samples, timed."""
        return _TimedCall(self, _COLLATE, function)

    def elements(self, elements: Iterator[Any]) -> Iterator[Any]:
        """The elements of an iterable, timed."""
        while True:
            self.enter()
            began = perf_counter()
            try:
                element = next(elements)
            except StopIteration:
                return
            finally:
                self.parts[_GETITEM] += perf_counter() - began
            yield element
