"""A keyed random permutation of ``[0, n)`` with random access, computed on demand and never stored.

A shuffled order of a billion samples as a list takes 8 GB and minutes, on every rank. Here an order is a function:
``at(i)`` is the element at place ``i``, in constant time, for any ``n`` up to ``2**45``; equal on all ranks and hosts.

Two ways, by size. Up to ``2**12`` elements the order is a sort of one random word per element: all ``n!`` orders are
equally likely, which no network of a few rounds reaches on small domains. Above, a Feistel network of 8 rounds permutes
``rows * 2**low`` numbers. A number is split in its row, which is changed by addition modulo ``rows``, and its ``low``
bits, changed by exclusive or. That domain exceeds ``[0, n)`` by less than one row, so next to no number falls outside;
one that does is sent through again until it falls inside ("cycle walking", Black and Rogaway 2002).

The parts of a number fit in words of 32 bits; all operations are on whole arrays, in place, in pieces that stay in the
processor's cache.

The order is a promise: saved states and recorded runs depend on it. Everything is arithmetic that is written out here
(the finalisers of SplitMix64, Steele, Lea and Flood 2014, and "lowbias32", Wellons 2018, less its last step); no
generator of a library takes part.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Ints: TypeAlias = npt.NDArray[np.int64]
Words: TypeAlias = npt.NDArray[np.uint64]

_MAX_LENGTH: Final = 2**45
_MAX_SORTED: Final = 2**12
_ROUNDS: Final = 8
_MAX_ROW_BITS: Final = 14  # of a place: the product that picks a row has to fit in a word
_WIDTH: Final = 32  # of a word
_BLOCK: Final = 2**15
_FIRST_BLOCK: Final = 2**10  # of an iteration: the first batch is there at once
_MASK: Final = 2**64 - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_FIRST: Final = 0xBF58476D1CE4E5B9
_SECOND: Final = 0x94D049BB133111EB
_SHORT_FIRST: Final = 0x7FEB352D
_SHORT_SECOND: Final = 0x846CA68B


def _mix(word: int) -> int:
    """SplitMix64's finaliser: a bijection of 64-bit words in which every bit depends on every bit."""
    word = ((word ^ (word >> 30)) * _FIRST) & _MASK
    word = ((word ^ (word >> 27)) * _SECOND) & _MASK
    return word ^ (word >> 31)


def _mix_words(words: Words) -> Words:
    """``_mix`` for an array, in place of its argument."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(_FIRST)
    words ^= words >> np.uint64(27)
    words *= np.uint64(_SECOND)
    words ^= words >> np.uint64(31)
    return words


def _digest(key: tuple[int, ...]) -> int:
    """One 64-bit word of all the ints of a key, of any size and sign; keys of different lengths differ too."""
    state = _mix(len(key) + _GOLDEN)
    for value in key:
        state = _with_value(state, value)
    return state


def _with_value(state: int, value: int) -> int:
    """The state of a digest after one more int of the key."""
    magnitude, words = abs(value), [int(value < 0)]
    while magnitude:
        words.append(magnitude & _MASK)
        magnitude >>= 64
    return _with_words(state, len(words), *words)


def _with_words(state: int, *words: int) -> int:
    for word in words:
        state = _mix((state ^ word) + _GOLDEN & _MASK)
    return state


def random_words(state: int, count: int) -> Words:
    """``count`` words of the SplitMix64 generator that starts at ``state``. Local."""
    steps = np.arange(1, count + 1, dtype=np.uint64)
    return _mix_words(steps * np.uint64(_GOLDEN) + np.uint64(state))


@final
class Permutation:
    """A permutation of ``[0, n)``, chosen by a key, in constant memory.

    Equal ``(n, key)`` give equal orders on every machine and in every version. Local: no communication.

    Args:
      n: how many elements, from 0 to ``2**45``.
      *key: ints of any size and sign, such as ``seed, epoch``; ``(1,)``, ``(1, 0)`` and ``(0, 1)`` are different keys.

    Raises:
      TypeError: if ``n`` or a part of the key is not an int.
      ValueError: if ``n`` is out of range.
    """

    __slots__ = ("_length", "_order")

    def __init__(self, n: int, *key: int) -> None:
        self._length = operator.index(n)
        if not 0 <= self._length <= _MAX_LENGTH:
            raise ValueError(f"a permutation needs 0 <= n <= 2**45 elements, got n={n}")
        state = _digest(tuple(operator.index(part) for part in key))
        short = self._length <= _MAX_SORTED
        self._order = _Sorted(self._length, state) if short else _Network(self._length, state)

    def __len__(self) -> int:
        """How many elements are permuted."""
        return self._length

    def __iter__(self) -> Iterator[int]:
        """Yields the elements in their permuted order, as Python ints."""
        start, size = 0, _FIRST_BLOCK
        while start < self._length:
            stop = min(start + size, self._length)
            yield from self.block(start, stop).tolist()
            start, size = stop, min(4 * size, _BLOCK)

    def at(self, indices: npt.NDArray[Any]) -> Ints:
        """The elements at these places.

        Args:
          indices: an array of ints in ``[0, n)``, of any shape.

        Returns:
          int64, of the same shape.

        Raises:
          TypeError: if the indices are not ints.
          IndexError: if one is outside ``[0, n)``.
        """
        places = np.asarray(indices)
        if places.size == 0:
            return np.empty(places.shape, dtype=np.int64)
        if places.dtype.kind not in "iu":
            raise TypeError(f"indices of a permutation must be ints, got an array of {places.dtype}")
        lowest, highest = int(places.min()), int(places.max())
        if lowest < 0 or highest >= self._length:
            outside = lowest if lowest < 0 else highest
            raise IndexError(f"index {outside} is outside of a permutation of [0, {self._length})")
        return self._order.at(places.astype(np.int64).reshape(-1)).reshape(places.shape)

    def block(self, start: int, stop: int) -> Ints:
        """The elements at places ``start`` to ``stop - 1``: int64, of shape ``(stop - start,)``.

        Raises:
          IndexError: unless ``0 <= start <= stop <= n``.
        """
        if not 0 <= start <= stop <= self._length:
            raise IndexError(f"block [{start}, {stop}) is outside of a permutation of [0, {self._length})")
        return self._order.at(np.arange(start, stop))


@final
class _Sorted:
    """A drawn order, kept.

    Args:
      length: the number of elements, at most ``_MAX_SORTED``.
      state: the seed of the words.
    """

    __slots__ = ("_elements",)

    def __init__(self, length: int, state: int) -> None:
        self._elements: Ints = np.argsort(random_words(state, length), kind="stable").astype(np.int64)

    def at(self, places: Ints) -> Ints:
        found: Ints = self._elements[places]
        return found


@final
class _Network:
    """The order of a Feistel network; see the docstring of the module.

    Args:
      length: the number of elements, more than ``_MAX_SORTED``.
      state: the seed of the round keys.
    """

    __slots__ = ("_constants", "_keys", "_length", "_low", "_one_word", "_rows")

    def __init__(self, length: int, state: int) -> None:
        bits = (length - 1).bit_length()
        self._length = length
        self._one_word = bits <= _WIDTH  # an element fits in a word, as its parts do
        self._low = max(bits // 2, bits - _MAX_ROW_BITS)
        self._rows = -(-length >> self._low)
        row_bits = self._rows.bit_length()
        # As arrays: NumPy would make one of each in each of its calls.
        shifts = (_WIDTH // 2, _WIDTH - self._low, row_bits, _WIDTH - row_bits)
        constants = (_SHORT_FIRST, _SHORT_SECOND, self._rows, *shifts)
        self._constants = tuple(np.array(each, np.uint32) for each in constants)
        self._keys = [np.array(key >> _WIDTH, np.uint32) for key in random_words(state, _ROUNDS).tolist()]

    def at(self, places: Ints) -> Ints:
        """The elements at these places, which may be any numbers of the network's domain; in one dimension."""
        elements = np.empty(len(places), np.int64)
        scratch = np.empty((4, min(_BLOCK, len(places))), np.uint32)
        for start in range(0, len(places), _BLOCK):
            wanted = places[start : start + _BLOCK]
            row, low, mixed, free = scratch[:, : len(wanted)]
            np.right_shift(wanted, self._low, out=row, casting="unsafe")
            np.bitwise_and(wanted, 2**self._low - 1, out=low, casting="unsafe")
            self._send(row, low, mixed, free, elements[start : start + _BLOCK])
        return self._inside(elements)

    def _inside(self, elements: Ints) -> Ints:
        """The elements, in place, after those that fell outside were sent through again."""
        if self._rows << self._low > self._length:  # not for every piece: few go through as slowly as many
            outside = np.flatnonzero(elements >= self._length)
            if outside.size:
                elements[outside] = self.at(elements[outside])
        return elements

    def _send(self, row: Any, low: Any, mixed: Any, free: Any, elements: Ints) -> None:
        """Sends numbers through all rounds.

        Args:
          row: the rows of the numbers; overwritten.
          low: their low bits; overwritten.
          mixed: memory of the same shape and dtype.
          free: the same.
          elements: where the results are put; some may fall outside.
        """
        first, second, rows, half, to_low, to_factor, to_row = self._constants
        for number, key in enumerate(self._keys):
            np.add(row if number % 2 else low, key, out=mixed)
            np.multiply(mixed, first, out=mixed)
            np.right_shift(mixed, half, out=free)
            np.bitwise_xor(mixed, free, out=mixed)
            np.multiply(mixed, second, out=mixed)
            if number % 2:
                np.right_shift(mixed, to_low, out=mixed)
                np.bitwise_xor(low, mixed, out=low)
            else:
                # The upper bits times rows, over their range: a number below rows.
                np.right_shift(mixed, to_factor, out=mixed)
                np.multiply(mixed, rows, out=mixed)
                np.right_shift(mixed, to_row, out=mixed)
                # The sum modulo rows: below zero, an unsigned number is larger than the sum.
                np.add(row, mixed, out=row)
                np.subtract(row, rows, out=mixed)
                np.minimum(row, mixed, out=row)
        words = elements.view(np.uint64)
        if self._one_word:
            np.left_shift(row, np.uint32(self._low), out=row)
            np.bitwise_or(row, low, out=row)
            np.copyto(words, row)
        else:
            np.copyto(words, row)
            np.left_shift(words, np.uint64(self._low), out=words)
            np.bitwise_or(words, low, out=words)


def word(*key: int) -> int:
    """A 64-bit word that depends on every bit of the key's ints, of any size and sign; the same on every machine."""
    return _digest(key)


def words_after(*key: int) -> Callable[[int], int]:
    """A function of an int: the ``word`` of this key and the int, in a fifth of the time."""
    state = _mix(len(key) + 1 + _GOLDEN)
    for value in key:
        state = _with_value(state, value)
    common = _with_words(state, 2, 0)  # of all positive numbers of one word

    def last(number: int) -> int:
        if 0 < number <= _MASK:
            return _mix((common ^ number) + _GOLDEN & _MASK)
        return _with_value(state, number)

    return last


def shuffled(n: int, *key: int) -> list[int]:
    """The whole of ``Permutation(n, *key)`` as a list of ints."""
    order: list[int] = Permutation(n, *key).block(0, n).tolist()
    return order
