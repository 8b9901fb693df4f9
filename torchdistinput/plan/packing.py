"""How samples are packed into rows of a fixed length: from their lengths alone, before any split among replicas.

The law, for samples in the order of their dataset and packs of at most ``L`` tokens:

(K1) Items. A sample of at most ``L`` tokens is an item. A longer one is an error, is dropped, is cut to its first ``L``
  tokens, or is split into items of ``L`` tokens and a rest.
(K2) Windows. ``window`` consecutive samples are packed together; no pack has items of two windows.
(K3) Best fit. Items of a window are taken by falling length, equal ones in order; each goes into the fullest pack that
  has room, of equally full ones the first; else it begins a pack. ``"first_fit"``: into the first pack that has room.
(K4) Concatenation. With ``"concat"`` the tokens of a window are cut every ``L`` tokens, wherever samples end.
(K5) Packs come in the order of their first items, and items of a pack in the order of the dataset.
(K6) The positions of an item begin at 0, so none reaches ``L``; with ``"sample"`` they are those in its sample.

Each token is in one pack, or is counted as dropped or truncated. Best fit by falling length is the offline rule of
Johnson, "Near-optimal bin packing algorithms", 1973.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias, final

import numpy as np

from torchdistinput.plan.permutation import Ints

PackingStrategy: TypeAlias = Literal["best_fit", "first_fit", "concat"]
Overflow: TypeAlias = Literal["error", "split", "truncate", "drop"]
PositionsIn: TypeAlias = Literal["segment", "sample"]

_STRATEGIES: Final = ("best_fit", "first_fit", "concat")
_OVERFLOWS: Final = ("error", "split", "truncate", "drop")
_POSITIONS: Final = ("segment", "sample")


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
      items: ``(n, 3)``: sample, start and stop of each item, pack by pack.
      bounds: ``(packs + 1,)``: pack ``p`` has the items from ``bounds[p]`` to ``bounds[p + 1] - 1``.
      dropped: tokens of samples that were left out.
      truncated: tokens that were cut off.
    """

    items: Ints
    bounds: Ints
    dropped: int
    truncated: int

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def pack(self, number: int) -> list[Item]:
        """The items of a pack."""
        return [Item(*item) for item in self.items[self.bounds[number] : self.bounds[number + 1]].tolist()]


def check_packing(max_length: int, window: int, strategy: object, overflow: object, positions: object) -> None:
    """Refuses numbers less than 1 and other words.

    Raises:
      ValueError: naming the argument.
    """
    for name, number in (("max_length", max_length), ("window", window)):
        if number < 1:
            raise ValueError(f"{name}={number}; it must be 1 or more.")
    for name, word, words in (
        ("strategy", strategy, _STRATEGIES),
        ("overflow", overflow, _OVERFLOWS),
        ("positions", positions, _POSITIONS),
    ):
        if word not in words:
            raise ValueError(f"{name} is {word!r}; it must be {', '.join(map(repr, words))}.")


def pack_window(lengths: Ints, first: int, max_length: int, strategy: PackingStrategy, overflow: Overflow) -> Packing:
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
        return _cut(lengths, first, max_length)
    too_long = lengths > max_length
    if overflow == "error" and too_long.any():
        wrong = int(np.argmax(too_long))
        raise ValueError(
            f"sample {first + wrong} has {lengths[wrong]} tokens, more than max_length={max_length}. "
            'overflow="split", "truncate" or "drop" takes such samples.'
        )
    kept = lengths
    if overflow == "truncate":
        kept = np.minimum(lengths, max_length)
    elif overflow == "drop":
        kept = np.where(too_long, 0, lengths)
    samples, starts, stops = _items(kept, max_length)
    packs = (_best_fit if strategy == "best_fit" else _first_fit)(stops - starts, max_length)
    begins = np.empty_like(packs)
    begins[packs[::-1]] = np.arange(len(packs))[::-1]  # the last one is written: the first item of each pack
    keys = begins[packs]
    order = np.argsort(keys, kind="stable")
    sizes = np.bincount(keys)
    lost = int(lengths.sum() - kept.sum())
    return Packing(
        np.stack([samples + first, starts, stops], axis=1)[order],
        np.append(0, np.cumsum(sizes[sizes > 0])),
        dropped=lost if overflow == "drop" else 0,
        truncated=lost if overflow == "truncate" else 0,
    )


def _items(kept: Ints, max_length: int) -> tuple[Ints, Ints, Ints]:
    """Sample, start and stop of each item; ``kept`` are the tokens of each sample that packs will have."""
    counts = -(-kept // max_length)
    samples = np.repeat(np.arange(len(kept)), counts)
    before = np.cumsum(counts) - counts
    starts = (np.arange(len(samples)) - before[samples]) * max_length
    return samples, starts, np.minimum(starts + max_length, kept[samples])


def _best_fit(lengths: Ints, max_length: int) -> Ints:
    """The pack of each item."""
    bits = len(lengths).bit_length()
    order = np.argsort(-lengths, kind="stable")
    needs = [length << bits for length in lengths[order].tolist()]
    shortest = needs[-1] if needs else 0
    rooms: list[int] = []  # rising: the room of each pack that may take more, and its number in the low bits
    found = []
    count = 0
    for need in needs:
        at = bisect_left(rooms, need)
        if at == len(rooms):
            room = (max_length << bits) + count
            count += 1
        else:
            room = rooms.pop(at)
        found.append(room)
        room -= need
        if room >= shortest:
            insort(rooms, room)
    packs = np.empty(len(lengths), np.int64)
    packs[order] = [room & ((1 << bits) - 1) for room in found]
    return packs


def _first_fit(lengths: Ints, max_length: int) -> Ints:
    """The pack of each item: a tree over the packs, each of whose nodes has the largest room of those below it."""
    size = 1 << max(len(lengths) - 1, 0).bit_length()
    rooms = [max_length] * (2 * size)  # the packs are the last ``size`` of them, one for each item
    found = []
    for length in lengths.tolist():
        node = 1
        while node < size:
            node *= 2
            if rooms[node] < length:
                node += 1
        found.append(node - size)
        rooms[node] -= length
        while node > 1:
            node //= 2
            rooms[node] = max(rooms[2 * node], rooms[2 * node + 1])
    return np.array(found, np.int64)


def _cut(lengths: Ints, first: int, max_length: int) -> Packing:
    """The tokens of all samples in a row, cut where a sample or a pack ends."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.unique(np.concatenate([ends[lengths > 0], np.arange(0, total, max_length)]))
    starts, stops = cuts[:-1], cuts[1:]
    samples = np.searchsorted(ends, starts, side="right")
    begins = (ends - lengths)[samples]
    items = np.stack([samples + first, starts - begins, stops - begins], axis=1)
    return Packing(items, np.append(np.flatnonzero(starts % max_length == 0), len(items)), 0, 0)
