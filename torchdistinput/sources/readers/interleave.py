"""``Reader``: one pass over undecoded records, which can be entered again between any two of them; ``Interleave``.

The readers of several fragments (``Interleave``), turn by turn, and of a mixture (``MixedReader``) read records of
other readers.

**Interleaving.** ``cycle_length`` slots, each with an open fragment, have turns in a fixed order. A turn yields up to
``block_length`` records; a slot whose fragment ended in its turn takes the next one at its next turn. These are the
rules of TensorFlow's ``interleave``.

**Resuming.** The reader has a cursor between any two records. Another one that starts at this cursor yields the same
records, in the same order and the same turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Final, NoReturn, Protocol, TypeAlias, final

from torchdistinput.coordination.batch_digests import digest_after_file
from torchdistinput.errors import SourceError, StateMismatch
from torchdistinput.plan.file_resharding import FileCursor, ReaderCursor
from torchdistinput.plan.mixing import Cursor
from torchdistinput.sources.formats.columns import RecordList, SchemaOfFiles, joined
from torchdistinput.sources.kernel.read_failures import RecordPlace
from torchdistinput.sources.readers.fragment_reader import FragmentReader, NumberedReader
from torchdistinput.sources.storage.retry import one_line
from torchdistinput.step_types import Digest, FilesRead
from torchdistinput.tracing.read_times import ReadTimes

Turn: TypeAlias = tuple[FragmentReader | NumberedReader, int, int]
"""A fragment, and the range of its records that a turn yielded, counted as they are yielded."""


class Reader(Protocol):
    """A reader of undecoded records: of files, of the indices of a dataset, or of a mixture."""

    @property
    def opened(self) -> int:
        """A count; where it has grown, the cursor is reported after the batch: fresh files that were opened."""

    @property
    def of_columns(self) -> bool:
        """Whether the records that were read are ``Columns``; in lists they may be beside a ``CorruptRecord``."""

    def take(self, count: int) -> RecordList:
        """The next ``count`` records, fewer at the end; ``places`` returns their origins."""

    def places(self, lo: int, hi: int) -> list[RecordPlace]:
        """The origins of the records ``[lo, hi)`` of the last ``take``. Call it before the next record is taken."""

    def digest(self) -> Digest:
        """A number of what was read so far that is the same on all ranks that read the same. Once a batch."""

    def position(self) -> Cursor:
        """The cursor: another reader that starts there yields the records that this one has not yielded."""

    def close(self) -> None:
        """Ends the reading. More calls do nothing."""


@final
class Reserved:
    """Reserved records of a reader: a slice of them reads its records.

    Args:
      parts: in order: lists of records that were read already, or turns whose records are still to be read.
    """

    def __init__(self, parts: Sequence[RecordList | Turn]) -> None:
        self._parts = parts
        self._sizes = [part[2] - part[1] if isinstance(part, tuple) else len(part) for part in parts]
        self._size = sum(self._sizes)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, wanted: slice) -> RecordList:
        """The records of a slice without a step. The records of one file are read in one call.

        Raises:
          SourceError: naming the file.
        """
        lo, hi, _ = wanted.indices(self._size)
        pieces: list[RecordList | Turn] = []
        ranges: dict[Any, tuple[int, int]] = {}  # of each file, from its first wanted record to its last
        for part, size in zip(self._parts, self._sizes, strict=True):
            a, b = max(lo, 0), min(hi, size)
            lo, hi = lo - size, hi - size  # as the next part counts
            if a >= b:
                continue
            if isinstance(part, tuple):
                file, first, _ = part
                pieces.append((file, first + a, first + b))
                ranges[file] = ranges.get(file, (first + a,))[0], first + b
            else:
                pieces.append(part[a:b])
        read = {file: file.read_range(a, b) for file, (a, b) in ranges.items()}
        whole: list[RecordList] = []
        for piece in pieces:
            if isinstance(piece, tuple):
                file, a, b = piece
                start = ranges[file][0]
                whole.append(read[file][a - start : b - start])
            else:
                whole.append(piece)
        return joined(whole)


_MAX_NAMED: Final = 16  # files that ended in one batch, for a message that names one of them
_MOST_READY: Final = 256  # records that are handed out at once: lazy ones are made then


@final
class Interleave:
    """The ``Reader`` of several fragments. Each is opened when its turn comes.

    All are closed at the end, after an error, by ``close``, and when the reader is garbage-collected.

    Args:
      order: the fresh fragments, in the order in which they are opened, with those that were opened before ``place``.
      open_fragment: makes the reader of one.
      cycle_length: how many slots there are, unless ``place`` has slots.
      block_length: how many records make a turn, if there are several slots.
      place: the cursor at which to start.
      schema: the columns of the fragments that were read, if their records are ``Columns``.
    """

    _closed = True  # until there is something to close

    def __init__(
        self,
        order: Sequence[int],
        open_fragment: Callable[[FileCursor], FragmentReader | NumberedReader],
        cycle_length: int,
        block_length: int,
        place: ReaderCursor,
        schema: SchemaOfFiles,
    ) -> None:
        self.opened = place.opened
        """How many fresh fragments were opened."""
        self._turns: list[Turn | tuple[_Rounds, int, int]] = []  # the turns of the last ``take``
        self._order = order
        self._open_fragment = open_fragment
        self._schema = schema
        self._waiting = deque(place.waiting)
        num_slots = min(cycle_length, len(place.waiting) + len(order) - place.opened)
        # The reader of each slot, or the cursor of a fragment that is not opened again yet.
        self._slots: list[FragmentReader | NumberedReader | FileCursor | None] = list(place.slots) or [None] * num_slots
        self._length = block_length if len(self._slots) > 1 else None  # a single slot has one turn without end
        self._turn, self._taken = place.turn, place.taken  # the slot whose turn it is, and its records in this turn
        if self._length is not None and self._taken >= self._length:  # the state of version 0.2 may be of its end
            self._pass_turn()
        self._num_ended, self._digest = 0, digest_after_file(0, 0)  # of the files that were read to their end
        self._new_ends: list[tuple[int, str, int]] = []
        self._ended: list[NumberedReader] = []  # files at their end whose records may still be read
        self._times: ReadTimes | None = None
        self._closed = False

    def measure(self, times: ReadTimes) -> None:
        """Tells how long the reading of each fragment takes from now on."""
        self._times = times

    def __del__(self) -> None:
        self.close()

    @property
    def of_columns(self) -> bool:
        """See ``Reader.of_columns``."""
        return self._schema.is_known

    def digest(self) -> Digest:
        """See ``Reader.digest``: how many records each file had that was read to its end."""
        ends, self._new_ends = tuple(self._new_ends), []
        return FilesRead(self._digest, ends) if ends else self._digest

    def position(self) -> ReaderCursor:
        """See ``Reader.position``."""
        slots = [each if each is None or isinstance(each, FileCursor) else each.position() for each in self._slots]
        taken = 0 if self._length is None else self._taken
        return ReaderCursor(tuple(slots), self._turn, taken, tuple(self._waiting), self.opened)

    def take(self, count: int) -> RecordList:
        """See ``Reader.take``."""
        parts = self._parts(count, FragmentReader.take)
        return parts[0] if len(parts) == 1 else joined(parts)

    def reserve(self, count: int) -> Reserved:
        """Skips the next ``count`` records, fewer at the end; they are read when the result is sliced.

        If they must be read from start to end, they are read at once. The result is valid until the next call.
        """
        ended, self._ended = self._ended, []
        for file in ended:
            file.close()
        return Reserved(self._parts(count, _reserved))

    def take_ready(self) -> RecordList:
        """The next records that are ready: at least one; empty only at the end.

        Good records in front of one that cannot be read are returned before its error is raised.
        """
        self._turns = []
        parts: list[Any] = []
        if self._length is not None and not self._turn and not self._taken:
            self._take_rounds(_MOST_READY // len(self._slots) // self._length, self._length, parts)
        if parts:
            return joined(parts)
        return self._take_turn(_MOST_READY, FragmentReader.take_ready) or []

    def places(self, lo: int, hi: int) -> list[RecordPlace]:
        """See ``Reader.places``."""
        found: list[RecordPlace] = []
        start = 0  # the position of the first record of a turn among those taken
        for reader, first, end in self._turns:
            stop = start + end - first
            if lo < stop and start < hi:
                found += reader.places(first + max(lo - start, 0), min(end, first + hi - start))
            start = stop
        return found

    def close(self) -> None:
        """Closes the fragments. More calls do nothing."""
        if not self._closed:
            self._closed = True
            for each in (*self._slots, *self._ended):
                if isinstance(each, FragmentReader | NumberedReader):
                    each.close()

    def _parts(self, count: int, take: Callable[[Any, int], Any]) -> list[Any]:
        """The next ``count`` records in parts, as ``take(reader, most)`` takes them."""
        self._turns = []
        parts: list[Any] = []
        while count:
            if self._length is not None and not self._turn and not self._taken:
                count -= self._take_rounds(count // len(self._slots) // self._length, self._length, parts)
            if not count or (part := self._take_turn(count, take)) is None:
                break
            parts.append(part)
            _, before, after = self._turns[-1]
            count -= after - before
        return parts

    def _take_rounds(self, rounds: int, length: int, parts: list[Any]) -> int:
        """Up to so many rounds of turns, as far as all their records are ready: several times as fast as one by one."""
        readers: list[FragmentReader] = []
        for each in self._slots:
            if not isinstance(each, FragmentReader) or self._times is not None:
                return 0
            rounds = min(rounds, each.num_ready // length)
            if rounds <= 0:
                return 0
            readers.append(each)
        begun, count = [(each, each.delivered) for each in readers], rounds * length * len(readers)
        taken = [each.take(rounds * length) for each in readers]
        self._turns.append((_Rounds(begun, length), 0, count))
        if length <= rounds and all(type(records) is list for records in taken):
            merged: list[Any] = [None] * count
            for slot, records in enumerate(taken):
                for inside in range(length):
                    merged[slot * length + inside :: length * len(taken)] = records[inside::length]
            parts.append(merged)
        else:
            parts += [records[lo : lo + length] for lo in range(0, rounds * length, length) for records in taken]
        return count

    def _take_turn(self, count: int, take: Callable[[Any, int], Any]) -> Any:
        """Up to ``count`` records of the next turn, or of the rest of this one; ``None`` at the end.

        Raises:
          SourceError: naming the file, if it cannot be read; the reading has ended then.
        """
        while (reader := self._current()) is not None:
            before = reader.delivered
            most = count if self._length is None else min(count, self._length - self._taken)
            began = 0.0 if self._times is None else perf_counter()
            try:
                part = take(reader, most)
            except BaseException as error:
                self._fail(reader, error)
            finally:
                if self._times is not None:
                    self._times.read(perf_counter() - began, reader.name, before)
            if reader.delivered == before:
                self._end(reader)
                continue
            self._turns.append((reader, before, reader.delivered))
            self._taken += reader.delivered - before
            if self._taken == self._length:
                self._pass_turn()
            return part
        return None

    def _current(self) -> FragmentReader | NumberedReader | None:
        """The reader whose turn it is, opened; ``None`` at the end."""
        while not self._closed:
            place = self._slots[self._turn] if self._slots else None
            if isinstance(place, FragmentReader | NumberedReader):
                return place
            if not (self.opened < len(self._order) or self._waiting or any(self._slots)):
                self._turn = 0
                if not self._ended:
                    self.close()
                break
            reader = self._opened(place)
            if reader is not None:
                self._slots[self._turn] = reader
                return reader
            self._pass_turn()
        return None

    def _opened(self, place: FileCursor | None) -> FragmentReader | NumberedReader | None:
        """The fragment of a slot, or the next one for it, if there is one: it counts only after it was opened."""
        if place is not None:
            return self._open(place)
        if self._waiting:
            reader = self._open(self._waiting[0])
            self._waiting.popleft()
            return reader
        if self.opened < len(self._order):
            reader = self._open(FileCursor(self._order[self.opened]))
            self.opened += 1
            return reader
        return None

    def _open(self, place: FileCursor) -> FragmentReader | NumberedReader:
        try:
            reader = self._open_fragment(place)
        except BaseException:
            self.close()
            raise
        began = perf_counter()
        try:
            reader.open()
        except BaseException as error:
            self._fail(reader, error)
        if self._times is not None:
            self._times.read(perf_counter() - began, reader.name, reader.delivered)
        return reader

    def _fail(self, reader: FragmentReader | NumberedReader, error: BaseException) -> NoReturn:
        of_fragment = isinstance(error, Exception) and not isinstance(error, StateMismatch)
        failure = reader.failure(error) if of_fragment else error  # before it is closed
        reader.close()
        self.close()
        if of_fragment:
            raise failure from ((error.__cause__ if isinstance(error, SourceError) else None) or error)
        raise error

    def _end(self, reader: FragmentReader | NumberedReader) -> None:
        """Frees the slot of the fragment whose turn it is, as it has ended."""
        self._slots[self._turn] = None
        self._digest = digest_after_file(self._digest, reader.delivered)
        if len(self._new_ends) < _MAX_NAMED:
            self._new_ends.append((self._num_ended, one_line(reader.name), reader.delivered))
        self._num_ended += 1
        if isinstance(reader, NumberedReader):
            self._ended.append(reader)  # it stays open for a while
        else:
            reader.close()
        self._pass_turn()

    def _pass_turn(self) -> None:
        self._turn, self._taken = (self._turn + 1) % len(self._slots), 0


@final
class _Rounds:
    """The origins of rounds of turns that were taken together.

    Args:
      begun: the reader of each slot, and how many of its records were yielded before.
      length: records in a turn.
    """

    def __init__(self, begun: Sequence[tuple[FragmentReader, int]], length: int) -> None:
        self._begun, self._length = begun, length

    def places(self, first: int, end: int) -> list[RecordPlace]:
        """The origins of the records ``[first, end)`` of the rounds."""
        found: list[RecordPlace] = []
        for at in range(first, end):
            turn, inside = divmod(at, self._length)
            number, slot = divmod(turn, len(self._begun))
            reader, before = self._begun[slot]
            record = before + number * self._length + inside
            found += reader.places(record, record + 1)
        return found


def _reserved(reader: FragmentReader | NumberedReader, most: int) -> RecordList | Turn:
    if isinstance(reader, FragmentReader):
        return reader.take(most)
    before = reader.delivered
    return reader, before, before + reader.skip(most)
