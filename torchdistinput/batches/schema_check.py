"""The structure of the elements of an iterator: learned from the first one, or from another rank; then checked.

The structure serves three purposes. An empty piece is made from it; pieces are padded by it; and the pieces of several
replicas become one element by it. In addition, ready batches, which a source yields and which are cut by their leaves,
must all be of one structure: a batch of another structure is a mistake in the data. The result of a collate function
may differ in structure from step to step; the structure that its first answers had counts.

The structure comes with the rows from whoever made the batches (``RowSizes.structure``): nothing is inspected here.
"""

from __future__ import annotations

import math
import pickle
import threading
from collections.abc import Callable
from typing import Any, Final, final

import torch

from torchdistinput.batches.pytree import all_have_rows, flatten
from torchdistinput.batches.schema import PER_SAMPLE, Structure, described
from torchdistinput.errors import BatchingError

_ANY: Final = 1
"""The digest of structures that need not be the same on all ranks."""

_INDEX: Final = Structure.of_leaf("tensor", torch.int64)


@final
class SchemaChecker:
    """The structure of the elements; makes empty pieces, and refuses other structures where they must be the same.

    Args:
      one_structure: whether all elements must be of one structure, on all ranks.
      may_lack: whether some replica may be left without a sample, so that an empty piece has to be made.
      tries: whether one is expected, and is made at the first element to see that it can be: a failure comes early.
      empty_fn: makes the empty element; ``None``: it is made from the structure.
      with_index: whether pieces are ``(index, element)``.
      pads: whether pieces are padded, or regrouped: each rank needs the structure even if there is an ``empty_fn``.
      structure: of the elements, if it is certain before the first one.
    """

    def __init__(
        self,
        *,
        one_structure: bool = True,
        may_lack: bool = False,
        tries: bool = False,
        empty_fn: Callable[[], Any] | None = None,
        with_index: bool = False,
        pads: bool = False,
        structure: Structure | None = None,
    ) -> None:
        self._learning = threading.Lock()
        self._one_structure = one_structure
        self._may_lack = may_lack
        self._empty_fn = empty_fn
        self._with_index = with_index
        self._pads = pads
        self._tries = tries  # whether an empty piece is still to be made, to see that it can be
        if structure is not None and with_index:
            structure = _beside_index(structure)
        self.structure = structure
        """The structure of the elements, or ``None`` before it is known."""
        self.leaf_structure: Structure | None = structure
        """The structure of an element by its leaves, for ``element_spec``."""
        self.has_rows = structure is not None
        """Whether each leaf of that element has a row for each sample."""
        self.row_bytes: int | None = None if structure is None else _bytes_of_row(structure)
        """Bytes of one sample in the tensors of an element; ``None`` if it is not known, or elements differ in it."""

    @property
    def makes_empty(self) -> bool:
        """Whether the empty pieces of a step can be made now."""
        return self.structure is not None or (self._empty_fn is not None and not self._pads)

    @property
    def has_empty_fn(self) -> bool:
        """Whether the user makes the empty pieces."""
        return self._empty_fn is not None

    @property
    def digest(self) -> int | None:
        """A number that ranks compare; ``None`` where this rank needs the structure from another rank."""
        compares = self._one_structure and self._empty_fn is None
        if self.structure is not None:
            return self.structure.digest() if compares else _ANY
        lacks = self._pads or (self._may_lack and self._empty_fn is None)
        return None if compares or lacks else _ANY

    def empty(self) -> Any:
        """A new piece without a sample, on the CPU.

        Raises:
          BatchingError: the structure is not known, or does not tell what an empty piece is; and no ``empty_fn``.
        """
        if self._empty_fn is not None:
            element = self._empty_fn()
            return (_INDEX.empty(), element) if self._with_index else element
        if self.structure is None:
            raise self.unknown()
        try:
            return self.structure.empty()
        except BatchingError as error:
            element = self.structure.parts[1] if self._with_index else self.structure
            raise self._cannot_be_empty(f"an element{_type_of(element)}", str(error)) from error

    def unknown(self) -> BatchingError:
        """The error for an empty piece of a structure that no rank knows."""
        return self._cannot_be_empty("an element", "no rank knows its structure")

    def want(self) -> None:
        """Notes that a piece without a sample came where none may: this rank needs the structure from another one."""
        self._may_lack = True

    def take(self, found: Structure | bytes) -> None:
        """Takes the structure of the rows of a batch, or checks it.

        Args:
          found: the structure, or the pickled one.

        Raises:
          BatchingError: the structure or a dtype differs from before, where that may not be; or no empty piece can be
            made, though one may be needed.
        """
        structure: Structure = pickle.loads(found) if isinstance(found, bytes) else found
        if self._with_index:
            structure = _beside_index(structure)
        self._take(structure)

    def note_leaves(self, piece: Any, size: int) -> None:
        """Notes the leaves of an element, where no structure came with the first row."""
        leaves, nesting = flatten(piece)
        self.leaf_structure = self.leaf_structure or described(leaves, nesting)
        self.has_rows = all_have_rows(leaves, size)

    def learn(self, structure: Structure) -> None:
        """Takes the structure of an element of another rank."""
        self._take(structure)
        if self.leaf_structure is None:
            self.leaf_structure, self.has_rows = structure, all(leaf.kind != "unknown" for leaf in structure.leaves)

    def _take(self, structure: Structure) -> None:
        with self._learning:  # two threads may see the first element, one of them another rank's
            before = self.structure
            if before is None or self._one_structure:
                if before is not None and before.signature() != structure.signature():
                    raise changed(before, structure)
                if self._one_structure:
                    row_bytes = None if structure.is_unknown else _bytes_of_row(structure)
                    self.row_bytes = row_bytes if before is None or self.row_bytes == row_bytes else None
                    self.has_rows = not structure.is_unknown
                    self.leaf_structure = structure
                self.structure = structure
        self._try()

    def _try(self) -> None:
        """Where an empty piece is expected, makes one at the first element: a failure is then one on all ranks."""
        if not (self._tries and self._may_lack):
            return
        self._tries = False
        try:
            self.empty()
        except BatchingError:
            raise
        except Exception as error:
            if self._empty_fn is not None:
                raise
            raise self._cannot_be_empty(f"an element like {self.structure}", str(error)) from error

    def _cannot_be_empty(self, what: str, why: str) -> BatchingError:
        other = "put a list or tensor with an entry for each sample in the place of such a value."
        if not self._one_structure:
            other = (
                "use drop_last=True, or a batch size and a number of samples with which each replica has a sample at "
                "every step."
            )
        return BatchingError(
            f"it is not known how to make {what} without a sample, and a replica may be left without one: {why}. Give "
            f"empty_fn= (of InputOptions or DataLoader), a function that returns the empty batch; or {other}"
        )


def changed(before: Structure, now: Structure) -> BatchingError:
    """The error for ready batches whose structures differ. Local."""
    return BatchingError(
        f"the structure of the elements changed: before {before}, now {now}. Nesting, names and dtypes must be the "
        f"same for every element; only sizes may differ. {PER_SAMPLE}"
    )


def _beside_index(structure: Structure) -> Structure:
    return Structure.together(_INDEX, structure)


def _type_of(structure: Structure) -> str:
    nesting, leaves = structure
    if structure.is_unknown:
        return f" of type {leaves[0].value[0]}" if leaves[0].value[0] else ""
    cls = leaves[0].cls if nesting is None else nesting.cls
    return f" of type {leaves[0].kind if cls is None else cls.__name__}"


def _bytes_of_row(structure: Structure) -> int:
    """Bytes of one sample in the tensors of an element of this structure. Local."""
    tensors = [leaf for leaf in structure.leaves if leaf.kind == "tensor"]
    return sum(int(leaf.dtype.itemsize) * math.prod(leaf.dims) for leaf in tensors)
