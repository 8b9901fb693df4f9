"""Indices as arrays: what torch's own samplers draw; and a digest of any batch of indices.

A list of ten million ints takes 80 MB and a second, and a list of 1024 ints costs more than the reading of as many
samples from memory. So the indices of samplers that are known stay arrays, of which each worker cuts its own part.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

__all__ = ["Numbers", "digest_of"]


@final
class Numbers:
    """Indices that one of torch's own samplers drew: ints of 0 and above. As a list they are what torch would yield.

    Args:
      content: int64, ``(n,)``; or a range with steps of 1.
    """

    __slots__ = ("content",)

    def __init__(self, content: npt.NDArray[np.int64] | range) -> None:
        self.content = content

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
        return zlib.crc32(self.array().data) + 1

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
        return zlib.crc32(array("q", indices)) + 1
    except (TypeError, ValueError, OverflowError):  # no ints, or not of 64 bits
        return zlib.crc32(repr(indices).encode()) + 1
