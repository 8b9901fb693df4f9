"""The schema of the elements of an iterator: learned from the first one, or from another rank; then checked.

The schema serves two purposes. Ready batches, which a source yields and which are cut by their leaves, must all be of
one structure: a batch of another structure is a mistake in the data. And an empty piece is made like earlier pieces.
The result of a collate function may differ in structure from step to step; for such pieces, only the second purpose
counts.

Nearly all batches are like the one before, so ``KnownSchema`` recognises such a batch in a fraction of a microsecond.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final, final

import torch
from torch import Tensor

from torchdistinput.batches import pytree
from torchdistinput.batches.pytree import Reading, read, structure_of
from torchdistinput.batches.schema import PER_SAMPLE, Structure
from torchdistinput.errors import BatchingError

_Shapes = tuple[type | None, list[Any] | None, int, Any]
"""Of a batch: its type, its keys (``None`` of a tuple or list, none of a tensor), its size, and a chain: the dtype and
shape of the first leaf, and the chain of those after it."""

_NO_BATCH: Final[_Shapes] = (None, None, 0, ())
_UNMARKED: Final = object()


@final
class KnownSchema:
    """The schema of the last batch, by which a batch of the same schema is recognised and counted.

    Args:
      strings: whether it is certain that batches which are lists hold strings and nothing else.
    """

    def __init__(self, *, strings: bool = False) -> None:
        self.structure: Structure | None = None
        """The structure of the batches, once the owner has set it; until then only equal shapes are recognised."""
        self.mark: object = _UNMARKED
        """``RowSizes.schema`` of rows that have this schema, set by ``Fetch``; forgotten with the schema."""
        self._strings = strings
        self._last = _NO_BATCH

    def forget(self) -> None:
        """Forgets the shapes of the last batch, and the mark. Any thread."""
        self.mark, self._last = _UNMARKED, _NO_BATCH

    @property
    def is_plain(self) -> bool:
        """Whether the last batch is a tensor, or a tuple, list or dict of tensors."""
        return self._last is not _NO_BATCH

    def remember(self, batch: Any, size: int) -> None:
        """Takes down the shapes of a batch of so many samples, if it is plain."""
        leaves = [*pytree.plain_leaves(batch)]
        keys = [] if type(batch) is Tensor else [*batch] if type(batch) is dict else None
        shapes: Any = ()
        for leaf in reversed([] if any(leaf.is_nested for leaf in leaves) else leaves):
            shapes = (leaf.dtype, leaf.shape, shapes)
        self._last = (type(batch), keys, size, shapes) if shapes else _NO_BATCH

    def size_of(self, batch: Any) -> int | None:
        """The size of a batch that plainly has the known schema; else ``None``: look closer. For every step."""
        cls, keys, size, known = self._last
        if type(batch) is cls:
            leaves: Any = batch if keys is None else _opened(batch, keys)
            for leaf in leaves:
                if not known:
                    break
                dtype, shape, after = known  # zip() takes half as long as all the rest, a counter a tenth
                if type(leaf) is not Tensor or leaf.dtype is not dtype or leaf.shape != shape:
                    break
                known = after
            else:
                if not known:
                    return size
        return None if self.structure is None else self._size_of_other(batch, self.structure)

    def _size_of_other(self, batch: Any, structure: Structure) -> int | None:
        """The size of a batch whose shapes differ from those of the last batch. Its shapes are remembered instead."""
        if self._strings and type(batch) is list and (structure.dtype, structure.cls) == (str, list):
            return len(batch)  # the strings need no check
        size = structure.size_of_same(batch)
        if size is not None:
            self.remember(batch, size)
        return size


def _opened(batch: Any, keys: list[Any]) -> Iterable[Any]:
    """The leaves of a tensor, or of a dict; none of a dict with other keys."""
    if not keys:
        return (batch,)
    return batch.values() if [*batch] == keys else ()


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
      empty_fn: makes the empty element; ``None``: it is made like earlier elements.
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
        self._one_structure = one_structure
        self._may_lack = may_lack
        self._empty_fn = empty_fn
        self._with_index = with_index
        self._signature: Any = None
        self._is_tried = False  # whether an empty piece was made, to see that it can be
        self.looks: Structure | None = None
        """The structure of the latest element, also where no empty one can be made like it."""
        self.row_bytes: int | None = None
        """Bytes of one sample in the tensors of an element; ``None`` before the first, or if elements differ in it."""
        self.known = KnownSchema(strings=strings)
        """Recognises an element of the same schema, which needs no more looking at."""

    @property
    def structure(self) -> Structure | None:
        """The structure of the latest element that empty ones can be made like, or ``None`` before the first."""
        return self.known.structure

    @property
    def makes_empty(self) -> bool:
        """Whether it is known how an empty piece is made."""
        return self._empty_fn is not None or self.structure is not None

    @property
    def digest(self) -> int | None:
        """A number that ranks compare; ``None`` where this rank needs the structure from another rank."""
        if self._one_structure and self._empty_fn is None:
            return None if self.structure is None else self.structure.digest()
        return _ANY if self.makes_empty or not self._may_lack else None

    def empty(self) -> Any:
        """A new piece without a sample, on the CPU.

        Raises:
          BatchingError: the structure is not known, and there is no ``empty_fn``.
        """
        if self._empty_fn is not None:
            element = self._empty_fn()
            return (_INDEX.empty(), element) if self._with_index else element
        if self.structure is None:
            raise _cannot_be_empty("the elements")
        return self.structure.empty()

    def knows(self, piece: Any) -> bool:
        """Whether a piece is plainly of the known structure; else call ``see``, which looks closer."""
        return self.known.size_of(piece) is not None

    def see(self, piece: Any, size: int) -> Any:
        """Takes the structure of a piece, or checks it.

        Args:
          piece: the piece.
          size: samples in it, one or more.

        Returns:
          The piece. Its arrays have become tensors. Where all must be of one structure, the keys of its dicts have the
          order of the first piece.

        Raises:
          BatchingError: the structure or a dtype differs from before, where that may not be; or no empty piece can be
            made like it, though one may be needed.
        """
        if pytree.holds_arrays(piece):
            piece = pytree.map_leaves(lambda leaf: leaf, piece)
        found = self._read(piece, size)
        if found is None:
            self._see_other(piece)
            return piece
        if self._one_structure and found.structure.signature() == self._signature and self.structure is not None:
            piece = self.structure.arrange(piece)
            found = self._read(piece, size) or found
        has_rows = found.has_rows and all(len(leaf) == size for leaf in found.leaves)
        self._take(found.structure, rows=has_rows)
        return piece

    def learn(self, structure: Structure) -> None:
        """Takes the structure of an element of another rank."""
        self._take(structure, rows=True)

    def _read(self, piece: Any, size: int) -> Reading | None:
        """The piece taken apart, if an empty one can be made like it."""
        if self._with_index:
            index, element = piece
            found = self._read_element(element, size, None if self.structure is None else self.structure.children[1])
            if found is None:
                return None
            children = (_INDEX, found.structure)
            return Reading([index, *found.leaves], Structure("tuple", (0, 1), children, cls=tuple), found.has_rows)
        return self._read_element(piece, size, self.structure)

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
        self.known.forget()

    def _take(self, structure: Structure, *, rows: bool) -> None:
        with self._learning:  # two threads may see the first element, one of them another rank's
            signature = structure.signature()
            row_bytes = _bytes_of_row(structure) if rows else None
            if self.looks is None:
                self.row_bytes = row_bytes
            elif signature != self._signature and self._one_structure:
                raise BatchingError(
                    f"the structure of the elements changed: before {self.structure}, now {structure}. Nesting, names "
                    f"and dtypes must be the same for every element; only sizes may differ. {PER_SAMPLE}"
                )
            elif self.row_bytes != row_bytes:
                self.row_bytes = None
            self.known.structure, self._signature, self.looks = structure, signature, structure
            self.known.forget()  # it had other inner dims, perhaps
        self._try()

    def _try(self) -> None:
        """Where an empty piece may be needed, makes one at the first element: a failure is then one on all ranks."""
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
            raise _cannot_be_empty(f"an element like {self.structure}") from error


def _cannot_be_empty(what: str) -> BatchingError:
    return BatchingError(
        f"it is not known how to make {what} without a sample, and a replica may be left without a sample. Give "
        "InputOptions(empty_fn=), a function that returns the empty batch; or use drop_last=True, or a batch size and "
        "a number of samples with which each replica has a sample at every step."
    )


def _bytes_of_row(structure: Structure) -> int:
    """Bytes of one sample in the tensors of an element of this structure. Local."""
    kinds = [(leaf.dtype, leaf.inner_dims) for leaf in structure.leaves()]
    return sum(dtype.itemsize * math.prod(dims) for dtype, dims in kinds if isinstance(dtype, torch.dtype))
