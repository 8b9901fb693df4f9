"""Indices as arrays: what torch's own samplers draw; and a digest of any batch of indices.

A list of ten million ints takes 80 MB and a second, and a list of 1024 ints costs more than the reading of as many
samples from memory. So the indices of samplers that are known stay arrays, of which each worker cuts its own part.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from torchdistinput.plan.permutation import random_words

__all__ = ["Digests", "Numbers", "digest_of"]


@final
class Digests:
    """Digests of batches that are taken from indices one after the other: many are made at once.

    Args:
      indices: int64, ``(n,)``.
    """

    def __init__(self, indices: npt.NDArray[np.int64]) -> None:
        self._indices = indices
        self._first = self._count = 0
        self._found: list[int] = []  # of the batches of so many that follow the first one

    def at(self, start: int, count: int) -> int:
        """That of ``count`` indices from ``start`` on; one or more, as there are."""
        place, rest = divmod(start - self._first, count)
        if count != self._count or rest or not 0 <= place < len(self._found):
            self._make(start, count)
            place = 0
        return self._found[place]

    def _make(self, start: int, count: int) -> None:
        indices = self._indices[start:]
        self._first, self._count = start, count
        if count > len(_WEIGHTS):
            self._found = [_digest(indices[:count])]
            return
        batches = min(len(indices) // count, _TOGETHER)
        sums: list[int] = indices[: batches * count].reshape(batches, count).dot(_WEIGHTS[:count]).tolist()
        self._found = [(count * _STEP + number) % _LARGEST + 1 for number in sums]


@final
class Numbers:
    """Indices that one of torch's own samplers drew: ints of 0 and above. As a list they are what torch would yield.

    Args:
      content: int64, ``(n,)``; or a range with steps of 1.
      digests: where the digest is made together with others; ``None`` where it is not.
      start: where the indices begin there.
    """

    __slots__ = ("_digests", "_start", "content")

    def __init__(self, content: npt.NDArray[np.int64] | range, digests: Digests | None = None, start: int = 0) -> None:
        self.content = content
        self._digests = digests
        self._start = start

    def __reduce__(self) -> tuple[Any, ...]:
        return Numbers.of_plain, (self.plain(),)  # all indices would come along with the digests

    def plain(self) -> tuple[int, int] | bytes:
        """The indices as ints and bytes, which take a fraction of the time of a range or an array to be pickled."""
        content = self.content
        return (content.start, content.stop) if isinstance(content, range) else content.tobytes()

    @staticmethod
    def of_plain(plain: tuple[int, int] | bytes) -> Numbers:
        """The indices that ``plain`` told of. An array can be written to, as it was."""
        if isinstance(plain, bytes):
            return Numbers(np.frombuffer(bytearray(plain), np.int64))
        return Numbers(range(*plain))

    def __len__(self) -> int:
        return len(self.content)

    def __getitem__(self, place: slice) -> Numbers:
        return Numbers(self.content[place])

    def array(self) -> npt.NDArray[np.int64]:
        """The indices, ``(n,)``."""
        content = self.content
        return np.arange(content.start, content.stop, dtype=np.int64) if isinstance(content, range) else content

    def digest(self) -> int:
        """See ``digest_of``."""
        content = self.content
        if isinstance(content, range):
            return _digest_of_range(content.start, len(content))
        if self._digests is not None and len(content):
            return self._digests.at(self._start, len(content))
        return _digest(content)

    def tolist(self) -> list[int]:
        """The indices as Python ints."""
        content = self.content
        numbers: list[int] = list(content) if isinstance(content, range) else content.tolist()
        return numbers


def digest_of(indices: Numbers | Sequence[Any]) -> int:
    """A number above 0 of a batch of indices: equal for equal batches, in every process; else hardly ever. Local."""
    if isinstance(indices, Numbers):
        return indices.digest()
    try:
        return _digest(np.frombuffer(array("q", indices), np.int64))
    except (TypeError, ValueError, OverflowError):  # no ints, or not of 64 bits
        return zlib.crc32(repr(indices).encode()) + 1


# Odd words that look random, of 64 bits.
_WEIGHTS: Final = (random_words(0, 4096) | np.uint64(1)).view(np.int64)
_NUM_WEIGHTS: Final = len(_WEIGHTS)
_STEP: Final = 0x9E3779B97F4A7C15
_LARGEST: Final = 1 << 63
_TOGETHER: Final = 64  # batches


def _digest(indices: npt.NDArray[np.int64]) -> int:
    """A weighted sum modulo 2**63, which takes a third of the time of a checksum of the bytes.

    Carter, Wegman, "Universal classes of hash functions", 1979: two batches have the same sum hardly ever, as the
    weights have nothing to do with them.
    """
    count = len(indices)
    number = count
    for start in range(0, count, len(_WEIGHTS)):
        block = indices[start : start + len(_WEIGHTS)]
        number = number * _STEP + int(block.dot(_WEIGHTS[: len(block)]))
    return number % _LARGEST + 1


def _digest_of_range(start: int, count: int) -> int:
    """The same of ``count`` indices in a row, without making them."""
    number = count
    for first in range(start, start + count, _NUM_WEIGHTS):
        weights, by_place = _sums_of(min(start + count - first, _NUM_WEIGHTS))
        number = number * _STEP + first * weights + by_place
    return number % _LARGEST + 1


@lru_cache(1024)
def _sums_of(count: int) -> tuple[int, int]:
    """The sum of the first weights, and that of each multiplied by its place."""
    weights = _WEIGHTS[:count]
    return int(weights.sum()), int(weights.dot(np.arange(count)))
