"""The rows of one epoch, as the pipeline takes them, from batches that were cut where they were read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, final

from torchdistinput.batches.schema import Structure
from torchdistinput.errors import StateMismatch
from torchdistinput.sources.kernel.cut import READ_HERE, Cut, cut_of
from torchdistinput.sources.kernel.position_log import PositionLog
from torchdistinput.sources.kernel.read_failures import Failure
from torchdistinput.sources.rng import WithRng, call_directly
from torchdistinput.step_types import Row, SizedRow, SourceCounts

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
        yield from rows[left:]
        left = max(0, left - len(rows))
    log.has_ended = True
    if left and must_have:
        raise StateMismatch(
            f"the data ended {left} step(s) before the one where the epoch was to begin. It must be the same data in "
            "the same order, and have that step."
        )


class Track(Protocol):
    """Tracks the position of a stream of rows."""

    owns_state: bool
    """See ``Stream.owns_state``."""

    def position(self, rows: int) -> list[Any]:
        """See ``Stream.position``."""


@final
class RowStream:
    """The stream over a generator of rows.

    Args:
      rows: the rows.
      in_background: whether reading them runs no user code in this process.
      close: releases everything else that belongs to the stream.
      track: tracks the position of the stream.
      with_rng: calls user code that may draw from the default random state, where all ranks must draw the same.
      structure: see ``Stream.structure``.
      one_structure: see ``Stream.one_structure``.
      counts: see ``Stream.counts``; ``None`` for data that can be no mixture.
    """

    samples_passed = None

    def __init__(
        self,
        rows: Generator[SizedRow, None, None],
        *,
        in_background: bool,
        track: Track,
        close: Callable[[], None] | None = None,
        with_rng: WithRng | None = None,
        structure: Structure | None = None,
        one_structure: bool = False,
        counts: Callable[[int], SourceCounts | None] | None = None,
    ) -> None:
        self.in_background = in_background
        self.one_structure = one_structure
        self.structure = structure
        self.draw: Callable[[], SizedRow | bool | None]
        """See ``Stream.draw``."""
        self._rows = rows
        self._next = partial(next, rows, None)
        self._track = track
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
        return self._track.owns_state

    def fetch(self, drawn: Any) -> SizedRow | None:
        """See ``Stream.fetch``."""
        row: SizedRow | None = self._next() if self.in_background else drawn
        return row

    def position(self, rows: int) -> list[Any]:
        """See ``Stream.position``."""
        return self._track.position(rows)

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
