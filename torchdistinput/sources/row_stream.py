"""``RowStream``: the stream of one epoch over a generator of rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Protocol, cast, final

from torchdistinput.batches.schema import Structure
from torchdistinput.errors import InputError
from torchdistinput.sources.iterable.cursor import Compared
from torchdistinput.sources.read_failures import Failure
from torchdistinput.sources.rng import Draw, call_directly
from torchdistinput.step_types import Counted, Digest, PeriodicSync, SizedRow, Updates

_LOG = logging.getLogger("torchdistinput")


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
      rows: the rows; a ``Failure`` among them is raised in its place.
      in_background: whether reading them runs no user code in this process.
      close: releases everything else that belongs to the stream.
      track: tracks the position of the stream.
      draws: calls user code that may draw from the default random state, where all ranks must draw the same.
      periodic_sync: see ``Stream.periodic_sync``.
      structure: see ``Stream.structure``.
      one_structure: see ``Stream.one_structure``.
      updates: see ``HasUpdates.updates``.
    """

    def __init__(  # noqa: PLR0913 - one stream is one call
        self,
        rows: Generator[Counted | Compared | SizedRow | Failure, None, None],
        *,
        in_background: bool,
        track: Track,
        close: Callable[[], None] | None = None,
        draws: Draw | None = None,
        periodic_sync: PeriodicSync | None = None,
        structure: Structure | None = None,
        one_structure: bool = False,
        updates: Updates | None = None,
    ) -> None:
        self.updates = updates
        self.in_background = in_background
        self.one_structure = one_structure
        self.structure = structure
        self.periodic_sync = periodic_sync
        self.draw: Callable[[], Counted | Compared | SizedRow | Failure | bool | None]
        """See ``Stream.draw``."""
        self._rows = rows
        self._read: Digest = 0  # the digest of the row that was fetched last
        self._next = partial(next, rows, None)
        self._track = track
        self._close = close
        if in_background:
            self.draw = _nothing_here
        elif draws is None or draws is call_directly:
            self.draw = self._next
        else:
            self.draw = partial(draws, self._next)

    @property
    def owns_state(self) -> bool:
        """See ``Stream.owns_state``. As of the last position."""
        return self._track.owns_state

    def fetch(self, drawn: Any) -> Counted | None:
        """See ``Stream.fetch``."""
        row: Counted | Compared | SizedRow | Failure | None = self._next() if self.in_background else drawn
        if type(row) is Failure:
            row.reraise(goes_on=not isinstance(row.error, InputError))
        if type(row) is tuple:
            known = cast(SizedRow, row)
            self._read = known[2]
            return Counted(known[0], known[1].pieces, known[1].structure)
        if type(row) is Compared:
            self._read = row.read
            return Counted(row.pieces, row.sizes, row.structure)
        self._read = 0
        return cast("Counted | None", row)

    def digest_of(self, drawn: Any) -> Digest:
        """See ``Stream.digest_of``. The digest of the batch from which the last fetched row was cut."""
        return self._read

    def position(self, rows: int) -> list[Any]:
        """See ``Stream.position``."""
        return self._track.position(rows)

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
