"""The saved position of a dataset of files, of fragments, or of a mixture.

**The position** is ``["files", replicas, deals, cursors, rows]``: the number of replicas; the changes of the world so
far (``plan.file_resharding``); for each worker ``[row, cursor]``: the cursor of its reader after ``row`` rows, as JSON
text, and in the middle of a batch the cursors of the files that the batch has opened; the rows delivered; and of a
mixture its weights. Rows count from the last change of the world. After a resume at the cursor,
``rows - row`` rows are read again, undecoded.

If all workers read the same (DATA, or one worker), there is one cursor. Else each worker knows its own; they are
gathered when a state is asked for (``joined``). A state has the mark of each file that is in progress, so that a file
that has changed is noticed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from torchdistinput.errors import StateMismatch
from torchdistinput.plan.file_resharding import Deals, ReaderCursor, checked_deals
from torchdistinput.plan.mixing import Cursor, cursor_from_json
from torchdistinput.sources.kernel.row_stream import PositionLog


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
    return PositionLog(*begun, row, read_ahead + 2, lambda _, cursors: cursors[-1])


def cursor_at(log: PositionLog[Cursor], row: int) -> list[Any]:
    """A row up to ``row``, the reader's cursor after it, and any files that its batch at ``row`` has opened."""
    known, place = log.at(row)
    found = [known, place.to_text()]
    after = log.in_progress(row)
    if not (isinstance(place, ReaderCursor) and isinstance(after, ReaderCursor)):
        return found  # a mixture has no file in progress
    files = {cursor.file for cursor in place.cursors}
    opened = tuple(cursor for cursor in after.slots if cursor is not None and cursor.file not in files)
    return [*found, ReaderCursor(waiting=opened).to_json()[3]] if opened else found


def joined(positions: Sequence[list[Any]]) -> list[Any]:
    """The position of all workers, from that of each."""
    kind, replicas, deals, _, *rest = positions[0]
    return [kind, replicas, deals, [cursor for each in positions for cursor in each[3]], *rest]
