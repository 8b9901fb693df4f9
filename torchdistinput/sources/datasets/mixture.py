"""``Mixture``: several datasets as one, in shares that hold at every moment. The law is ``plan.mixing``.

It is read from front to end: files, fragments and map-style datasets in any mix. Under policy DATA each rank reads the
undecoded records of all sources, and decodes its part of each batch.

A state has the weights of its epoch. Where those of the mixture from its position on are others, they hold from there
on; before it, the records were read by the weights of the state.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from fractions import Fraction
from functools import partial
from itertools import accumulate
from typing import Any, Final, Literal, NoReturn, TypeAlias, cast, final

from torch.utils.data import Dataset, IterableDataset

from torchdistinput.errors import StateMismatch
from torchdistinput.plan.mixing import (
    Changes,
    Cursor,
    MixtureCursor,
    MixtureOrder,
    SourceCursor,
    Stop,
    check_changes,
    mixture_length,
    of_version_02,
    shares,
)
from torchdistinput.sources.checks import MapStyle, checked_int
from torchdistinput.sources.datasets.fragment_dataset import FragmentDataset, own_places
from torchdistinput.sources.fragments import FragmentSource
from torchdistinput.sources.kernel.epoch_order import SourceSample, cannot_know
from torchdistinput.sources.kernel.read_failures import Decoded, FindPlaces, RecordPlace
from torchdistinput.sources.map_style.samplers import Lengths
from torchdistinput.sources.readers.mixed import (
    IndexRecords,
    MixedReader,
    MixedRecord,
    MixtureSource,
    Numbers,
    RecordSet,
)
from torchdistinput.sources.readers.record_order import RecordSequence, found_in_source
from torchdistinput.sources.sample_seed import epoch_key
from torchdistinput.sources.set_epoch import EpochCounter, loader_worker
from torchdistinput.step_types import SourceCounts


@final
class MixtureWeights:
    """See the module.

    Args:
      names: of the sources.
      schedule: the weights from positions on.
      temperature: see ``Mixture``.

    Raises:
      ValueError: a weight is negative, of an unknown source, or missing; all weights are 0.
    """

    def __init__(
        self, names: Sequence[str], schedule: Sequence[tuple[int, Mapping[str, float]]], temperature: float | None
    ) -> None:
        self._names = list(names)
        self._base: Changes = [(at, self._shares(each, temperature)) for at, each in schedule]
        self.schedule = [(at, {name: float(each[name]) for name in names}) for at, each in schedule]
        self._resumed: tuple[int, Changes] | None = None  # an epoch that was entered, and its weights

    def _shares(self, weights: Mapping[str, float], temperature: float | None) -> list[Fraction]:
        unknown = [name for name in weights if name not in self._names]
        if unknown:
            known = ", ".join(map(repr, self._names))
            raise ValueError(f"there is a weight for {unknown[0]!r}; the sources are {known}.")
        missing = [name for name in self._names if name not in weights]
        if missing:
            raise ValueError(f"there is no weight for {missing[0]!r}; give each source one, or 0 to leave it out.")
        return shares([weights[name] for name in self._names], temperature)

    def changes(self, epoch: int) -> Changes:
        """The weights of an epoch from positions on."""
        return self._resumed[1] if self._resumed is not None and self._resumed[0] == epoch else self._base

    def to_json(self, epoch: int) -> list[object]:
        """The weights of an epoch as its states have them, as plain values."""
        return [[at, [*map(str, weights)]] for at, weights in self.changes(epoch)]

    def begin(self, epoch: int) -> None:
        """Begins an epoch at its front."""
        if self._resumed is not None and self._resumed[0] == epoch:
            self._resumed = None

    def resume(self, value: object, epoch: int, position: int) -> None:
        """Takes the weights of a state.

        Args:
          value: of ``to_json``.
          epoch: of the state.
          position: how many samples of the epoch came.

        Raises:
          StateMismatch: see ``parsed``.
        """
        then = self.parsed(value)
        rest = _from(self._base, position)
        if _from(then, position) != rest:
            then = [*(each for each in then if each[0] < position), *rest]
        self._resumed = epoch, then

    def parsed(self, value: object) -> Changes:
        """The weights of a state.

        Raises:
          StateMismatch: the value is malformed, or of version 0.2.
        """
        given: Any = value
        try:
            if isinstance(given[0][0], list):
                raise of_version_02()
            found = [(int(at), [Fraction(str(each)) for each in weights]) for at, weights in given]
            if any(len(weights) != len(self._names) for _, weights in found):
                raise ValueError(found)
        except (TypeError, ValueError, IndexError, ZeroDivisionError) as error:
            raise StateMismatch(f"position: found {value!r:.200} in the state as the weights of a mixture.") from error
        return found


def _from(changes: Changes, position: int) -> list[tuple[int, Sequence[Fraction]]]:
    """The weights from a position on."""
    now = [weights for at, weights in changes if at <= position][-1]
    return [(position, now), *(each for each in changes if each[0] > position)]


Unit: TypeAlias = Literal["samples", "tokens"]
Weights: TypeAlias = Mapping[str, float] | Sequence[tuple[int, Mapping[str, float]]]

_STOPS: Final = ("first", "all", "repeat")
_UNITS: Final = ("samples", "tokens")
_READ_TOGETHER: Final = 64
_ENDLESS: Final = 2**62  # positions

LENGTHS_WAY_OUT: Final = (
    "Of a mixture these are the sources of the samples, and the tokens of each source so far: lengths= must tell every "
    "rank the same, and the sources must have the same records."
)
"""Advice where the ranks drew different samples of a mixture."""


def _schedule(weights: Weights, batch_size: int | None) -> list[tuple[int, Mapping[str, float]]]:
    """The weights from positions on, in samples.

    Args:
      weights: see ``Mixture``.
      batch_size: samples of a step, where the schedule is in steps.
    """
    size = 1 if batch_size is None else checked_int("batch_size", batch_size, at_least=1)
    if isinstance(weights, Mapping):
        return [(0, weights)]
    found = [(checked_int("the start of weights", at) * size, each) for at, each in weights]
    check_changes(found)
    return found


@final
class Mixture(IterableDataset[Any]):
    r"""Samples of several datasets, mixed by weights: a stream, which is the same at any number of ranks.

    The sources are map-style datasets, files (``FileDataset``), fragments (``FragmentDataset``, ``FragmentSource``),
    packs and mixtures of them. The next sample comes from the source that has used the least for its weight, of equal
    ones from the first: so each share holds at every position. Map-style sources are shuffled, each in epochs of its
    own; files come in their own order under policy DATA, with their own shuffling.

    >>> fsspec.filesystem("memory").pipe("/data/web", b"1\n2\n3\n")
    >>> web = tdi.FileDataset("memory://data/web", tdi.readers.text_lines, map_fn=int)
    >>> mixture = tdi.Mixture({"web": web, "code": range(9)}, {"web": 0.75, "code": 0.25}, stop="all", shuffle=False)
    >>> list(tdi.Strategy().distribute_dataset(mixture, global_batch_size=6))
    [tensor([1, 0, 2, 3, 1, 2]), tensor([3, 4, 5, 6, 7, 8])]

    ``loader.stats()`` has the samples and tokens of each source that were delivered in the epoch, over all ranks, as
    ``sources/NAME/samples`` and ``sources/NAME/tokens``. Each epoch of the mixture begins another epoch of
    each source. All ranks have one order, so the policy is DATA; FILE is refused, as one worker's files have no shares
    of all sources. A state of other weights is refused; with ``strict=False`` the new weights hold from its position
    on.

    Args:
      sources: the datasets by name. A ``Mixture`` is one too; it comes in its own order.
      weights: of all sources, by name; 0 leaves one out. Or pairs ``(start, weights)``: from a start on these weights
        hold; the first is 0. The starts are samples, or steps with ``batch_size``.
      unit: of the weights: shares of the samples, or of the tokens.
      lengths: tokens by the name of the source: an array, or a function of the index, of a map-style dataset; a
        function of the undecoded record of files and fragments. For all sources with ``unit="tokens"``.
      stop: ``"first"``: an epoch ends where a source would begin again. ``"all"``: it goes on with the others, their
        weights scaled, until each sample came once. ``"repeat"``: sources begin again, for ``num_samples``, or without
        an end.
      num_samples: how many samples an epoch has; with ``"first"`` and ``"all"`` at most.
      batch_size: the global batch size, if the starts of weights are steps.
      seed: of all orders; the same on every rank.
      shuffle: whether the samples of each map-style source are in a new order in each of its epochs.
      temperature: weights are raised to the power ``1 / temperature``: above 1 small sources come more often.
      with_source: whether samples come as ``(name, sample)``.

    Raises:
      TypeError: a source is of no such kind; plain iterables have no place from which to go on.
      ValueError: weights are negative, all 0, of an unknown source, or missing; a source with a weight is empty, has no
        ``lengths`` where they are needed, or no end where each sample is to come once.
    """

    yields_strings = False
    decodes = True

    def __init__(  # noqa: PLR0913 - one mixture is one call
        self,
        sources: Mapping[str, Any],
        weights: Weights,
        *,
        unit: Unit = "samples",
        lengths: Mapping[str, Lengths] | None = None,
        stop: Stop = "first",
        num_samples: int | None = None,
        batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        temperature: float | None = None,
        with_source: bool = False,
    ) -> None:
        super().__init__()
        if stop not in _STOPS:
            raise ValueError(f"stop is {stop!r}; it must be {', '.join(map(repr, _STOPS))}.")
        if unit not in _UNITS:
            raise ValueError(f"unit is {unit!r}; it must be {', '.join(map(repr, _UNITS))}.")
        num_samples = None if num_samples is None else checked_int("num_samples", num_samples, at_least=1)
        self._stop, self._num_samples, self._unit = stop, num_samples, unit
        self.seed = checked_int("seed", seed)
        self.batch_size = batch_size
        self._with_source, self._shuffle = with_source, shuffle
        self._weights = MixtureWeights([*sources], _schedule(weights, batch_size), temperature)
        self._parts = _parts_of(sources, dict(lengths or {}), self.seed if shuffle else None)
        self.names = tuple(f"{part.name}: {name}" for part in self._parts for name in part.records.names)
        self._check_sources()
        self._epochs = EpochCounter()

    def _check_sources(self) -> None:
        weighed = {part for _, each in self._weights.changes(0) for part, share in enumerate(each) if share}
        for number in sorted(weighed):
            part, size = self._parts[number], self._size_of(number)
            if size == 0:
                raise ValueError(f"the source {part.name!r} is empty; give it the weight 0, or leave it out.")
            if self._unit == "tokens" and part.length is None:
                raise ValueError(
                    f"shares of tokens need the length of each sample, and there is none for {part.name!r}. Give "
                    f"lengths={{{part.name!r}: ...}}: an array, or a function of the index or record."
                )
            if self._stop == "all" and isinstance(part.records, Mixture) and part.records.is_endless:
                raise ValueError(
                    f'the source {part.name!r} has no end, and stop="all" waits for it. Give it num_samples, or use '
                    'stop="repeat".'
                )

    @property
    def is_endless(self) -> bool:
        """Whether it has no end. Local."""
        return self._stop == "repeat" and self._num_samples is None

    def _size_of(self, source: int) -> int | None:
        """How many records a source has, if that is known."""
        records = self._parts[source].records
        if isinstance(records, IndexRecords):
            return len(records)
        known = records.num_records() if isinstance(records, RecordDataset) else None
        return None if known is None else sum(known)

    @property
    def order_in_words(self) -> str:
        """The data and its order, for people. Local."""
        _, weights = self._weights.changes(0)[0]
        shown = ", ".join(f"{part.name} {float(share):.3g}" for part, share in zip(self._parts, weights, strict=True))
        return f"mixture of {shown} of the {self._unit}, stop={self._stop!r}"

    @property
    def weights(self) -> MixtureWeights:
        """The weights, for the loader. Local."""
        return self._weights

    def marks(self) -> list[str]:
        """See ``FragmentDataset.marks``. Local."""
        records = [part.records for part in self._parts]
        return [mark for each in records if isinstance(each, RecordDataset) for mark in each.marks()]

    def num_records(self, *, opens: bool = False) -> list[int] | None:
        """How many samples an epoch has, if that is known before it is read, or found as each file is opened. Local.

        Raises:
          SourceError: naming a file that is missing or cannot be opened.
        """
        sizes = []
        for number, part in enumerate(self._parts):
            counts = part.records.num_records(opens=True) if opens and isinstance(part.records, RecordDataset) else None
            sizes.append(self._size_of(number) if counts is None else sum(counts))
        if self._stop == "repeat":
            return None if self._num_samples is None else [self._num_samples]
        if self._unit == "tokens" or None in sizes:
            return None
        known = [size or 0 for size in sizes]
        return [mixture_length(known, self._weights.changes(0), self._stop, self._num_samples)]

    def _reader(
        self, parts: Sequence[MixtureSource], epoch: int, cursor: MixtureCursor, *, skip: bool = False
    ) -> MixedReader:
        used, changes = [each.used for each in cursor.sources] or [0] * len(parts), self._weights.changes(epoch)
        mixed = MixtureOrder(used, changes, self._stop, self._num_samples, tokens=self._unit == "tokens")
        # Fewer come of a row group that cannot be read: one record that is left out stands for all.
        sizes = [None if skip else self._size_of(number) for number in range(len(parts))]
        return MixedReader(parts, epoch, cursor, mixed, sizes, repeats=self._stop == "repeat", skip=skip)

    def epoch_order(self, epoch: int) -> RecordSequence:
        """See ``RecordSet.epoch_order``."""
        if self._unit == "tokens":
            raise cannot_know(
                "the shares of the mixture are of tokens, which are counted as they are read",
                'Use unit="samples", whose order follows from the weights.',
            )
        names, sources = [part.name for part in self._parts], [part.records.epoch_order(epoch) for part in self._parts]
        sizes, changes = [*map(len, sources)], self._weights.changes(epoch)
        numbers = [MixtureSource(part.name, cast(RecordSet, Numbers(part.records)), None, 0) for part in self._parts]
        return RecordSequence(
            _ENDLESS if self.is_endless else mixture_length(sizes, changes, self._stop, self._num_samples),
            partial(self._reader, numbers, epoch, MixtureCursor()),
            lambda each: SourceSample(names[each.source], each.record),
            _refuse_endless if self.is_endless else partial(found_in_source, names, [each.found for each in sources]),
        )

    def read_epoch(self, epoch: int, place: Cursor | None = None, *, skip: bool = False) -> MixedReader:
        """See ``RecordSet.read_epoch``.

        Raises:
          StateMismatch: the cursor is not one of this mixture.
        """
        return self._reader(self._parts, epoch, self._checked(place), skip=skip)

    def _checked(self, place: Cursor | None) -> MixtureCursor:
        if place is None:
            return MixtureCursor()
        if not isinstance(place, MixtureCursor):
            if not place.cursors and not place.opened:  # the front
                return MixtureCursor()
            raise StateMismatch("the saved state is that of files, and the data is a mixture of sources.")
        if len(place.sources) not in {0, len(self._parts)}:
            raise StateMismatch(
                f"the saved state is that of a mixture of {len(place.sources)} sources, but this one has "
                f"{len(self._parts)}; load a state of this mixture."
            )
        return place

    def check_places(self, places: Sequence[Cursor]) -> None:
        """Checks that the files at which reading goes on exist and are unchanged. Local.

        Raises:
          StateMismatch: naming the file that has changed, or is gone.
        """
        for place in map(self._checked, places):
            for part, cursor in zip(self._parts, place.sources or [SourceCursor()] * len(self._parts), strict=True):
                if cursor.place is not None:
                    part.records.check_places([cursor.place])

    def decode(
        self, records: list[Any], places: FindPlaces, key: int, *, seeds: bool = False, skip: bool = False
    ) -> Decoded:
        """See ``FragmentDataset.decode``: each source decodes its own records."""
        samples: dict[int, Any] = {}
        left_out: dict[int, str] = {}
        by_source: dict[int, list[int]] = {}
        for row, record in enumerate(records):
            by_source.setdefault(record.source, []).append(row)
        for source, rows in by_source.items():
            part, own = self._parts[source], [records[row].record for row in rows]

            def found(rows: list[int] = rows) -> list[RecordPlace]:
                origins = places()
                return [origins[row] for row in rows]

            decoded, without = part.records.decode(own, found, key, seeds=seeds, skip=skip)
            if without:
                left_out |= {rows[row]: text for row, text in without.items()}
                rows = [row for place, row in enumerate(rows) if place not in without]  # noqa: PLW2901 - those that are left
            samples |= zip(rows, [(part.name, each) for each in decoded] if self._with_source else decoded, strict=True)
        return [samples[row] for row in sorted(samples)], dict(sorted(left_out.items()))

    def counts(self, cursor: Cursor) -> SourceCounts:
        """The samples and tokens of each source up to a cursor, by name. Local."""
        sources = self._checked(cursor).sources or [SourceCursor()] * len(self._parts)
        return {
            part.name: {"samples": each.done, "tokens": each.tokens}
            for part, each in zip(self._parts, sources, strict=True)
        }

    def fingerprint(self) -> dict[str, Any]:
        """Plain facts that determine the records and their order; ranks compare them."""
        facts = {
            "kind": "mixture",
            "sources": ", ".join(part.name for part in self._parts),
            "weights": json.dumps(self._weights.schedule),
            "unit": self._unit,
            "stop": self._stop,
            "num_samples": self._num_samples,
            "seed": self.seed,
            "shuffle": self._shuffle,
        }
        for part in self._parts:
            source = json.dumps(part.records.fingerprint(), sort_keys=True)
            facts[f"source {part.name}"] = hashlib.sha256(source.encode()).hexdigest()[:16]
        return facts

    def schema_facts(self) -> dict[str, Any]:
        """See ``FragmentDataset.schema_facts``. Local."""
        found = {part.name: part.records for part in self._parts if isinstance(part.records, RecordDataset)}
        return {f"{name}: {key}": each for name, of in found.items() for key, each in of.schema_facts().items()}

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch of the next ``iter()``; later ones follow. Also for persistent loader workers."""
        self._epochs.announce(epoch)

    @property
    def epoch(self) -> int:
        """The epoch that ``set_epoch`` chose last, or that a distributed dataset of this began; 0 before. Local."""
        return self._epochs.last

    def __iter__(self) -> Iterator[Any]:
        """The samples of the next epoch in plain torch; in a loader worker, this worker's part of them."""
        epoch = self._epochs.take()
        worker, num_workers = loader_worker()
        key = epoch_key(self.seed, epoch)
        with closing(self.read_epoch(epoch)) as reader:
            while records := reader.take(_READ_TOGETHER * num_workers):
                own = slice(worker, None, num_workers)
                yield from self.decode(records[own], partial(own_places, reader, len(records), own), key)[0]

    def __repr__(self) -> str:
        names = ", ".join(part.name for part in self._parts)
        return f"Mixture({names}; stop={self._stop!r}, seed={self.seed})"


RecordDataset: TypeAlias = FragmentDataset | Mixture
"""A dataset of records that are read in order, apart from being decoded."""


def _refuse_endless(_: Any) -> NoReturn:
    raise cannot_know("the mixture has no end, so a sample comes again and again", "Give the mixture num_samples.")


def _parts_of(sources: Mapping[str, Any], lengths: dict[str, Lengths], seed: int | None) -> list[MixtureSource]:
    unknown = [name for name in lengths if name not in sources]
    if unknown:
        raise ValueError(f"there are lengths for {unknown[0]!r}; the sources are {', '.join(map(repr, sources))}.")
    records = [_records_of(name, source, number, seed) for number, (name, source) in enumerate(sources.items())]
    firsts = accumulate((len(each.names) for each in records), initial=0)
    return [
        MixtureSource(name, each, _length_of(name, each, lengths.get(name)), first)
        for name, each, first in zip(sources, records, firsts, strict=False)
    ]


def _records_of(name: str, source: Any, number: int, seed: int | None) -> RecordSet:
    if isinstance(source, RecordDataset):
        return source
    if isinstance(source, FragmentSource) and not isinstance(source, Dataset):
        return FragmentDataset(source)
    if issubclass(type(source), MapStyle) and not isinstance(source, IterableDataset):
        return IndexRecords(source, number, seed)
    raise TypeError(
        f"the source {name!r} is a {type(source).__name__}; a map-style dataset (with __len__ and __getitem__), a "
        "FileDataset or a FragmentSource is needed: another iterable has no place from which it could go on."
    )


def _length_of(name: str, records: RecordSet, lengths: Lengths | None) -> Callable[[Any], int] | None:
    if lengths is None:
        return None
    if callable(lengths):
        return partial(_length_of_inner, lengths) if isinstance(records, Mixture) else lengths
    if not isinstance(records, IndexRecords):
        raise TypeError(
            f"lengths of {name!r} is an array, and its records have no index; a function of the record is needed."
        )
    if len(lengths) != len(records):
        raise ValueError(f"lengths of {name!r} has {len(lengths)} numbers; the source has {len(records)} samples.")
    return lengths.__getitem__


def _length_of_inner(lengths: Callable[[Any], int], record: MixedRecord) -> int:
    """The tokens of a record of a mixture in a mixture."""
    while isinstance(record.record, MixedRecord):
        record = record.record
    return lengths(record.record)
