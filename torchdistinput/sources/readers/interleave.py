"""Interleaves the records of several open files, turn by turn or in whole rounds.

**Interleaving.** ``cycle_length`` slots, each with an open file, have turns in a fixed order. A turn yields up to
``block_length`` records; a slot whose file ended in its turn takes the next file at its next turn. These are the rules
of TensorFlow's ``interleave``.

**Rounds.** A turn is often one record, and several calls for one record cost too much. While all open files have ready
records, whole rounds of turns are taken as slices of these records, and interleaved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar, cast, final

import numpy as np

from torchdistinput.coordination.batch_digests import digest_after_file
from torchdistinput.errors import StateMismatch
from torchdistinput.plan.file_resharding import FileCursor, ReaderCursor
from torchdistinput.sources.formats.columns import Columns, RecordList, joined
from torchdistinput.sources.readers.open_file import OpenFile
from torchdistinput.sources.storage.retry import one_line
from torchdistinput.step_types import Digest, FilesRead

T = TypeVar("T")

_MAX_TOLD: Final = 16  # files that ended in one batch, for a message that names one of them

Turn: TypeAlias = tuple[OpenFile, int, int]
"""A file, and the range of its records that a turn yielded, counted as they are yielded."""


class Rounds(NamedTuple):
    """Rounds in which each of some files had a turn of the same length. Single turns are listed only by ``turns``."""

    files: Sequence[OpenFile]
    """The files, in the order of their turns."""
    firsts: Sequence[int]
    """The first record of each file."""
    rounds: int
    """How many rounds."""
    length: int
    """How many records a turn has."""

    def turns(self) -> Iterator[Turn]:
        """Each turn, in order."""
        for start in range(0, self.rounds * self.length, self.length):
            for file, first in zip(self.files, self.firsts, strict=True):
                yield file, first + start, first + start + self.length


Taken: TypeAlias = Turn | Rounds


def taken_turns(taken: Sequence[Taken]) -> Iterator[Turn]:
    """The turns one by one."""
    for each in taken:
        if isinstance(each, Rounds):
            yield from each.turns()
        else:
            yield each


def interleaved(parts: Sequence[RecordList], length: int) -> RecordList:
    """Records in the order of rounds: ``length`` of the first part, as many of the second, and so on, then again.

    No Python code runs for a record: there are as many slices as the lesser of rounds and length, for each part.

    >>> interleaved([["a", "b", "c", "d"], ["A", "B", "C", "D"]], 2)
    ['a', 'b', 'A', 'B', 'c', 'd', 'C', 'D']

    Args:
      parts: the records of each file, equally many, a multiple of ``length``.
      length: records of a turn.
    """
    size, step = len(parts[0]), len(parts) * length
    if any(isinstance(part, Columns) for part in parts):
        records = joined(parts)
        order = np.arange(len(records)).reshape(len(parts), -1, length).swapaxes(0, 1).ravel()
        if isinstance(records, Columns):
            return records.take(order)
        return [records[index] for index in order.tolist()]
    parts = cast("Sequence[list[Any]]", parts)
    if length * length > size:
        mixed: list[Any] = []
        for start in range(0, size, length):
            for part in parts:
                mixed += part[start : start + length]
        return mixed
    mixed = [None] * (len(parts) * size)
    for number, part in enumerate(parts):
        for place in range(length):
            mixed[number * length + place :: step] = part[place::length]
    return mixed


@final
class Interleave:
    """The open files of a ``RecordReader``, and whose turn it is.

    It is separate from the reader, as a generator that refers to its own reader would keep it alive.

    Args:
      order: the fresh files, in the order in which they are opened, including those that were opened before ``place``.
      open_file: opens a file.
      cycle_length: how many slots there are, unless ``place`` has slots.
      block_length: how many records make a turn, if there are several slots.
      place: the cursor at which to start.
    """

    def __init__(
        self,
        order: Sequence[int],
        open_file: Callable[[FileCursor], OpenFile],
        cycle_length: int,
        block_length: int,
        place: ReaderCursor,
    ) -> None:
        self.last: OpenFile | None = None
        """The file of the last record."""
        self.taken: list[Taken] = []
        """The turns of the last ``take``."""
        self.opened = place.opened
        """How many fresh files were opened."""
        self._order = order
        self._open_file = open_file
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

    def position(self) -> ReaderCursor:
        """See ``RecordReader.position``."""
        slots = tuple([file.position() if isinstance(file, OpenFile) else file for file in self._slots])
        taken = self._before if self._current is None else self._current.delivered - self._start
        if len(slots) == 1:
            taken = 0  # its turn has no end
        return ReaderCursor(slots, self._turn, taken, tuple(self._waiting), self.opened)

    def next_turn(self, most: int) -> tuple[OpenFile, int] | None:
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

    def take_rounds(self, most: int) -> RecordList:
        """Up to ``most`` records in whole rounds of turns that need no reading, or none.

        The state afterwards is the same as after taking the turns one by one.
        """
        if self._length is None or self._closed:
            return []
        if self._slow_turns:
            self._slow_turns -= 1
            return []
        if self._current is None and self._before:
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
        self.taken.append(Rounds(files, [file.delivered for file in files], rounds, self._length))
        parts = [file.take(rounds * self._length) for file in files]
        last = self.last = self._current = files[-1]
        self._turn, self._start = self._slots.index(last), last.delivered - self._length
        return interleaved(parts, self._length)

    def _files_of_round(self) -> list[OpenFile]:
        """The files in the order of their next turns; none while a file is to be opened. Between two turns."""
        first, slots = self._turn + (self._current is not None), self._slots
        files = [file for file in (*slots[first:], *slots[:first]) if isinstance(file, OpenFile)]
        empty = slots.count(None) if self.opened == len(self._order) and not self._waiting else 0
        return files if len(files) + empty == len(slots) else []

    def read(self, file: OpenFile, take: Callable[[int], T], count: int) -> T:
        """Reads from the file whose turn it is, and notes the records for ``places``.

        Args:
          file: the file.
          take: takes records of it, or skips them.
          count: how many at most.
        """
        before = file.delivered
        try:
            return take(count)
        except BaseException as error:
            self.fail(file, error)
            raise
        finally:
            if file.delivered > before:
                self.last = file
                self.taken.append((file, before, file.delivered))

    def fail(self, file: OpenFile, error: BaseException) -> None:
        """Ends the reading, as a file cannot be read.

        Raises:
          SourceError: naming the file, if the error comes from the file's reader.
        """
        failure = file.failure(error) if isinstance(error, Exception) and not isinstance(error, StateMismatch) else None
        self.close()
        if failure is not None:
            raise failure from error

    def end_file(self, file: OpenFile, *, keep: bool = False) -> None:
        """Frees the slot of the file whose turn it is, as the file has ended.

        Args:
          file: its file.
          keep: whether it stays open until ``let_go``.
        """
        self._slots[self._turn] = None
        self._digest = digest_after_file(self._digest, file.delivered)
        if len(self._new_ends) < _MAX_TOLD:
            self._new_ends.append((self._num_ended, one_line(file.name), file.delivered))
        self._num_ended += 1
        if keep:
            self._ended.append(file)
        else:
            file.close()
        self._pass_turn()

    def digest(self) -> Digest:
        """See ``Reads.digest``."""
        ends, self._new_ends = tuple(self._new_ends), []
        return FilesRead(self._digest, ends) if ends else self._digest

    def let_go(self) -> None:
        """Closes files at their end."""
        ended, self._ended = self._ended, []
        for file in ended:
            file.close()

    def close(self) -> None:
        """Closes the files. More calls do nothing."""
        if not self._closed:
            self._closed = True
            for file in (*self._slots, *self._ended):
                if isinstance(file, OpenFile):
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
