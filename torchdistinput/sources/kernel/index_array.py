"""Sample indices as arrays, for torch's own samplers; and a digest of any batch of indices.

A list of ten million ints takes 80 MB and a second, and a list of 1024 ints costs more than reading as many samples
from memory. So the indices of torch's own samplers stay arrays, from which each worker cuts its part.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from torchdistinput.batches.containers import PLAIN_TYPES
from torchdistinput.coordination.batch_digests import digest_of_draw
from torchdistinput.plan.permutation import random_words


@final
class IndexArray:
    """Indices that one of torch's own samplers drew: ints of 0 and above. ``tolist`` gives what torch would yield.

    Args:
      content: int64, ``(n,)``; or a range with steps of 1.
    """

    __slots__ = ("content",)

    def __init__(self, content: npt.NDArray[np.int64] | range) -> None:
        self.content = content

    def __reduce__(self) -> tuple[Any, ...]:
        return IndexArray, (self.content,)

    def __len__(self) -> int:
        return len(self.content)

    def __getitem__(self, place: slice) -> IndexArray:
        return IndexArray(self.content[place])

    def take(self, places: npt.NDArray[np.int64]) -> IndexArray:
        """The indices at some places."""
        return IndexArray(self.array()[places])

    def array(self) -> npt.NDArray[np.int64]:
        """The indices, ``(n,)``."""
        content = self.content
        return np.arange(content.start, content.stop, dtype=np.int64) if isinstance(content, range) else content

    def digest(self) -> int:
        """See ``digest_of``."""
        content = self.content
        if isinstance(content, range):
            return _digest_of_range(content.start, len(content))
        return _digest(content)

    def tolist(self) -> list[int]:
        """The indices as Python ints."""
        content = self.content
        numbers: list[int] = list(content) if isinstance(content, range) else content.tolist()
        return numbers


def digest_of(indices: IndexArray | Sequence[Any]) -> int:
    """A digest above 0 of a batch of indices: equal for equal batches, in every process; else almost never. Local.

    Items that are no ints may be of any kind, and are compared by their content; see ``batch_digests``.
    """
    if isinstance(indices, IndexArray):
        return indices.digest()
    try:
        return _digest(np.frombuffer(array("q", indices), np.int64))
    except (TypeError, ValueError, OverflowError):  # not ints, or ints of more than 64 bits
        return _digest_by_repr(indices) if _is_plain(indices) else digest_of_draw(indices)


def is_digest_of(digest: int, indices: IndexArray | Sequence[Any]) -> bool:
    """Whether a saved digest is that of a batch of indices. Version 0.2 took the ``repr`` of objects. Local."""
    return digest in (digest_of(indices), 0 if isinstance(indices, IndexArray) else _digest_by_repr(indices))


def _digest_by_repr(indices: Sequence[Any]) -> int:
    return zlib.crc32(repr(indices).encode("utf-8", "surrogatepass")) + 1


def _is_plain(value: Any) -> bool:
    """Whether equal values of this kind, and no others, have an equal ``repr`` in every process."""
    if type(value) in (list, tuple):  # most often of plain values, which are checked in one go
        return PLAIN_TYPES.issuperset(map(type, value)) or all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value.items()))
    return type(value) in PLAIN_TYPES


# Odd 64-bit constants that look random.
_WEIGHTS: Final = (random_words(0, 4096) | np.uint64(1)).view(np.int64)
_NUM_WEIGHTS: Final = len(_WEIGHTS)
_STEP: Final = 0x9E3779B97F4A7C15
_LARGEST: Final = 1 << 63


def _digest(indices: npt.NDArray[np.int64]) -> int:
    """A weighted sum modulo 2**63, which takes a third of the time of a checksum of the bytes.

    Carter, Wegman, "Universal classes of hash functions", 1979: two batches almost never have the same sum, as the
    weights do not depend on the batches.
    """
    count = len(indices)
    number = count
    for start in range(0, count, len(_WEIGHTS)):
        block = indices[start : start + len(_WEIGHTS)]
        number = number * _STEP + int(block.dot(_WEIGHTS[: len(block)]))
    return number % _LARGEST + 1


def _digest_of_range(start: int, count: int) -> int:
    """The digest of ``count`` consecutive indices from ``start`` on, without making them."""
    number = count
    for first in range(start, start + count, _NUM_WEIGHTS):
        weights, by_place = _sums_of(min(start + count - first, _NUM_WEIGHTS))
        number = number * _STEP + first * weights + by_place
    return number % _LARGEST + 1


@lru_cache(1024)
def _sums_of(count: int) -> tuple[int, int]:
    """The sum of the first weights, and the sum of each of them multiplied by its position."""
    weights = _WEIGHTS[:count]
    return int(weights.sum()), int(weights.dot(np.arange(count)))
