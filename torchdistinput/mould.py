"""The structure of the elements of an iterator: learned from the first one, or told by another rank."""

from __future__ import annotations

import math
import threading
from typing import Any, final

import torch

from torchdistinput.alike import Alike
from torchdistinput.errors import BatchingError
from torchdistinput.structure import PER_SAMPLE, Structure
from torchdistinput.tree import flatten, structure_of

__all__ = ["Mould"]


@final
class Mould:
    """The structure of the elements, learned from the first one; makes empty batches and refuses other structures.

    Args:
      strings: whether it is certain that elements which are lists hold strings and nothing else.
    """

    def __init__(self, *, strings: bool = False) -> None:
        self._learning = threading.Lock()
        self._strings = strings
        self._structure: Structure | None = None
        self._signature: Any = None
        self._digest: int | None = None
        self.row_bytes: int | None = None
        """Bytes of one sample in the tensors of an element; ``None`` before the first, or if elements differ in it."""
        self.last = Alike()
        """How the last element looked: one that is exactly like it needs no more looking at."""
        self._lists_strings = False  # nor need they be looked at

    @property
    def structure(self) -> Structure | None:
        """The structure of the latest element, or ``None`` before the first."""
        return self._structure

    @property
    def digest(self) -> int | None:
        """Its number, for comparing ranks."""
        return self._digest

    def known_size(self, piece: Any) -> int | None:
        """The batch size of a piece that is plainly of the known structure; else ``None``: measure it."""
        if self._lists_strings and type(piece) is list:
            return len(piece)
        size = self.last.size_of(piece)
        if size is None:
            size = self.last.resized(piece)
        if size is None and self._structure is not None:
            size = self._structure.size_of_same(piece)
            if size is not None:
                self.last.remember(piece, size)
        return size

    def measure(self, piece: Any) -> tuple[Any, int]:
        """The piece and its batch size. Its structure is learned or checked, its dicts get the order of the first one.

        Raises:
          BatchingError: the structure or a dtype differs from before.
        """
        if self._structure is not None and structure_of(piece).signature() == self._signature:
            piece = self._structure.arrange(piece)
        leaves, structure = flatten(piece)
        self.learn(structure)
        return piece, len(leaves[0])

    def learn(self, structure: Structure) -> None:
        """Takes the structure of an element, here or on another rank."""
        with self._learning:  # two threads may see the first element, one of them another rank's
            signature = structure.signature()
            if self._structure is None:
                self._signature = signature
                self._digest = structure.digest()
                self.row_bytes = _bytes_of_row(structure)
            elif signature != self._signature:
                raise BatchingError(
                    f"the structure of the elements changed: before {self._structure}, now {structure}. Nesting, names "
                    f"and dtypes must be the same for every element; only sizes may differ. {PER_SAMPLE}"
                )
            elif self.row_bytes is not None and self.row_bytes != _bytes_of_row(structure):
                self.row_bytes = None
            known, self._structure = self._structure, structure
            self._lists_strings = (
                self._strings and structure.kind == "rows" and (structure.dtype, structure.cls) == (str, list)
            )
            if known is not None:
                self.last.forget()  # it had other inner dims, perhaps


def _bytes_of_row(structure: Structure) -> int:
    """Bytes of one sample in the tensors of an element of this structure. Local."""
    kinds = [(leaf.dtype, leaf.inner_dims) for leaf in structure.leaves()]
    return sum(dtype.itemsize * math.prod(dims) for dtype, dims in kinds if isinstance(dtype, torch.dtype))
