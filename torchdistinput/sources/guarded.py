"""Reading an opaque iterable from a place on, in a loader worker or in this process; see ``opaque``."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any, NamedTuple, cast, final

from torch.utils.data import IterableDataset

from torchdistinput.errors import StateMismatch
from torchdistinput.flow import Known, Like, ReadFailure, Row
from torchdistinput.plan.batching import Cutter
from torchdistinput.sources.index import Positions
from torchdistinput.sources.opaque import Entry, Marked, Place, Reader, ReadLog, Taken, Wait, worker_number
from torchdistinput.sources.own_state import HasState, entered, snapshot_of
from torchdistinput.sources.worker_side import Cut, Failure, cut_of

__all__ = ["Guarded", "GuardedIterator", "entrances_at", "labels_by_position", "rows_logged"]

_END = object()


@final
class Entrance(NamedTuple):
    """Where one reader of an iterable begins.

    Args:
      reader: where it stands.
      waits: whether its first turn passes, as another reader's batch comes first.
    """

    reader: Reader
    waits: bool


def entrances_at(place: Place) -> list[Entrance]:
    """Where each loader worker begins, so that torch's turns go on at a place."""
    return [Entrance(reader, waits=number < place.turn) for number, reader in enumerate(place.readers)]


@final
class Guarded(IterableDataset[Any]):
    """An iterable dataset whose exception is its last element, as a ``Failure``.

    Loader workers take turns, and torch begins with the first of them. Where it is another one's turn, the workers
    before it answer with an empty batch once, so that seeds and numbers of the workers stay what they were.

    Args:
      dataset: the user's dataset.
      per_batch: elements that make a batch.
      snapshot_every: batches from one taking of the own state to the next; the first is taken after the first batch.
      entrances: where each loader worker begins, the first time; without, at the front.
    """

    def __init__(
        self, dataset: Iterable[Any], per_batch: int, snapshot_every: int, entrances: Sequence[Entrance] = ()
    ) -> None:
        self.dataset = dataset
        self._per_batch = per_batch
        self._snapshot_every = snapshot_every
        self._entrances = entrances

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self._parts())  # passes on what comes in half the time of `yield from`

    def _parts(self) -> Iterator[Iterable[Any]]:
        # Of loader workers that live on, each process has an object of its own, and enters it again in the next epoch.
        entrances, self._entrances = self._entrances, ()
        entrance = entrances[worker_number()] if entrances else Entrance(Reader(), waits=False)
        reader, per_batch = entrance.reader, self._per_batch
        if entrance.waits:
            yield [Wait()] * per_batch
        try:
            elements, keeper = entered(self.dataset, reader.text)
        except Exception as error:
            where = "element 0" if reader.text is None else "restoring the dataset's own state"
            yield [Failure(error, where)] * per_batch
            return
        passed = reader.batches - reader.since
        guarded = GuardedIterator(elements, keeper, per_batch, self._snapshot_every, number=passed * per_batch)
        # The last of the batches may have been a short one.
        problem = guarded.pass_over(reader.since * per_batch, (reader.since - 1) * per_batch + 1 if reader.since else 0)
        yield guarded.elements() if problem is None else [problem] * per_batch


@final
class GuardedIterator(Iterator[Any]):
    """An iterator whose exception is its last batch, as ``Failure``s. May be dropped while another thread is in it.

    Args:
      iterator: the user's.
      keeper: who keeps the user's own state, if there is one; the last elements of some batches are then ``Marked``.
      per_batch: elements that make a batch.
      snapshot_every: batches from one marked element to the next.
      number: the number of the first element.
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        keeper: HasState | None = None,
        per_batch: int = 1,
        snapshot_every: int = 1,
        *,
        number: int = 0,
    ) -> None:
        self._iterator = iterator
        self._keeper = keeper
        self._interval = per_batch * snapshot_every
        self._per_batch = per_batch
        self._number = number
        self._due = -1 if keeper is None else number + per_batch
        self._failure: Failure | None = None
        self._repeated = 1

    def __next__(self) -> Any:
        if self._failure is not None:
            return self._fill_batch(self._failure)
        try:
            element = next(self._iterator)
        except StopIteration:
            raise
        except Exception as error:
            return self._failed(error)
        self._number += 1
        return self._marked(element) if self._number == self._due else element

    def elements(self) -> Iterator[Any]:
        """What is left, as this iterator gives it; a loop over it makes no call of a method for every element."""
        iterator, number, due = self._iterator, self._number, self._due
        while True:
            try:
                element = next(iterator)
            except StopIteration:
                return
            except Exception as error:
                self._number = number
                yield self._failed(error)
                break
            number += 1
            if number == due:
                self._number = number
                element = self._marked(element)
                due = self._due
            yield element
        yield from self

    def _failed(self, error: Exception) -> Failure:
        if isinstance(error, ReadFailure):
            self._failure = Failure(cast(Exception, error.__cause__), error.where, error.origin)
        else:
            self._failure = Failure(error, f"element {self._number}")
        return self._failure

    def _marked(self, element: Any) -> Any:
        """The element after which the user's own state is taken, with it."""
        self._due = self._number + self._interval
        return element if self._keeper is None else Marked(element, snapshot_of(self._keeper))

    def _fill_batch(self, failure: Failure) -> Failure:
        """The failure again, for a whole batch: torch drops one that is not full, under ``drop_last``."""
        if self._repeated == self._per_batch:
            raise StopIteration
        self._repeated += 1
        return failure

    def pass_over(self, elements: int, at_least: int) -> Failure | None:
        """Reads elements and forgets them.

        Args:
          elements: how many, unless the data ends before.
          at_least: how many there must be.

        Returns:
          What went wrong, or ``None``.
        """
        first, marks, self._due = self._number, self._due >= 0, -1
        for _ in range(elements):
            element = next(self, _END)
            if isinstance(element, Failure):
                return element
            if element is _END:
                break
        if self._number - first < at_least:
            problem = StateMismatch(
                f"the data ended after {self._number} element(s), but the state says that {first + at_least} or more "
                "were delivered. It must be the same data in the same order as when the state was saved."
            )
            return Failure(problem, "")
        self._due = self._number + self._per_batch if marks else -1
        return None


def rows_logged(
    items: Iterable[Any],
    cut: Callable[[Any], Cut | Known | Failure],
    log: ReadLog,
    place: Place,
    label: Callable[[Cut], list[Row]] | None = None,
) -> Generator[Row | Known, None, None]:
    """The rows of opaque batches from a place on, as ``rows_of``, with a note of each batch in the log.

    Args:
      items: what is read: batches, or samples of one.
      cut: cuts it into rows. A function or method: it is called for every step, where other objects take much longer.
      log: takes the notes.
      place: where the rows begin.
      label: puts the index beside each piece.

    Raises:
      StateMismatch: the data has fewer rows than come before the place.
    """
    left, here = place.rows, _one_of(0)
    closely = left > 0 or label is not None  # else known rows go on as they are
    before: Like | None = None  # how the row before was, and where it is counted, if nothing had to be done to it
    entry: Entry | None = None
    for item in items:
        found: Any = cut(item)
        if closely or type(found) is not tuple:
            whole = cut_of(found)
            rows = whole.rows if label is None or not whole.rows else label(whole)
            if rows:  # else a turn passed
                plainly, reader = whole.snapshot is None, whole.worker
                log.add(len(rows), whole.size, _one_of(reader) if plainly else (Taken(reader, 1, whole.snapshot),))
            entry = None
            yield from rows[left:]
            left = max(0, left - len(rows))
            closely = left > 0 or label is not None
            continue
        like: Like = found[1]
        if entry is None or like is not before:
            before, entry = like, log.add(1, like.samples, here)
        else:
            entry.times += 1  # written out, as the call takes as long as all the rest
        yield found
    log.end()
    if left:
        raise StateMismatch(
            f"the data ended {left} step(s) before the one where the epoch was to begin. It must be the same data in "
            "the same order, and have that step."
        )


@cache
def _one_of(reader: int) -> tuple[Taken]:
    """One batch of a reader, without a state: for each reader the same object always."""
    return (Taken(reader, 1, None),)


def labels_by_position(cutter: Cutter, samples: int) -> Callable[[Cut], list[Row]]:
    """Puts the index beside the pieces of one epoch's batches, by their order, after so many samples."""
    positions = Positions(cutter.topology, shared=cutter.shared, taken=samples)
    return lambda cut: positions.label(cut.rows, cut.size, cutter)
