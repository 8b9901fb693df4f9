"""The structure of the elements of an iterator: learned from the first one, or told by another rank.

It serves two purposes. Batches that a source yields ready, and that are cut by their leaves, must all be of one
structure: one that differs is a mistake in the data. And an empty piece is made like the pieces before. What a collate
function makes may be anything, and differ from step to step: of that only the second holds.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any, Final, final

import torch

from torchdistinput.batches import pytree
from torchdistinput.batches.pytree import Reading, read, structure_of
from torchdistinput.batches.same_schema import SameSchema
from torchdistinput.batches.schema import PER_SAMPLE, Structure
from torchdistinput.errors import BatchingError

__all__ = ["SchemaChecker"]

_ANY: Final = 1
"""The digest of structures that need not be the same on all ranks."""

_INDEX: Final = Structure("tensor", dtype=torch.int64)


@final
class SchemaChecker:
    """The structure of the elements; makes empty pieces, and refuses other structures where they must be the same.

    Args:
      strings: whether it is certain that elements which are lists hold strings and nothing else.
      one_structure: whether all elements must be of one structure, on all ranks.
      may_lack: whether some replica may be left without a sample, so that an empty piece is needed.
      empty_fn: makes the empty element; ``None``: it is made like those before.
      with_index: whether pieces are ``(index, element)``.
    """

    def __init__(
        self,
        *,
        strings: bool = False,
        one_structure: bool = True,
        may_lack: bool = False,
        empty_fn: Callable[[], Any] | None = None,
        with_index: bool = False,
    ) -> None:
        self._learning = threading.Lock()
        self._strings = strings
        self._one_structure = one_structure
        self._may_lack = may_lack
        self._empty_fn = empty_fn
        self._with_index = with_index
        self._structure: Structure | None = None
        self._signature: Any = None
        self._is_tried = False  # whether an empty piece was made, to see that it can be
        self.looks: Structure | None = None
        """The structure of the latest element, also where no empty one can be made like it."""
        self.row_bytes: int | None = None
        """Bytes of one sample in the tensors of an element; ``None`` before the first, or if elements differ in it."""
        self.last = SameSchema()
        """How the last element looked: one that is exactly like it needs no more looking at."""
        self._lists_strings = False  # nor need they be looked at

    @property
    def structure(self) -> Structure | None:
        """The structure of the latest element that empty ones can be made like, or ``None`` before the first."""
        return self._structure

    @property
    def makes_empty(self) -> bool:
        """Whether it is known how an empty piece is made."""
        return self._empty_fn is not None or self._structure is not None

    @property
    def digest(self) -> int | None:
        """A number for comparing ranks; ``None`` where another rank has to tell how an empty piece is made."""
        if self._one_structure and self._empty_fn is None:
            return None if self._structure is None else self._structure.digest()
        return _ANY if self.makes_empty or not self._may_lack else None

    def empty(self) -> Any:
        """A new piece without a sample, on the CPU.

        Raises:
          BatchingError: nobody knows how.
        """
        if self._empty_fn is not None:
            element = self._empty_fn()
            return (_INDEX.empty(), element) if self._with_index else element
        if self._structure is None:
            raise _cannot_be_empty("the elements")
        return self._structure.empty()

    def knows(self, piece: Any) -> bool:
        """Whether a piece is plainly of the known structure; else have a closer look: ``see`` it."""
        if self._lists_strings and type(piece) is list:
            return True
        if self.last.size_of(piece) is not None or self.last.resized(piece) is not None:
            return True
        size = None if self._structure is None else self._structure.size_of_same(piece)
        if size is not None:
            self.last.remember(piece, size)
        return size is not None

    def see(self, piece: Any, size: int) -> Any:
        """Takes the structure of a piece, or checks it.

        Args:
          piece: the piece.
          size: samples in it, one or more.

        Returns:
          The piece. Its arrays have become tensors; where all must be of one structure, its dicts have the order of the
          first one.

        Raises:
          BatchingError: the structure or a dtype differs from before, where that may not be; or no empty piece can be
            made like it, though one may be needed.
        """
        if pytree.holds_arrays(piece):
            piece = pytree.map_leaves(_itself, piece)
        found = self._read(piece, size)
        if found is None:
            self._see_other(piece)
            return piece
        if self._one_structure and found.structure.signature() == self._signature and self._structure is not None:
            piece = self._structure.arrange(piece)
            found = self._read(piece, size) or found
        self._take(found.structure, rows=found.has_rows and _are_rows(found, size))
        return piece

    def learn(self, structure: Structure) -> None:
        """Takes the structure of an element of another rank."""
        self._take(structure, rows=True)

    def _read(self, piece: Any, size: int) -> Reading | None:
        """The piece taken apart, if an empty one can be made like it."""
        if self._with_index:
            index, element = piece
            found = self._read_element(element, size, None if self._structure is None else self._structure.children[1])
            if found is None:
                return None
            children = (_INDEX, found.structure)
            return Reading([index, *found.leaves], Structure("tuple", (0, 1), children, cls=tuple), found.has_rows)
        return self._read_element(piece, size, self._structure)

    def _read_element(self, element: Any, size: int, like: Structure | None) -> Reading | None:
        found = read(element, size, like)
        if self._one_structure:
            return found if found is not None and found.leaves else None
        if found is None:  # a collate function may make more rows than it has samples, or fewer
            try:
                found = read(element, pytree.batch_size(element))
            except BatchingError:
                return None
        if found is None or not found.leaves or found.structure.holds_objects:
            return None
        return found

    def _see_other(self, piece: Any) -> None:
        """A piece that no empty one can be made like."""
        if self._may_lack and not self.makes_empty:
            raise _cannot_be_empty(f"an element of type {type(piece[1] if self._with_index else piece).__name__}")
        self._try()
        self.row_bytes = None
        self.looks = structure_of(piece)
        self.last.forget()

    def _take(self, structure: Structure, *, rows: bool) -> None:
        with self._learning:  # two threads may see the first element, one of them another rank's
            signature = structure.signature()
            row_bytes = _bytes_of_row(structure) if rows else None
            if self.looks is None:
                self.row_bytes = row_bytes
            elif signature != self._signature and self._one_structure:
                raise BatchingError(
                    f"the structure of the elements changed: before {self._structure}, now {structure}. Nesting, names "
                    f"and dtypes must be the same for every element; only sizes may differ. {PER_SAMPLE}"
                )
            elif self.row_bytes != row_bytes:
                self.row_bytes = None
            known, self._structure, self._signature, self.looks = self._structure, structure, signature, structure
            self._lists_strings = (
                self._strings and structure.kind == "rows" and (structure.dtype, structure.cls) == (str, list)
            )
            if known is not None:
                self.last.forget()  # it had other inner dims, perhaps
        self._try()

    def _try(self) -> None:
        """Where an empty piece may be needed, makes one at the first element: all ranks hear then if it cannot be."""
        if self._is_tried or not self._may_lack:
            return
        self._is_tried = True
        try:
            self.empty()
        except BatchingError:
            raise
        except Exception as error:
            if self._empty_fn is not None:
                raise
            raise _cannot_be_empty(f"an element like {self._structure}") from error


def _cannot_be_empty(what: str) -> BatchingError:
    return BatchingError(
        f"nobody knows how to make {what} without a sample, and a replica may be left without one. Give "
        "InputOptions(empty_fn=), a function that returns the empty batch; or use drop_last=True, or sizes of the data "
        "and of the batches, with which each replica has a sample at every step."
    )


def _are_rows(found: Reading, size: int) -> bool:
    return all(len(leaf) == size for leaf in found.leaves)


def _bytes_of_row(structure: Structure) -> int:
    """Bytes of one sample in the tensors of an element of this structure. Local."""
    kinds = [(leaf.dtype, leaf.inner_dims) for leaf in structure.leaves()]
    return sum(dtype.itemsize * math.prod(dims) for dtype, dims in kinds if isinstance(dtype, torch.dtype))


def _itself(leaf: Any) -> Any:
    return leaf
