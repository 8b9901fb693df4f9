"""The walk over the records of files: which file has the next turn, and what came last.

**Interleaving.** ``cycle_length`` slots, each with an open file, have turns in a fixed order. A turn yields up to
``block_length`` records; a slot whose file ended in its turn takes the next file at its next turn. These are the rules
of TensorFlow's ``interleave``.

**Going on.** A walk tells its place between any two records, and another walk goes on from there with the same records,
in the same order and the same turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import islice
from typing import Any, final

from torchdistinput.errors import StateMismatch
from torchdistinput.plan.lanes import LanePlace, WalkPlace
from torchdistinput.sources.lanes import Lane, RecordPlace

__all__ = ["RecordPlace", "RecordWalk"]


@final
class RecordWalk:
    """An iterator over undecoded records that knows where the last one came from.

    Its files are opened as their turns come, and closed at the end, after an error, by ``close``, and when the walk is
    dropped.

    Args:
      order: the fresh files, in the order in which they are opened; those that were opened before ``place`` too.
      open_lane: opens a file at a place in it.
      cycle_length: how many are open at the same time.
      block_length: how many records one of them yields in a turn.
      place: where to start.
    """

    def __init__(
        self,
        order: Sequence[int],
        open_lane: Callable[[LanePlace], Lane],
        cycle_length: int,
        block_length: int,
        place: WalkPlace | None = None,
    ) -> None:
        self._table = table = _Table(order, cycle_length, place or WalkPlace())
        length = block_length if len(table.slots) > 1 else None  # alone, a file has all turns: one will do
        self._records = _take_turns(table, open_lane, length)

    def __iter__(self) -> Iterator[Any]:
        """The walk's one generator: a loop over it makes no call of a method for every record."""
        return self._records

    def __next__(self) -> Any:
        """The next record."""
        return next(self._records)

    @property
    def place(self) -> RecordPlace:
        """Where the last record came from.

        Raises:
          RuntimeError: before the first record.
        """
        if self._table.lane is None:
            raise RuntimeError("the walk has yielded no record yet, so there is no place")
        return self._table.lane.place()

    @property
    def opened(self) -> int:
        """How many fresh files were opened so far."""
        return self._table.opened

    def position(self) -> WalkPlace:
        """Where the walk stands: another one that starts there yields the records that this one has not yielded."""
        return self._table.position()

    def take(self, count: int) -> list[Any]:
        """The next ``count`` records, fewer at the end; ``places`` tells where they came from."""
        table = self._table
        table.turns = []
        if table.first is not None and table.lane is not None:
            now = table.lane.count()
            table.first, table.taken = now, table.taken + now - table.first
        return list(islice(self._records, count))

    def places(self, lo: int, hi: int) -> list[RecordPlace]:
        """Where the records ``[lo, hi)`` of the last ``take`` came from. Before the next record is taken."""
        table = self._table
        turns = list(table.turns or ())
        if table.first is not None and table.lane is not None:
            turns.append((table.lane, table.first, table.lane.count()))
        found: list[RecordPlace] = []
        start = 0  # the position of the turn's first record among those taken
        for lane, first, end in turns:
            stop = start + end - first
            if lo < stop and start < hi:
                found += lane.places(first + max(lo - start, 0), min(end, first + hi - start))
            start = stop
        return found

    def close(self) -> None:
        """Closes the open files; the walk is at its end. More calls do nothing."""
        self._records.close()


@final
class _Table:
    """What a walk has in hand. Apart from the walk: a generator that knew its walk would keep it alive.

    Args:
      order: the fresh files.
      cycle_length: how many slots there are, unless the place has some.
      place: where to start.
    """

    __slots__ = ("_order", "_waiting", "first", "lane", "opened", "slots", "taken", "turn", "turns")

    def __init__(self, order: Sequence[int], cycle_length: int, place: WalkPlace) -> None:
        self.lane: Lane | None = None
        """The lane of the last record."""
        self.first: int | None = None
        """Where the turn in progress began, or the last ``take`` in it: a count of the lane's records."""
        self.turns: list[tuple[Lane, int, int]] | None = None  # nobody asks unless records are taken
        """The turns that ended since the last ``take``, each with its range of the lane's records."""
        self._order = order
        self.opened = place.opened
        """How many fresh files were opened."""
        self._waiting = deque(place.waiting)
        num_slots = min(cycle_length, len(place.waiting) + len(order) - place.opened)
        self.slots: list[Lane | LanePlace | None] = list(place.slots) or [None] * num_slots
        """The lane of each slot, or the place of one that is yet to be opened again."""
        self.turn = place.turn
        """The slot whose turn it is."""
        self.taken = place.taken
        """How many records were taken in its turn; of the turn in progress, before ``first``."""

    def position(self) -> WalkPlace:
        """See ``RecordWalk.position``."""
        slots = tuple([lane.position() if isinstance(lane, Lane) else lane for lane in self.slots])
        taken = self.taken
        if self.first is not None and self.lane is not None:
            taken += self.lane.count() - self.first
        if len(slots) == 1:
            taken = 0  # its turn has no end
        return WalkPlace(slots, self.turn, taken, tuple(self._waiting), self.opened)

    def has_more(self) -> bool:
        """Whether a file is open or to be opened."""
        return self.opened < len(self._order) or bool(self._waiting) or any(self.slots)

    def fill_slot(self, open_lane: Callable[[LanePlace], Lane]) -> Lane | None:
        """Opens the next file for the slot whose turn it is; none if there is none."""
        place = self.slots[self.turn]
        if isinstance(place, LanePlace):
            lane = open_lane(place)
        elif self._waiting:
            lane = open_lane(self._waiting[0])
            self._waiting.popleft()  # not before it is open: one that cannot be is still to be read
        elif self.opened < len(self._order):
            lane = open_lane(LanePlace(self._order[self.opened]))
            self.opened += 1
        else:
            return None
        self.slots[self.turn] = lane
        return lane


def _take_turns(
    table: _Table, open_lane: Callable[[LanePlace], Lane], block_length: int | None
) -> Generator[Any, None, None]:
    """The walk: the turns of the slots in order, until no file is open or waiting."""
    slots = table.slots
    try:
        while table.has_more():
            for number in range(table.turn, len(slots)):
                table.turn = number
                lane = slots[number]
                if not isinstance(lane, Lane):
                    lane = table.fill_slot(open_lane)
                if lane is not None and (yield from _turn(lane, block_length, table)):
                    slots[number] = None
                    lane.close()
                table.taken = 0
            table.turn = 0
    finally:
        for lane in slots:
            if isinstance(lane, Lane):
                lane.close()


def _turn(lane: Lane, length: int | None, table: _Table) -> Generator[Any, None, bool]:
    """Yields the records of one turn, or the rest of one that was left; returns whether the file ended in it."""
    before, previous = lane.before, table.lane
    table.lane, table.first = lane, before
    left = length if length is None or not table.taken else max(0, length - table.taken)
    try:
        yield from lane.turn(left)
    except StateMismatch:
        raise
    except Exception as error:
        raise lane.failure(error) from error
    finally:
        end = lane.before = lane.count()
        if table.turns is not None:
            table.turns.append((lane, table.first, end))
        table.taken += end - table.first
        table.first = None
        if end == before:
            table.lane = previous
    return length is None or table.taken < length
