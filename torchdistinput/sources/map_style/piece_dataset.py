"""A dataset whose items are whole pieces: reads and collates the samples of one replica's part of a batch.

It runs in loader workers, or in this process if there are none. Only the samples that this rank needs are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, cast, final, runtime_checkable

from torch.utils.data import Dataset

from torchdistinput.batches.schema import Structure, structure_of
from torchdistinput.coordination.failures import in_one_line, plain_indices
from torchdistinput.sources.kernel.batcher import Collator, piece_without
from torchdistinput.sources.kernel.collating import ask, ask_collate
from torchdistinput.sources.kernel.index_array import IndexArray
from torchdistinput.sources.kernel.read_failures import Failure
from torchdistinput.sources.map_style.in_memory import NOT_THERE, InMemoryRows, gather_of, index_array_of
from torchdistinput.sources.sample_seed import Samples
from torchdistinput.sources.set_epoch import SharedEpoch, set_announced_epoch
from torchdistinput.step_types import Described, Origin, ReadFailure
from torchdistinput.tracing.read_times import ReadTimes, TimedSamples


@runtime_checkable
class FetchesBatches(Protocol):
    """A dataset that reads many samples at once, as torch's loader asks for them."""

    def __getitems__(self, indices: list[Any]) -> list[Any]: ...


def samples_of(dataset: Any, indices: list[int]) -> Iterable[Any]:
    """The samples of some indices, read together if the dataset can do that."""
    return dataset.__getitems__(indices) if isinstance(dataset, FetchesBatches) else map(dataset.__getitem__, indices)


def read_samples(
    data: Any,
    indices: Sequence[Any],
    reading: Samples,
    begins: Sequence[Any],
    *,
    together: bool,
    skip: bool = False,
) -> tuple[list[Any], dict[int, str]]:
    """Reads samples. What cannot be read is named: the sample, or all of those that were read together.

    Args:
      data: the map-style dataset.
      indices: of the samples.
      reading: is told of each sample that is read by itself.
      begins: what it is told, for each of the indices.
      together: whether the dataset reads many at once.
      skip: whether samples that cannot be read are left out; those read together are then read one by one.

    Returns:
      The samples; and in words why others were left out, by their places. No exception is kept: its traceback would
      keep the iterator alive of a loop that is left.

    Raises:
      ReadFailure: a sample cannot be read; its ``__cause__`` says why.
      InputError: see ``Samples.begin``.
    """
    if together:
        try:
            return data.__getitems__(indices), {}
        except Exception as error:
            if not skip:
                raise _read_failure(indices) from error
    samples: list[Any] = []
    left_out: dict[int, str] = {}
    for place, index in enumerate(indices):
        reading.begin(begins[place])
        try:
            if together:  # its samples may differ from those of ``__getitem__``
                (sample,) = data.__getitems__([index])
            else:
                sample = data[index]
        except Exception as error:
            if not skip:
                raise _read_failure([index]) from error
            left_out[place] = in_one_line(error)
        else:
            samples.append(sample)
    return samples, left_out


def _read_failure(indices: Sequence[Any]) -> ReadFailure:
    return ReadFailure(f"sample{'s' * (len(indices) > 1)} {indices_as_text(indices)}", Origin(plain_indices(indices)))


Request = tuple[bool, Any, int] | None
"""The request that torch's loader passes to a ``PieceDataset``: whether to collate a list of samples, the index or
indices (as an ``IndexArray`` if torch's own sampler drew a list of them), and the key of the epoch for ``sample_seed``.
``None`` for a piece without a sample; its result is ``None``, too."""


@final
class PieceDataset(Dataset[Any]):
    """A map-style dataset whose items are whole pieces: one request gives the collated piece of a replica.

    Args:
      dataset: the user's dataset.
      collate: makes a batch of a list of samples, or converts a ready batch.
      skip: whether samples that cannot be read are left out.
      seeds: whether the global generators are seeded for each sample; samples are then read one by one.
      shared_epoch: the epoch to which the dataset is set, in persistent loader workers.
      asks: whether pieces come ``Described``.
      times: measures how long the dataset and ``collate`` take; ``None``: they are not measured.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[Any], Any],
        *,
        skip: bool = False,
        seeds: bool = False,
        shared_epoch: SharedEpoch | None = None,
        asks: bool = False,
        times: ReadTimes | None = None,
    ) -> None:
        self._times = times
        self._samples = dataset if times is None else TimedSamples(times, dataset)
        self._shared_epoch = shared_epoch
        self._key: int | None = None  # the key of the epoch that the dataset was set to last
        self.dataset = dataset
        self._collate = collate
        self._collator = Collator(collate if times is None else times.of_collate(collate), asks=asks)
        self._skip = skip
        self._seeds = seeds
        self._fetches_batches = isinstance(dataset, FetchesBatches) and not seeds
        self._gather: InMemoryRows | None = None
        self._looked = False  # whether a way to gather was searched for

    def __getstate__(self) -> dict[str, Any]:
        # The copy searches for a way to gather again: pickle would copy the tensors to which it refers.
        return {**vars(self), "_gather": None, "_looked": False}

    @property
    def gather(self) -> InMemoryRows | None:
        """The reader that gathers the pieces of this epoch from plain int indices; ``None`` if it is not possible.

        The first piece of an epoch is not gathered by it where pieces are described.
        """
        return self._gather if self._looked and self._collator.knows else None

    def begin(self) -> None:
        """Begins an epoch. It takes in the changes that the user made to the dataset since the last epoch."""
        self._looked = self._gather is not None and self._gather.is_current()
        self._collator.begin()

    def __getitem__(self, request: Request) -> Any:
        """The collated piece, ``PartialPiece`` if samples were left out; or a ``Failure`` that names the indices.

        It is ``Described`` where that was asked for.
        """
        if self._times is not None:
            self._times.enter()
        if request is None:
            return None
        piece, structure = self._piece(*request), self._collator.structure
        return piece if structure is None or type(piece) is Failure else Described(piece, structure)

    def _structure_of(self, samples: Any, wanted: Sequence[Any]) -> Structure:
        if type(samples) is list:
            return ask_collate(self._collator.collate, samples[0])
        return ask(lambda count: self._collator.collate(self.dataset.__getitems__([wanted[0]] * count)))

    def _piece(self, many: bool, wanted: Any, key: int) -> Any:  # noqa: FBT001 - as in the request
        try:
            if not self._looked:
                self._gather, self._looked = gather_of(self.dataset, self._collate, many=many), True
            if self._gather is not None:
                rows = wanted if type(wanted) is IndexArray else index_array_of(wanted)
                if rows is not None and len(rows):  # for no samples the user's collate function may return anything
                    piece = self._gather(rows)
                    self._collator.note(lambda: structure_of(piece))
                    return piece
        except NOT_THERE:  # reading one by one names the bad index, or counts it from the end
            pass
        except Exception as error:
            return _failure(error, wanted.tolist() if isinstance(wanted, IndexArray) else wanted)
        if isinstance(wanted, IndexArray):
            wanted = wanted.tolist()
        return self._read(many, wanted, key)

    def _read(self, many: bool, wanted: Any, key: int) -> Any:  # noqa: FBT001 - as in the request
        try:
            if self._shared_epoch is not None and key != self._key:
                set_announced_epoch(self._shared_epoch, self.dataset)
                self._key = key
            with Samples(key, seeds=self._seeds) as reading:
                samples, left_out = self._samples_of(many, wanted, reading)
            collated = None if left_out and not len(samples) else self._collator.collate(samples)
            return piece_without(left_out, collated)
        except ReadFailure as failure:
            return Failure(cast(Exception, failure.__cause__), failure.where, failure.origin)
        except Exception as error:
            return _failure(error, wanted)

    def _samples_of(self, many: bool, wanted: Any, reading: Samples) -> tuple[Any, dict[int, str]]:  # noqa: FBT001 - as in the request
        """The samples, or the item that is a batch; and the messages for those that were left out, by their places."""
        if many:
            found, reasons = read_samples(
                self._samples, wanted, reading, wanted, together=self._fetches_batches, skip=self._skip
            )
            if len(found):
                self._collator.note(lambda: self._structure_of(found, wanted))
            return found, {place: _unread(wanted[place], reason) for place, reason in reasons.items()}
        is_list = isinstance(wanted, list)
        try:
            reading.begin(wanted)
            item = self._samples[wanted]
        except Exception as error:
            if not self._skip:
                raise
            return (), dict.fromkeys(
                range(len(wanted) if is_list and wanted else 1), _unread(wanted, in_one_line(error))
            )
        if is_list and wanted:
            one = wanted[:1]
            self._collator.note(lambda: ask(lambda count: self._collator.collate(self.dataset[one * count])))
        return item, {}


def _failure(error: Exception, wanted: Any) -> Failure:
    indices = wanted if isinstance(wanted, list | tuple) else [wanted]
    return Failure(error, f"samples {indices_as_text(wanted)}", Origin(plain_indices(indices)))


def indices_of(request: Request) -> list[Any]:
    """The indices that a request asks for."""
    wanted = [] if request is None else request[1]
    if isinstance(wanted, IndexArray):
        return wanted.tolist()
    return list(wanted) if isinstance(wanted, list | tuple) else [wanted]


def indices_as_text(indices: Any) -> str:
    """Indices as text; of many indices only the first few."""
    if isinstance(indices, Sequence) and not isinstance(indices, str) and len(indices) > 8:
        return f"{', '.join(map(str, indices[:8]))}, ... ({len(indices)} in all)"
    return ", ".join(map(str, indices)) if isinstance(indices, list | tuple) else str(indices)


def _unread(index: Any, reason: str) -> str:
    return f"sample {plain_indices([index])[0]}: {reason}"
