"""Reads an opaque iterable batch by batch, from a position on, and cuts its batches where they are read.

That is in a loader worker, or here. Errors become values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, repeat
from typing import Any, cast, final

from torch.utils.data import IterableDataset

from torchdistinput.coordination.batch_digests import (
    digest_of_element,
    digest_of_samples,
    is_digest_of,
    longer_gap,
    number_of_size,
)
from torchdistinput.errors import StateMismatch
from torchdistinput.plan.batching import Cutter
from torchdistinput.sources.iterable.position import IterablePosition, ReaderPosition
from torchdistinput.sources.iterable.user_state import Mark, OwnState, StatefulObjects, begun_again, entered
from torchdistinput.sources.kernel.batcher import Batcher, Collator, Cut, MarkedBatch, TakenBatches
from torchdistinput.sources.kernel.read_failures import Failure
from torchdistinput.sources.kernel.sample_costs import CostDivider
from torchdistinput.sources.set_epoch import SharedEpoch, loader_worker, set_announced_epoch
from torchdistinput.step_types import Digest, ReadFailure, SizedRow
from torchdistinput.tracing.read_times import ReadTimes

_END = object()
_MOST_BETWEEN_MARKS = 16  # batches


@final
class ElementReader:
    """Reads the batches of an opaque iterable: lists of its elements, or ready batches. A failure is the last value.

    Some batches come as a ``MarkedBatch``: the first one that is given, and then those 1, 2, 4, 8 and always 16 batches
    later. A mark holds a digest of the last element of the batch, and of data with a state of its own the state before
    this element. If the ranks compare batches, the first one that is given is compared, and then others as
    ``longer_gap`` says. Both counts start anew whenever the reading does.

    Args:
      iterator: the user's iterator.
      kept: the objects that keep the user's own state, if any.
      size: elements that make a batch; ``None``: the elements are ready batches.
      batch: the number of the first batch.
      drop_last: whether a short last batch is dropped.
      compares: whether the ranks compare batches.
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        kept: StatefulObjects,
        size: int | None,
        *,
        batch: int = 0,
        drop_last: bool = False,
        compares: bool = False,
    ) -> None:
        self._iterator = iterator
        # A slice would call `__iter__`, which some iterators lack, and with which others begin again.
        self._elements = map(next, repeat(iterator))
        self._kept = kept
        self._size = size
        self._per_batch = size or 1
        self._drop_last = drop_last
        self._compares = compares
        self._batch = batch  # the number of the next batch
        self._elements_of_batch = 0  # how many of its elements were read
        self._has_ended = False
        self._last: Any = _END  # the element that was skipped last
        self._takes_states = bool(kept)
        self._begin_marks()

    def _begin_marks(self) -> None:
        """Finds the next batches to be marked, as if the next one were the first that is given."""
        self._first = self._batch
        self._mark_due, self._mark_gap = self._batch, 1
        self._compare_due, self._gap = self._batch if self._compares else -1, 1
        self._find_due()

    def _find_due(self) -> None:
        self._due = self._mark_due if self._compare_due < 0 else min(self._mark_due, self._compare_due)

    def batches(self) -> Iterator[Any]:
        """The remaining batches: lists, or ready batches; some as a ``MarkedBatch``; a failure as a ``Failure``."""
        iterator, size = self._iterator, self._size
        while True:
            batch = failure = None
            try:
                if self._batch == self._due:
                    batch = self._marked()
                else:
                    batch = next(iterator) if size is None else self._listed([], size)
            except StopIteration:
                return
            except Exception as error:
                failure = self._failed(error)  # a generator suspended in here would keep the exception alive
            if failure is None:
                self._batch += 1
                yield batch
            else:
                yield failure
                return

    def _listed(self, batch: list[Any], size: int) -> list[Any]:
        """The next batch, of which some elements were read.

        Raises:
          StopIteration: there is none.
        """
        self._extend(batch, size)
        if not batch or (self._drop_last and len(batch) < size):
            raise StopIteration
        return batch

    def _extend(self, batch: list[Any], size: int) -> None:
        """Reads elements until the batch has ``size``, or the data ends, which is not asked again then."""
        if self._has_ended:
            return
        try:
            batch.extend(islice(self._elements, size - len(batch)))
        finally:
            self._elements_of_batch = len(batch)
        self._has_ended = len(batch) < size

    def _failed(self, error: Exception) -> Failure:
        number = self._batch * self._per_batch + self._elements_of_batch
        if isinstance(error, ReadFailure):
            return Failure(cast(Exception, error.__cause__), error.where, error.origin)
        return Failure(error, f"element {number}")

    def _marked(self) -> Any:
        """The next batch, with a mark, with a request to compare it, or both."""
        marks, compared = self._batch == self._mark_due, self._batch == self._compare_due
        begun, size = list[Any](), self._size
        mark: Mark | None = Mark() if marks else None
        # No state is taken before the first element: some have none yet.
        if marks and self._takes_states and (self._per_batch > 1 or self._batch > self._first):
            if size is not None:
                self._extend(begun, size - 1)
            if not self._has_ended:
                mark = self._kept.mark()
                self._takes_states = not mark.reads_again
        batch = next(self._iterator) if size is None else self._listed(begun, size)
        if mark is not None and size is not None and len(batch) < size:
            mark = None
        elif mark is not None:
            self._mark_due += self._mark_gap
            self._mark_gap = min(2 * self._mark_gap, _MOST_BETWEEN_MARKS)
            if self._kept.is_checked:
                mark = mark._replace(digest=digest_of_element(batch if size is None else batch[-1]))
        if compared:
            self._compare_due += self._gap
            self._gap = longer_gap(self._gap)
        self._find_due()
        return MarkedBatch(batch, mark, compared)

    def enter(self, reader: ReaderPosition) -> Failure | None:
        """Goes on to the position of a reader, from its own state or from the front. Returns a failure, if any.

        The marked element, the last one of its batch, must be the one that came when the state was saved.
        """
        size, marked, since = self._per_batch, reader.batches - reader.since, reader.since
        number = marked * size - 1
        if reader.text is None:
            problem = self.skip(marked, number + 1)
            if problem is not None:
                return problem
        elif marked:
            try:
                self._last = next(self._iterator, _END)
            except Exception as error:
                return Failure(error, f"element {number}")
        if marked and reader.digest and self._kept.is_checked:
            ended = self._last is _END
            if ended or not is_digest_of(reader.digest, self._last):
                if reader.text is None:
                    return Failure(_read_other(number + 1), "")
                return Failure(_not_there(number + (not ended), ended=ended), "")
        return self.skip(since, (since - 1) * size + 1)  # the last of these batches may have been short

    def skip(self, batches: int, at_least: int) -> Failure | None:
        """Reads batches and discards them.

        Args:
          batches: how many, unless the data ends before.
          at_least: how many elements of them there must be.

        Returns:
          The failure, or ``None``.
        """
        first, size = self._batch * self._per_batch, self._per_batch
        number, end = first, self._batch + batches
        while self._batch < end and not self._has_ended:
            batch: list[Any] = []
            try:
                self._extend(batch, size)
            except Exception as error:
                return self._failed(error)
            number += len(batch)
            if len(batch) == size:
                self._batch += 1
                self._last = batch[-1]
        if number - first < at_least:
            problem = StateMismatch(
                f"the data ended after {number} element(s), but the state says that {first + at_least} or more "
                "were delivered. It must be the same data in the same order as when the state was saved."
            )
            return Failure(problem, "")
        self._elements_of_batch = 0
        self._begin_marks()
        return None


def _read_other(number: int) -> StateMismatch:
    return StateMismatch(
        f"the data was read again, and other elements came among the first {number} than before the state was saved. "
        "They follow from something that the state does not hold, such as a random state or a count of epochs. Let "
        "them follow from set_epoch(epoch) alone, give the data state_dict() and load_state_dict(), or use map-style "
        'data. own_state="use" takes them as they come, unchecked.'
    )


def _not_there(number: int, *, ended: bool) -> StateMismatch:
    found = "there is none" if ended else "there is another one"
    return StateMismatch(
        f"the data's own state does not restore it exactly: after it came an element (the {number}th of its reader) "
        f"when the state was saved, and now {found}. load_state_dict() must go where state_dict() was called, and "
        'the state must hold all random draws. InputOptions(own_state="ignore") reads the data again instead, if the '
        'same elements come then; "use" takes it as it comes.'
    )


@final
class CutSamples:
    """Collates a list of samples into rows.

    Args:
      collate: makes a batch of a list of samples.
      cutter: cuts batches by the laws of ``plan``.
      balance: divides batches by cost; ``None``: they are cut by place.
      asks: whether ``collate`` is asked for the structure of its batches.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Any],
        cutter: Cutter,
        balance: CostDivider | None = None,
        *,
        asks: bool = False,
    ) -> None:
        self._collator = Collator(collate, asks=asks)
        self._batcher = Batcher(cutter, balance)
        self._compares = cutter.read_by_all

    def __call__(self, batch: list[Any] | MarkedBatch | Failure) -> Cut | Failure:
        """The rows of a batch of samples, or the failure with which reading ended."""
        if isinstance(batch, Failure):
            return batch
        samples, mark, compared = batch if isinstance(batch, MarkedBatch) else (batch, None, False)
        try:
            read: Digest = 0
            if self._compares:
                read = digest_of_samples(samples) if compared else number_of_size(len(samples))
            divided = self._batcher.divide(samples, read)
            order = divided.order
            places = None if order is None else divided.of_pieces(lambda lo, hi: order[lo:hi])
            told = len(samples), (TakenBatches(loader_worker()[0], 1, mark),)
            return divided.cut(self._piece, self._collator, told, places)
        except Exception as error:
            return Failure(error, "collating")

    def _piece(self, samples: list[Any], lo: int, hi: int) -> Any:
        return self._collator(samples[lo:hi])


@final
class ElementBatches(IterableDataset[Any]):
    """The batches of an opaque iterable, cut where they are read; a failure is the last of them.

    Loader workers take turns, and torch begins with the first of them. If another one has the turn, the loader workers
    before it answer once with a batch without rows, so that all loader workers keep their seeds and numbers.

    Args:
      dataset: the user's dataset.
      size: elements that make a batch; ``None``: the elements are ready batches.
      cut: cuts a batch into rows. A method: calling other objects takes longer, for each batch.
      place: where the loader workers begin the first time; ``None``: at the start.
      drop_last: whether a short last batch is dropped.
      shared_epoch: the epoch to which the dataset is set, in persistent loader workers.
      own_state: see ``InputOptions.own_state``.
      compares: whether the ranks compare the batches that they read.
      times: measures how long reading and ``cut`` take; ``None``: they are not measured.
    """

    def __init__(  # noqa: PLR0913 - each tells of one thing
        self,
        dataset: Iterable[Any],
        size: int | None,
        cut: Callable[[Any], Cut | SizedRow | Failure],
        place: IterablePosition | None = None,
        *,
        drop_last: bool = False,
        shared_epoch: SharedEpoch | None = None,
        own_state: OwnState = "auto",
        compares: bool = False,
        times: ReadTimes | None = None,
    ) -> None:
        self._times = times
        self.dataset = dataset
        self._size = size
        self._cut = cut
        self._place = place
        self._drop_last = drop_last
        self._shared_epoch = shared_epoch
        self._own_state = own_state
        self._compares = compares

    def __iter__(self) -> Iterator[Cut | SizedRow | Failure]:
        return chain.from_iterable(self._parts())  # half the time of `yield from`

    def _parts(self) -> Iterator[Iterable[Cut | SizedRow | Failure]]:
        # Each persistent loader worker has its own copy of this object, and iterates over it again in the next epoch.
        place, self._place = self._place, None
        number = loader_worker()[0]
        reader = ReaderPosition() if place is None else place.readers[number]
        if place is not None and number < place.turn:  # torch's turns go on at the right loader worker
            yield [Cut([], 0, [])]
        try:
            if self._shared_epoch is not None:
                set_announced_epoch(self._shared_epoch, self.dataset)
            elements, kept = entered(self.dataset, reader.text, self._own_state)
            passed = reader.batches - reader.since
            if reader.text is not None and not passed:
                elements = begun_again(self.dataset, elements)
        except Exception as error:
            yield [Failure(error, "element 0" if reader.text is None else "restoring the dataset's own state")]
            return
        found = ElementReader(
            elements,
            kept,
            self._size,
            batch=0 if reader.text is None else passed,
            drop_last=self._drop_last,
            compares=self._compares,
        )
        problem = found.enter(reader)
        if problem is not None:
            yield [problem]
        elif self._times is None:
            yield map(self._cut, found.batches())
        else:
            yield map(self._times.of_collate(self._cut), self._times.elements(found.batches()))
