"""The reader of a mixture: merges the records of several sources by the order of ``plan.mixing``.

Each source has a reader and a cursor of its own. Its records are taken in chunks, undecoded, and wait here until their
turn comes; the cursor of a source is that of its oldest waiting chunk, and how many records of this chunk have come.
So the position is exact after any record, and a resume reads less than one chunk of each source again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, cast, final

import numpy as np

from torchdistinput.coordination.batch_digests import digest_after_file, digest_of_read
from torchdistinput.coordination.failures import in_one_line
from torchdistinput.errors import SourceError, StateMismatch
from torchdistinput.plan.file_resharding import FileCursor, ReaderCursor
from torchdistinput.plan.mixing import Cursor, MixtureCursor, MixtureOrder, SourceCursor
from torchdistinput.plan.permutation import Permutation
from torchdistinput.sources.kernel.epoch_order import IndexSequence, SampleSequence
from torchdistinput.sources.kernel.read_failures import CorruptRecord, Decoded, FindPlaces, RecordPlace
from torchdistinput.sources.map_style.piece_dataset import FetchesBatches, read_samples
from torchdistinput.sources.readers.interleave import Reader
from torchdistinput.sources.sample_seed import Samples
from torchdistinput.step_types import ReadFailure

_CHUNK: Final = 64  # records
_KEPT: Final = 4  # permutations of a source
EPOCHS_OF_MIXTURE: Final = 2**32
"""A source that repeats is in other epochs of its own: by as many further each time."""


class RecordSet(Protocol):
    """Records that are read in the order of an epoch, apart from being decoded: files, fragments, a mixture."""

    @property
    def names(self) -> tuple[str, ...]:
        """The files or other parts."""

    def read_epoch(self, epoch: int, place: Cursor | None, *, skip: bool) -> Reader:
        """A reader of all undecoded records, from the front or a cursor on."""

    def epoch_order(self, epoch: int) -> SampleSequence:
        """The numbers of the records that ``read_epoch`` reads from the front, without reading any.

        Raises:
          InputError: it cannot be known.
        """

    def decode(
        self, records: list[Any], places: FindPlaces, key: int, *, seeds: bool = False, skip: bool = False
    ) -> Decoded:
        """See ``FragmentDataset.decode``."""

    def check_places(self, places: Sequence[Cursor]) -> None:
        """See ``FragmentDataset.check_places``."""

    def fingerprint(self) -> dict[str, Any]:
        """Plain facts that determine the records and their order."""


class MixtureSource(NamedTuple):
    """A source of a mixture.

    Args:
      name: its name.
      records: its records.
      length: the tokens of an undecoded record; ``None`` where they do not count.
      first: the number of its first file among the files of all sources.
    """

    name: str
    records: RecordSet
    length: Callable[[Any], int] | None
    first: int


class MixedRecord(NamedTuple):
    """An undecoded record, and the number of its source."""

    source: int
    record: Any


_Measured: TypeAlias = tuple[Any, RecordPlace, int]
"""An undecoded record, its origin, and its tokens."""


@final
class _SourceBuffer:
    """The records of one source that were read, and whose turn has not come yet.

    Args:
      part: the source.
      epoch: of the mixture.
      cursor: where to begin.
      repeats: whether it begins again at its end.
      skip: see ``FragmentDataset.reader``.
    """

    def __init__(self, part: MixtureSource, epoch: int, cursor: SourceCursor, *, repeats: bool, skip: bool) -> None:
        self._part, self._epoch, self._repeats, self._skip = part, epoch, repeats, skip
        self._place, self._turn = cursor.place, cursor.turn
        self._reader: Reader | None = None
        self._read_this_turn = cursor.place is not None
        self._ended = False
        self.ends = 0  # the digest of the numbers of records at which the source ended
        self._most = 0  # records of a chunk; 0 for the usual number
        self._chunks: deque[tuple[int, int, Cursor]] = deque()  # records read before it, its turn, its cursor
        self._read = self._given = 0
        self.waiting: list[_Measured] = []
        self.done, self.tokens = 0, 0
        if cursor.behind:
            found = self.have(cursor.behind)
            if found < cursor.behind:
                raise StateMismatch(
                    f"the source {part.name!r} ends {cursor.behind - found} record(s) before the place of the saved "
                    "state: it has changed since."
                )
            self.take(cursor.behind)
        self.done, self.tokens = cursor.done, cursor.tokens

    def have(self, count: int) -> int:
        """Reads until so many records wait, or the source has ended. Returns how many wait."""
        while len(self.waiting) < count and not self._ended:
            self._fill(self._most or max(_CHUNK, count - len(self.waiting)))
        return len(self.waiting)

    def _fill(self, count: int) -> None:
        if self._reader is None:
            number = self._epoch + self._turn * EPOCHS_OF_MIXTURE
            self._reader = self._part.records.read_epoch(number, self._place, skip=self._skip)
        before = self._reader.position()
        try:
            found = list(self._reader.take(count))
            places = self._reader.places(0, len(found))
            lengths = self._measured(found, places)
        except SourceError:
            if count == 1:
                raise
            self._reader.close()
            self._reader, self._place, self._most = None, before, 1  # the good records in front of it come first
            return
        if found:
            self._chunks.append((self._read, self._turn, before))
            self._read += len(found)
            self._read_this_turn = True
            self.waiting += zip(found, places, lengths, strict=True)
        if len(found) == count:
            return
        self.ends = digest_after_file(self.ends, self._read)
        if not self._repeats:
            self._ended = True
            return
        if not self._read_this_turn:
            raise SourceError(
                f"the source {self._part.name!r} of the mixture has no record; give it the weight 0, or leave it out."
            )
        self._reader.close()
        self._reader, self._place, self._read_this_turn = None, None, False
        self._turn += 1

    def _measured(self, records: list[Any], places: list[RecordPlace]) -> list[int]:
        length = self._part.length
        if length is None:
            return [0] * len(records)
        found: list[int] = []
        try:
            found.extend(0 if isinstance(record, CorruptRecord) else int(length(record)) for record in records)
        except Exception as error:
            raise self._unmeasured(places[len(found)], f"could not be found: {in_one_line(error)}") from error
        if found and min(found) < 0:
            raise self._unmeasured(places[found.index(min(found))], f"is {min(found)}; it must be 0 or more")
        return found

    def _unmeasured(self, place: RecordPlace, problem: str) -> SourceError:
        text = f"{self._part.name}: the length of record {place.record} of {place.file} {problem} (lengths=)."
        return SourceError(text, file=place.file)

    def take(self, count: int) -> list[_Measured]:
        """Hands over the next records that wait."""
        taken = self.waiting[:count]
        del self.waiting[:count]
        self.tokens += sum(length for _, _, length in taken)
        self.done += count
        self._given += count
        while self._chunks and (self._chunks[1][0] if len(self._chunks) > 1 else self._read) <= self._given:
            self._chunks.popleft()
        return taken

    def cursor(self, used: int) -> SourceCursor:
        """The position after the records that were handed over."""
        if self._chunks:
            before, turn, oldest = self._chunks[0]
            return SourceCursor(self.done, self.tokens, used, turn, self._given - before, oldest)
        place = self._place if self._reader is None else self._reader.position()
        return SourceCursor(self.done, self.tokens, used, self._turn, 0, place)

    def close(self) -> None:
        """Closes the reader."""
        if self._reader is not None:
            self._reader.close()


@final
class MixedReader:
    """The reader of the undecoded records of a mixture, see ``Reader``; and a ``mixing.Supply``.

    Args:
      parts: the sources.
      epoch: of the mixture.
      place: where to begin.
      order: of the sources; it is made from the cursor.
      sizes: how many records each source has said to have; ``None`` where it has not.
      repeats: whether sources begin again.
      skip: see ``FragmentDataset.reader``.
    """

    of_columns = False

    def __init__(
        self,
        parts: Sequence[MixtureSource],
        epoch: int,
        place: MixtureCursor,
        order: MixtureOrder,
        sizes: Sequence[int | None],
        *,
        repeats: bool,
        skip: bool,
    ) -> None:
        self._parts = parts
        self._position = place.position
        cursors = place.sources or [SourceCursor()] * len(parts)
        self._sources = [
            _SourceBuffer(part, epoch, cursor, repeats=repeats, skip=skip)
            for part, cursor in zip(parts, cursors, strict=True)
        ]
        self._order = order
        self._sizes = sizes
        self._last: list[tuple[int, _Measured]] = []  # the sources and records that were taken last

    @property
    def opened(self) -> int:
        """See ``Reader.opened``: the cursor is reported after each batch, which the counts by source need."""
        return self._position

    def have(self, source: int, count: int) -> int:
        """See ``Supply.have``.

        Raises:
          SourceError: the source ended before the size that it has told.
        """
        buffer = self._sources[source]
        found = len(buffer.waiting) if len(buffer.waiting) >= count else buffer.have(count)
        known = self._sizes[source]
        if found < count and known is not None and buffer.done + found < known:
            raise SourceError(
                f"the source {self._parts[source].name!r} of the mixture ended after {buffer.done + found} of the "
                f"{known} records that its fragments tell; correct num_records."
            )
        return found

    def length(self, source: int, number: int) -> int:
        """See ``Supply.length``."""
        return self._sources[source].waiting[number][2]

    def take(self, count: int) -> list[MixedRecord]:
        """The next records; fewer at the end."""
        drawn = self._order.draw(self._position, count, self)
        self._position += len(drawn)
        needed = np.bincount(drawn, minlength=len(self._parts)).tolist()
        taken = [iter(buffer.take(count)) for buffer, count in zip(self._sources, needed, strict=True)]
        self._last = [(source, next(taken[source])) for source in drawn]
        return [MixedRecord(source, record) for source, (record, _, _) in self._last]

    def places(self, lo: int, hi: int) -> list[RecordPlace]:
        """See ``Reader.places``."""
        found = ((self._parts[source], place) for source, (_, place, _) in self._last[lo:hi])
        return [
            RecordPlace(f"{part.name}: {place.file}", place.record, part.first + place.file_number)
            for part, place in found
        ]

    def digest(self) -> int:
        """A number of the sources of the records that were taken last, and the tokens of each source up to there."""
        found = [buffer.ends for buffer in self._sources]
        if any(part.length is not None for part in self._parts):
            found += [*(source for source, _ in self._last), *(buffer.tokens for buffer in self._sources)]
        return digest_of_read(blake2b(np.array(found).tobytes(), digest_size=16).hexdigest())

    def position(self) -> MixtureCursor:
        """See ``Reader.position``."""
        sources = [each.cursor(used) for each, used in zip(self._sources, self._order.used, strict=True)]
        return MixtureCursor(self._position, tuple(sources))

    def close(self) -> None:
        """Closes the readers of all sources."""
        for buffer in self._sources:
            buffer.close()


@final
class IndexRecords:
    """A map-style dataset as records: an undecoded record is an index, and decoding reads the sample.

    Args:
      data: the dataset.
      number: of the source in the mixture, for its order.
      seed: of its order; ``None`` for the order of the indices.
    """

    names: tuple[str, ...] = ("samples",)

    def __init__(self, data: Any, number: int, seed: int | None) -> None:
        self._data, self._number, self._seed = data, number, seed
        self._order = lru_cache(_KEPT)(self._made)

    def __getstate__(self) -> tuple[Any, int, int | None]:
        return self._data, self._number, self._seed

    def __setstate__(self, state: tuple[Any, int, int | None]) -> None:
        self.__init__(*state)

    def __len__(self) -> int:
        return len(self._data)

    def _made(self, epoch: int) -> Permutation | range:
        """The order of an epoch of its own."""
        turn, own = divmod(epoch, EPOCHS_OF_MIXTURE)
        length = len(self._data)
        return range(length) if self._seed is None else Permutation(length, self._seed, own, self._number, turn)

    def epoch_order(self, epoch: int) -> IndexSequence:
        """See ``RecordSet.epoch_order``."""
        return IndexSequence(self._order(epoch))

    def read_epoch(self, epoch: int, place: Cursor | None, *, skip: bool) -> Reader:
        """See ``RecordSet.read_epoch``."""
        begun = place.cursors[0].delivered if isinstance(place, ReaderCursor) and place.cursors else 0
        return _IndexReader(self.epoch_order(epoch), begun)

    def decode(
        self, records: list[Any], places: FindPlaces, key: int, *, seeds: bool = False, skip: bool = False
    ) -> Decoded:
        """See ``RecordSet.decode``."""
        together = isinstance(self._data, FetchesBatches) and not seeds
        with Samples(key, seeds=seeds) as reading:
            reading.places = places
            try:
                rows = range(len(records))
                samples, reasons = read_samples(self._data, records, reading, rows, together=together, skip=skip)
            except ReadFailure as failure:
                error, file = cast(Exception, failure.__cause__), places()[0].file
                raise SourceError(f"{file}: {failure.where} cannot be read: {in_one_line(error)}", file=file) from error
        origins = places() if reasons else ()
        return samples, {
            row: f"{origins[row].file}: sample {records[row]} cannot be read: {reason}"
            for row, reason in reasons.items()
        }

    def check_places(self, places: Sequence[Cursor]) -> None:
        """See ``RecordSet.check_places``."""
        for cursor in (each for place in places if isinstance(place, ReaderCursor) for each in place.cursors):
            if cursor.size != len(self._data):
                raise StateMismatch(
                    f"a source of the mixture has {len(self._data)} samples, but had {cursor.size} when the state was "
                    "saved; put it back as it was, or start the epoch anew"
                )

    def fingerprint(self) -> dict[str, Any]:
        """See ``RecordSet.fingerprint``."""
        return {"kind": f"map-style {type(self._data).__name__}", "length": len(self._data)}


@final
class Numbers(NamedTuple):
    """The records of a source, of which only the order is wanted: a ``RecordSet`` to read, not to decode."""

    records: RecordSet

    def read_epoch(self, epoch: int, place: Cursor | None, *, skip: bool) -> Reader:
        """See ``RecordSet.read_epoch``."""
        return _IndexReader(self.records.epoch_order(epoch), 0)


@final
class _IndexReader:
    """What has an order without being read, such as the indices of a map-style dataset; see ``Reader``.

    Args:
      order: of an epoch.
      begun: how many came before.
    """

    of_columns = False
    opened = 0

    def __init__(self, order: SampleSequence, begun: int) -> None:
        self._order, self._at = order, begun
        self._last: Sequence[Any] = []

    def take(self, count: int) -> Any:
        until = min(len(self._order), self._at + count)
        self._last = self._order.between(self._at, until)
        self._at = until
        return self._last

    def places(self, lo: int, hi: int) -> list[RecordPlace]:
        return [RecordPlace("samples", index, 0) for index in self._last[lo:hi]]

    def digest(self) -> int:
        return 1

    def position(self) -> ReaderCursor:
        return ReaderCursor((FileCursor(0, delivered=self._at, size=len(self._order)),))

    def close(self) -> None:
        """Nothing is open."""
