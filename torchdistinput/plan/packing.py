"""How samples are packed into rows of a fixed length: from their lengths alone, before any split among replicas.

The law, for samples in the order of their dataset and packs of at most ``L`` tokens:

(K1) Items. A sample of at most ``L`` tokens is an item. A longer one is an error, is dropped, is cut to its first ``L``
  tokens, or is split into items of ``L`` tokens and a rest.
(K2) Windows. ``window`` consecutive samples are packed together; no pack has items of two windows.
(K3) Best fit. Items of a window are taken by falling length, equal ones in order; each goes into the fullest pack that
  has room, of equally full ones the first; else it begins a pack. ``"first_fit"``: into the first pack that has room.
(K4) Concatenation. With ``"concat"`` the tokens of a window are cut every ``L`` tokens, wherever samples end.
(K5) Packs come in the order of their first items, and items of a pack in the order of the dataset.

Each token is in one pack, or is counted as dropped or truncated. Best fit by falling length is the offline rule of
Johnson, "Near-optimal bin packing algorithms", 1973.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias, final

import numpy as np
import numpy.typing as npt

__all__ = ["Item", "Overflow", "Packing", "PackingStrategy", "check_packing", "pack_window"]

PackingStrategy: TypeAlias = Literal["best_fit", "first_fit", "concat"]
Overflow: TypeAlias = Literal["error", "split", "truncate", "drop"]

_STRATEGIES: Final = ("best_fit", "first_fit", "concat")
_OVERFLOWS: Final = ("error", "split", "truncate", "drop")


class Item(NamedTuple):
    """A run of tokens of a sample: ``[start, stop)``."""

    sample: int
    start: int
    stop: int


@final
@dataclass(frozen=True)
class Packing:
    """The packs of a window.

    Args:
      packs: the items of each pack.
      dropped: tokens of samples that were left out.
      truncated: tokens that were cut off.
    """

    packs: list[list[Item]]
    dropped: int
    truncated: int


def check_packing(max_length: int, window: int, strategy: object, overflow: object) -> None:
    """Refuses numbers less than 1 and other words.

    Raises:
      ValueError: naming the argument.
    """
    for name, number in (("max_length", max_length), ("window", window)):
        if number < 1:
            raise ValueError(f"{name}={number}; it must be 1 or more.")
    for name, word, words in (("strategy", strategy, _STRATEGIES), ("overflow", overflow, _OVERFLOWS)):
        if word not in words:
            raise ValueError(f"{name} is {word!r}; it must be {', '.join(map(repr, words))}.")


def pack_window(
    lengths: npt.NDArray[np.int64], first: int, max_length: int, strategy: PackingStrategy, overflow: Overflow
) -> Packing:
    """Packs the samples of a window (K1 to K5).

    Args:
      lengths: of the samples of the window.
      first: the index of its first sample.
      max_length: tokens of a pack at most.
      strategy: see K3 and K4.
      overflow: see K1; with ``"concat"`` no sample is too long.

    Raises:
      ValueError: a length is negative, or a sample is too long under ``"error"``; the sample is named.
    """
    if len(lengths) and int(lengths.min()) < 0:
        wrong = int(np.argmin(lengths))
        raise ValueError(f"sample {first + wrong} has {lengths[wrong]} tokens; a length must be 0 or more.")
    if strategy == "concat":
        return Packing(_cut(lengths, first, max_length), 0, 0)
    too_long = np.flatnonzero(lengths > max_length)
    if len(too_long) and overflow == "error":
        raise ValueError(
            f"sample {first + too_long[0]} has {lengths[too_long[0]]} tokens, more than max_length={max_length}. "
            'overflow="split", "truncate" or "drop" takes such samples.'
        )
    over = int((lengths[too_long] - max_length).sum()) if overflow == "truncate" else 0
    dropped = int(lengths[too_long].sum()) if overflow == "drop" else 0
    items = list(_items(lengths, first, max_length, overflow))
    place = _best_fit if strategy == "best_fit" else _first_fit
    packs: list[list[Item]] = []
    for pack, item in zip(place([item.stop - item.start for item in items], max_length), items, strict=True):
        while pack >= len(packs):
            packs.append([])
        packs[pack].append(item)
    return Packing(packs, dropped, over)


def _items(lengths: npt.NDArray[np.int64], first: int, max_length: int, overflow: Overflow) -> Iterator[Item]:
    for sample, length in enumerate(lengths.tolist(), first):
        if length <= max_length:
            if length:
                yield Item(sample, 0, length)
        elif overflow == "truncate":
            yield Item(sample, 0, max_length)
        elif overflow == "split":
            for start in range(0, length, max_length):
                yield Item(sample, start, min(length, start + max_length))


def _best_fit(lengths: Sequence[int], max_length: int) -> list[int]:
    """The pack of each item."""
    found = [0] * len(lengths)
    rooms: list[int] = []  # rising: the room of packs that are not full, each once
    of_room: dict[int, list[int]] = {}  # the packs with this room, the first one last
    count = 0
    for item in sorted(range(len(lengths)), key=lambda each: (-lengths[each], each)):
        length = lengths[item]
        at = bisect_left(rooms, length)
        if at == len(rooms):
            pack, room = count, max_length
            count += 1
        else:
            room = rooms[at]
            packs = of_room[room]
            pack = packs.pop()
            if not packs:
                del rooms[at]
        found[item] = pack
        rest = room - length
        if rest:
            packs = of_room.setdefault(rest, [])
            if not packs:
                insort(rooms, rest)
            insort(packs, pack, key=lambda each: -each)
    return _in_order(found)


def _first_fit(lengths: Sequence[int], max_length: int) -> list[int]:
    """The pack of each item. A tree of maxima finds the first pack with room in ``log`` of their number."""
    size = 1 << max(0, len(lengths) - 1).bit_length()
    room = [max_length] * (2 * size)
    found = []
    for length in lengths:
        node = 1
        while node < size:
            node *= 2
            node += room[node] < length
        found.append(node - size)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return _in_order(found)


def _in_order(found: Sequence[int]) -> list[int]:
    """The packs numbered by their first item in the order of the dataset."""
    numbers: dict[int, int] = {}
    return [numbers.setdefault(pack, len(numbers)) for pack in found]


def _cut(lengths: npt.NDArray[np.int64], first: int, max_length: int) -> list[list[Item]]:
    packs: list[list[Item]] = []
    room = 0
    for sample, length in enumerate(lengths.tolist(), first):
        start = 0
        while start < length:
            if not room:
                packs.append([])
                room = max_length
            stop = min(length, start + room)
            packs[-1].append(Item(sample, start, stop))
            room -= stop - start
            start = stop
    return packs
