"""The places of many strings at once: a hash table with open addressing (Knuth, TAOCP 3, 6.4), searched by NumPy.

A string is its UTF-8 bytes, in words of 8 bytes filled up with zeros. The hash only tells where to look: all words are
compared, so unequal strings never meet. Zeros at the end cannot be told from NULs, so no string with a NUL is in a
table, and inputs with one are looked up in a dict, like the few that are longer than 32 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any, Final, NamedTuple, final

import numpy as np
import numpy.typing as npt

from torchdistinput.plan.arrays import Ints, Words
from torchdistinput.preprocessing.inputs import Texts, is_arrow, listed, taken

NOWHERE: Final = -(2**63)

_WIDTHS: Final = (1, 2, 4)
"""Words of the keys of each table."""
_LONGEST: Final = 8 * _WIDTHS[-1]
_PADDING: Final = bytes(_LONGEST)
_BLOCK: Final = 2**17  # strings that are searched at once: 1 MiB for each array in between
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio
_FOLD: Final = np.uint64(29)
_MASKS: Final = np.array([0] * (_LONGEST - 8) + [(1 << 8 * length) - 1 for length in range(9)], np.uint64)
"""The bytes of a word that belong to a string, by its length; of word ``n`` from entry ``_LONGEST - 8 - 8 * n`` on."""


class _JoinedStrings(NamedTuple):
    """Strings in one piece of memory. ``windows`` has the 8 bytes at each place of it, zeros after the end."""

    windows: npt.NDArray[Any]
    starts: Ints
    lengths: Ints

    def words(self, rows: Any, width: int) -> Words:
        """The first words of some of the strings, ``(width, rows)``."""
        starts, lengths = self.starts[rows], self.lengths[rows]
        found = np.empty((width, len(starts)), np.uint64)
        for word, column in enumerate(found):
            inside = _MASKS[_LONGEST - 8 - 8 * word :].take(lengths, mode="clip")
            np.bitwise_and(self.windows[8 * word :][starts], inside, out=column)
        return found

    def part(self, start: int, stop: int) -> _JoinedStrings:
        """Some of the strings."""
        return _JoinedStrings(self.windows, self.starts[start:stop], self.lengths[start:stop])


def _joined(padded: bytes, starts: Ints, lengths: Ints) -> _JoinedStrings:
    return _JoinedStrings(np.ndarray(len(padded) - 7, "<u8", padded, strides=(1,)), starts, lengths)


def _of_list(texts: Sequence[str]) -> _JoinedStrings | None:
    """``None`` where a string has a NUL; a ``TypeError`` where an entry is no string."""
    joined = "\0".join(texts)
    padded = f"\0{joined}\0{_PADDING.decode()}".encode("utf-8", "surrogatepass")
    nuls = np.flatnonzero(np.frombuffer(padded, np.uint8) == 0)  # around each string, and the padding
    if len(nuls) != len(texts) + 1 + len(_PADDING):
        return None
    starts = nuls[: len(texts)] + 1
    return _joined(padded, starts, nuls[1 : len(texts) + 1] - starts)


def _of_array(array: npt.NDArray[Any]) -> _JoinedStrings | None:
    """``None`` where UTF-8 is not the code points, as they are not ASCII. NULs inside are kept: they equal no key."""
    if array.dtype.kind == "U":
        points = np.ascontiguousarray(array, array.dtype.newbyteorder("=")).view(np.uint32)
        if points.max() > 127:
            return None
        array = points.astype(np.uint8).view(f"S{array.dtype.itemsize // 4}")
    return _joined(array.tobytes() + _PADDING, np.arange(len(array)) * array.dtype.itemsize, np.char.str_len(array))


def _of_arrow(array: Any) -> _JoinedStrings | None:
    """``None`` where a string has a NUL."""
    _, offsets, buffer = array.buffers()
    bounds = np.frombuffer(offsets, np.int32 if array.type == "string" else np.int64)
    bounds = bounds[array.offset : array.offset + len(array) + 1].astype(np.int64)
    data = memoryview(buffer or b"")[bounds[0] : bounds[-1]]
    if (np.frombuffer(data, np.uint8) == 0).any():
        return None
    return _joined(b"".join((data, _PADDING)), bounds[:-1] - bounds[0], np.diff(bounds))


@final
class _HashTable:
    """Places of keys of one width. Each key is in the first free slot from that of its hash on.

    Args:
      keys: all different, ``(width, n)``, none with a first word of zero, which stands for a free slot; where slots are
        wanted by several, the first one comes first.
      places: of the keys.
      room: slots for each key; at least one slot stays free.
    """

    def __init__(self, keys: Words, places: Ints, room: int) -> None:
        width, count = keys.shape
        bits = max(1, (room * count).bit_length())
        self._shift, self._last = np.uint64(64 - bits), (1 << bits) - 1
        owners = np.full(1 << bits, count, np.int32)
        slots, waiting = self._slots(keys), np.arange(count)[::-1]
        while len(waiting):
            wanted = slots[waiting]
            free = owners[wanted] == count
            owners[wanted[free]] = waiting[free]  # the last one is written, so the first key
            waiting = waiting[owners[wanted] != waiting]
            slots[waiting] = (slots[waiting] + 1) & self._last
        self._keys = np.zeros((width, 1 << bits), np.uint64)
        self._keys[:, slots] = keys
        self._places = np.full(1 << bits, NOWHERE)
        self._places[slots] = places

    def _slots(self, words: Words) -> Ints:
        mixed = words[0]
        for column in words[1:]:
            mixed = (mixed ^ mixed >> _FOLD) * _ODD + column
        mixed = mixed ^ mixed >> _FOLD
        mixed *= _ODD
        mixed >>= self._shift
        slots: Ints = mixed.view(np.int64)
        return slots

    def find(self, words: Words) -> Ints:
        """The places of keys, ``(width, n)``; ``NOWHERE`` where there is none."""
        slots = self._slots(words)
        found, left = self._found(words, slots)
        rows = left
        while len(left):
            words, slots = words[:, left], (slots[left] + 1) & self._last
            found[rows], left = self._found(words, slots)
            rows = rows[left]
        return found

    def _found(self, words: Words, slots: Ints) -> tuple[Ints, npt.NDArray[np.intp]]:
        """The places of the keys that are in these slots, and which keys are to be looked for in the next ones."""
        first = self._keys[0].take(slots)
        equal = first == words[0]
        for key, column in zip(self._keys[1:], words[1:], strict=True):
            equal &= key.take(slots) == column
        return self._places.take(slots), np.flatnonzero(equal < (first != 0))


@final
class StringTable:
    """The places of terms.

    Args:
      places: the place of each term, 64-bit ints.
      room: slots for each term; with fewer of them more terms meet.
      few: lists of up to so many strings are looked up in the dict.
    """

    def __init__(self, places: Mapping[str, int], *, room: int = 4, few: int = 512) -> None:
        self._places, self._few = dict(places), few
        self._empty = places.get("", NOWHERE)
        terms = [term for term in places if term and "\0" not in term]
        contents = [term.encode("utf-8", "surrogatepass") for term in terms]
        lengths = np.fromiter(map(len, contents), np.int64, len(terms))
        read = _joined(b"".join((*contents, _PADDING)), np.cumsum(lengths) - lengths, lengths)
        sizes = np.searchsorted([8 * width for width in _WIDTHS], lengths)
        numbers = self._in_dict(terms)
        self._tables = []
        for size, width in enumerate(_WIDTHS):
            rows = np.flatnonzero(sizes == size)
            self._tables.append(_HashTable(read.words(rows, width), numbers[rows], room))
        self._has_others = int((sizes < len(_WIDTHS)).sum()) < len(places) - ("" in places)

    def find(self, texts: Texts) -> Ints:
        """The place of each text; ``NOWHERE`` where there is none.

        Raises:
          TypeError: an entry of a list is no string.
          ValueError: an entry of an ``S`` array is not UTF-8; it may be ``NOWHERE`` instead.
        """
        if is_arrow(texts) and str(texts.type).startswith("dictionary"):
            return self.find(texts.dictionary).take(np.asarray(texts.indices))
        read = self._read(texts) if len(texts) else None
        if read is None:
            return self._in_dict(listed(texts))
        found = np.empty(len(texts), np.int64)
        for start in range(0, len(found), _BLOCK):
            found[start : start + _BLOCK] = self._in_tables(read.part(start, start + _BLOCK))
        if self._has_others:
            rows = np.flatnonzero(found == NOWHERE)
            found[rows] = self._in_dict(listed(taken(texts, rows)))
        return found

    def _read(self, texts: Texts) -> _JoinedStrings | None:
        if isinstance(texts, np.ndarray):
            return _of_array(texts)
        if not isinstance(texts, list):
            return _of_arrow(texts)
        if len(texts) > self._few:
            return _of_list(texts)
        "".join(texts)  # a TypeError where an entry is no string
        return None

    def _in_dict(self, texts: Sequence[str]) -> Ints:
        return np.fromiter(map(self._places.get, texts, repeat(NOWHERE)), np.int64, len(texts))

    def _in_tables(self, texts: _JoinedStrings) -> Ints:
        found = self._tables[0].find(texts.words(slice(None), 1))
        if self._empty != NOWHERE:  # its word is that of a free slot
            found[texts.lengths == 0] = self._empty
        rows = np.flatnonzero(texts.lengths > 8)
        for table, width in zip(self._tables[1:], _WIDTHS[1:], strict=True):
            if not len(rows):
                break
            found[rows] = table.find(texts.words(rows, width))
            rows = rows[texts.lengths[rows] > 8 * width]
        found[rows] = NOWHERE
        return found
