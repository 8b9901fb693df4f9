"""The first stage of the pipeline: reads rows from a source, makes steps of them, and checks their structure.

A row is read in two halves. ``draw`` runs on the caller's thread: there torch runs the user's sampler and dataset, too.
``finish`` may run on the background thread; it reads the batches that loader workers made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

from torchdistinput.batches.schema import Structure
from torchdistinput.batches.schema_check import SchemaChecker
from torchdistinput.step_types import (
    NOTHING_SKIPPED,
    Drawn,
    Failed,
    Held,
    LocalStep,
    OpaqueBatch,
    PartialPiece,
    PastEnd,
    ReadFailure,
    Row,
    Rows,
    SizedRow,
    Skipped,
)


@final
class Fetch:
    """Reads the rows of a stream as steps.

    Args:
      stream: the rows of one epoch.
      checker: learns and checks the structure of the elements.
      as_read: whether a step without an empty piece is complete when it is read: it is neither padded nor copied.
      notes: write facts about its data into each step: a digest, where other ranks must read the same data; sums.
    """

    def __init__(
        self,
        stream: Rows,
        checker: SchemaChecker,
        *,
        as_read: bool = False,
        notes: Sequence[Callable[[LocalStep, Row], None]] = (),
    ) -> None:
        self._notes = notes
        self._stream = stream
        self._in_background = stream.in_background
        self._as_read = as_read
        self._draw = stream.draw
        self._checker = checker
        self._structure: Structure | bytes | None = None  # the one that came last
        self._arranges = False  # whether the keys of its dicts have another order than at first
        self._inspects = True  # whether elements are to be inspected
        self._drawn_out = False
        self._read_out = False

    def draw(self) -> Drawn | Held:
        """The next step, or the half of it that belongs to the caller's thread. After the end always ``PastEnd``."""
        if self._drawn_out:
            return PastEnd()
        draw = self._draw
        try:
            content = draw()
            if content is not None:
                return Drawn(content) if self._in_background else self._read(content)
        except Exception as error:
            failed = _failed(error)
            self._drawn_out = not failed.goes_on
            return failed
        self._drawn_out = True
        return PastEnd()

    def finish(self, drawn: Drawn | Held) -> Held:
        """The complete step."""
        return self._read(drawn.content) if isinstance(drawn, Drawn) else drawn

    def _read(self, content: Any) -> Held:
        if self._read_out:
            return PastEnd()
        try:
            found: SizedRow | None = content if type(content) is tuple else self._stream.fetch(content)
            if found is None:
                self._read_out = True
                return PastEnd()
            row, known, digest = found
            sizes, structure = known.pieces, known.structure
            skipped = NOTHING_SKIPPED
            # The common case has nothing to inspect: a call would take half as long again.
            if structure is not self._structure or self._inspects or len(row) > 1 or type(row[0]) is PartialPiece:
                sizes, skipped = self._seen(row, sizes, structure)
            is_whole = 0 not in sizes or type(row[0]) is OpaqueBatch  # no empty piece must be made
            step = LocalStep(row, sizes, row if self._as_read and is_whole else (), digest, skipped)
            for note in self._notes:
                note(step, row)
            return step  # noqa: TRY300 - a note may fail, too
        except Exception as error:
            failed = _failed(error)
            self._read_out = not failed.goes_on
            return failed

    def _seen(
        self, row: Row, sizes: tuple[int, ...], structure: Structure | bytes | None
    ) -> tuple[tuple[int, ...], Skipped]:
        """Learns or checks the structure of the pieces. Returns the samples left in each, and the skipped ones."""
        left, skipped = [], NOTHING_SKIPPED
        for place, (piece, size) in enumerate(zip(row, sizes, strict=True)):
            if type(piece) is PartialPiece:
                skipped = skipped.plus(piece.skipped)
                left.append(size - len(piece.left_out))
                row[place] = piece.piece
            else:
                left.append(size)
        if any(left):
            if structure is not self._structure:
                self._structure = structure
                self._arranges = structure is not None and self._checker.take(structure)
            self._inspects = self._arranges or (self._inspects and self._checker.leaf_structure is None)
            if self._inspects:
                self._inspect(row, left)
        return tuple(left), skipped

    def _inspect(self, row: Row, sizes: list[int]) -> None:
        """Puts the keys of dicts in the order of the first element, or notes the leaves of the first element."""
        first = self._checker.structure
        for place, (piece, size) in enumerate(zip(row, sizes, strict=True)):
            if type(piece) is OpaqueBatch:
                self._inspects = False
            elif self._arranges and first is not None and piece is not None:
                row[place] = first.arrange(piece)
            elif size and self._checker.leaf_structure is None:
                self._checker.note_leaves(piece, size)

    def close(self) -> None:
        """Ends the stream. Idempotent."""
        self._stream.close()


def _failed(error: Exception) -> Failed:
    if isinstance(error, ReadFailure) and error.__cause__ is not None:
        return Failed(error.__cause__, error.where, error.origin, error.goes_on)
    return Failed(error, "")
