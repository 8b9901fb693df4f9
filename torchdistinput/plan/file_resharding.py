"""Where the reading of files was left, and how that is dealt again when the number of workers changes.

A *walk* is what one worker reads. A ``ReaderCursor`` says where the walk stands, a ``FileCursor`` where one of its open
files stands: positions, never records. The files of an epoch that nobody has opened follow from the order of the files
and from a few counts, so a state stays small however many files there are. The *deals* are the changes of the world so
far, each as ``[W, opened_0, …, opened_{W-1}]``: how many workers there were, and how many fresh files each had opened.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from torchdistinput.errors import StateMismatch

__all__ = ["Deals", "FileCursor", "ReaderCursor", "checked_deals", "fresh_files", "redeal"]

Deals: TypeAlias = Sequence[Sequence[int]]
"""The changes of the world, the first one first."""


class FileCursor(NamedTuple):
    """Where one file was left. The anchor (``offset``, ``record``) is where its reader can be entered again."""

    file: int
    """The place of the file in the dataset's list."""
    offset: Any = 0
    """Where the anchor is: in bytes of the uncompressed content, or a position of a fragment in a list of one."""
    record: int = 0
    """The number of the record that starts there."""
    delivered: int = 0
    """How many of the file's records were yielded, in their shuffled order."""
    size: int = -1
    """The stored size of the file, in bytes; -1 where it is not known."""


class ReaderCursor(NamedTuple):
    """Where a walk was left. It goes on with its slots, then opens what waits, then fresh files."""

    slots: Sequence[FileCursor | None] = ()
    """The open file of each slot; none where the slot takes the next file. No slots: all files are yet to open."""
    turn: int = 0
    """The slot whose turn it is."""
    taken: int = 0
    """How many records were taken in that turn."""
    waiting: Sequence[FileCursor] = ()
    """Files that were begun, and are in no slot."""
    opened: int = 0
    """How many of the fresh files that the walk was dealt were opened."""

    @property
    def cursors(self) -> list[FileCursor]:
        """The files that were begun and not finished: those in slots, then those that wait."""
        return [*(cursor for cursor in self.slots if cursor is not None), *self.waiting]

    def to_json(self) -> list[object]:
        """The place as plain lists and ints."""
        slots = [None if cursor is None else list(cursor) for cursor in self.slots]
        return [slots, self.turn, self.taken, [list(cursor) for cursor in self.waiting], self.opened]

    def to_text(self) -> str:
        """``to_json`` as JSON."""
        return json.dumps(self.to_json())

    @classmethod
    def from_json(cls, value: object) -> ReaderCursor:
        """The place that ``to_json`` gave.

        Raises:
          StateMismatch: if it is none, naming the part that is wrong.
        """
        match value:
            case [list() as slots, turn, taken, list() as waiting, opened]:
                place = cls(
                    tuple(None if slot is None else _cursor(slot) for slot in slots),
                    _count("turn", turn),
                    _count("taken", taken),
                    tuple(map(_cursor, waiting)),
                    _count("opened", opened),
                )
            case _:
                raise _malformed("the place of a walk", "[slots, turn, taken, waiting, opened]", value)
        if place.turn >= max(1, len(place.slots)):
            raise _malformed("the turn of a walk", f"the number of one of its {len(place.slots)} slots", place.turn)
        return place


def fresh_files(order: Sequence[int], deals: Deals) -> list[int]:
    """The files that nobody has opened, in their order; worker ``i`` of ``W`` is dealt ``[i::W]`` of them.

    Args:
      order: all files of the epoch.
      deals: the changes of the world so far, see the top.
    """
    fresh = list(order)
    for num_workers, *opened in deals:
        fresh = [file for j, file in enumerate(fresh) if j // num_workers >= opened[j % num_workers]]
    return fresh


def redeal(
    places: Sequence[ReaderCursor], deals: Deals, num_workers: int
) -> tuple[list[ReaderCursor], list[list[int]]]:
    """Deals what a world has begun to another one: file ``j`` to worker ``j mod num_workers``; so the fresh files.

    Args:
      places: where the walk of each worker was left; of all workers.
      deals: the changes of the world before.
      num_workers: how many workers go on.

    Returns:
      The place at which each of the new workers starts, and the deals with this one.
    """
    in_slots = chain.from_iterable(place.slots for place in places)
    cursors = [cursor for cursor in in_slots if cursor is not None]
    cursors += chain.from_iterable(place.waiting for place in places)
    dealt = [ReaderCursor(waiting=tuple(cursors[worker::num_workers])) for worker in range(num_workers)]
    return dealt, [*map(list, deals), [len(places), *(place.opened for place in places)]]


def checked_deals(value: object) -> list[list[int]]:
    """The deals, as they come out of a saved state.

    Raises:
      StateMismatch: if they are none.
    """
    if not isinstance(value, list):
        raise _malformed("the list of deals", "a list", value)
    deals: list[list[int]] = []
    for deal in value:
        if not isinstance(deal, list):
            raise _malformed("a deal", "[workers, files opened by each]", deal)
        counts = [_count("deal", each) for each in deal]
        if len(counts) < 2 or counts[0] != len(counts) - 1:
            raise _malformed("a deal", "[workers, files opened by each]", deal)
        deals.append(counts)
    return deals


def _cursor(value: object) -> FileCursor:
    match value:
        case [int(), int() | [_] as offset, int(), int(), int(size)] if not isinstance(size, bool) and size >= -1:
            file, record, delivered = (_count("lane", value[number]) for number in (0, 2, 3))
            offset = offset if isinstance(offset, list) else _count("lane", offset)
        case _:
            raise _malformed("the place of a file", "[file, offset, record, delivered, size], of ints", value)
    if record > delivered:
        raise _malformed("the place of a file", "an anchor that is not behind the records that were delivered", value)
    return FileCursor(file, offset, record, delivered, size)


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _malformed(f"{name} in the place of a walk", "an int of at least 0", value)
    return value


def _malformed(what: str, needed: str, found: object) -> StateMismatch:
    return StateMismatch(
        f"the saved state is damaged: {what} must be {needed}, found {found!r:.200}; "
        "load a state as state_dict() gave it"
    )
