"""``ElementReader``: reads an opaque iterable batch by batch, from a position on; errors become values."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, repeat
from typing import Any, cast, final

from torchdistinput.coordination.batch_digests import digest_of_element, digest_of_read, is_digest_of, longer_gap
from torchdistinput.errors import StateMismatch
from torchdistinput.sources.iterable.position import ReaderPosition
from torchdistinput.sources.iterable.user_state import Snapshot, StatefulObjects
from torchdistinput.sources.kernel.cut import MarkedBatch
from torchdistinput.sources.kernel.read_failures import ENDS, Failure, OnFailure
from torchdistinput.step_types import ReadFailure

_END = object()
_CHECKED = 512  # one element in so many is in the digest of what was read
_MOST_BETWEEN_STATES = 16  # batches


@final
class ElementReader:
    """Reads the batches of an opaque iterable: lists of its elements, or ready batches. A failure is a value.

    Like torch's loader, it may go on after a failure: the elements of the batch are lost, and the next batch begins
    with the next element of the user's iterator. A generator has ended by then.

    Some batches come as a ``MarkedBatch``. The own state is taken before the last element of the first batch, and then
    1, 2, 4, 8 and always 16 batches later. If the ranks compare batches, the first one that is given is compared, and
    then others as ``longer_gap`` says. Both counts start anew whenever the reading does.

    Args:
      iterator: the user's iterator.
      kept: the objects that keep the user's own state, if any.
      size: elements that make a batch; ``None``: the elements are ready batches.
      batch: the number of the first batch.
      drop_last: whether a short last batch is dropped.
      on_failure: how a failure of the iterator is handled.
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
        on_failure: OnFailure = ENDS,
        compares: bool = False,
    ) -> None:
        self._goes_on, self._caught = on_failure
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
        self.missing = 0
        """How many of the elements that were to be skipped were not there."""
        self._read = 0  # the digest of the checked elements from the first one on
        self._begin_marks()

    def _begin_marks(self) -> None:
        """Finds the next batches to be marked, as if the next one were the first that is given."""
        # No state is taken before the first element: some have none yet.
        self._state_due, self._state_gap = self._batch + (self._per_batch == 1) if self._kept else -1, 1
        self._compare_due, self._gap = self._batch if self._compares else -1, 1
        self._check_due = self._next_check(self._batch)
        self._find_due()

    def _next_check(self, batch: int) -> int:
        """The next batch, from this one on, whose last element is checked on a resume. A second reading checks it too.

        They are batches 1, 2, 4, ..., counted from 1, and after ``_CHECKED`` elements once in so many.
        """
        gap = _CHECKED // self._per_batch or 1
        return (min(1 << batch.bit_length(), gap) if batch < gap else (batch // gap + 1) * gap) - 1

    def _find_due(self) -> None:
        self._due = min(due for due in (self._state_due, self._compare_due, self._check_due) if due >= 0)

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
            except self._caught as error:
                failure = self._failed(error)  # a generator suspended in here would keep the exception alive
            if failure is None:
                self._batch += 1
                yield batch
            else:
                yield failure
                if not self._goes_on:
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

    def _failed(self, error: BaseException) -> Failure:
        number = self._batch * self._per_batch + self._elements_of_batch
        self._elements_of_batch = 0
        if self._goes_on:
            self._batch += 1  # as if it had been read
            self._begin_marks()
        if isinstance(error, ReadFailure):
            return Failure(cast(BaseException, error.__cause__), error.where, error.origin)
        return Failure(error, f"element {number}")

    def _marked(self) -> Any:
        """The next batch, with the user's own state before its last element, digests, or a request to compare it."""
        takes, compared = self._batch == self._state_due, self._batch == self._compare_due
        checked, snapshot, size = self._batch == self._check_due, None, self._size
        if size is None:
            snapshot = self._kept.snapshot() if takes else None
            batch = last = next(self._iterator)
        else:
            begun: list[Any] = []
            if takes:
                self._extend(begun, size - 1)
                snapshot = self._kept.snapshot() if len(begun) == size - 1 else None
            batch = self._listed(begun, size)
            last = batch[-1]
            if len(batch) < size:
                snapshot, checked = None, False
        if snapshot is not None:
            self._state_due = -1 if snapshot.reads_again else self._batch + self._state_gap
            self._state_gap = min(2 * self._state_gap, _MOST_BETWEEN_STATES)
            if self._kept.is_checked:
                snapshot = snapshot._replace(digest=digest_of_element(last))
        if compared:
            self._compare_due += self._gap
            self._gap = longer_gap(self._gap)
        if checked:
            self._check(last)
            snapshot = (snapshot or Snapshot(None))._replace(read=self._read)
        self._find_due()
        return MarkedBatch(batch, snapshot, compared)

    def _check(self, last: Any) -> None:
        """Takes the last element of a batch into the digest of what was read."""
        self._read = digest_of_read((self._read, last))
        self._check_due = self._next_check(self._batch + 1)

    def enter(self, reader: ReaderPosition, batches: int, at_least: int) -> Failure | None:
        """Goes on from the own state of a reader, or from the start, to its position. Returns a failure, if any.

        The first element after the state is compared with the element that followed when the state was taken. This
        element is the last one of a batch.

        Where all elements are read again, those that are checked must be the ones that came then.

        Args:
          reader: the position.
          batches: how many batches lie between the state, or the start, and the position.
          at_least: how many elements of them there must be.
        """
        if reader.text is not None and reader.batches > reader.since:
            number = self._batch * self._per_batch - 1
            try:
                element = next(self._iterator, _END)
            except self._caught as error:
                return Failure(error, f"element {number}")
            ended = element is _END
            if reader.digest and self._kept.is_checked and (ended or not is_digest_of(reader.digest, element)):
                return Failure(_not_there(number + (not ended), ended=ended), "")
        reads_all = not self._batch
        problem = self.skip(batches, at_least)
        if not reads_all:
            self._read = reader.read
        elif problem is None and reader.read not in (0, self._read) and self._kept.is_checked:
            problem = Failure(_read_other(self._batch * self._per_batch), "")
        return problem

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
            except self._caught as error:
                failure = self._failed(error)
                if not self._goes_on:
                    return failure
                number = self._batch * size  # it was raised before, and reading went on
                continue
            number += len(batch)
            if len(batch) == size:
                if self._batch == self._check_due:
                    self._check(batch[-1])
                self._batch += 1
        self.missing = batches * size - (number - first)
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
