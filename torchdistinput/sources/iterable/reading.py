"""Reads an opaque iterable from a position on, in a loader worker or in this process; see ``cursor``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast, final

from torch.utils.data import IterableDataset, get_worker_info

from torchdistinput.coordination.batch_digests import digest_of_element, digest_of_read, is_digest_of, longer_gap
from torchdistinput.errors import StateMismatch
from torchdistinput.plan.batching import Cutter
from torchdistinput.sources.files.plain_epochs import SharedEpoch, loader_worker
from torchdistinput.sources.iterable.cursor import (
    Marked,
    Place,
    ReaderPosition,
    Wait,
)
from torchdistinput.sources.iterable.data_pipes import PipeSetting, is_data_pipe
from torchdistinput.sources.iterable.user_state import (
    NOBODY,
    OwnState,
    Snapshot,
    StatefulObjects,
    begun_again,
    entered,
)
from torchdistinput.sources.kernel.cut import Cut
from torchdistinput.sources.kernel.read_failures import ENDS, Failure, OnFailure
from torchdistinput.sources.kernel.sample_index import Positions
from torchdistinput.sources.set_epoch import set_announced_epoch
from torchdistinput.step_types import ReadFailure, Row

_END = object()
_CHECKED = 512  # one element in so many is in the digest of what was read


@final
class ReaderStart(NamedTuple):
    """Where one reader of an iterable begins.

    Args:
      reader: its position.
      waits: whether it skips its first turn, as another reader's batch comes first.
    """

    reader: ReaderPosition
    waits: bool


def starts_at(place: Place) -> list[ReaderStart]:
    """The start of each loader worker, so that torch's turns go on at the right loader worker."""
    return [ReaderStart(reader, waits=number < place.turn) for number, reader in enumerate(place.readers)]


@final
class CapturingIterable(IterableDataset[Any]):
    """An iterable dataset whose exception is its last element, as a ``Failure``.

    Loader workers take turns, and torch begins with the first of them. If another one has the turn, the loader workers
    before it answer once with an empty batch, so that all loader workers keep their seeds and numbers.

    Args:
      dataset: the user's dataset.
      per_batch: elements that make a batch.
      snapshot_every: the own state is taken once in this many batches.
      starts: where each loader worker begins the first time; without them, at the start.
      on_failure: how a failure of the dataset is handled.
      pipe: the seed and shard of the dataset, if it is a DataPipe.
      shared_epoch: the epoch to which the dataset is set, in persistent loader workers.
      own_state: see ``InputOptions.own_state``.
      compares: whether the ranks compare the batches that they read.
    """

    def __init__(  # noqa: PLR0913 - each tells of one thing
        self,
        dataset: Iterable[Any],
        per_batch: int,
        snapshot_every: int,
        starts: Sequence[ReaderStart] = (),
        *,
        on_failure: OnFailure = ENDS,
        pipe: PipeSetting | None = None,
        shared_epoch: SharedEpoch | None = None,
        own_state: OwnState = "auto",
        compares: bool = False,
    ) -> None:
        self._own_state = own_state
        self._pipe = pipe
        self._shared_epoch = shared_epoch
        self._compares = compares
        self._on_failure = on_failure
        self.dataset = dataset
        self._per_batch = per_batch
        self._snapshot_every = snapshot_every
        self._starts = starts

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self._parts())  # half the time of `yield from`

    def _parts(self) -> Iterator[Iterable[Any]]:
        # Each persistent loader worker has its own copy of this object, and iterates over it again in the next epoch.
        starts, self._starts = self._starts, ()
        start = starts[loader_worker()[0]] if starts else ReaderStart(ReaderPosition(), waits=False)
        reader, per_batch = start.reader, self._per_batch
        if start.waits:
            yield [Wait()] * per_batch
        try:
            if self._shared_epoch is not None:
                set_announced_epoch(self._shared_epoch, self.dataset)
            if self._pipe is not None and is_data_pipe(self.dataset):
                self._pipe.tell_seed(self.dataset)
                if get_worker_info() is None:
                    self._pipe.tell_part(self.dataset)
            elements, kept = entered(self.dataset, reader.text, self._own_state)
            passed = reader.batches - reader.since
            if reader.text is not None and not passed:
                elements = begun_again(self.dataset, elements)
        except self._on_failure.caught as error:
            where = "element 0" if reader.text is None else "restoring the dataset's own state"
            yield [Failure(error, where)] * per_batch
            return
        guarded = CapturingIterator(
            elements,
            kept,
            per_batch,
            self._snapshot_every,
            number=passed * per_batch,
            on_failure=self._on_failure,
            compares=self._compares,
        )
        # The last of these batches may have been short.
        at_least = (reader.since - 1) * per_batch + 1 if reader.since else 0
        problem = guarded.enter(reader, reader.since * per_batch, at_least)
        yield guarded.elements() if problem is None else [problem] * per_batch


@final
class CapturingIterator(Iterator[Any]):
    """An iterator whose exception is its last batch, as ``Failure``s. May be dropped while another thread is in it.

    Like torch's loader, it may go on after an exception: the elements of the batch are lost, and the next batch begins
    with the next element of the user's iterator. A generator has ended by then.

    Args:
      iterator: the user's iterator.
      kept: the objects that keep the user's own state, if any.
      per_batch: elements that make a batch.
      snapshot_every: batches from one marked element to the next.
      number: the number of the first element.
      on_failure: how a failure of the iterator is handled.
      compares: whether the ranks compare batches. Then the first elements of some batches are ``Marked``: of the first
        batch that is given, and after it as ``longer_gap`` says. The count starts anew whenever the reading does.
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        kept: StatefulObjects = NOBODY,
        per_batch: int = 1,
        snapshot_every: int = 1,
        *,
        number: int = 0,
        on_failure: OnFailure = ENDS,
        compares: bool = False,
    ) -> None:
        self._goes_on, self._caught = on_failure
        self._iterator = iterator
        self._kept = kept
        self._interval = per_batch * snapshot_every
        self._per_batch = per_batch
        self._number = number
        self._compares = compares
        self._state_due = self._compare_due = self._check_due = self._due = -1  # elements that are to be ``Marked``
        self._read = 0  # the digest of the checked elements from the first one on
        self._failure: Failure | None = None
        self._repeated = 1
        self._expect_marks()

    def _expect_marks(self) -> None:
        """Prepares for the next element to begin the first batch that is given."""
        self._state_due = self._next_state() if self._kept else -1
        self._compare_due, self._gap = self._number if self._compares else -1, 1
        self._check_due = self._next_check()
        self._find_due()

    def _next_state(self) -> int:
        """The number of the element before which the next state is taken: the last one of the current or next batch."""
        return self._number + (self._per_batch - 1 or 1)  # not before the first element: some have no state yet

    def _next_check(self) -> int:
        """The number of the next element that is checked on a resume; a second reading checks the same ones.

        They are the last elements of batches 1, 2, 4, ..., and after ``_CHECKED`` elements once in so many.
        """
        batches, gap = self._number // self._per_batch, _CHECKED // self._per_batch or 1
        count = min(1 << batches.bit_length(), gap) if batches < gap else (batches // gap + 1) * gap
        return count * self._per_batch - 1

    def __next__(self) -> Any:
        if self._failure is not None and not self._has_gone_on():
            return self._fill_batch(self._failure)
        return self._marked() if self._number == self._due else self._next()

    def _next(self) -> Any:
        try:
            element = next(self._iterator)
        except StopIteration:
            raise
        except self._caught as error:
            return self._failed(error)
        self._number += 1
        return element

    def elements(self) -> Iterator[Any]:
        """The remaining elements. A loop over this generator is faster than a method call for every element."""
        iterator, number, due = self._iterator, self._number, self._due
        while True:
            if number == due:
                self._number = number
                try:
                    element = self._marked()
                except StopIteration:
                    return
                if isinstance(element, Failure):
                    break
                number, due = self._number, self._due
                yield element
                continue
            try:
                element = next(iterator)
            except StopIteration:
                return
            except self._caught as error:
                self._number = number
                self._failed(error)
                break  # a generator suspended here would keep the exception alive
            number += 1
            yield element
        yield self._failure
        yield from self

    def _failed(self, error: BaseException) -> Failure:
        if isinstance(error, ReadFailure):
            failure = Failure(cast(BaseException, error.__cause__), error.where, error.origin)
        else:
            failure = Failure(error, f"element {self._number}")
        self._failure = failure
        if self._goes_on:
            self._number += 1  # it counts as an element, as do the copies that fill its batch
        return failure

    def _has_gone_on(self) -> bool:
        """Whether the batch of the failure is full, after which this goes on."""
        if not self._goes_on or self._number % self._per_batch:
            return False
        self._failure = None
        if 0 <= self._state_due <= self._number:
            self._state_due = self._next_state()
        if self._check_due >= 0:
            self._check_due = self._next_check()
            self._find_due()
        return True

    def _mark_none(self) -> None:
        self._state_due = self._compare_due = self._check_due = self._due = -1

    def _find_due(self) -> None:
        self._due = min(due for due in (self._state_due, self._compare_due, self._check_due) if due >= 0)

    def _marked(self) -> Any:
        """The next element, with the user's own state before it, digests, or a request to compare its batch."""
        snapshot, compared, checked = None, self._number == self._compare_due, self._number == self._check_due
        if self._number == self._state_due:
            snapshot = self._kept.snapshot()
            self._state_due = -1 if snapshot.reads_again else self._number + self._interval
        if compared:
            self._compare_due += self._gap * self._per_batch
            self._gap = longer_gap(self._gap)
        element = self._next()
        if isinstance(element, Failure):
            return element
        if snapshot is not None and self._kept.is_checked:
            snapshot = snapshot._replace(digest=digest_of_element(element))
        if checked:
            self._read = digest_of_read((self._read, element))
            self._check_due = self._next_check()
            snapshot = (snapshot or Snapshot(None))._replace(read=self._read)
        self._find_due()
        return Marked(element, snapshot, compared)

    def _fill_batch(self, failure: Failure) -> Failure:
        """Repeats the failure to fill a whole batch: under ``drop_last`` torch drops a batch that is not full."""
        if self._goes_on:
            self._number += 1
            return failure
        if self._repeated == self._per_batch:
            raise StopIteration
        self._repeated += 1
        return failure

    def enter(self, reader: ReaderPosition, elements: int, at_least: int) -> Failure | None:
        """Goes on from the own state of a reader, or from the start, to its position. Returns a failure, if any.

        The first element after the state is compared with the element that followed when the state was taken. This
        element is the last one of a batch.

        Where all elements are read again, those that are checked must be the ones that came then.

        Args:
          reader: the position.
          elements: how many elements lie between the state, or the start, and the position.
          at_least: how many of them there must be.
        """
        if reader.text is not None and reader.batches > reader.since:
            self._number -= 1
            self._mark_none()
            element = next(self, _END)
            if isinstance(element, Failure) and not self._goes_on:
                return element
            if (
                reader.digest
                and self._kept.is_checked
                and (element is _END or not is_digest_of(reader.digest, element))
            ):
                return Failure(_not_there(self._number, ended=element is _END), "")
        reads_all = not self._number
        problem = self.pass_over(elements, at_least)
        if not reads_all:
            self._read = reader.read
        elif problem is None and reader.read not in (0, self._read) and self._kept.is_checked:
            problem = Failure(_read_other(self._number), "")
        return problem

    def pass_over(self, elements: int, at_least: int) -> Failure | None:
        """Reads elements and discards them.

        Args:
          elements: how many, unless the data ends before.
          at_least: how many there must be.

        Returns:
          The failure, or ``None``.
        """
        first = self._number
        self._mark_none()
        check_due = self._next_check()
        for _ in range(elements):
            checked = self._number == check_due
            element = next(self, _END)
            if isinstance(element, Failure) and not self._goes_on:  # else it was raised before, and reading went on
                return element
            if element is _END:
                break
            if checked:
                self._read = self._read if isinstance(element, Failure) else digest_of_read((self._read, element))
                check_due = self._next_check()
        if self._number - first < at_least:
            problem = StateMismatch(
                f"the data ended after {self._number} element(s), but the state says that {first + at_least} or more "
                "were delivered. It must be the same data in the same order as when the state was saved."
            )
            return Failure(problem, "")
        self._expect_marks()
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
        f"when the state was saved, and now {found}. Either load_state_dict() does not go where state_dict() was "
        "called, or the elements follow from random draws that the state does not hold, or it is other data. "
        'InputOptions(own_state="ignore") reads the data again instead, if the same elements come then; "use" takes it '
        "as it comes."
    )


def labels_by_position(cutter: Cutter, samples: int) -> Callable[[Cut], list[Row]]:
    """A function that adds the index to the pieces of an epoch's batches, by their order; ``samples`` come before."""
    positions = Positions(cutter.topology, shared=cutter.shared, taken=samples)
    return lambda cut: positions.label(cut.rows, cut.size, cutter, cut.numbers)
