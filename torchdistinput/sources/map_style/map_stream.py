"""The stream of rows of a map-style loader: draws indices, and fetches the pieces of this worker.

Indices are drawn on the caller's thread; pieces are fetched where torch fetches them. Data in memory of this process is
gathered as a whole row as soon as its indices are drawn. The structure of such a row is known, so it is not inspected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from torchdistinput.batches.schema import Structure
from torchdistinput.plan.batching import Cutter
from torchdistinput.sources.kernel.cut import Cut, as_is, labelled_piece, no_sizes, nothing_left
from torchdistinput.sources.kernel.position_log import in_any_order
from torchdistinput.sources.kernel.read_failures import Failure
from torchdistinput.sources.kernel.ready_batches import AS_LEAVES, CutReady, ReadyFns
from torchdistinput.sources.kernel.sample_index import labelled_batch
from torchdistinput.sources.map_style.in_memory import NOT_THERE, InMemoryRows
from torchdistinput.sources.map_style.piece_dataset import PieceDataset
from torchdistinput.sources.map_style.sampler_draws import DrawnRow, SamplerDraws
from torchdistinput.sources.rng import packed
from torchdistinput.step_types import Described, DividedDraw, PartialPiece, Row, RowSizes, SizedRow


@final
class MapStream:
    """The stream of one epoch.

    Its position is ``["map", rows]``; under HINT it also has the states of this worker's generators at the start of the
    epoch. Under DATA, rows are batches.

    Args:
      draws: draws the indices.
      read: gives the next piece.
      cutter: cuts batches by the laws of ``plan``.
      pieces: makes the pieces in this process; ``None`` if torch's loader makes them.
      in_background: see ``Stream.in_background``.
      first_row: rows of the epoch before the first one.
      states: under HINT, the states of this worker's generators at the start of the epoch.
      close: stops the reading.
      in_order: whether the pieces come in the order in which they were drawn.
      collates: whether pieces are collated from samples; else they may be cut from items that are whole batches.
      ready: how such items are counted and cut.
    """

    structure: Structure | None = None
    owns_state = False

    def __init__(  # noqa: PLR0913 - one stream is one call
        self,
        draws: SamplerDraws,
        read: Callable[[], Any],
        cutter: Cutter,
        *,
        pieces: PieceDataset | None,
        in_background: bool,
        first_row: int,
        states: Sequence[torch.Tensor],
        close: Callable[[], None],
        in_order: bool = True,
        collates: bool = True,
        ready: ReadyFns = AS_LEAVES,
    ) -> None:
        self.one_structure = not collates and ready.split is None
        self._in_order = in_order
        self.in_background = in_background
        self._first_row = first_row
        self._states = states
        self._draws = draws
        self._pieces = pieces
        self._gather: InMemoryRows | None = None  # once it is found
        self._read = read
        self._close = close
        self._cutter = cutter
        self._whole = CutReady(as_is, cutter, ready)
        self._rows_of_whole: list[SizedRow] = []

    @property
    def samples_passed(self) -> int | None:
        """See ``Stream.samples_passed``."""
        return self._draws.samples_passed

    def draw(self) -> DrawnRow | SizedRow | None:
        """See ``Stream.draw``. A row that is gathered from memory is whole at once, and known."""
        drawn = self._draws.take_row()
        if self._pieces is None or drawn is None or drawn.gathered is None:
            return drawn
        gather = self._gather = self._gather or self._pieces.gather
        if gather is None:
            return drawn
        requests = [self._draws.take_request() for _ in range(drawn.wanted)]
        try:
            made = iter([gather(request[1]) for request in requests if request is not None])
        except NOT_THERE:  # reading one by one will raise it too, and name the samples
            self._draws.give_back(requests)
            return drawn
        return [next(made) if wanted else None for wanted in drawn.pieces], drawn.gathered, drawn.digest

    def fetch(self, drawn: DrawnRow) -> SizedRow:
        """See ``Stream.fetch``."""
        pieces: Row = []
        structure: Structure | None = None
        for wanted in drawn.pieces:
            piece = self._read() if wanted else None
            if type(piece) is Described:
                piece, structure = piece
            if type(piece) is Failure:
                piece.reraise()
            pieces.append(piece)
        if drawn.failure is not None:
            raise drawn.failure
        if drawn.row_of_whole is None:
            sizes, numbers = drawn.sizes, drawn.numbers
            if type(drawn.digest) is DividedDraw:
                drawn.digest.note_left_out(pieces)
            pieces = pieces if numbers is None else _labelled(pieces, numbers)
            return pieces, RowSizes(0, sizes, structure), drawn.digest
        if drawn.pieces[0]:  # the first row of a whole batch that is read
            self._rows_of_whole = self._cut_whole(pieces[0], drawn)
        return (*self._rows_of_whole[drawn.row_of_whole][:2], drawn.digest)

    def _cut_whole(self, item: Any, drawn: DrawnRow) -> list[SizedRow]:
        if isinstance(item, PartialPiece):
            rows = nothing_left(item.skipped, self._cutter)
            rows = [*rows[1:][: drawn.row_of_whole], rows[0], *rows[1:][drawn.row_of_whole :]]
            return Cut(rows, 0, no_sizes(rows)).sized()
        numbers = drawn.numbers
        return self._whole.cut(item).sized(
            None if numbers is None else lambda cut: labelled_batch(numbers[0], cut.rows, cut.size, self._cutter)
        )

    def position(self, rows: int) -> list[Any]:
        """See ``Stream.position``."""
        if not self._in_order:
            raise in_any_order()
        return ["map", self._first_row + rows, *map(packed, self._states)]

    def counts(self, rows: int) -> None:
        """See ``Stream.counts``."""

    def close(self) -> None:
        """See ``Stream.close``."""
        self._close()


def _labelled(pieces: Row, index: Sequence[torch.Tensor]) -> Row:
    return [labelled_piece(numbers, piece) for piece, numbers in zip(pieces, index, strict=True)]
