"""The rows of one epoch, as the pipeline takes them, from batches that were cut where they were read.

``PositionLog`` has where reading stood after each batch, so that a state can say where it stood after a row.

Problem. Batches are read ahead of the training loop, and a state describes what was delivered. Readers tell where they
stand in different ways: a reader of records gives its cursor from time to time; of an opaque iterable only the batches
can be counted.

Decision. Each batch is noted when it is fetched, with what its reader told. What the notes mean is the reader's matter:
``follow`` brings a position forward over notes, which happens when a position is asked for. Notes that lie behind all
rows that may still be asked for are followed and dropped, many together: one at a time costs part of a step.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, Final, Generic, TypeVar, final

from torchdistinput.batches.schema import Structure
from torchdistinput.errors import StateMismatch
from torchdistinput.sources.kernel.batcher import READ_HERE, Cut, cut_of
from torchdistinput.sources.kernel.read_failures import Failure
from torchdistinput.sources.rng import WithRng, call_directly
from torchdistinput.step_types import Row, SizedRow, SourceCounts

_FOLLOWED_TOGETHER: Final = 32

T = TypeVar("T")


def in_any_order() -> StateMismatch:
    """The error for a state in the middle of an epoch whose batches come in any order."""
    return StateMismatch(
        "the DataLoader has in_order=False, so its batches come in any order, and nobody knows which of them were "
        "delivered. Build it with in_order=True to save its state in the middle of an epoch, or save it at the end."
    )


Note = tuple[int, int, Any]
"""A batch that was read: the row before it, its last row, and what its reader told."""


@final
class PositionLog(Generic[T]):
    """Where reading stood after the rows of one epoch.

    Rows are read on one thread, and positions are asked for on another, perhaps by the handler of a signal.

    Args:
      row: a row, after which reading stood at ``position``.
      position: this position.
      begins_at: the row at which the stream begins.
      most_behind: how many rows behind the batch that was read last a position may be asked for.
      follow: brings a position forward over what the reader told, batch by batch.
    """

    def __init__(
        self, row: int, position: T, begins_at: int, most_behind: int, follow: Callable[[T, Sequence[Any]], T]
    ) -> None:
        self._row, self._position = row, position
        self._last = self._begins_at = begins_at
        self._most_behind = most_behind
        self._follow = follow
        self._notes: deque[Note] = deque()
        self._lock = threading.RLock()
        self.samples_passed = 0
        """Samples of the rows at the beginning that were read and passed over; see ``Stream.samples_passed``."""
        self.has_ended = False
        """Whether all batches were read."""

    @property
    def is_unread(self) -> bool:
        """Whether nothing of the epoch was read, not even its end."""
        return self._last == self._begins_at and not self.has_ended

    def add(self, rows: int, told: Any) -> None:
        """Notes a fetched batch of so many rows; ``None``: its reader told nothing. Fetching thread."""
        before = self._last
        with self._lock:
            self._last = before + rows
            if told is None:
                return
            self._notes.append((before, self._last, told))
            if len(self._notes) > self._most_behind + _FOLLOWED_TOGETHER:
                self._row, self._position, passed = self._reached(before - self._most_behind)
                for _ in range(passed):
                    self._notes.popleft()

    def at(self, row: int) -> tuple[int, T]:
        """The last row up to ``row`` after which it is known where reading stood, and where."""
        with self._lock:
            if row < self._row:
                raise AssertionError(f"the position after row {row} is asked for; up to {self._row} they are forgotten")
            return self._reached(row)[:2]

    def in_progress(self, row: int) -> Any:
        """What the reader of the batch told of which some rows up to ``row`` were delivered; ``None``: nothing."""
        with self._lock:
            return next((told for before, last, told in self._notes if before < row < last), None)

    def rows_read(self, row: int) -> int:
        """``row``, or the last row of the data, if that comes before."""
        return min(row, self._last) if self.has_ended else row

    def _reached(self, row: int) -> tuple[int, T, int]:
        passed = list(takewhile(lambda note: note[1] <= row, self._notes))
        if not passed:
            return self._row, self._position, 0
        return passed[-1][1], self._follow(self._position, [told for _, _, told in passed]), len(passed)


_LOG = logging.getLogger("torchdistinput")


def rows_of(
    cuts: Iterable[Cut | SizedRow | Failure],
    log: PositionLog[Any],
    left: int = 0,
    label: Callable[[Cut], list[Row]] | None = None,
    *,
    must_have: bool = True,
) -> Generator[SizedRow, None, None]:
    """The rows of batches. Each batch is noted in the log.

    Args:
      cuts: the batches, cut; one that is a row of this process comes as it is.
      log: the log.
      left: how many rows are left out at first.
      label: puts the index beside each piece.
      must_have: whether there must be as many rows as are left out; a rank with data of its own may have fewer.

    Raises:
      StateMismatch: the data has fewer rows than are left out.
    """
    found: Any
    for found in cuts:
        rows: Sequence[SizedRow] = [found]
        if type(found) is tuple and label is None:
            log.add(1, (found[1].samples, READ_HERE))
        else:
            whole = cut_of(found)
            rows = whole.sized(label)
            if rows:  # else a loader worker skipped its turn
                log.add(len(rows), whole.told)
        if left:
            log.samples_passed += sum(row[1].samples for row in rows[:left])
        yield from rows[left:]
        left = max(0, left - len(rows))
    log.has_ended = True
    if left and must_have:
        raise StateMismatch(
            f"the data ended {left} step(s) before the one where the epoch was to begin. It must be the same data in "
            "the same order, and have that step."
        )


@final
class RowStream:
    """The stream over a generator of rows.

    Args:
      rows: the rows.
      in_background: whether reading them runs no user code in this process.
      close: releases everything else that belongs to the stream.
      position: see ``Stream.position``.
      owns_state: see ``Stream.owns_state``; ``None`` for data without a state of its own.
      with_rng: calls user code that may draw from the default random state, where all ranks must draw the same.
      structure: see ``Stream.structure``.
      one_structure: see ``Stream.one_structure``.
      counts: see ``Stream.counts``; ``None`` for data that can be no mixture.
      passed: the log of the rows, where it counts all samples before the first one that is given.
    """

    def __init__(  # noqa: PLR0913 - one stream is one call
        self,
        rows: Generator[SizedRow, None, None],
        *,
        in_background: bool,
        position: Callable[[int], list[Any]],
        owns_state: Callable[[], bool] | None = None,
        close: Callable[[], None] | None = None,
        with_rng: WithRng | None = None,
        structure: Structure | None = None,
        one_structure: bool = False,
        counts: Callable[[int], SourceCounts | None] | None = None,
        passed: PositionLog[Any] | None = None,
    ) -> None:
        self._passed = passed
        self.in_background = in_background
        self.one_structure = one_structure
        self.structure = structure
        self.draw: Callable[[], SizedRow | bool | None]
        """See ``Stream.draw``."""
        self._rows = rows
        self._next = partial(next, rows, None)
        self.position = position
        """See ``Stream.position``."""
        self._owns_state = owns_state
        self._close = close
        self._counts = counts
        if in_background:
            self.draw = _nothing_here
        elif with_rng is None or with_rng is call_directly:
            self.draw = self._next
        else:
            self.draw = partial(with_rng, self._next)

    @property
    def owns_state(self) -> bool:
        """See ``Stream.owns_state``. As of the last position."""
        return self._owns_state is not None and self._owns_state()

    @property
    def samples_passed(self) -> int | None:
        """See ``Stream.samples_passed``."""
        return None if self._passed is None else self._passed.samples_passed

    def fetch(self, drawn: Any) -> SizedRow | None:
        """See ``Stream.fetch``."""
        row: SizedRow | None = self._next() if self.in_background else drawn
        return row

    def counts(self, rows: int) -> SourceCounts | None:
        """See ``Stream.counts``."""
        return None if self._counts is None else self._counts(rows)

    def close(self) -> None:
        """See ``Stream.close``. Closes the user's files and generators too, unless a thread may still read them."""
        if self._close is not None:
            self._close()
            self._close = None
        if self.in_background:
            return
        try:
            self._rows.close()
        except ValueError as error:
            if str(error) != "generator already executing":
                raise
            _LOG.debug("closed while another thread reads, which closes its files when it is done: %s", error)


def _nothing_here() -> bool:
    """Draws a row that is fetched in the background."""
    return True
