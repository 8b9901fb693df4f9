"""The stream of rows of a map-style loader: draws indices, and fetches the pieces of this worker.

Indices are drawn on the caller's thread; pieces are fetched where torch fetches them. Data in memory of this process is
gathered as a whole row as soon as its indices are drawn. The structure of such a row is known, so it is not inspected.

``SamplerDraws`` feeds one epoch of a rebuilt ``DataLoader``. It advances the user's sampler only on the caller's
thread, when and as often as torch would (with loader workers: by torch's own read-ahead, plus the steps that are read
ahead here), so that random state in user code stays repeatable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from functools import partial
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from torchdistinput.batches.schema import Structure
from torchdistinput.errors import BatchingError, StateMismatch
from torchdistinput.plan.batching import Cutter, Limits
from torchdistinput.sources.kernel.batcher import Batcher, Cut, as_is, labelled, no_sizes, nothing_left
from torchdistinput.sources.kernel.index_array import IndexArray, digest_of, is_digest_of
from torchdistinput.sources.kernel.read_failures import Failure
from torchdistinput.sources.kernel.ready_batches import AS_LEAVES, CutReady, ReadyFns
from torchdistinput.sources.kernel.row_stream import in_any_order
from torchdistinput.sources.kernel.sample_costs import CostDivider
from torchdistinput.sources.kernel.sample_index import SampleNumbers, no_numbers
from torchdistinput.sources.map_style.in_memory import NOT_THERE, InMemoryRows
from torchdistinput.sources.map_style.piece_dataset import PieceDataset, Request
from torchdistinput.sources.map_style.sampler_batches import SkippedBatches, batches_of, size_of
from torchdistinput.sources.rng import call_directly, packed
from torchdistinput.step_types import Described, Digest, PartialPiece, Row, RowSizes, SizedRow
from torchdistinput.tracing.read_times import ReadTimes


class DrawnRow(NamedTuple):
    """A row whose indices were drawn: the pieces that will come from the loader, or its number in a whole batch."""

    pieces: tuple[bool, ...]
    row_of_whole: int | None
    digest: Digest
    """The digest of the batch that was drawn, for comparing ranks; 0 if each worker draws batches of its own."""
    numbers: tuple[npt.NDArray[np.int64], ...] | None
    """The numbers of the samples of each piece, if they are wanted."""
    wanted: int
    """How many pieces will come."""
    sizes: tuple[int, ...] = ()
    """Samples in each piece; the sizes of a whole batch are known only after it was read."""
    gathered: RowSizes | None = None
    """The sizes of the row, if all its pieces are gathered from memory."""
    failure: Exception | None = None
    """The exception that the sampler raised in place of a batch; one request was made for it."""


class CutRow(NamedTuple):
    """A row of a batch of some size: the limits of its pieces, which pieces are requested, and how many."""

    limits: tuple[tuple[int, int], ...]
    pieces: tuple[bool, ...]
    wanted: int
    sizes: RowSizes

    def requests(self, indices: Any, key: int, *, collate: bool) -> list[Request]:
        """The requests for the pieces; loader workers also get requests for pieces without a sample."""
        # A list is copied, as the user may change it later.
        size = len(indices) if type(indices) is IndexArray else -1
        parts = [indices if hi - lo == size else indices[lo:hi] for lo, hi in self.limits if lo < hi]
        requests: list[Request] = [(collate, part, key) for part in parts]
        if len(requests) < self.wanted:
            full = iter(requests)
            return [next(full) if lo < hi else None for lo, hi in self.limits]
        return requests


@final
class SamplerDraws:
    """One epoch of the user's batch sampler, drawn as needed.

    Args:
      batches: the user's batch sampler, or a sampler that yields batches itself, at its start.
      cutter: cuts batches by the laws of ``plan``.
      collate: whether a batch is a list of sample indices to be collated; else its items are given to the dataset.
      lead: how many batches torch's loader draws when its iterator is made.
      draw: calls user code that may draw from the default random state.
      once: whether ``draw`` is used for the first batch only.
      numbers: numbers the samples, if the index is wanted.
      balance: divides batches by cost; ``None``: they are cut by place.
      times: measures how long the sampler takes; ``None``: it is not measured.
      like_torch: whether empty lists are batches, too, as in torch's loader; else they are rows without a piece.
    """

    key = 0
    """The key of the epoch, for ``sample_seed``; set before the first request is taken."""

    def __init__(  # noqa: PLR0913 - one epoch is one call
        self,
        batches: Iterable[Any],
        cutter: Cutter,
        *,
        collate: bool,
        lead: int,
        draw: Callable[[Callable[[], Any]], Any],
        once: bool = False,
        numbers: SampleNumbers | None = None,
        balance: CostDivider | None = None,
        like_torch: bool = False,
        times: ReadTimes | None = None,
    ) -> None:
        self._balance = balance
        self._like_torch = like_torch
        self._batches = batches_of(batches, (lambda batch: len(_sized(batch))) if collate else size_of)
        self._next_batch = self._batches.draw if times is None else times.of_sampler(self._batches.draw)
        self._cutter = cutter
        self._batcher = Batcher(cutter, balance)
        self._cut: tuple[Sequence[Limits], list[CutRow]] = (), []  # the rows of a size, which most batches have
        self._rows_a_batch = 1 if cutter.shared else cutter.topology.num_workers
        self._alone = cutter.topology.num_workers == 1
        self._collate = collate
        self._draw = draw
        self._once = once
        self._numbers = numbers
        self._rows: deque[DrawnRow] = deque()
        self._requests: deque[Request] = deque()
        self._lead = lead
        self.samples_passed: int | None = None
        """See ``Stream.samples_passed``."""
        self._num_drawn = self._rows_taken = 0  # batches and rows, including skipped ones
        self._exhausted = False

    def skip(self, rows: int, draw_digest: int = 0) -> None:
        """Skips the first ``rows`` rows of the epoch: makes their random draws, and reads none of their samples.

        Call it before anything is taken, with the ``key`` set, and after the draws of torch's loader at the start of an
        epoch: the user's sampler is advanced at once. So its random states are right even if no row is taken.

        Args:
          rows: how many; a batch is one row if the workers share it, else a row for each worker.
          draw_digest: the digest of the last skipped batch; 0: it is not compared.

        Raises:
          StateMismatch: as the ``failure`` of the first row: the sampler drew other samples, or (if the workers share
            its batches) ended too early.
        """
        if rows:
            try:
                self._start_after(rows, draw_digest)
            except Exception as error:
                self._fail(error)
        self._lead_on()

    def _lead_on(self) -> None:
        """Draws as many batches as torch would have drawn by now; the loader workers may need fewer."""
        while self._num_drawn < self._lead - -self._rows_taken // self._rows_a_batch and self._advance():
            pass

    def take_request(self) -> Request:
        """The next request for torch's loader. Raises ``StopIteration`` when none is left."""
        while not self._requests:
            if not self._advance():
                raise StopIteration
        return self._requests.popleft()

    def give_back(self, requests: Sequence[Request]) -> None:
        """Takes back the requests that were taken last."""
        self._requests.extendleft(reversed(requests))

    def take_row(self) -> DrawnRow | None:
        """The next row, after drawing the requests that it needs; ``None`` at the end. Caller's thread.

        An exception that the user's sampler raised while drawing ahead is a row, too: it comes after the earlier rows.
        """
        while not self._rows and self._advance():
            pass
        if not self._rows:
            return None
        row = self._rows.popleft()
        self._rows_taken += 1
        self._lead_on()
        return row

    def _advance(self) -> bool:
        """Draws one batch from the user's sampler. Returns whether there was one, or a failure in its place."""
        if self._exhausted:
            return False
        try:
            self._num_drawn += 1  # a failure counts as a batch
            try:
                draw = self._draw
                batch = self._next_batch() if draw is call_directly else draw(self._next_batch)
            except StopIteration:
                self._num_drawn -= 1
                self._exhausted = True
                return False
            if self._once:
                self._draw = call_directly
            self._add(batch, 0)
        except Exception as error:
            self._fail(error)
        return True

    def _fail(self, error: Exception) -> None:
        """A failure is a row: torch's loader would raise it before the rows that were drawn, and lose one.

        A request is made for it, as for any row: torch's loader takes one request for each item.
        """
        self._exhausted = True
        self._requests.append(None)
        self._rows.append(DrawnRow((True,), None, 0, None, 1, (0,), None, error))

    def _start_after(self, rows: int, digest: int) -> None:
        """Draws the batch that has the last row to be skipped; the rest of this batch comes next."""
        before, row = divmod(rows - 1, self._rows_a_batch)
        self._exhausted = True  # unless the batch is found
        passed, batch = self._draw(lambda: self._draw_after(before))
        if self._once:
            self._draw = call_directly
        if batch is self:
            if not self._cutter.shared:  # other workers may have more batches
                return
            raise StateMismatch(
                f"the sampler ended after {passed.batches} batch(es), but the epoch is to go on after step {rows}, so "
                f"at least {rows} are needed. Give the dataset and the sampler the length that they had, or start at "
                "an earlier step."
            )
        if digest:
            _check_drawn(rows, digest, [batch] if self._is_whole(batch) else self._listed(batch))
        if self._numbers is not None:
            self._numbers.pass_over(passed.samples)
        if self._cutter.shared and not self._is_whole(batch):
            self.samples_passed = passed.samples + len(self._listed(batch))
        self._exhausted = False
        self._num_drawn, self._rows_taken = before + 1, rows
        self._add(batch, row + 1)

    def _draw_after(self, batches: int) -> tuple[SkippedBatches, Any]:
        """Skips ``batches`` batches. Returns what was skipped, and the next batch; this object if there is none."""
        passed = self._batches.skip(batches)
        try:
            return passed, self._batches.draw()
        except StopIteration:
            return passed, self

    def _is_whole(self, batch: Any) -> bool:
        """Whether it is one item of the dataset that is a whole batch."""
        return not self._collate and not isinstance(batch, list | tuple | IndexArray)

    def _listed(self, batch: Any) -> IndexArray | Sequence[Any]:
        indices: IndexArray | Sequence[Any]
        indices = _sized(batch) if self._collate else batch if isinstance(batch, list | IndexArray) else list(batch)
        return indices

    def _add(self, batch: Any, first: int) -> None:
        """The rows of a batch from the ``first`` on, and the requests for their pieces."""
        known = type(batch) is IndexArray
        if not known and self._is_whole(batch):
            self._add_whole(batch, first)
            return
        indices: Any = batch if known else self._listed(batch)
        size = len(indices)
        numbers = None if self._numbers is None else self._numbers.of_batch(indices)
        digest = self._digest_of(indices)
        if not size and self._like_torch:
            self._requests.append((self._collate, indices, self.key))
            self._rows.append(DrawnRow((True,), None, digest, None, 1, (0,)))
            return
        if self._balance is not None and not known:
            indices = [*indices]  # the costs of a step may be asked for later
        divided = self._batcher.divide(indices, digest)
        if numbers is not None and divided.order is not None:
            numbers = numbers[divided.order]
        rows = self._rows_of(divided.rows, size)
        for cut in rows[first:] if first else rows:
            index = None if numbers is None else tuple(numbers[lo:hi] for lo, hi in cut.limits)
            gathered = cut.sizes if known and index is None else None
            # The row comes last: after an interruption there is none whose requests are not there.
            self._requests += cut.requests(divided.samples, self.key, collate=self._collate)
            self._rows.append(DrawnRow(cut.pieces, None, divided.read, index, cut.wanted, cut.sizes.pieces, gathered))

    def _digest_of(self, indices: IndexArray | Sequence[Any]) -> Digest:
        """See ``DrawnRow.digest``."""
        if not self._cutter.shared:
            return 0
        # A list may change later, so its digest is computed now. An ``IndexArray`` does not; one rank rarely needs it.
        return indices.digest if self._alone and type(indices) is IndexArray else digest_of(indices)

    def _rows_of(self, limits_of_rows: Sequence[Limits], size: int) -> list[CutRow]:
        """The rows of a batch of ``size`` samples that was divided so."""
        if limits_of_rows is self._cut[0]:
            return self._cut[1]
        rows = []
        for limits in limits_of_rows:
            # Loader workers take requests ahead: a rank without a request for a row would draw further than others.
            pieces = tuple(lo < hi or self._lead > 0 for lo, hi in limits)
            rows.append(CutRow(limits, pieces, sum(pieces), RowSizes(size, tuple(hi - lo for lo, hi in limits))))
        self._cut = limits_of_rows, rows
        return rows

    def _add_whole(self, item: Any, first: int) -> None:
        """Adds the rows of one item that is a whole batch: it is requested once, and cut after it was read."""
        if self._numbers is not None:
            raise no_numbers("an item that is a whole batch")
        if self._balance is not None:
            raise BatchingError(
                "balance was given, and the sampler drew an item that is a whole batch. Let it draw lists of indices, "
                "or give the DataLoader a batch_size."
            )
        if first == self._rows_a_batch:
            return
        self._requests.append((False, item, self.key))
        digest: Digest = 0
        if self._cutter.shared:  # an int does not change until the digest is needed
            digest = partial(digest_of, [item]) if type(item) is int else digest_of([item])
        for number in range(first, self._rows_a_batch):
            self._rows.append(DrawnRow((number == first,), number, digest, None, int(number == first)))


def _sized(batch: Any) -> Any:
    """The batch, as a list if it has no length: torch takes any iterable of indices."""
    return batch if type(batch) is list or isinstance(batch, Sized) else list(batch)


def _check_drawn(rows: int, saved: int, batch: IndexArray | Sequence[Any]) -> None:
    if not is_digest_of(saved, batch):
        raise StateMismatch(
            f"the sampler drew other samples for batch {rows} of the epoch (digest {digest_of(batch)}) than when the "
            f"state was saved (digest {saved}), so the rest of the epoch would differ, too. Give the sampler the seed "
            "or state that it had then; a torch generator of its own and set_epoch are restored with the state."
        )


@final
class IndexFeed(Sampler[Request]):
    """The sampler of a rebuilt ``DataLoader``: yields the requests that were drawn for the current epoch."""

    def __init__(self) -> None:
        self.draws: SamplerDraws | None = None
        self.taken: deque[Request] = deque(maxlen=0)
        """The requests that torch took last."""

    def __iter__(self) -> Iterator[Request]:
        draws = self.draws
        return iter(()) if draws is None else _Requests(draws, self.taken)


@final
class _Requests(Iterator[Request]):
    """An iterator that may yield again after ``StopIteration``: torch's loader calls it again when more is drawn."""

    def __init__(self, draws: SamplerDraws, taken: deque[Request]) -> None:
        self._draws = draws
        self._taken = taken

    def __next__(self) -> Request:
        request = self._draws.take_request()
        self._taken.append(request)
        return request


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
            pieces = pieces if numbers is None else labelled(pieces, numbers)
            return pieces, RowSizes(0, sizes, structure), drawn.digest
        if drawn.pieces[0]:  # the first row of a whole batch that is read
            self._rows_of_whole = self._cut_whole(pieces[0], drawn.row_of_whole)
        return (*self._rows_of_whole[drawn.row_of_whole][:2], drawn.digest)

    def _cut_whole(self, item: Any, first: int) -> list[SizedRow]:
        if isinstance(item, PartialPiece):
            rows = nothing_left(item.skipped, self._cutter)
            rows = [*rows[1:][:first], rows[0], *rows[1:][first:]]
            return Cut(rows, 0, no_sizes(rows)).sized()
        return self._whole.cut(item).sized()

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
