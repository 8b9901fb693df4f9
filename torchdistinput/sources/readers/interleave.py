"""Reads the undecoded records of several files, interleaved turn by turn or in whole rounds.

**Interleaving.** ``cycle_length`` slots, each with an open file, have turns in a fixed order. A turn yields up to
``block_length`` records; a slot whose file ended in its turn takes the next file at its next turn. These are the rules
of TensorFlow's ``interleave``.

**Rounds.** A turn is often one record, and several calls for one record cost too much. While all open files have ready
records, whole rounds of turns are taken as slices of these records, and interleaved.

**Resuming.** The reader has a cursor between any two records. Another one that starts at this cursor yields the same
records, in the same order and the same turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, TypeVar, final

import numpy as np

from torchdistinput.coordination.batch_digests import digest_after_file
from torchdistinput.errors import StateMismatch
from torchdistinput.plan.file_resharding import FileCursor, ReaderCursor
from torchdistinput.sources.formats.columns import Columns, RecordList, SchemaOfFiles, joined
from torchdistinput.sources.readers.open_file import OpenFile, RecordPlace
from torchdistinput.sources.readers.reader import Reserved, Turn
from torchdistinput.sources.storage.retry import one_line
from torchdistinput.step_types import Digest, FilesRead

T = TypeVar("T")

_MAX_NAMED: Final = 16  # files that ended in one batch, for a message that names one of them
_MOST_READY: Final = 256  # records that are handed out at once: lazy ones are made then


def _interleaved(parts: Sequence[RecordList], length: int) -> RecordList:
    """Equally many records of each file, in rounds: ``length`` of the first file, as many of the second, and so on."""
    records = joined(parts)
    order = np.arange(len(records)).reshape(len(parts), -1, length).swapaxes(0, 1).ravel()
    return records.take(order) if isinstance(records, Columns) else [*map(records.__getitem__, order.tolist())]


def _turns_of_rounds(files: Sequence[OpenFile], firsts: Sequence[int], rounds: int, length: int) -> Iterator[Turn]:
    """The turns of rounds in which each of some files had a turn of one length, from its first record on."""
    for start in range(0, rounds * length, length):
        for file, first in zip(files, firsts, strict=True):
            yield file, first + start, first + start + length


@final
class Interleave:
    """The ``Reader`` of several files. A file is opened when its turn comes.

    All files are closed at the end, after an error, by ``close``, and when the reader is garbage-collected.

    Args:
      order: the fresh files, in the order in which they are opened, including those that were opened before ``place``.
      open_file: opens a file.
      cycle_length: how many slots there are, unless ``place`` has slots.
      block_length: how many records make a turn, if there are several slots.
      place: the cursor at which to start.
      schema: the columns of the files that were read, if their records are ``Columns``.
    """

    def __init__(
        self,
        order: Sequence[int],
        open_file: Callable[[FileCursor], OpenFile],
        cycle_length: int,
        block_length: int,
        place: ReaderCursor,
        schema: SchemaOfFiles,
    ) -> None:
        self.opened = place.opened
        """How many fresh files were opened."""
        self._taken: list[Turn | Callable[[], Iterator[Turn]]] = []  # the turns of the last ``take``
        self._order = order
        self._open_file = open_file
        self._schema = schema
        self._waiting = deque(place.waiting)
        num_slots = min(cycle_length, len(place.waiting) + len(order) - place.opened)
        # The file of each slot, or the cursor of a file that is not opened again yet.
        self._slots: list[OpenFile | FileCursor | None] = list(place.slots) or [None] * num_slots
        self._length = block_length if len(self._slots) > 1 else None  # a single slot has one turn without end
        self._turn = place.turn  # the slot whose turn it is
        self._before = place.taken  # records of its turn that were taken when its file was opened
        self._current: OpenFile | None = None  # its file, once it is open
        self._start = 0  # the file's count where the turn began
        self._slow_turns = 0  # how many turns are taken before whole rounds are tried again
        self._num_ended, self._digest = 0, digest_after_file(0, 0)  # of the files that were read to their end
        self._new_ends: list[tuple[int, str, int]] = []
        self._ended: list[OpenFile] = []  # files at their end whose records may still be read
        self._closed = False

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
        slots = tuple([file.position() if isinstance(file, OpenFile) else file for file in self._slots])
        taken = self._before if self._current is None else self._current.delivered - self._start
        if len(slots) == 1:
            taken = 0  # its turn has no end
        return ReaderCursor(slots, self._turn, taken, tuple(self._waiting), self.opened)

    def take(self, count: int) -> RecordList:
        """See ``Reader.take``."""
        self._taken = []
        parts: list[RecordList] = []
        missing = count
        while missing:
            found = self._take_rounds(missing)
            if not found:
                turn = self._next_turn(missing)
                if turn is None:
                    break
                file, wanted = turn
                found = self._read(file, file.take, wanted)
                if len(found) < wanted:
                    self._end_file(file)
            parts.append(found)
            missing -= len(found)
        return parts[0] if len(parts) == 1 else joined(parts)

    def reserve(self, count: int) -> Reserved:
        """See ``Reader.reserve``."""
        self._taken = []
        self._close_ended()
        parts: list[RecordList | Turn] = []
        size = 0
        while size < count:
            if records := self._take_rounds(count - size):
                parts.append(records)
                size += len(records)
                continue
            turn = self._next_turn(count - size)
            if turn is None:
                break
            file, wanted = turn
            before = file.delivered
            if file.can_skip:
                number = self._read(file, file.skip, wanted)
                parts.append((file, before, before + number))
            else:
                records = self._read(file, file.take, wanted)
                number = len(records)
                parts.append(records)
            if number < wanted:
                self._end_file(file, keep=True)
            size += number
        return Reserved(parts)

    def take_ready(self) -> RecordList:
        """The next records that are ready: at least one; empty only at the end.

        Good records in front of one that cannot be read are returned before its error is raised.
        """
        self._taken = []
        if rounds := self._take_rounds(_MOST_READY):
            return rounds
        while (turn := self._next_turn(_MOST_READY)) is not None:
            file, wanted = turn
            if records := self._read(file, file.take_ready, wanted):
                return records
            self._end_file(file)
        return []

    def places(self, lo: int, hi: int) -> list[RecordPlace]:
        """See ``Reader.places``."""
        found: list[RecordPlace] = []
        start = 0  # the position of the first record of a turn among those taken
        for each in self._taken:
            for file, first, end in each() if callable(each) else (each,):
                stop = start + end - first
                if lo < stop and start < hi:
                    found += file.places(first + max(lo - start, 0), min(end, first + hi - start))
                start = stop
        return found

    def close(self) -> None:
        """Closes the files. More calls do nothing."""
        if not self._closed:
            self._closed = True
            for file in (*self._slots, *self._ended):
                if isinstance(file, OpenFile):
                    file.close()

    def _next_turn(self, most: int) -> tuple[OpenFile, int] | None:
        """The file whose turn it is, and how many records, up to ``most``, it has left in it; ``None`` at the end."""
        while not self._closed:
            if self._current is None:
                if not self._has_more():
                    self._turn = 0
                    if not self._ended:
                        self.close()
                    break
                self._begin_turn()
            file = self._current
            if file is not None:
                if self._length is None:
                    return file, most
                left = self._length - (file.delivered - self._start)
                if left > 0:
                    return file, min(left, most)
            self._pass_turn()
        return None

    def _take_rounds(self, most: int) -> RecordList:
        """Up to ``most`` records in whole rounds of turns that need no reading, or none.

        The state afterwards is the same as after taking the turns one by one.
        """
        if self._length is None or self._closed:
            return []
        if self._slow_turns:
            self._slow_turns -= 1
            return []
        if self._current is not None and self._current.delivered - self._start != self._length:
            return []
        files = self._files_of_round()
        rounds = most // (len(files) * self._length) if files else 0
        if rounds:
            rounds = min(rounds, min([file.num_ready for file in files]) // self._length)
        if not rounds:  # not before each slot had its turn
            self._slow_turns = len(files or self._slots) - 1
            return []
        firsts = [file.delivered for file in files]
        self._taken.append(partial(_turns_of_rounds, files, firsts, rounds, self._length))
        parts = [file.take(rounds * self._length) for file in files]
        last = self._current = files[-1]
        self._turn, self._start = self._slots.index(last), last.delivered - self._length
        return _interleaved(parts, self._length)

    def _files_of_round(self) -> list[OpenFile]:
        """The files in the order of their next turns; none while a file is to be opened. Between two turns."""
        first, slots = self._turn + (self._current is not None), self._slots
        files = [file for file in (*slots[first:], *slots[:first]) if isinstance(file, OpenFile)]
        empty = slots.count(None) if self.opened == len(self._order) and not self._waiting else 0
        return files if len(files) + empty == len(slots) else []

    def _read(self, file: OpenFile, take: Callable[[int], T], count: int) -> T:
        """Takes records of the file whose turn it is, or skips them, and notes them for ``places``.

        Raises:
          SourceError: naming the file, if it cannot be read; the reading has ended then.
        """
        before = file.delivered
        try:
            return take(count)
        except BaseException as error:
            of_file = isinstance(error, Exception) and not isinstance(error, StateMismatch)
            failure = file.failure(error) if of_file else error  # before it is closed
            self.close()
            if of_file:
                raise failure from error
            raise
        finally:
            if file.delivered > before:
                self._taken.append((file, before, file.delivered))

    def _end_file(self, file: OpenFile, *, keep: bool = False) -> None:
        """Frees the slot of the file whose turn it is, as it has ended; with ``keep`` it stays open for a while."""
        self._slots[self._turn] = None
        self._digest = digest_after_file(self._digest, file.delivered)
        if len(self._new_ends) < _MAX_NAMED:
            self._new_ends.append((self._num_ended, one_line(file.name), file.delivered))
        self._num_ended += 1
        if keep:
            self._ended.append(file)
        else:
            file.close()
        self._pass_turn()

    def _close_ended(self) -> None:
        ended, self._ended = self._ended, []
        for file in ended:
            file.close()

    def _has_more(self) -> bool:
        return self.opened < len(self._order) or bool(self._waiting) or any(self._slots)

    def _begin_turn(self) -> None:
        """Opens the file of the slot whose turn it is, or the next file for it, if there is one."""
        place = self._slots[self._turn]
        try:
            file = place if isinstance(place, OpenFile) else self._opened(place)
        except BaseException:
            self.close()
            raise
        if file is not None:
            self._slots[self._turn] = self._current = file
            self._start = file.delivered - self._before

    def _opened(self, place: FileCursor | None) -> OpenFile | None:
        if place is not None:
            return self._open_file(place)
        if self._waiting:
            file = self._open_file(self._waiting[0])
            self._waiting.popleft()  # only after it was opened: a file that cannot be opened is still to be read
            return file
        if self.opened < len(self._order):
            file = self._open_file(FileCursor(self._order[self.opened]))
            self.opened += 1
            return file
        return None

    def _pass_turn(self) -> None:
        self._current, self._before = None, 0
        self._turn = (self._turn + 1) % len(self._slots)
