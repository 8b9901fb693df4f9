"""The samples of any step of an epoch, at any number of ranks, where their order can be known without reading.

What a step holds is found by walking through the order as reading does: the samples come from the readers of the
source, which read numbers in the place of records, and each batch is divided by the ``Batcher`` of reading.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice, zip_longest
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar, cast, final, runtime_checkable

from torchdistinput.errors import InputError
from torchdistinput.plan.batching import Cutter
from torchdistinput.plan.block_shuffle import BlockShuffle
from torchdistinput.plan.permutation import Ints, Permutation
from torchdistinput.plan.topology import Topology
from torchdistinput.sources.kernel.batcher import Batcher, as_is
from torchdistinput.sources.kernel.sample_costs import CostDivider

T = TypeVar("T")

_AT_ONCE: Final = 2**15


class FileRecord(NamedTuple):
    """A record: the name of its file or fragment, and its number in it."""

    file: str
    record: int


class SourceSample(NamedTuple):
    """A sample of a mixture: the name of its source, and the sample in it."""

    source: str
    sample: Any


class PackItem(NamedTuple):
    """Part of a pack: a sample, and which of its tokens."""

    sample: Any
    start: int
    stop: int


class PackOf(NamedTuple):
    """A pack: its number, and what is in it."""

    pack: int
    items: tuple[PackItem, ...]


class SampleSequence(Protocol):
    """The samples of one worker in an epoch, in order."""

    def __len__(self) -> int: ...

    def between(self, lo: int, hi: int) -> Sequence[Any]:
        """The samples at places ``lo`` to ``hi - 1``; fewer at the end."""

    def found(self, sample: Any) -> Any:
        """A sample that a user names, as ``between`` has it.

        Raises:
          ValueError: the data has no such sample.
        """


@final
class IndexSequence:
    """The indices of map-style data; see ``SampleSequence``.

    Args:
      order: in which they come.
    """

    def __init__(self, order: Permutation | BlockShuffle | range) -> None:
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    def between(self, lo: int, hi: int) -> list[int]:
        """See ``SampleSequence.between``."""
        if isinstance(self._order, range):
            return list(self._order[lo:hi])
        found: list[int] = self._order.block(lo, min(hi, len(self))).tolist()
        return found

    def found(self, sample: Any) -> int:
        """See ``SampleSequence.found``."""
        if type(sample) is not int or not 0 <= sample < len(self):
            raise ValueError(f"found the sample {sample!r:.100}; an index from 0 to {len(self) - 1} is needed.")
        return sample


@final
class Walk(Generic[T]):
    """Things in an order that is walked through from the front; or from where the last question ended, if it can.

    Args:
      begin: begins at the front.
    """

    def __init__(self, begin: Callable[[], Iterator[T]]) -> None:
        self._begin = begin
        self._reached = 0, begin()
        self._lock = threading.Lock()

    def between(self, lo: int, hi: int) -> list[T]:
        """The things at places ``lo`` to ``hi - 1``; fewer at the end."""
        with self._lock:
            (at, rest), self._reached = self._reached, (0, self._begin())  # if this is interrupted
            if at > lo:
                at, rest = self._reached
            found = list(islice(rest, lo - at, hi - at))
            self._reached = hi, rest
        return found


@runtime_checkable
class TellsParts(Protocol):
    """A map-style dataset whose samples are made of samples of others: packs, mixtures."""

    def parts_of_sample(self, index: int) -> Any:
        """What the sample is made of. Local, reads no sample."""

    def indices_of(self, parts: Any) -> list[int]:
        """The samples that are made of this; the inverse.

        Raises:
          ValueError: there can be no such sample.
        """


@final
class EpochOrder:
    """The order of an epoch.

    Args:
      topology: the workers and replicas.
      shared: whether all workers share their batches; they are cut then as those of one worker with all replicas.
      batch_size: G; ``None`` for batches of sizes of their own.
      sequences: the samples of each worker; one for all if all have the same.
      drop_last: whether a short last batch is dropped.
      ends: where each batch of a size of its own ends.
      balance: divides batches, which are shared, by cost; ``None``: by place.
      composed: the dataset, if its samples are made of others.
      notes: on what it depends.
    """

    def __init__(  # noqa: PLR0913 - one epoch is one call
        self,
        topology: Topology,
        sequences: Sequence[SampleSequence],
        batch_size: int | None,
        *,
        shared: bool,
        drop_last: bool,
        ends: Ints | None = None,
        balance: CostDivider | None = None,
        composed: TellsParts | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.topology, self.notes, self._composed = topology, notes, composed
        own = replace(topology, worker=0)
        if shared:
            own = Topology(num_workers=1, replicas_per_worker=topology.num_replicas, worker=0)
        self._cutter = Cutter(own, shared, batch_size)
        self._balance = None if balance is None else replace(balance, topology=own)
        self._sequences = list(sequences) * (own.num_workers if len(sequences) == 1 else 1)
        self._drop_last, self._ends = drop_last, ends
        self._steps = Walk(self._walked)  # where each worker has batches of its own

    @cached_property
    def _length(self) -> int:
        return len(self._batches(0)) if self._cutter.shared else sum(1 for _ in self._walked())

    def __len__(self) -> int:
        """How many steps the epoch has."""
        return self._length

    def _batches(self, worker: int) -> Sequence[int]:
        """Where each batch of a worker ends."""
        if self._ends is not None:
            return cast("Sequence[int]", self._ends)
        size, count = self._cutter.global_batch_size or 1, len(self._sequences[worker])
        return range(size, count + 1 if self._drop_last else count + size, size)

    def _walked(self) -> Iterator[list[list[tuple[int, int]]]]:
        """Of each step, for each worker, the places of the pieces among its samples. Empty steps are passed over."""
        workers = [self._rows(worker) for worker in range(self._cutter.topology.num_workers)]
        nothing = [(0, 0)] * self._cutter.topology.replicas_per_worker
        return (
            [*rows]
            for rows in zip_longest(*workers, fillvalue=nothing)
            if any(lo < hi for limits in rows for lo, hi in limits)
        )

    def _rows(self, worker: int) -> Iterator[list[tuple[int, int]]]:
        batcher = Batcher(replace(self._cutter, topology=replace(self._cutter.topology, worker=worker)), None)
        start, count = 0, len(self._sequences[worker])
        for end in self._batches(worker):
            for limits in batcher.divide(range(start, min(end, count)), 0).rows:
                yield [(start + lo, start + hi) for lo, hi in limits]
            start = end

    def _parts(self, step: int) -> list[Sequence[Any]]:
        """The samples of a step, for each replica."""
        if not self._cutter.shared:
            ((*limits_of_workers,),) = self._steps.between(step, step + 1)
            pairs = zip(self._sequences, limits_of_workers, strict=True)
            return [sequence.between(lo, hi) for sequence, limits in pairs for lo, hi in limits]
        ends = self._batches(0)
        samples = self._sequences[0].between(int(ends[step - 1]) if step else 0, int(ends[step]))
        divided = Batcher(self._cutter, self._balance).divide(samples, 0)
        return [divided.samples[lo:hi] for lo, hi in divided.rows[0]]

    def parts(self, step: int) -> list[list[Any]]:
        """The samples of a step, for each replica.

        Raises:
          IndexError: there is no such step.
        """
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} is outside of an epoch of {len(self)} steps")
        tell = as_is if self._composed is None else self._composed.parts_of_sample
        return [[*map(tell, part)] for part in self._parts(step)]

    def steps_of(self, sample: Any) -> list[tuple[int, int]]:
        """The steps of a sample, each with the replica that gets it.

        Raises:
          ValueError: the data has no such sample.
        """
        if self._composed is not None and not isinstance(sample, int):
            return sorted({step for index in self._composed.indices_of(sample) for step in self.steps_of(index)})
        sample = self._sequences[0].found(sample)
        places = [_places_of(sample, sequence) for sequence in self._sequences]
        if self._cutter.shared:
            ends = self._batches(0)
            steps = {step for place in places[0] if (step := bisect_right(ends, place)) < len(ends)}
            return [
                (step, replica)
                for step in sorted(steps)
                for replica, part in enumerate(self._parts(step))
                if sample in part
            ]
        local = self._cutter.topology.replicas_per_worker
        return [
            (step, worker * local + replica)
            for step, rows in enumerate(self._walked() if any(places) else ())
            for worker, limits in enumerate(rows)
            for replica, (lo, hi) in enumerate(limits)
            if any(lo <= place < hi for place in places[worker])
        ]


def _places_of(sample: Any, sequence: SampleSequence) -> list[int]:
    """All places of a sample in an order, which is walked through as it is read: some 50 ms a million indices."""
    found: list[int] = []
    for start in range(0, len(sequence), _AT_ONCE):
        block = sequence.between(start, min(start + _AT_ONCE, len(sequence)))
        if sample in block:
            found += [start + place for place, each in enumerate(block) if each == sample]
    return found


def cannot_know(what: str, way_out: str) -> InputError:
    """The error for an order that cannot be known without reading."""
    return InputError(f"which samples a step holds cannot be known before it is read: {what}. {way_out}")
