"""Positions in the files of an epoch, and how the unread rest is divided again when the number of workers changes.

A ``ReaderCursor`` is the position of one worker's reader, a ``FileCursor`` the position in one of its open files. They
hold positions, never records. A *fresh* file is a file that no worker has opened. The fresh files follow from the order
of the files and from a few counts, so a state is small for any number of files. The *deals* are the changes of the
number of workers so far, each as ``[W, opened_0, …, opened_{W-1}]``: the number of workers before the change, and how
many fresh files each of them had opened.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from torchdistinput.errors import StateMismatch
from torchdistinput.plan.topology import shards_of

Deals: TypeAlias = Sequence[Sequence[int]]
"""The changes of the number of workers, in order."""


class FileCursor(NamedTuple):
    """The position in one file. Its reader can start again at the anchor (``offset``, ``record``)."""

    file: int
    """The place of the file in the dataset's list."""
    offset: Any = 0
    """The offset of the anchor: bytes of the uncompressed content, or a list with one position of a fragment."""
    record: int = 0
    """The number of the record that starts at the anchor."""
    delivered: int = 0
    """How many of the file's records were yielded, in their shuffled order."""
    size: int = -1
    """The stored size of the file, in bytes; -1 where it is not known."""
    mark: str = ""
    """A short text that changes with its content; empty where it is not known, as in states of version 0.2."""


class ReaderCursor(NamedTuple):
    """The position of one worker's reader. The reader continues its slots, then the waiting files, then fresh files."""

    slots: Sequence[FileCursor | None] = ()
    """The open file of each interleave slot; ``None``: the slot opens the next file. Empty: no file is open yet."""
    turn: int = 0
    """The slot that is read next."""
    taken: int = 0
    """How many records were taken in this turn of the slot."""
    waiting: Sequence[FileCursor] = ()
    """Files that were begun by an earlier reader, and are in no slot."""
    opened: int = 0
    """How many of its fresh files the reader has opened."""

    @property
    def cursors(self) -> list[FileCursor]:
        """The files that were begun and not finished: the files in slots, then the waiting files."""
        return [*(cursor for cursor in self.slots if cursor is not None), *self.waiting]

    def to_json(self) -> list[object]:
        """The position as plain lists and ints."""
        slots = [None if cursor is None else _plain(cursor) for cursor in self.slots]
        return [slots, self.turn, self.taken, [_plain(cursor) for cursor in self.waiting], self.opened]

    def to_text(self) -> str:
        """``to_json`` as JSON."""
        return json.dumps(self.to_json())

    @classmethod
    def from_json(cls, value: object) -> ReaderCursor:
        """The position from the value of ``to_json``.

        Raises:
          StateMismatch: the value is malformed; the message names the part that is wrong.
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
                raise _malformed("the cursor of a reader", "[slots, turn, taken, waiting, opened]", value)
        if place.turn >= max(1, len(place.slots)):
            raise _malformed("the turn of a reader", f"the number of one of its {len(place.slots)} slots", place.turn)
        return place


def fresh_files(order: Sequence[int], deals: Deals, sizes: Sequence[int] | None = None) -> list[int]:
    """The files that no worker has opened, in their order.

    ``topology.shards_of`` divides them among the workers.

    Args:
      order: all files of the epoch.
      deals: the changes of the number of workers so far; see the module.
      sizes: of each file, by its number, if files are divided by size.
    """
    fresh = list(order)
    for num_workers, *opened in deals:
        shards = shards_of(fresh, num_workers, sizes)
        left = {file for shard, count in zip(shards, opened, strict=True) for file in shard[count:]}
        fresh = [file for file in fresh if file in left]
    return fresh


def redeal(
    places: Sequence[ReaderCursor], deals: Deals, num_workers: int
) -> tuple[list[ReaderCursor], list[list[int]]]:
    """Divides the begun files among another number of workers: begun file ``j`` goes to worker ``j mod num_workers``.

    Fresh files are divided in the same way, by ``fresh_files`` with the deals that are returned.

    Args:
      places: the position of each worker's reader; of all workers.
      deals: the changes of the number of workers before.
      num_workers: the new number of workers.

    Returns:
      The position at which the reader of each new worker starts, and the deals with this change added.
    """
    in_slots = chain.from_iterable(place.slots for place in places)
    cursors = [cursor for cursor in in_slots if cursor is not None]
    cursors += chain.from_iterable(place.waiting for place in places)
    dealt = [ReaderCursor(waiting=tuple(cursors[worker::num_workers])) for worker in range(num_workers)]
    return dealt, [*map(list, deals), [len(places), *(place.opened for place in places)]]


def checked_deals(value: object) -> list[list[int]]:
    """The deals of a saved state, checked.

    Raises:
      StateMismatch: the value is malformed.
    """
    if not isinstance(value, list):
        raise _malformed("the list of deals", "a list", value)
    deals: list[list[int]] = []
    for deal in value:
        if not isinstance(deal, list):
            raise _malformed("a deal", "[ranks, files opened by each]", deal)
        counts = [_count("deal", each) for each in deal]
        if len(counts) < 2 or counts[0] != len(counts) - 1:
            raise _malformed("a deal", "[ranks, files opened by each]", deal)
        deals.append(counts)
    return deals


def _plain(cursor: FileCursor) -> list[Any]:
    return list(cursor if cursor.mark else cursor[:-1])


def _cursor(value: object) -> FileCursor:
    match value:
        case [int(), int() | [_] as offset, int(), int(), int(size), *mark] if (
            not isinstance(size, bool) and size >= -1 and len(mark) < 2 and all(isinstance(each, str) for each in mark)
        ):
            file, record, delivered = (_count("an open file", value[number]) for number in (0, 2, 3))
            offset = offset if isinstance(offset, list) else _count("an open file", offset)
        case _:
            raise _malformed("the place of a file", "[file, offset, record, delivered, size, mark]", value)
    if record > delivered:
        raise _malformed("the place of a file", "an anchor that is not behind the records that were delivered", value)
    return FileCursor(file, offset, record, delivered, size, "".join(map(str, mark)))


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _malformed(f"{name} in the cursor of a reader", "an int of at least 0", value)
    return value


def _malformed(what: str, needed: str, found: object) -> StateMismatch:
    return StateMismatch(
        f"the saved state is damaged: {what} must be {needed}, found {found!r:.200}; "
        "load a state as state_dict() gave it"
    )
