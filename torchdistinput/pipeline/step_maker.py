"""Makes the steps of this rank: reads a row, checks it, pads it, begins its copies to the devices, measures the times.

A step is made in two halves. ``draw`` runs on the caller's thread: there torch runs the user's sampler and dataset,
too. ``make`` may run on the background thread; it reads the batches that loader workers made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, final

from torchdistinput.batches.padding import Pad
from torchdistinput.batches.pytree import bytes_held
from torchdistinput.batches.schema import Structure
from torchdistinput.batches.schema_check import SchemaChecker
from torchdistinput.errors import InputError
from torchdistinput.pipeline.metrics import COPY, FETCH, Metrics, in_range
from torchdistinput.pipeline.to_device import ToDevice
from torchdistinput.plan.balancing import StepCosts
from torchdistinput.step_types import (
    NOTHING_SKIPPED,
    DividedDraw,
    Failed,
    LocalStep,
    OpaqueBatch,
    PartialPiece,
    ReadFailure,
    Row,
    Rows,
    SizedRow,
)


@final
class StepMaker:
    """Makes the steps of this rank. No other rank takes part.

    Args:
      stream: the rows of one epoch.
      checker: learns and checks the structure of the elements.
      pad: pads the pieces to one size; ``None`` for no padding.
      to_device: copies the pieces to the devices.
      replicas_per_worker: pieces of a step.
      metrics: collects the times.
      consumers: see ``open_runs.OpenRuns.consumers``.
      notes: write facts about its data into each step: a digest, where other ranks must read the same data; sums.
      give_back: is called with ``to_device`` when the pipeline no longer needs it.
    """

    def __init__(  # noqa: PLR0913 - all that makes steps, put together in one call
        self,
        stream: Rows,
        checker: SchemaChecker,
        pad: Pad | None,
        to_device: ToDevice,
        replicas_per_worker: int,
        metrics: Metrics,
        consumers: dict[object, float],
        *,
        notes: Sequence[Callable[[LocalStep, Row], None]] = (),
        give_back: Callable[[ToDevice], None] | None = None,
    ) -> None:
        self._stream = stream
        self._in_background = stream.in_background
        self._draw = stream.draw
        self._checker = checker
        self._pad = pad
        self._to_device = to_device
        self._as_read = pad is None and not to_device.moves  # a step without an empty piece is complete when it is read
        self._local = replicas_per_worker
        self._metrics = metrics
        self._notes = notes
        self._give_back = give_back
        self._structure: Structure | bytes | None = None  # the one that came last
        self._inspects = True  # whether elements are to be inspected
        self._drawn_out = self._read_out = False
        self.close_source = stream.close
        """Ends loader workers and open files."""
        self.enter_thread = to_device.enter_thread
        """The thread that calls ``make`` calls this first."""
        self.consumers = consumers
        """The consumers that wait for a step now, each with the time since when, by ``perf_counter``."""

    def draw(self) -> LocalStep:
        """The next step, or the half of it that belongs to the caller's thread. After the end always one past it."""
        step = LocalStep()
        if self._drawn_out:
            step.is_past_end = step.is_made = True
            return step
        draw = self._draw
        try:
            content = draw()
        except Exception as error:
            _note_failure(step, error)
            self._drawn_out = step.is_made = True
            return step
        if content is None:
            self._drawn_out = step.is_past_end = step.is_made = True
        elif self._in_background:
            step.drawn = content
        else:
            self._read(step, content)
            step.is_made = bool(step.transfers) or step.is_past_end or step.failure is not None
        return step

    def make(self, step: LocalStep) -> None:
        """Makes a drawn step: reads it, and begins its copies to the devices; or it failed, or is past the end."""
        if step.drawn is not None:
            self._finish(step)
        if not (step.transfers or step.is_past_end or step.failure is not None):
            if 0 in step.sizes and not self._checker.makes_empty:
                self._checker.want()
            else:
                try:
                    self._metrics.copying += self._sent(step)
                except Exception as error:  # for example out of memory: a failed step like any other
                    where = "" if isinstance(error, InputError) else "copying to the devices"
                    step.failure = Failed(error, where)
        step.is_made = True

    def _finish(self, step: LocalStep) -> None:
        began = perf_counter()
        in_range(FETCH, self._read, step, step.drawn)
        step.drawn = None
        ended = perf_counter()
        self._metrics.fetching += ended - began
        if self._metrics.trace is not None:
            self._metrics.trace.fetched(began, ended)

    def _read(self, step: LocalStep, content: Any) -> None:
        if self._read_out:
            step.is_past_end = True
            return
        try:
            found: SizedRow | None = content if type(content) is tuple else self._stream.fetch(content)
            if found is None:
                self._read_out = step.is_past_end = True
                return
            row, known, digest = found
            if type(digest) is DividedDraw:
                left_out = [each.left_out if type(each) is PartialPiece else () for each in row]
                step.costs = StepCosts(digest.division, tuple(left_out))
                digest = digest.draw_digest
            structure, step.draw_digest = known.structure, digest
            step.pieces, step.sizes = row, known.pieces
            # The common case has nothing to inspect: a call would take half as long again.
            is_new = structure is not self._structure and structure != self._structure
            if is_new or self._inspects or len(row) > 1 or type(row[0]) is PartialPiece:
                self._look_at(step, row, structure)
            if self._as_read and (0 not in step.sizes or type(row[0]) is OpaqueBatch):  # no empty piece must be made
                step.transfers = row
            for note in self._notes:
                note(step, row)
        except Exception as error:
            step.transfers = ()
            _note_failure(step, error)
            self._read_out = True

    def _look_at(self, step: LocalStep, row: Row, structure: Structure | bytes | None) -> None:
        """Learns or checks the structure of the pieces. Notes the samples left in each, and the skipped ones."""
        left, skipped = [], NOTHING_SKIPPED
        for place, (piece, size) in enumerate(zip(row, step.sizes, strict=True)):
            if type(piece) is PartialPiece:
                skipped = skipped.plus(piece.skipped)
                left.append(size - len(piece.left_out))
                row[place] = piece.piece
            else:
                left.append(size)
        if any(left):
            if structure is not self._structure and structure != self._structure:
                self._structure = structure
                if structure is not None:
                    self._checker.take(structure)
            self._inspects = self._inspects and self._checker.leaf_structure is None
            if self._inspects:
                self._inspect(row, left)
        step.sizes, step.skipped = tuple(left), skipped

    def _inspect(self, row: Row, sizes: list[int]) -> None:
        """Notes the leaves of the first element."""
        for piece, size in zip(row, sizes, strict=True):
            if type(piece) is OpaqueBatch:
                self._inspects = False
            elif size and self._checker.leaf_structure is None:
                self._checker.note_leaves(piece, size)

    def fill(self, step: LocalStep) -> None:
        """Completes a step during a vote, whose structure was unknown. ``make`` may run at the same time."""
        self._metrics.filling += self._sent(step)

    def _sent(self, step: LocalStep) -> float:
        """Makes the empty pieces of a step, pads it, sends it to the devices. Returns the seconds that it took."""
        began = perf_counter()
        in_range(COPY, self._send, step)
        ended = perf_counter()
        if self._metrics.trace is not None:
            self._metrics.trace.copied(step, began, ended)
        return ended - began

    def _send(self, step: LocalStep) -> None:
        step.sizes = step.sizes or (0,) * self._local
        pieces = step.pieces or [None] * self._local
        # A piece that has samples is None where the user's collate function returned None.
        given = self._checker.has_empty_fn
        step.pieces = [
            self._checker.empty() if not size and (piece is None or given) else piece
            for piece, size in zip(pieces, step.sizes, strict=True)
        ]
        if self._pad is not None:
            self._pad(step, self._checker.structure)
        step.transfers = self._to_device.send(step.pieces)
        step.pieces = []

    def weigh(self, step: LocalStep) -> int:
        """About how many bytes a step takes; 0 where the size is not known."""
        pieces = [each.batch for each in step.transfers] if self._to_device.moves else step.transfers or step.pieces
        weights = [bytes_held(piece) for piece in pieces if piece is not None]
        return 0 if None in weights else sum(weight or 0 for weight in weights)

    def discard(self, step: LocalStep) -> None:
        """Discards a step that will not be delivered."""
        if step.transfers:
            self._to_device.discard(step.transfers)

    def close_devices(self) -> None:
        """Releases the devices, once the thread has stopped."""
        if self._give_back is not None:
            self._give_back(self._to_device)


def _note_failure(step: LocalStep, error: Exception) -> None:
    """Notes how a step failed, after which the data does not go on."""
    step.failure = Failed(error, "")
    if isinstance(error, ReadFailure) and error.__cause__ is not None:
        step.failure = Failed(error.__cause__, error.where, error.origin)
