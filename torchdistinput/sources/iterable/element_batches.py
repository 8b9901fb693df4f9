"""``ElementBatches``: the batches of an opaque iterable, cut where they are read: in a loader worker, or here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, final

from torch.utils.data import IterableDataset

from torchdistinput.plan.batching import Cutter
from torchdistinput.sources.iterable.element_reader import ElementReader
from torchdistinput.sources.iterable.position import Place, ReaderPosition
from torchdistinput.sources.iterable.user_state import OwnState, begun_again, entered
from torchdistinput.sources.kernel.cut import Cut
from torchdistinput.sources.kernel.read_failures import Failure
from torchdistinput.sources.kernel.sample_index import Positions
from torchdistinput.sources.plain_epochs import SharedEpoch, loader_worker
from torchdistinput.sources.set_epoch import set_announced_epoch
from torchdistinput.step_types import Row, SizedRow
from torchdistinput.tracing.read_times import ReadTimes


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
class ElementBatches(IterableDataset[Any]):
    """The batches of an opaque iterable, cut where they are read; a failure is the last of them.

    Loader workers take turns, and torch begins with the first of them. If another one has the turn, the loader workers
    before it answer once with a batch without rows, so that all loader workers keep their seeds and numbers.

    Args:
      dataset: the user's dataset.
      size: elements that make a batch; ``None``: the elements are ready batches.
      cut: cuts a batch into rows. A method: calling other objects takes longer, for each batch.
      starts: where each loader worker begins the first time; without them, at the start.
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
        starts: Sequence[ReaderStart] = (),
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
        self._starts = starts
        self._drop_last = drop_last
        self._shared_epoch = shared_epoch
        self._own_state = own_state
        self._compares = compares

    def __iter__(self) -> Iterator[Cut | SizedRow | Failure]:
        return chain.from_iterable(self._parts())  # half the time of `yield from`

    def _parts(self) -> Iterator[Iterable[Cut | SizedRow | Failure]]:
        # Each persistent loader worker has its own copy of this object, and iterates over it again in the next epoch.
        starts, self._starts = self._starts, ()
        start = starts[loader_worker()[0]] if starts else ReaderStart(ReaderPosition(), waits=False)
        reader = start.reader
        if start.waits:
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


def labels_by_position(cutter: Cutter, samples: int) -> Callable[[Cut], list[Row]]:
    """A function that adds the index to the pieces of an epoch's batches, by their order; ``samples`` come before."""
    positions = Positions(cutter.topology, shared=cutter.shared, taken=samples)
    return lambda cut: positions.label(cut.rows, cut.size, cutter, cut.numbers)
