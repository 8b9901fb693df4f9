"""The saved position of a dataset of files: its format, and how the workers exchange their cursors.

**The position** is ``["files", replicas, deals, cursors, rows]``: the number of replicas; the changes of the world so
far (``plan.file_resharding``); for each worker ``[row, cursor]``: the cursor of its reader after ``row`` rows, as JSON
text, and in the middle of a batch the cursors of the files that the batch has opened; the rows delivered; and of a
mixture its weights (``mixture_weights``). Rows count from the last change of the world. After a resume at the cursor,
``rows - row`` rows are read again, undecoded.

**The exchange.** If all workers read the same (DATA, or one worker), each worker knows the cursor. Under FILE each
worker has a cursor of its own. The workers exchange them after 1, 2, 4, ... and then every 64 rows (256 if steps are
short, and quickly read again), so taking a state is local, and the state is the same on every rank. They also exchange
them in the vote after one of them opened a file: a state has the mark of each file that is in progress, so that a file
that has changed is noticed.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, final

from torchdistinput.coordination.channel import plain_message
from torchdistinput.errors import InputError, StateMismatch
from torchdistinput.plan.file_resharding import Deals, ReaderCursor, checked_deals
from torchdistinput.plan.mixing import Cursor, cursor_from_json
from torchdistinput.sources.kernel.position_log import PositionLog
from torchdistinput.step_types import ROWS_BETWEEN_SYNCS


class FilesPosition(NamedTuple):
    """A position, taken apart."""

    num_replicas: int
    deals: Deals
    cursors: Sequence[tuple[int, Cursor]]
    rows: int
    weights: Any = None
    """Of a mixture; as plain values."""
    begun: Sequence[Cursor] = ()
    """Cursors of readers in the files that were opened in batches of which some rows were delivered."""

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> FilesPosition:
        """The position of a saved state.

        Raises:
          StateMismatch: the value is not a position.
        """
        match value:
            case ["files", int(num_replicas), list() as deals, list() as cursors, int(rows), *weights] if (
                cursors and len(weights) < 2
            ):
                found = [*map(_cursor_of, cursors)]
                places = [(row, cursor_from_json(place)) for row, place, _ in found]
                begun = [ReaderCursor.from_json([[], 0, 0, opened, 0]) for _, _, opened in found if opened]
                return cls(num_replicas, checked_deals(deals), places, rows, weights[0] if weights else None, begun)
            case _:
                raise StateMismatch(f"position: found {value!r:.100} in the state, not one of files.")

    def to_json(self) -> list[Any]:
        """The position as a saved state has it."""
        return self.json_at(self.rows, [(row, place.to_text()) for row, place in self.cursors], self.weights)

    def json_at(self, rows: int, cursors: Sequence[Sequence[Any]], weights: Any = None) -> list[Any]:
        """``to_json`` for other rows, with the cursors as texts, and the weights of a mixture."""
        values = ["files", self.num_replicas, list(map(list, self.deals)), list(map(list, cursors)), rows]
        return values if weights is None else [*values, weights]


def _cursor_of(value: Any) -> tuple[int, object, list[Any]]:
    match value:
        case [int(row), str(place)] | [int(row), str(place), list()]:
            try:
                return row, json.loads(place), [] if len(value) == 2 else value[2]
            except (ValueError, RecursionError) as error:
                raise StateMismatch(f"position: found {place!r:.100} in the state as a reader's cursor.") from error
        case _:
            raise StateMismatch(f"position: found {value!r:.100} in the state of a reader; [row, cursor] is needed.")


def cursor_log(begun: tuple[int, Cursor], row: int, read_ahead: int) -> PositionLog[Cursor]:
    """The log of the cursors of one reader.

    Args:
      begun: a row, and the reader's cursor after it.
      row: the row at which the stream begins, after the cursor at which the reader starts.
      read_ahead: rows that may be read before they are delivered.
    """
    # Read-ahead of the agreed row is bounded, and the agreed row may be as many rows behind a periodic sync.
    return PositionLog(*begun, row, 2 * (read_ahead + 2), lambda _, cursors: cursors[-1])


class _Told(NamedTuple):
    """A cursor of one worker, as all workers know it."""

    row: int
    """The row after which it is the cursor."""
    place: str
    before: int
    """The row before its batch."""
    since: int
    """The row from which on all workers know it."""


@final
class CommonPlaces:
    """The cursors of all workers after some rows, as the workers exchanged them: a ``PeriodicSync``, and ``Updates``.

    Args:
      own: this worker's cursors.
      begun: where the epoch begins.
      worker: the number of this worker.
      read_ahead: rows that may be read before they are delivered.
    """

    every = ROWS_BETWEEN_SYNCS
    early = True  # so that a state of the first steps has the open files, too

    def __init__(self, own: PositionLog[Cursor], begun: FilesPosition, worker: int, read_ahead: int) -> None:
        self._own = own
        self._worker = worker
        self._first_row = begun.rows
        self._keep = 2 * (read_ahead + 2)
        self._known = [deque([_Told(row, place.to_text(), row, row)]) for row, place in begun.cursors]
        self._sent_row, self._sent_opened = begun.cursors[worker][0], _opened(begun.cursors[worker][1])

    @property
    def pending(self) -> bool:
        """See ``Updates.pending``: whether this worker has opened a file since the last exchange."""
        last = self._own.last_told
        return last is not None and _opened(last) > self._sent_opened

    def mine(self, rows: int) -> str:
        """See ``PeriodicSync.mine``: the cursors after the batches in which files were opened, and the last cursor."""
        places = self._own.between(self._sent_row, self._first_row + rows)
        told = []
        for before, row, place in places:
            opens = _opened(place) > self._sent_opened
            if opens or row == places[-1][1]:
                self._sent_row, self._sent_opened = row, _opened(place)
                # A file that a batch opens is told in the vote on the first row of the batch, or before.
                told.append([row, place.to_text(), before, before + 1 if opens else self._first_row + rows])
        return json.dumps({"worker": self._worker, "places": told})

    def learn(self, rows: int, texts: Sequence[str]) -> None:
        """See ``PeriodicSync.learn``.

        Raises:
          InputError: a rank sent something else.
        """
        for worker, places in map(_received, texts):
            known = self._known[worker]
            if places and places[-1].row > known[-1].row:  # else a rank with the same coordinate sent it, too
                known.extend(places)
            while len(known) > 1 and max(known[1].row, known[1].since) <= self._first_row + rows - self._keep:
                known.popleft()

    def at(self, row: int) -> list[list[Any]]:
        """For each worker a row up to ``row``, its cursor after it, and any files that its batch at ``row`` opened."""
        return [_at(row, [each for each in known.copy() if each.since <= row]) for known in self._known]


def _at(row: int, known: Sequence[_Told]) -> list[Any]:
    last = _last_before(row, known)
    found: list[Any] = [known[last].row, known[last].place]
    if last + 1 == len(known) or known[last + 1].before >= row:
        return found
    before, after = (cursor_from_json(json.loads(each.place)) for each in known[last : last + 2])
    if not (isinstance(before, ReaderCursor) and isinstance(after, ReaderCursor)):
        return found  # a mixture has no file in progress
    files = {cursor.file for cursor in before.cursors}
    opened = tuple(cursor for cursor in after.slots if cursor is not None and cursor.file not in files)
    return [*found, ReaderCursor(waiting=opened).to_json()[3]] if opened else found


def _opened(place: Cursor) -> int:
    return place.opened if isinstance(place, ReaderCursor) else 0


def _received(text: str) -> tuple[int, list[_Told]]:
    """The worker that sent the text, and its cursors after some rows."""
    match sent := plain_message(text):
        case {"worker": int(worker), "places": list() as places}:
            return worker, [
                _Told(int(row), str(place), int(before), int(since)) for row, place, before, since in places
            ]
        case _:
            raise InputError(
                f"another rank sent {sent!r:.100} as the cursor of its reader; every rank must run the same version of "
                "torchdistinput."
            )


def _last_before(row: int, known: Sequence[_Told]) -> int:
    """The number of the last entry up to that row."""
    for number in reversed(range(len(known))):
        if known[number][0] <= row:
            return number
    raise AssertionError(f"the place after row {row} was asked for, but those before row {known[0][0]} are forgotten")
