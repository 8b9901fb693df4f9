"""Shuffles that are addressed, not stored: a keyed permutation of ``[0, n)`` with random access.

A shuffled order of a billion samples as a list is 8 GB and minutes of work, on every rank. Here an order is a function:
``at(i)`` is the element at place ``i``, at once, for any ``n`` up to ``2**62``, the same on every rank and machine.

Two ways, by size. Up to ``2**12`` elements the order is a sort of one random word per element: all ``n!`` orders are
equally likely, which no network of a few rounds reaches on small domains. Above, a Feistel network of 8 rounds permutes
the next power of two, and an index that falls outside ``[0, n)`` is sent through again until it falls inside ("cycle
walking", Black and Rogaway 2002); at most half of the domain is outside, so two passes suffice on average.

The order is a promise: saved states and recorded runs depend on it. Everything is arithmetic on 64-bit words that is
written out here (the finaliser of SplitMix64, Steele, Lea and Flood 2014); no generator of a library takes part.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    Indices: TypeAlias = npt.NDArray[np.int64]
    Words: TypeAlias = npt.NDArray[np.uint64]

__all__ = ["Permutation", "shuffled", "word"]

_MAX_LENGTH: Final = 2**62
_MAX_SORTED: Final = 2**12
_ROUNDS: Final = 8
_BLOCK: Final = 1024
_MASK: Final = 2**64 - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_FIRST: Final = 0xBF58476D1CE4E5B9
_SECOND: Final = 0x94D049BB133111EB


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
        magnitude, words = abs(value), [int(value < 0)]
        while magnitude:
            words.append(magnitude & _MASK)
            magnitude >>= 64
        for word in (len(words), *words):
            state = _mix((state ^ word) + _GOLDEN & _MASK)
    return state


def _stream(state: int, count: int) -> Words:
    """``count`` words of the SplitMix64 generator that starts at ``state``."""
    steps = np.arange(1, count + 1, dtype=np.uint64)
    return _mix_words(steps * np.uint64(_GOLDEN) + np.uint64(state))


@final
class Permutation:
    """A permutation of ``[0, n)``, chosen by a key, in constant memory.

    Equal ``(n, key)`` give equal orders on every machine and in every version. Local: no communication.

    Args:
      n: how many elements, from 0 to ``2**62``.
      *key: ints of any size and sign, such as ``seed, epoch``; ``(1,)``, ``(1, 0)`` and ``(0, 1)`` are different keys.

    Raises:
      TypeError: if ``n`` or a part of the key is not an int.
      ValueError: if ``n`` is out of range.
    """

    __slots__ = ("_length", "_round_keys", "_table", "_widths")

    def __init__(self, n: int, *key: int) -> None:
        self._length = operator.index(n)
        if not 0 <= self._length <= _MAX_LENGTH:
            raise ValueError(f"a permutation needs 0 <= n <= 2**62 elements, got n={n}")
        state = _digest(tuple(operator.index(part) for part in key))
        self._table: Indices | None = None
        self._round_keys: Words = _stream(state, _ROUNDS)
        bits = max(self._length - 1, 1).bit_length()
        self._widths = ((bits + 1) // 2, bits // 2)
        if self._length <= _MAX_SORTED:
            self._table = np.argsort(_stream(state, self._length), kind="stable").astype(np.int64)

    def __len__(self) -> int:
        """How many elements are permuted."""
        return self._length

    def __iter__(self) -> Iterator[int]:
        """Yields the elements in their permuted order, as Python ints."""
        for start in range(0, self._length, _BLOCK):
            yield from self.block(start, min(start + _BLOCK, self._length)).tolist()

    def at(self, indices: npt.NDArray[Any]) -> Indices:
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
        if self._table is not None:
            return self._table[places.astype(np.int64)]
        flat = self._encrypt(places.astype(np.uint64).reshape(-1))
        limit = np.uint64(self._length)
        outside_at = np.flatnonzero(flat >= limit)
        while outside_at.size:
            again = self._encrypt(flat[outside_at])
            flat[outside_at] = again
            outside_at = outside_at[again >= limit]
        return flat.astype(np.int64).reshape(places.shape)

    def block(self, start: int, stop: int) -> Indices:
        """The elements at places ``start`` to ``stop - 1``: int64, of shape ``(stop - start,)``.

        Raises:
          IndexError: unless ``0 <= start <= stop <= n``.
        """
        if not 0 <= start <= stop <= self._length:
            raise IndexError(f"block [{start}, {stop}) is outside of a permutation of [0, {self._length})")
        return self.at(np.arange(start, stop, dtype=np.int64))

    def _encrypt(self, words: Words) -> Words:
        """Sends words of the power-of-two domain through all rounds; a new array."""
        left_bits, right_bits = self._widths
        left, right = words >> np.uint64(right_bits), words & np.uint64(2**right_bits - 1)
        for key in self._round_keys:
            # The halves may differ by one bit; they change places, and widths with them, after every round.
            left, right = right, left ^ (_mix_words(right + key) >> np.uint64(64 - left_bits))
            left_bits, right_bits = right_bits, left_bits
        joined: Words = (left << np.uint64(right_bits)) | right
        return joined


def word(*key: int) -> int:
    """A 64-bit word that depends on every bit of the key's ints, of any size and sign; the same on every machine."""
    return _digest(key)


def shuffled(n: int, *key: int) -> list[int]:
    """The whole of ``Permutation(n, *key)`` as a list of ints."""
    order: list[int] = Permutation(n, *key).block(0, n).tolist()
    return order
